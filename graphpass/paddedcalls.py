"""Padded calls, under every front: the buffers that graphs read in place, how they are filled, and how a call runs.

An input has one allocation, as large as its largest size so far; the buffer of each size is a view of its start, at a
static address, so that filling it writes to where the graph reads.

A front (a compiled callable, a manager) looks up once what serves calls of one real size, and :func:`run` serves each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar, cast

import torch

from graphpass.capture.pool import PoolLease
from graphpass.capture.replay import ContextReads, ReplayPlan
from graphpass.capture.staging import grouped_copies, storage_id
from graphpass.compat import memory
from graphpass.context import ForwardContext
from graphpass.errors import OptionError, ShapeError
from graphpass.ledger import Row

PadRule = float | int | bool | Literal["repeat"] | Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]
"""A value, ``"repeat"`` (the last real slice), or ``f(real tensor, padded shape) -> padded tensor``."""
PaddingParts: TypeAlias = Sequence[tuple[torch.Tensor, torch.Tensor | float]]
"""(part of the padding, its contents), in the order in which they are filled."""

_Name = TypeVar("_Name", bound=Hashable)
_MOST_REPEATS = 16
"""The most rows of padding that one fused copy of several inputs writes; above it, each input has a launch."""


class PaddedMemory(Generic[_Name]):
    """One allocation for each input, large enough for the largest size; smaller sizes use the start of it."""

    def __init__(self, allocated: Mapping[_Name, torch.Tensor] | None = None) -> None:
        self._memory = dict(allocated or {})
        self._by_shape: dict[tuple[_Name, tuple[int, ...]], torch.Tensor] = {}

    def view(
        self, name: _Name, shape: tuple[int, ...], like: torch.Tensor, order: Sequence[int] | None = None
    ) -> torch.Tensor:
        """The buffer of an input at one shape: the same dense tensor, at a static address, in every call."""
        view = self._by_shape.get((name, shape))
        if view is None:
            with torch.inference_mode(False), torch.no_grad():
                flat = self._memory.get(name)
                if flat is None or flat.numel() < math.prod(shape):  # graphs that read the old one keep it alive
                    flat = self._memory[name] = torch.zeros(math.prod(shape), dtype=like.dtype, device=like.device)
                view = flat.as_strided(shape, dense_strides(shape, order))
            memory.mark_static_address(view)
            self._by_shape[name, shape] = view
        return view

    def num_bytes(self) -> int:
        """Bytes of all allocations."""
        return sum(tensor.nbytes for tensor in self._memory.values())

    def storages(self) -> frozenset[int]:
        """Storage ids of all allocations."""
        return frozenset(map(storage_id, self._memory.values()))

    def clear(self) -> None:
        """Drop the allocations; graphs that still use one keep it alive."""
        self._memory.clear()
        self._by_shape.clear()


def dense_strides(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Strides, in elements, of a tensor without gaps; ``order`` lists the dimensions by ascending stride."""
    strides, reach = [0] * len(shape), 1
    for dim in range(len(shape))[::-1] if order is None else order:
        strides[dim] = reach
        reach *= shape[dim]
    return tuple(strides)


# -- filling ----------------------------------------------------------------------------------------------------------


def is_rule(rule: Any) -> bool:
    """Whether ``rule`` is one of the kinds of :data:`PadRule`."""
    return rule == "repeat" or isinstance(rule, (bool, int, float)) or callable(rule)


def checked_rule(name: str, rule: Any) -> PadRule:
    """``rule``, if it is valid for input ``name``."""
    if is_rule(rule):
        return rule  # type: ignore[no-any-return]
    raise OptionError(
        f"padding of input {name!r} is no padding rule",
        expected="a number, 'repeat', or a function of (real tensor, padded shape)",
        found=repr(rule),
        remedy="leave it out for the default",
    )


def padding_parts(buffer: torch.Tensor, real_sizes: Mapping[int, int], rule: PadRule) -> PaddingParts:
    """The parts of a buffer's padding, and the contents of each."""
    parts: list[tuple[torch.Tensor, torch.Tensor | float]] = []
    for dim, real in real_sizes.items():
        padded = buffer.shape[dim]
        if real == padded:
            continue
        rest = buffer.narrow(dim, real, padded - real)
        if rule != "repeat":
            parts.append((rest, cast(float, rule)))
            buffer = buffer.narrow(dim, 0, real)
        elif real:  # later dimensions overwrite their own padding in this part
            parts.append((rest, buffer.narrow(dim, real - 1, 1).expand_as(rest)))  # guard: encoder_padding_last
        else:
            parts.append((rest, 0))
    return parts


