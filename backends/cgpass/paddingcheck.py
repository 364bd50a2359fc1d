"""The check at a key's first padded call: neither the padding's contents nor its presence changes a real entry.

A control replay with equal contents runs first: a multiple of its difference (atomic additions) is allowed. Then each
input without declared padding has other contents there: floats are random numbers, small and large; integers are copies
of real entries, so that indices stay valid, and so are floats of which the model may compute an index. A wrong
insertion does not depend on contents: the call is also compared with a run without padding, in the graph's own types.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch

from cgpass.keyrules import AutoRules
from cgpass.servedcalls import ServedCall
from cgpass.wrappers import CallableGraphs
from graphpass.capture.compare import has_fractions, in_double, largest_difference
from graphpass.capture.settings import restoring
from graphpass.compat.configuration import float32_precisions
from graphpass.errors import GraphpassError
from graphpass.paddedcalls import PaddedInput
from graphpass.ranks.lockstep import Lockstep

_SPREADS_ALLOWED = 4.0
_ATTEMPTS = 3
_SEEDS = itertools.count()  # other contents in each check
_OF_ONE_RUN, _OF_16_BITS = 1e-4, 2e-2
"""Allowed difference of real entries from a run without padding in own types, as a share of the largest that differ."""
_Entries: TypeAlias = dict[str, torch.Tensor]
"""Real entries by name: of an output, or of a tensor that the graph has written to."""


@dataclass(frozen=True, slots=True)
class PaddedCall:
    """One call at a key larger than its real sizes, which can be repeated."""

    call: ServedCall  #: its key, padded inputs and cuts
    rules: AutoRules  #: of the graph's dispatcher
    graphs: CallableGraphs
    args: Sequence[Any]  #: the caller's arguments
    filled: Sequence[Any]  #: the graph's arguments at the key's sizes
    replay: Callable[[], Sequence[Any]]  #: replays with the buffers' contents; returns the flat outputs, uncut

    @property
    def device(self) -> torch.device:
        """Where the graph runs."""
        return self.graphs.runtime.lease.device_for(self.filled).device

    @property
    def ranks(self) -> Lockstep | None:
        """Ranks that check together, each with as many replays: the graph has collectives."""
        return self.graphs.runtime.lockstep.get(self.graphs.name)

    def restoring(self, written: Iterable[torch.Tensor] = ()) -> AbstractContextManager[None]:
        """Restore ``written`` and all random number generators after the body."""
        return restoring(tuple(written), [arg for arg in self.args if isinstance(arg, torch.Generator)], self.device)

    def observed(self, others: _OtherContents | None = None) -> _Entries:
        """Replay, restore the state, and return copies of all real entries of the replay."""
        for padded in self.call.inputs.all:
            padded.fill(self.args[padded.position])
            is_declared = padded.rule != "repeat" or padded.name in self.graphs.settings.padding
            if others is not None and not is_declared:
                others.fill(padded)
        with self.restoring(self.filled[p] for p in self.rules.written):  # guard: padding_check_undone
            found = {f"output {index}": part for index, part in self.call.results.real_parts(self.replay()).items()}
            found |= self._written({padded.position: padded.real for padded in self.call.results.written})
            return {name: tensor.clone() for name, tensor in found.items()}

    def unpadded(self) -> _Entries:
        """The results of a run at the real sizes; restores the state."""
        written = self._written({padded.position: self.args[padded.position] for padded in self.call.results.written})
        with self.restoring(written.values()):
            outputs = self.graphs.flat(self.graphs.stitched(*self.args))
            found = {f"output {index}": outputs[index] for index in self.call.results.real_parts(outputs)}
            return {name: tensor.clone() for name, tensor in (found | written).items()}

    def _written(self, padded: Mapping[int, torch.Tensor]) -> _Entries:
        """The tensors that the graph writes to; ``padded`` has those that are padded, by position."""
        order = (*padded, *(position for position in self.rules.written if position not in padded))
        return {f"written input {position}": padded.get(position, self.filled[position]) for position in order}


def fault_of_padding(call: PaddedCall) -> tuple[str | None, bool]:
    """(Why a graph cannot be padded or None, whether replays of equal contents differ), by repetitions of a call.

    Another thread may change the weights meanwhile: a fault counts if a last replay equals the first, or after the last
    attempt.
    """
    with call.restoring():  # random contents come from the default generator
        for _ in range(_ATTEMPTS):
            expected = call.observed()
            fault, is_noisy = _compared(call, expected)
            if fault is None or call.ranks is not None:  # ranks replay equally often
                break
            last = call.observed()
            moved = any(largest_difference(one, last[name]) for name, one in expected.items())
            if not moved:  # guard: weights_moved
                break
    if call.ranks is not None and call.ranks.most(int(fault is not None)):
        fault = fault or "on another rank, real entries depend on the padding"  # guard: lockstep_checked_together
    return fault, is_noisy


def _compared(call: PaddedCall, expected: _Entries) -> tuple[str | None, bool]:
    control = call.observed()
    spreads = {name: largest_difference(one, control[name]) for name, one in expected.items()}
    checks: list[Callable[[], str | None]] = [
        partial(_fault_of_contents, call, expected, spreads, scale)
        for scale in (1.0, 1e4)  # guard: padding_of_large_values
    ]
    is_coarse = may_round(call.rules.products, call.device)  # guard: products_of_fewer_bits
    checks.append(lambda: _fault_of_sizes(expected, call.unpadded(), spreads, is_coarse=is_coarse))
    fault = None
    for check in checks:
        if fault is None or call.ranks is not None:  # guard: lockstep_checks_as_often
            found = check()
            fault = fault or found
    return fault, any(spreads.values())


def _fault_of_contents(call: PaddedCall, expected: _Entries, spreads: Mapping[str, float], scale: float) -> str | None:
    try:
        found = call.observed(_OtherContents(call.device, call.rules.check_contents, scale))
    except (GraphpassError, torch.AcceleratorError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        return f"it fails for other contents of the padding: {error}"
    for name, one in expected.items():
        if largest_difference(one, found[name]) > _SPREADS_ALLOWED * spreads[name]:
            return f"real entries of {name} depend on the padding"
    return None


def may_round(products: Iterable[str], device: torch.device) -> bool:
    """Whether torch's settings now let a device compute some of these products in float32 with fewer bits, as TF32."""
    precisions = float32_precisions()
    return any(precisions[device.type, kind] != "ieee" for kind in products)


