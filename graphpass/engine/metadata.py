"""Attention metadata that lacks a field: whose builder left it out, and who reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from graphpass.compat import failures
from graphpass.engine.batch import AttentionMetadataBuilder
from graphpass.errors import ContextError

__all__ = ["fields_named", "slot_mapping_of"]


def slot_mapping_of(builder: AttentionMetadataBuilder | None, metadata: Any) -> Any:
    """The slots that the forward context carries; None without metadata.

    Raises:
        ContextError: the metadata has none.
    """
    if metadata is None:
        return None
    try:
        return metadata.slot_mapping
    except AttributeError as error:
        raise _missing(builder, metadata, "slot_mapping", "the manager reads it for the forward context") from error


class fields_named:  # noqa: N801 - a context manager, named like one
    """Turn what an op raises when it reads a missing field of ``metadata`` into an error that names the builder.

    Raises:
        ContextError: an attribute or a key of ``metadata`` is missing that the body reads.
    """

    __slots__ = ("_builder", "_metadata")

    def __init__(self, builder: AttentionMetadataBuilder | None, metadata: Any) -> None:
        self._builder = builder
        self._metadata = metadata

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None or self._metadata is None:
            return
        for cause in _chain(error):
            field = _field_of(cause, self._metadata)
            if field is not None:
                place = failures.place_of_failure(cause) or "read while the model runs"
                raise _missing(self._builder, self._metadata, field, place) from error


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it was raised from."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def _field_of(error: BaseException, metadata: Any) -> str | None:
    """The field of ``metadata`` that ``error`` says is missing."""
    if isinstance(error, AttributeError) and error.obj is metadata:
        return str(error.name)
    is_key = isinstance(error, KeyError) and isinstance(metadata, Mapping) and len(error.args) == 1
    return str(error.args[0]) if is_key and error.args[0] not in metadata else None


def _missing(builder: object, metadata: Any, field: str, place: str) -> ContextError:
    return ContextError(
        f"attention metadata has no field {field!r}",
        expected=f"every field that the model's attention reads, in what {type(builder).__name__}.build() returns",
        found=f"a {type(metadata).__name__} without it; {place}",
        remedy=f"add {field!r} to {type(metadata).__name__}, for steps with a key and without",
    )
