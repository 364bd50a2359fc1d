"""The run-time check of padding: with other contents in the padding, all real entries must be equal bit by bit.

A control replay with equal contents runs first. If its results already differ (atomic additions), the comparison allows
a multiple of that difference. Then each input without declared padding is replayed with other contents in its padding:
floats are random numbers, small and large; integers are copies of real entries, so that indices stay valid. So are
floats, if the model may compute an index from them.

Where no proof covers a size, other contents do not suffice: declared padding has no others, copies of entries that are
all equal change nothing, and a mean over n rows leaks only 1/n. There the graph also runs in float64, at the real sizes
and with two amounts of padding. Other sizes round otherwise, but far below such a leak. An operator without float64
rounds as visibly as a leak changes results; but a leak grows with the amount of padding, and rounding does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import torch

from cgpass.calls import AutoCall
from cgpass.float64run import Float64Run
from graphpass.capture.snapshot import restoring
from graphpass.context import ForwardContext, entered
from graphpass.errors import GraphpassError
from graphpass.keys import BatchDescriptor
from graphpass.paddedmemory import OutputCuts, PaddedInput, prefix

__all__ = ["DueChecks", "PaddedCall", "PaddingCheck", "check_padding", "real_entries"]

_LARGE: Mapping[torch.dtype, float] = MappingProxyType({torch.float16: 1e2, torch.bfloat16: 1e2})
_LARGE_OTHERWISE = 1e4
_SPREADS_ALLOWED = 4.0
_SEEDS = itertools.count()  # other contents in each check
_FLOAT64_ROUNDING = 1e-8
"""Allowed difference in float64 of real entries at padded and at real sizes, as a share of the largest."""
_OF_OWN_ROUNDING = 1e-7
"""The same, as a share of what the replay in the graph's own types has rounded."""
_ROUNDING: Mapping[torch.dtype, float] = MappingProxyType({torch.float64: 1e-6, torch.float32: 1e-2})
_ROUNDING_OTHERWISE = 5e-2
"""The same, at most, where an operator has run in its own type."""
_GROWTH_ALLOWED = 1.5
"""Of a difference by rounding, from less padding to more; that of a leak grows by twice or more."""


@dataclass(slots=True)
class _Checked:
    """What was checked of one key: padded calls so far, and the smallest size checked of each field."""

    calls: int = 0
    smallest: tuple[int, ...] | None = None


class DueChecks:
    """Which padded calls of one graph are checked.

    Args:
        checks: once for each key; often: also at smaller sizes, and at every call whose number is a power of two; or
            never.
    """

    def __init__(self, checks: Literal["once", "often", "never"]) -> None:
        self._checks = checks
        self._checked: dict[BatchDescriptor, _Checked] = {}

    def takes(self, call: AutoCall) -> bool:
        """Whether this call is to be checked; it then counts as checked."""
        if self._checks == "never":
            return False
        checked = self._checked.setdefault(call.key.descriptor, _Checked())
        checked.calls += 1
        if checked.smallest is not None:
            is_smaller = any(real < seen for real, seen in zip(call.real, checked.smallest, strict=True))
            if self._checks == "once" or not (is_smaller or checked.calls & (checked.calls - 1) == 0):
                return False
        checked.smallest = tuple(min(pair) for pair in zip(call.real, checked.smallest or call.real, strict=True))
        return True

    def clear(self) -> None:
        """Forget what was checked."""
        self._checked.clear()


def real_entries(cuts: OutputCuts, outputs: Sequence[Any]) -> list[tuple[str, torch.Tensor]]:
    """The real parts of the outputs by name."""
    return [(f"output {index}", part) for index, part in cuts.real_parts(outputs).items()]


@dataclass(frozen=True, slots=True)
class RunsInFloat64:
    """How a call runs in float64.

    Attributes:
        run: the graph.
        padded: the call with its padding; before it, one with less, where the graph admits a size in between.
        context: what the graph's operators see, but for the mask of padded rows.
    """

    run: Float64Run
    padded: Sequence[AutoCall]
    context: ForwardContext