def _fault_of_sizes(
    expected: _Entries, unpadded: _Entries, spreads: Mapping[str, float], *, is_coarse: bool
) -> str | None:
    """Whether real entries differ from a run without padding by more than rounding, in the graph's own types.

    ``spreads`` are the differences of replays with equal contents; where ``is_coarse``, float32 may be as coarse as 16
    bits.
    """
    for name, one in expected.items():
        other = unpadded[name]
        if one.shape != other.shape:
            return f"{name} has another shape than in a run without padding"
        spread = largest_difference(one, other)
        if spread <= _SPREADS_ALLOWED * spreads[name]:  # guard: noise_of_replays
            continue
        is_fine = one.dtype is torch.float64 or (one.dtype is torch.float32 and not is_coarse)
        allowed = (_OF_ONE_RUN if is_fine else _OF_16_BITS) if has_fractions(one) else 0.0
        if spread > allowed * _largest(other, one != other):  # guard: padding_against_one_run
            return f"real entries of {name} differ from a run without padding"
    return None


def _largest(tensor: torch.Tensor, where: torch.Tensor) -> float:
    return float(in_double(tensor).abs().nan_to_num(0.0, 0.0, 0.0).masked_fill(~where, 0.0).max())


class _OtherContents:
    """Other finite contents for the padding of all inputs of a call; ``scale`` is that of random numbers.

    A model may compute an index from several integers: so a slice of copied padding is one whole real slice, the same
    one in all inputs that are padded alike.
    """

    def __init__(self, device: torch.device, of_floats: Literal["random", "real"], scale: float) -> None:
        self._device, self._of_floats, self._scale = device, of_floats, scale
        # Its own generator: the model may draw from the default one, which has to be the same in all replays.
        self._generator = torch.Generator(device).manual_seed(next(_SEEDS))
        self._indices: dict[tuple[int, int], torch.Tensor] = {}

    def fill(self, padded: PaddedInput) -> None:
        buffer = padded.buffer
        if buffer.dtype is torch.bool:  # a mask that marks the padding must stay correct
            return
        if self._of_floats == "real" or not (buffer.dtype.is_floating_point or buffer.dtype.is_complex):
            self._copy_slices(padded)
            return
        real = padded.real.clone()
        random = torch.randn(buffer.shape, generator=self._generator, dtype=torch.float32, device=self._device)
        is_narrow = buffer.dtype in (torch.float16, torch.bfloat16)
        buffer.copy_(random * (min(self._scale, 1e2) if is_narrow else self._scale))
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