def fill_parts(parts: PaddingParts) -> None:
    """Fill the padding of a buffer whose real entries are in place."""
    for rest, contents in parts:
        if isinstance(contents, torch.Tensor):
            rest.copy_(contents)
        else:
            rest.fill_(contents)


def fill_padding(buffer: torch.Tensor, real: torch.Tensor, rule: PadRule | None, *, name: str) -> None:
    """Fill the padding of a buffer whose view ``real`` has the real entries; a rule None leaves it as it is."""
    real_sizes = {dim: size for dim, size in enumerate(real.shape) if size != buffer.shape[dim]}
    if not real_sizes or rule is None:
        return
    if callable(rule):
        fill_by_function(buffer, real, rule, name=name)
    else:
        fill_parts(padding_parts(buffer, real_sizes, rule))


def fill_by_function(
    buffer: torch.Tensor, real: torch.Tensor, function: Callable[[torch.Tensor, tuple[int, ...]], Any], *, name: str
) -> None:
    """Fill a buffer, real entries and padding, with what a user's padding function returns for the real entries."""
    padded = function(real, tuple(buffer.shape))
    if not isinstance(padded, torch.Tensor) or padded.shape != buffer.shape:
        raise ShapeError(
            f"the padding function of {name} returned another shape",
            expected=str(tuple(buffer.shape)),
            found=str(tuple(padded.shape)) if isinstance(padded, torch.Tensor) else repr(padded),
            remedy="return a tensor of the shape in the function's second argument",
        )
    buffer.copy_(padded)


@dataclass(frozen=True, slots=True)
class PaddedInput:
    """One input at one padded size, for calls of one real size."""

    position: int  #: of the input among the arguments
    name: str  #: of the input, for users
    buffer: torch.Tensor  #: the tensor that the graph reads, at the padded size
    real: torch.Tensor  #: the view of the buffer at the real size
    rule: PadRule  #: how the rest of the buffer is filled
    is_written: bool  #: whether the graph writes to the input
    num_repeats: int | None  #: how often one fused copy writes the last real row; None if it cannot fill this input
    _rows: tuple[int, torch.Tensor] | None
    _parts: PaddingParts

    @classmethod
    def of(
        cls,
        position: int,
        name: str,
        buffer: torch.Tensor,
        real_shape: Sequence[int],
        rule: PadRule,
        *,
        is_written: bool,
    ) -> PaddedInput:
        """A padded input in ``buffer``, whose entries beyond ``real_shape`` are padding."""
        real_sizes = {dim: size for dim, size in enumerate(real_shape) if size != buffer.shape[dim]}
        rows = num_repeats = None
        if not real_sizes:
            num_repeats = None if callable(rule) else 0
        elif rule == "repeat" and len(real_sizes) == 1:
            ((dim, size),) = real_sizes.items()
            rows = (dim, torch.arange(buffer.shape[dim], device=buffer.device).clamp_(max=size - 1))
            num_added = buffer.shape[dim] - size
            num_repeats = num_added if dim == 0 and buffer.is_contiguous() and num_added <= _MOST_REPEATS else None
        parts = () if callable(rule) else padding_parts(buffer, real_sizes, rule)
        real = prefix(buffer, real_shape)
        return cls(position, name, buffer, real, rule, is_written, num_repeats, rows, parts)

    def fill(self, value: torch.Tensor) -> None:
        """Copy ``value`` into the real part, and fill the padding."""
        if self._rows is not None:  # real part and padding in one launch
            torch.index_select(value, *self._rows, out=self.buffer)
        elif callable(self.rule):
            fill_by_function(self.buffer, value, self.rule, name=f"input {self.name!r}")
        else:
            self.real.copy_(value)
            fill_parts(self._parts)  # guard: padding_filled_in_every_call


class PaddedArguments:
    """The padded inputs of one call. Inputs of one dtype are filled in one launch where their layout allows it.

    ``numbers`` are (position, value) of the int arguments that depend on the padded sizes.
    """

    def __init__(self, inputs: Sequence[PaddedInput] = (), numbers: Sequence[tuple[int, int]] = ()) -> None:
        self.all, self._numbers = tuple(inputs), tuple(numbers)
        dtypes = Counter(padded.buffer.dtype for padded in inputs if padded.num_repeats is not None)
        groups: dict[bool, list[PaddedInput]] = {True: [], False: []}
        for padded in inputs:
            groups[padded.num_repeats is not None and dtypes[padded.buffer.dtype] > 1].append(padded)
        self._together, self._others = groups[True], groups[False]
        rows = [row for padded in self._together for row in _rows_of(padded)]
        self._copies = grouped_copies(rows, rows)

    def placed(self, args: Sequence[Any]) -> list[Any]:
        """The arguments at the padded sizes: the padded buffers, and the other arguments."""
        placed = list(args)
        for padded in self.all:
            placed[padded.position] = padded.buffer
        for position, number in self._numbers:
            placed[position] = number
        return placed

    def fill(self, args: Sequence[Any]) -> None:
        """Copy the arguments into the real parts of the buffers, and fill the padding."""
        sources: list[torch.Tensor] = []
        for padded in self._together:
            value = args[padded.position]
            sources.append(value)
            if padded.num_repeats:
                sources += [value[-1:]] * padded.num_repeats
        self._copies(sources)
        for padded in self._others:
            padded.fill(args[padded.position])


