"""What a manager is told: the model's inputs, once, and each step's batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

import torch

from graphpass.dispatch.support import AttentionSupport
from graphpass.errors import OptionError
from graphpass.keys import BatchDescriptor
from graphpass.padrules import PadRule, checked_rule

__all__ = ["AttentionMetadataBuilder", "Batch", "InputSpec"]


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input of the model, at the largest batch.

    Attributes:
        name: the model's argument.
        shape: of its buffer; the token dimension as large as the largest batch that will come.
        dtype: of its buffer.
        token_dim: the dimension that has one entry a token; None for an input without one.
        request_dim: the dimension that has one entry a request; None for an input without one. Keys that carry no
            request count are given all of it.
        padding: what fills the rest, see :data:`graphpass.padrules.PadRule`.

    Raises:
        OptionError: a dimension is none of the shape's, or the rule is none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    _: KW_ONLY
    token_dim: int | None = 0
    request_dim: int | None = None
    padding: PadRule = 0

    def __post_init__(self) -> None:
        rule = checked_rule(self.name, self.padding)
        if isinstance(rule, (bool, int, float)) and not _fits(rule, self.dtype):
            raise OptionError(
                f"input {self.name!r} cannot hold its padding",
                expected=f"a value of {self.dtype}",
                found=repr(rule),
                remedy="give a value that the dtype can hold exactly",
            )
        if any(type(size) is not int or size < 1 for size in self.shape):
            raise OptionError(
                f"input {self.name!r} has no such buffer",
                expected="sizes of at least 1, those of the largest batch",
                found=str(self.shape),
                remedy="give the shape at the largest batch that will come",
            )
        for what, dim in (("token_dim", self.token_dim), ("request_dim", self.request_dim)):
            if dim is not None and not -len(self.shape) <= dim < len(self.shape):
                raise OptionError(
                    f"{what} of input {self.name!r} is no dimension of it",
                    expected=f"{-len(self.shape)} to {len(self.shape) - 1}, or None",
                    found=str(dim),
                    remedy=f"name the dimension of {self.shape} that grows with the batch",
                )
        if self.token_dim is not None and self.request_dim is not None and not self.dims_differ():
            raise OptionError(
                f"input {self.name!r} has one dimension for tokens and requests",
                expected="token_dim and request_dim, two dimensions or one of them None",
                found=f"both {self.token_dim}",
                remedy="leave one of them out",
            )

    def dims_differ(self) -> bool:
        """Whether tokens and requests are counted in two dimensions."""
        return len(self.dims()) > 1

    def dims(self) -> dict[int, str]:
        """{dimension: key field} of the dimensions that a batch cuts."""
        named = ((self.token_dim, "num_tokens"), (self.request_dim, "num_reqs"))
        return {dim % len(self.shape): name for dim, name in named if dim is not None}


def _fits(value: float, dtype: torch.dtype) -> bool:
    """Whether a number survives the way into a tensor; floats may be rounded."""
    if dtype.is_floating_point or dtype.is_complex:
        return True
    if value != value or (isinstance(value, float) and not value.is_integer()):
        return False
    least, greatest = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return least <= value <= greatest


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work, at its real sizes.

    Attributes:
        num_tokens: tokens of all requests together.
        inputs: a tensor for each declared input, at real sizes; None where they are in the manager's buffers already
            (the first ``num_tokens`` entries of each).
        num_reqs: requests, None where the model does not care.
        uniform_decode: every request has ``uniform_decode_query_len`` tokens.
        num_active_loras: adapters in use.
        attention: what the manager's attention builds its metadata from.
        extra: other key fields, see :meth:`CudagraphDispatcher.dispatch <graphpass.CudagraphDispatcher.dispatch>`.
    """

    num_tokens: int
    _: KW_ONLY
    inputs: Mapping[str, torch.Tensor] | None = None
    num_reqs: int | None = None
    uniform_decode: bool = False
    num_active_loras: int = 0
    attention: Any = None
    extra: tuple[tuple[str, Any], ...] = field(default=())


class AttentionMetadataBuilder(Protocol):
    """Makes what the model's attention reads from the forward context, for every step and for captures.

    A graph of a FULL key has the addresses and numbers baked in that attention read at capture. So each FULL key has
    one metadata object, made once, whose tensors :meth:`build` refills; what it rounds up stands in the key.
    """

    @property
    def support(self) -> AttentionSupport:
        """Which batches it can be captured with."""
        ...

    @property
    def splitting_ops(self) -> tuple[str, ...]:
        """The ops that read the metadata: they stay eager in PIECEWISE, and they alone may mix tokens and requests.

        Qualified names, ``mylib::paged_attention``.
        """
        ...

    def extra(self, attention: Any) -> tuple[tuple[str, Any], ...]:
        """The key fields that a batch's attention needs, such as its longest sequence.

        Those that the dispatcher has no ladder for are left out: then one bound holds for all keys.
        """
        ...

    def example(self, key: BatchDescriptor, *, query_len: int | None) -> Any:
        """Requests to warm up and capture ``key`` with, in place of :attr:`Batch.attention`.

        Short sequences whose pages are scratch, so that nothing live is written.

        Args:
            key: the padded shape.
            query_len: tokens of each request in a uniform decode key; None for a mixed one.
        """
        ...

    def build(self, attention: Any, key: BatchDescriptor | None) -> Any:
        """The metadata of one step, on the device; its ``slot_mapping`` goes into the forward context too.

        Args:
            attention: the batch's requests.
            key: the FULL key whose graph will read it: the same object in every call, refilled in place. None for
                eager attention: at real sizes, valid for this step.

        Raises:
            ShapeError: the requests do not fit the key, or each other.
        """
        ...