@dataclass(frozen=True, slots=True)
class PaddedCall:
    """One call at a key larger than its real sizes, which can be repeated.

    Attributes:
        inputs: the padded inputs.
        declared: positions of inputs whose padding the user declared; it is not changed.
        args: the caller's arguments.
        written: (name, tensor) of the tensors that the graph writes: padded buffers and the caller's other tensors.
            They are restored after each replay.
        generators: random number generators among the arguments.
        cuts: how to cut the outputs.
        contents: what other contents floats have: random numbers, or copies of real entries.
        replay: replays with the current contents of the buffers; returns the flat outputs, uncut.
        run_unpadded: runs without a graph at the real sizes; returns the flat outputs.
        in_float64: the runs in float64; None where a proof covers all sizes.
        device: where the graph runs.
    """

    inputs: Sequence[PaddedInput]
    declared: frozenset[int]
    args: Sequence[Any]
    written: Sequence[tuple[str, torch.Tensor]]
    generators: Sequence[torch.Generator]
    cuts: OutputCuts
    contents: Literal["random", "real"]
    replay: Callable[[], Sequence[Any]]
    run_unpadded: Callable[[], Sequence[Any]]
    in_float64: RunsInFloat64 | None
    device: torch.device

    def observed(self, magnitude: Callable[[torch.dtype], float] | None) -> list[tuple[str, torch.Tensor]]:
        """Replay, restore the state, and return copies of all real entries of the replay as (name, tensor).

        Args:
            magnitude: dtype -> scale of random contents in the padding; None: the contents by the padding rules.
        """
        others = _OtherContents(self.device, self.contents)
        for padded in self.inputs:
            padded.fill(self.args[padded.position])
            if magnitude is not None and padded.position not in self.declared:
                others.fill(padded, magnitude)
        # guard: padding_check_undone
        with restoring([tensor for _, tensor in self.written], self.generators, self.device):
            outputs = self.replay()
            entries = real_entries(self.cuts, outputs)
            for padded in self.inputs:
                if padded.is_written:
                    entries.append((f"written input {padded.position}", padded.real))
            entries += self._written_unpadded()
            return [(name, tensor.clone()) for name, tensor in entries]

    def _written_unpadded(self) -> list[tuple[str, torch.Tensor]]:
        """The written tensors that are no padded buffers."""
        buffers = {id(padded.buffer) for padded in self.inputs}
        return [(name, tensor) for name, tensor in self.written if id(tensor) not in buffers]

    def unpadded(self) -> dict[str, torch.Tensor]:
        """The results of a run at the real sizes by name; restores the state."""
        written = [(f"written input {p.position}", self.args[p.position]) for p in self.inputs if p.is_written]
        written += self._written_unpadded()
        with restoring([tensor for _, tensor in written], self.generators, self.device):
            outputs = self.run_unpadded()
            found = {f"output {index}": outputs[index].clone() for index in self.cuts.real_parts(outputs)}
            return found | {name: tensor.clone() for name, tensor in written}


@dataclass(frozen=True, slots=True)
class PaddingCheck:
    """What a check found.

    Attributes:
        fault: why the graph cannot be padded: real entries depend on the padding, or the model fails for other
            contents; None if it can be.
        is_noisy: whether two replays differ although their contents are equal.
        in_own_type: the operators that have run in their own type, because they have no float64.
    """

    fault: str | None
    is_noisy: bool
    in_own_type: tuple[str, ...] = ()

    def limits(self) -> Iterator[tuple[str, str]]:
        """(text, remedy) of each way in which the comparison was weaker than it should be."""
        if self.is_noisy:
            text = "replays of equal contents differ; padding was compared within their spread"
            yield text, "set torch.use_deterministic_algorithms(True) for a check by bits"
        if self.in_own_type:
            text = f"no float64 for {', '.join(self.in_own_type)}; padding was compared within their rounding"
            yield text, "register_padding_rule, which proves what an operator does with padding"


