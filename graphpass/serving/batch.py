"""What users declare to a manager: inputs, batches, how attention metadata is built, and hooks that move weights."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

import torch

from graphpass.errors import OptionError, positive
from graphpass.keys import AttentionSupport, BatchDescriptor
from graphpass.paddedcalls import PadRule, checked_rule


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input of the model, at the largest batch.

    Raises:
        OptionError: a size is below 1, a dimension is out of range, both dimensions are the same, or the padding is
            not a valid rule for the dtype.
    """

    name: str  #: name of the model's argument
    shape: tuple[int, ...]  #: shape of the buffer; the token dimension has the size of the largest batch
    dtype: torch.dtype  #: dtype of the buffer
    _: KW_ONLY
    token_dim: int | None = 0  #: the dimension that has one entry per token; None for an input without one
    #: the dimension that has one entry per request; None for an input without one. A key without a request count uses
    #: the whole dimension.
    request_dim: int | None = None
    padding: PadRule = 0  #: the values of padded entries, see :data:`graphpass.paddedcalls.PadRule`

    def __post_init__(self) -> None:
        rule = checked_rule(self.name, self.padding)
        if isinstance(rule, (bool, int, float)) and not _fits(rule, self.dtype):
            raise OptionError(
                f"input {self.name!r} cannot hold its padding",
                expected=f"a value of {self.dtype}",
                found=repr(rule),
                remedy="choose a padding value that the dtype represents exactly",
            )
        for size in self.shape:
            positive(size, f"a size of input {self.name!r}", remedy="pass the shape that it has in the largest batch")
        grows, rank = [dim for dim in (self.token_dim, self.request_dim) if dim is not None], len(self.shape)
        if not all(-rank <= dim < rank for dim in grows) or len(self.dims()) < len(grows):
            raise OptionError(
                f"the dimensions of input {self.name!r} cannot be used",
                expected=f"two different dimensions of {self.shape}, {-rank} to {rank - 1}, or None for one of them",
                found=f"token_dim={self.token_dim}, request_dim={self.request_dim}",
                remedy="pass the dimensions that grow with the batch",
            )

    def dims(self) -> dict[int, str]:
        """{dimension: key field} of the dimensions that grow with the batch."""
        named = ((self.token_dim, "num_tokens"), (self.request_dim, "num_reqs"))
        return {dim % len(self.shape): name for dim, name in named if dim is not None}


def _fits(value: float, dtype: torch.dtype) -> bool:
    """Whether a tensor of this dtype can store the number; floating-point dtypes may round it."""
    try:
        return dtype.is_floating_point or dtype.is_complex or torch.full((), value, dtype=dtype).item() == value
    except (RuntimeError, ValueError, OverflowError):  # out of range, infinite or NaN
        return False


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs and sizes of one step, without padding."""

    num_tokens: int  #: total number of tokens of all requests
    _: KW_ONLY
    #: a tensor for each declared input, without padding; None if the caller has written them to the manager's buffers
    #: (the first ``num_tokens`` entries of each)
    inputs: Mapping[str, torch.Tensor] | None = None
    num_reqs: int | None = None  #: number of requests; None for a model that has no input with a request dimension
    uniform_decode: bool = False  #: every request has ``uniform_decode_query_len`` tokens
    num_active_loras: int = 0  #: number of LoRA adapters that the batch uses
    attention: Any = None  #: argument of :meth:`AttentionMetadataBuilder.build`
    #: other key fields, see :meth:`CudagraphDispatcher.dispatch <graphpass.CudagraphDispatcher.dispatch>`
    extra: tuple[tuple[str, Any], ...] = field(default=())


class AttentionMetadataBuilder(Protocol):
    """Builds the metadata that the model's attention reads from the forward context, for steps and for captures.

    The graph of a FULL key contains the addresses and Python numbers that attention read at capture. So each FULL key
    has one metadata object: :meth:`build` creates it once and writes later steps into its tensors. A Python number in
    it, such as the longest sequence, is rounded up to a value that is part of the key.
    """

    @property
    def support(self) -> AttentionSupport:
        """The kinds of batches that a FULL graph of this attention can serve."""
        ...

    @property
    def splitting_ops(self) -> tuple[str, ...]:
        """Qualified names of the ops that read the metadata, such as ``mylib::paged_attention``.

        They run eagerly in PIECEWISE mode. No other op of the model may mix tokens or requests.
        """
        ...

    def extra(self, attention: Any) -> tuple[tuple[str, Any], ...]:
        """The key fields that depend on a batch's attention, such as its longest sequence, as (field, value) pairs.

        The manager ignores a field that the dispatcher has no capture sizes for: one bound then serves all keys.
        """
        ...

    def example(self, key: BatchDescriptor, *, query_len: int | None) -> Any:
        """Example requests for the warm-up and capture of ``key``, in place of :attr:`Batch.attention`.

        They are short sequences on scratch pages, so that a capture does not write to pages in use.

        Args:
            key: the padded shape.
            query_len: tokens of each request for a uniform decode key; None for a mixed key.
        """
        ...

    def build(self, attention: Any, key: BatchDescriptor | None) -> Any:
        """Build the metadata of one step, on the device.

        The manager also puts its ``slot_mapping``, an attribute or the key of a dict, into the forward context.

        Args:
            attention: :attr:`Batch.attention` of the step.
            key: the FULL key whose graph reads the metadata: return the same object in every call, with its tensors
                overwritten in place. None for eager attention: without padding, valid for this step.

        Raises:
            ShapeError: the requests do not fit the key, or contradict each other.
        """
        ...


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
