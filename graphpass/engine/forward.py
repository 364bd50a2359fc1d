"""The parts of a forward besides the model: attention metadata, the forward context, and hooks that move weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from graphpass.capture.scope import CallObserver
from graphpass.compat import nnmodules
from graphpass.context import ForwardContext, entered
from graphpass.engine.batch import AttentionMetadataBuilder
from graphpass.engine.buffers import PaddedInputs
from graphpass.engine.hooks import ForwardHooks
from graphpass.errors import ContextError
from graphpass.keys import BatchDescriptor
from graphpass.modes import CUDAGraphMode

__all__ = ["ForwardParts", "fields_named"]

_NO_HOOKS = contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class ForwardParts:
    """The parts of every forward of a model: captures, replays and runs without a graph.

    Attributes:
        attention: builds the attention metadata; None for a model without attention metadata.
        hooks: move weights around each forward; None if all weights are on the device.
        num_ranks: number of data-parallel ranks that run the same steps; None without an agreement.
    """

    attention: AttentionMetadataBuilder | None
    hooks: ForwardHooks | None
    num_ranks: int | None

    def splitting_ops(self) -> list[str]:
        """Qualified names of the ops that run eagerly in PIECEWISE mode."""
        return [op for part in (self.attention, self.hooks) if part is not None for op in part.splitting_ops]

    def mixing_ops(self) -> tuple[str, ...]:
        """Qualified names of the ops that may mix the tokens and requests of a batch."""
        return () if self.attention is None else self.attention.splitting_ops

    def example(self, key: BatchDescriptor, query_len: int | None) -> Any:
        """Example requests on scratch pages, in place of :attr:`Batch.attention`; None without attention.

        Args:
            key: the padded shape.
            query_len: tokens of each request in a uniform decode key.
        """
        return (
            None
            if self.attention is None
            else self.attention.example(key, query_len=query_len if key.uniform else None)
        )

    def metadata(self, attention: Any, key: BatchDescriptor | None, mode: CUDAGraphMode) -> Any:
        """The attention metadata of one forward; None without attention.

        In FULL mode it is the metadata object that the key's graph reads.

        Raises:
            ShapeError: the requests do not fit the key, or contradict each other.
        """
        if self.attention is None:
            return None
        return self.attention.build(attention, key if mode is CUDAGraphMode.FULL else None)

    def context(
        self,
        metadata: Any,
        inputs: PaddedInputs,
        mode: CUDAGraphMode,
        key: BatchDescriptor | None,
        num_tokens: int,
        num_tokens_across_dp: tuple[int, ...] | None = None,
        *,
        observer: CallObserver | None = None,
    ) -> entered:
        """The forward context of one forward.

        Args:
            metadata: the attention metadata.
            inputs: the padded inputs.
            mode: mode of the forward.
            key: the padded shape; None for a first run, which has no key.
            num_tokens: real tokens of this rank.
            num_tokens_across_dp: real tokens of each rank; None if every rank has ``num_tokens``.
            observer: sees the graphs that the forward calls.
        """
        alike = None if self.num_ranks is None else (num_tokens,) * self.num_ranks
        return entered(
            ForwardContext(
                attn_metadata=metadata,
                runtime_mode=mode,
                batch_descriptor=key,
                num_tokens=num_tokens,
                num_tokens_across_dp=alike if num_tokens_across_dp is None else num_tokens_across_dp,
                slot_mapping=_slot_mapping_of(self.attention, metadata),
                is_padding=inputs.is_padding,
                extra=None if self.hooks is None else self.hooks.context,
                observer=observer,
            )
        )

    def hooked(self, mode: CUDAGraphMode) -> contextlib.AbstractContextManager[None]:
        """The hooks' context manager for one forward in this mode; does nothing without hooks."""
        return _NO_HOOKS if self.hooks is None else self.hooks.forward(replays=mode is CUDAGraphMode.FULL)


def _slot_mapping_of(builder: AttentionMetadataBuilder | None, metadata: Any) -> Any:
    """The metadata's ``slot_mapping``, an attribute or the key of a dict; None without metadata.

    Raises:
        ContextError: the metadata has no such field.
    """
    if metadata is None:
        return None
    try:
        return metadata["slot_mapping"] if isinstance(metadata, Mapping) else metadata.slot_mapping
    except (AttributeError, KeyError) as error:
        raise _missing(builder, metadata, "slot_mapping", "the manager reads it for the forward context") from error


class fields_named:  # noqa: N801 - a context manager, named like one
    """Translate the error of an op that reads a missing field of ``metadata`` into one that names the builder.

    Raises:
        ContextError: the body reads an attribute or a dict key that ``metadata`` does not have.
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
                place = nnmodules.place_of_failure(cause) or "read while the model runs"
                raise _missing(self._builder, self._metadata, field, place) from error


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes, the latest first."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def _field_of(error: BaseException, metadata: Any) -> str | None:
    """The missing field of ``metadata`` that ``error`` names; None if the error has another reason."""
    if isinstance(error, AttributeError) and error.obj is metadata:  # guard: manager_metadata_fields
        return str(error.name)
    is_key = isinstance(error, KeyError) and isinstance(metadata, Mapping) and len(error.args) == 1
    return str(error.args[0]) if is_key and error.args[0] not in metadata else None


def _missing(builder: object, metadata: Any, field: str, place: str) -> ContextError:
    return ContextError(
        f"attention metadata has no field {field!r}",
        expected=f"{type(builder).__name__}.build() to return every field that the model's attention reads",
        found=f"a {type(metadata).__name__} without it; {place}",
        remedy=f"add {field!r} to {type(metadata).__name__}, for steps with a key and without",
    )
