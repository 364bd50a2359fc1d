"""The parts of a forward besides the model: attention metadata, the forward context, and hooks that move weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from graphpass.capture.scope import CallObserver
from graphpass.compat import nnmodules
from graphpass.context import ForwardContext, entered
from graphpass.engine.batch import AttentionMetadataBuilder
from graphpass.engine.buffers import PaddedInputs
from graphpass.errors import ContextError
from graphpass.keys import BatchDescriptor, CUDAGraphMode

_NO_HOOKS = contextlib.nullcontext()


class ForwardHooks(Protocol):
    """Work around and inside each forward of a model, such as copying a layer's weights to the device.

    A manager enters :meth:`forward` around every forward. Before a capture it calls :meth:`sync_prev_onload`. At the
    end of the model, inside the capture, it calls :meth:`join_after_forward`. The model must be one graph.
    """

    @property
    def splitting_ops(self) -> tuple[str, ...]:
        """Qualified names of the ops that layers call when they begin; they run eagerly in PIECEWISE mode."""
        ...

    @property
    def context(self) -> Mapping[str, Any]:
        """The values that those ops read from ``ForwardContext.extra``, by name."""
        ...

    def check_model(self, modules: Sequence[torch.nn.Module], device: torch.device) -> None:
        """Check that the hooks belong to this model and device.

        Args:
            modules: all modules of the model, the model itself first.
            device: device of the inputs.

        Raises:
            GraphpassError: the hooks were created for another model or device.
        """
        ...

    def forward(self, *, replays: bool) -> contextlib.AbstractContextManager[None]:
        """A context manager around one forward.

        Args:
            replays: the forward may be the replay of one graph, in which no op calls the hooks.
        """
        ...

    def sync_prev_onload(self) -> None:
        """Make the current stream wait for all work that the last forward has left in flight."""
        ...

    def join_after_forward(self) -> None:
        """End a forward inside a capture: the current stream waits for the streams that the forward has used."""
        ...


@dataclass(frozen=True, slots=True)
class ForwardParts:
    """The parts of every forward of a model: captures, replays and runs without a graph."""

    attention: AttentionMetadataBuilder | None  #: None for a model without attention metadata
    hooks: ForwardHooks | None  #: move weights around each forward; None if all weights are on the device
    num_ranks: int | None  #: data-parallel ranks that run the same steps; None without an agreement

    def splitting_ops(self) -> list[str]:
        """Qualified names of the ops that run eagerly in PIECEWISE mode."""
        return [op for part in (self.attention, self.hooks) if part is not None for op in part.splitting_ops]

    def mixing_ops(self) -> tuple[str, ...]:
        """Qualified names of the ops that may mix the tokens and requests of a batch."""
        return () if self.attention is None else self.attention.splitting_ops

    def example(self, key: BatchDescriptor, query_len: int | None) -> Any:
        """Example requests on scratch pages, in place of :attr:`Batch.attention`; None without attention.

        ``query_len`` is the number of tokens of each request in a uniform decode key.
        """
        if self.attention is None:
            return None
        return self.attention.example(key, query_len=query_len if key.uniform else None)

    def metadata(self, attention: Any, key: BatchDescriptor | None, mode: CUDAGraphMode) -> Any:
        """The attention metadata of one forward; None without attention.

        In FULL mode it is the metadata object that the key's graph reads.
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
        """The forward context of one forward, which has no ``key`` in a first run.

        ``num_tokens`` are the real tokens of this rank. Without ``num_tokens_across_dp`` every rank has as many.
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
    """The metadata's ``slot_mapping``, an attribute or the key of a dict; None without metadata."""
    if metadata is None:
        return None
    try:
        return metadata["slot_mapping"] if isinstance(metadata, Mapping) else metadata.slot_mapping
    except (AttributeError, KeyError) as error:
        raise _missing(builder, metadata, "slot_mapping", "the manager reads it for the forward context") from error


class fields_named:  # noqa: N801 - a context manager, named like one
    """Translate the error of an op that reads a missing field of ``metadata`` into a ContextError with the builder."""

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