def check_padding(call: PaddedCall) -> PaddingCheck:
    """Repeat a call with other contents of its padding, and in float64 with other amounts; compare all real entries."""
    with restoring((), call.generators, call.device):  # random contents come from the default generator
        expected, control = call.observed(None), call.observed(None)
        spreads = [_spread(one, other) for (_, one), (_, other) in zip(expected, control, strict=True)]
        # guard: padding_that_is_not_finite
        fault = _fault_of_contents(call, expected, spreads) or _fault_of_infinities(call, expected)
        if fault is not None or call.in_float64 is None:  # guard: padding_against_no_padding
            return PaddingCheck(fault, any(spreads))
        fault = _fault_of_amounts(call, call.in_float64, dict(expected))
        return PaddingCheck(fault, any(spreads), tuple(sorted(call.in_float64.run.in_own_type)))


def _fault_of_contents(
    call: PaddedCall, expected: Sequence[tuple[str, torch.Tensor]], spreads: Sequence[float]
) -> str | None:
    for magnitude in (_small, _large):  # guard: padding_of_large_values
        try:
            found = call.observed(magnitude)
        except (GraphpassError, torch.AcceleratorError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            return f"it fails for other contents of the padding: {error}"
        for (name, one), (_, other), spread in zip(expected, found, spreads, strict=True):
            if _spread(one, other) > _SPREADS_ALLOWED * spread:
                return f"real entries of {name} depend on the padding"
    return None


def _fault_of_infinities(call: PaddedCall, expected: Sequence[tuple[str, torch.Tensor]]) -> str | None:
    """NaN and infinity in a real entry may come from the padding, whatever its contents, or from the model."""
    suspects = [(name, one) for name, one in expected if _is_real_number(one) and not bool(one.isfinite().all())]
    unpadded = call.unpadded() if suspects else {}
    for name, one in suspects:
        for kind in (torch.isnan, torch.isinf):
            if not torch.equal(kind(one), kind(unpadded[name])):
                return f"real entries of {name} are not finite, and differ from a run without padding"
    return None


def _fault_of_amounts(call: PaddedCall, runs: RunsInFloat64, replayed: Mapping[str, torch.Tensor]) -> str | None:
    try:
        unpadded = _in_float64(call, runs, None)
        padded = [_in_float64(call, runs, amount) for amount in runs.padded]
    except torch.AcceleratorError:
        raise
    except Exception as error:  # out of memory, too: what cannot be checked is not padded
        return f"it cannot be checked in float64: {error}"
    own_types = set(runs.run.in_own_type.values())
    rounding = min((_ROUNDING.get(dtype, _ROUNDING_OTHERWISE) for dtype in own_types), default=0.0)
    for name, expected in unpadded.items():
        found = [results[name] for results in padded]
        noise = (replayed[name], found[-1])
        if not any(_is_leak(one, expected, noise) for one in found):
            continue
        if not own_types or not _is_rounding(found, expected, rounding):
            return f"real entries of {name} differ from a run without padding"
    return None


def _in_float64(call: PaddedCall, runs: RunsInFloat64, padded: AutoCall | None) -> dict[str, torch.Tensor]:
    """The real entries of a run in float64 by name; nothing that it reads changes."""
    args = call.args if padded is None else padded.filled(call.args)
    context = replace(runs.context, is_padding=None if padded is None else padded.mask)
    with restoring((), call.generators, call.device), entered(context):
        outputs, written = runs.run(args)
    found = dict(real_entries(call.cuts, outputs))
    for position, tensor in written.items():
        found[f"written input {position}"] = prefix(tensor, call.args[position].shape)
    return found


def _is_leak(found: torch.Tensor, expected: torch.Tensor, noise: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether results in float64 differ by more than rounding; ``noise``: equal results but for the rounding of types.

    Entries that agree do not count: beside a masked logit of -1e30 any leak is small. Of an entry that cancels out only
    rounding is left, in float64 far below that of the graph's own types.
    """
    spread = _spread(found, expected)
    if not spread or not _is_real_number(expected):
        return bool(spread)
    differs = found != expected
    if spread <= _FLOAT64_ROUNDING * _largest(expected, differs):
        return False
    return spread > _OF_OWN_ROUNDING * _largest(_wide(noise[0]) - _wide(noise[1]), differs)


def _is_rounding(found: Sequence[torch.Tensor], expected: torch.Tensor, rounding: float) -> bool:
    """Whether the differences at growing amounts of padding are as small as rounding and do not grow with them."""
    if len(found) < 2 or not _is_real_number(expected):
        return False
    if any(_spread(one, expected) > rounding * _largest(expected, one != expected) for one in found):
        return False
    less, more = (_wide(one).sub(_wide(expected)).nan_to_num(0.0, 0.0, 0.0).norm() for one in found)
    return bool(more <= _GROWTH_ALLOWED * less)  # guard: padding_in_own_type


def _largest(tensor: torch.Tensor, where: torch.Tensor) -> float:
    """The largest finite magnitude among some entries."""
    return float(_wide(tensor).abs().nan_to_num(0.0, 0.0, 0.0).masked_fill(~where, 0.0).max())


def _is_real_number(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _small(_: torch.dtype) -> float:
    return 1.0


def _large(dtype: torch.dtype) -> float:
    return _LARGE.get(dtype, _LARGE_OTHERWISE)


class _OtherContents:
    """Other finite contents for the padding of all inputs of a call.

    A model may compute an index from several integers: the width of a box from its corners, a row from two inputs. So a
    slice of copied padding is one whole real slice, the same one in all inputs that are padded alike.

    Args:
        device: where the inputs are.
        of_floats: whether floats are random numbers, or copies as integers are.
    """

    def __init__(self, device: torch.device, of_floats: Literal["random", "real"]) -> None:
        self._device, self._of_floats = device, of_floats
        # Its own generator: the model may draw from the default one, which has to be the same in all replays.
        self._generator = torch.Generator(device).manual_seed(next(_SEEDS))
        self._indices: dict[tuple[int, int], torch.Tensor] = {}

    def fill(self, padded: PaddedInput, magnitude: Callable[[torch.dtype], float]) -> None:
        """Write other contents to the padding of one input; ``magnitude`` is the scale of random numbers."""
        buffer = padded.buffer
        if buffer.dtype is torch.bool:  # a mask that marks the padding must stay correct
            return
        if self._of_floats == "real" or not (buffer.dtype.is_floating_point or buffer.dtype.is_complex):
            self._copy_slices(padded)
            return
        real = padded.real.clone()
        random = torch.randn(buffer.shape, generator=self._generator, dtype=torch.float32, device=self._device)
        buffer.copy_(random * magnitude(buffer.dtype))
        padded.real.copy_(real)

    def _copy_slices(self, padded: PaddedInput) -> None:
        """Write copies to the padding; zeros if there is a single real slice, whose copies would change nothing."""
        buffer = padded.buffer
        for dim, (real, size) in enumerate(zip(padded.real.shape, buffer.shape, strict=True)):
            if real == size:
                continue
            if real == 1:
                buffer.narrow(dim, 1, size - 1).zero_()
                continue
            index = self._indices.get((real, size))
            if index is None:
                index = torch.arange(size, device=self._device)
                index[real:] = torch.randint(real, (size - real,), generator=self._generator, device=self._device)
                self._indices[real, size] = index  # guard: padding_integer_slices
            buffer.copy_(buffer.index_select(dim, index))


def _spread(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two tensors: 0 if all bits agree, infinite if a difference is not finite."""
    if one.shape != other.shape or not (one.is_floating_point() or one.is_complex()):
        return 0.0 if torch.equal(one, other) else float("inf")
    same = (one == other) | (one.isnan() & other.isnan())
    if bool(same.all()):
        return 0.0
    difference = (_wide(one) - _wide(other)).abs().masked_fill(same, 0.0).max()
    return float(difference) if bool(difference.isfinite()) else float("inf")