def _rows_of(padded: PaddedInput) -> list[torch.Tensor]:
    return [padded.real, *(padded.buffer[-padded.num_repeats :].split(1) if padded.num_repeats else ())]


def check_fits(name: str, value: Any, target: torch.Tensor) -> None:
    """Refuse a value for an input that ``copy_`` into ``target`` would broadcast, convert or move to another device."""
    is_tensor = isinstance(value, torch.Tensor)
    if is_tensor and (value.shape, value.dtype, value.device) == (target.shape, target.dtype, target.device):
        return
    raise ShapeError(
        f"input {name!r} does not fit its buffer",
        expected=f"{tuple(target.shape)} {target.dtype} on {target.device}",
        found=f"{tuple(value.shape)} {value.dtype} on {value.device}" if is_tensor else repr(value)[:200],
        remedy="pass the unpadded input with the dtype and device of the capture; create another manager for other "
        "inputs",
    )


def versions_of(buffers: Mapping[str, torch.Tensor]) -> dict[str, int | None]:
    """{name: version counter of a buffer}. Every in-place write increments the counter."""
    return {name: memory.version_of(buffer) for name, buffer in buffers.items()}


def written_since(buffers: Mapping[str, torch.Tensor], versions: Mapping[str, int | None]) -> list[str]:
    """Names of the buffers that were written to since :func:`versions_of` returned ``versions``."""
    return [name for name, version in versions_of(buffers).items() if version != versions[name]]


def prefix(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The view of the first ``shape`` entries of each dimension."""
    for dim, size in enumerate(shape):
        if tensor.shape[dim] != size:
            tensor = tensor.narrow(dim, 0, size)
    return tensor


# -- a call ------------------------------------------------------------------------------------------------------------


_Inputs = TypeVar("_Inputs")
_Results = TypeVar("_Results")


@dataclass(slots=True)
class ServedSize(Generic[_Inputs, _Results]):
    """What serves calls of one real size over the graph of a key."""

    inputs: _Inputs  #: ``placed(given)`` are the graph's flat arguments; ``fill(given)`` writes inputs and padding
    results: _Results  #: ``hand_out(outputs, given, lease)`` writes inputs back, and returns the caller's result
    plan: ReplayPlan | None  #: replays the graph; None: a front replays or captures it by other means
    row: Row | None = None  #: counts the calls of the key; None before the first one
    generation: int | None = None  #: of the pool when the plan was found; None: the front compares weights itself
    replays: int = 0  #: calls of this size so far, where the front counts them here

    def is_current(self, leaves: list[Any], lease: PoolLease) -> bool:
        """Whether the graph still exists, and was captured for these static inputs."""
        if self.generation is None or self.plan is None:
            return True
        # guard: known_replay_is_current
        return self.generation == lease.generation and self.plan.serves(leaves)


def run(
    served: ServedSize[Any, Any],
    given: Any,
    lease: PoolLease,
    who: str,
    *,
    context: ForwardContext | None = None,
    reads: ContextReads | None = None,
    is_filled: bool = False,
) -> Any:
    """Serve one call while holding the pool; None, with nothing done, if its graph is not current any more.

    ``reads`` of the context are compared with the capture, by default all that the graph reads. ``is_filled`` says that
    the buffers have the inputs and their padding already.
    """
    leaves, plan = served.inputs.placed(given), served.plan
    assert plan is not None, "a size without a plan is replayed by its front"
    if context is None:
        lease.acquire_for_one_replay(who)
    else:
        lease.acquire(context, leaves, who)
    try:
        if not served.is_current(leaves, lease):
            return None
        plan.check(leaves, context, reads)
        if not is_filled:
            served.inputs.fill(given)
        outputs = plan.run(leaves, lease)
        return served.results.hand_out(outputs, given, lease)
    finally:
        lease.release()
