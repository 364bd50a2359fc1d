"""The run-time check of padding: with other contents in the padding, all real entries must be equal bit by bit.

A control replay with equal contents runs first. If its results already differ (atomic additions), the comparison allows
a multiple of that difference. Then each input without declared padding is replayed with other finite contents in its
padding, small and large.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from cgpass.cutting import OutputCuts
from cgpass.paddedinputs import PaddedInput
from graphpass.capture.snapshot import restoring

__all__ = ["PaddedCall", "padding_reaches", "real_entries"]

_LARGE: Mapping[torch.dtype, float] = MappingProxyType({torch.float16: 1e2, torch.bfloat16: 1e2})
_LARGE_OTHERWISE = 1e4
_SPREADS_ALLOWED = 4.0


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
        replay: replays with the current contents of the buffers; returns the flat outputs, uncut.
        device: where the graph runs.
    """

    inputs: Sequence[PaddedInput]
    declared: frozenset[int]
    args: Sequence[Any]
    written: Sequence[tuple[str, torch.Tensor]]
    generators: Sequence[torch.Generator]
    cuts: OutputCuts
    replay: Callable[[], Sequence[Any]]
    device: torch.device

    def observed(self, magnitude: Callable[[torch.dtype], float] | None) -> list[tuple[str, torch.Tensor]]:
        """Replay, restore the state, and return copies of all real entries of the replay as (name, tensor).

        Args:
            magnitude: dtype -> scale of random contents in the padding; None: the contents by the padding rules.
        """
        sources = _SourceSlices()
        for padded in self.inputs:
            padded.fill(self.args[padded.position])
            if magnitude is not None and padded.position not in self.declared:
                _scramble(padded, sources, magnitude)
        with restoring([tensor for _, tensor in self.written], self.generators, self.device):
            outputs = self.replay()
            entries = real_entries(self.cuts, outputs)
            for padded in self.inputs:
                if padded.is_written:
                    entries.append((f"written input {padded.position}", padded.real))
            buffers = {id(padded.buffer) for padded in self.inputs}
            entries += [(name, tensor) for name, tensor in self.written if id(tensor) not in buffers]
            return [(name, tensor.clone()) for name, tensor in entries]


def real_entries(cuts: OutputCuts, outputs: Sequence[Any]) -> list[tuple[str, torch.Tensor]]:
    """The real parts of the outputs by name."""
    indices = [cut.index for group in cuts.tensors for cut in group]
    return [(f"output {index}", part) for index, part in zip(indices, cuts.real_parts(outputs), strict=True)]


def padding_reaches(call: PaddedCall) -> tuple[str | None, bool]:
    """The name of an output or input whose real entries depend on the padding, or None; and whether replays are noisy.

    Replays are noisy if two of them differ with equal contents.
    """
    with restoring((), call.generators, call.device):  # random contents come from the default generator
        expected, control = call.observed(None), call.observed(None)
        spreads = [_spread(one, other) for (_, one), (_, other) in zip(expected, control, strict=True)]
        for magnitude in (_small, _large):
            for (name, one), (_, other), spread in zip(expected, call.observed(magnitude), spreads, strict=True):
                if _spread(one, other) > _SPREADS_ALLOWED * spread:
                    return name, any(spreads)
    return None, any(spreads)


def _small(_: torch.dtype) -> float:
    return 1.0


def _large(dtype: torch.dtype) -> float:
    return _LARGE.get(dtype, _LARGE_OTHERWISE)


class _SourceSlices:
    """Chooses the real slices that the integers of the padding are copied from.

    A model may compute an index from several integers: the width of a box from its corners, a row from two inputs. So a
    slice of the padding is a copy of one whole real slice, the same one in all inputs that are padded alike.
    """

    def __init__(self) -> None:
        self._indices: dict[tuple[int, int], torch.Tensor] = {}

    def fill(self, padded: PaddedInput) -> None:
        """Write integers to the padding; zeros if there is a single real slice, whose copies would change nothing."""
        buffer = padded.buffer
        for dim, (real, size) in enumerate(zip(padded.real.shape, buffer.shape, strict=True)):
            if real == size:
                continue
            if real == 1:
                buffer.narrow(dim, 1, size - 1).zero_()
                continue
            index = self._indices.get((real, size))
            if index is None:
                index = torch.arange(size, device=buffer.device)
                index[real:] = torch.randint(real, (size - real,), device=buffer.device)
                self._indices[real, size] = index
            buffer.copy_(buffer.index_select(dim, index))


def _scramble(padded: PaddedInput, sources: _SourceSlices, magnitude: Callable[[torch.dtype], float]) -> None:
    """Write random finite contents to the padding; integers are copies of real slices, so that indices stay valid."""
    buffer = padded.buffer
    if buffer.dtype is torch.bool:  # a mask that marks the padding must stay correct
        return
    if not (buffer.dtype.is_floating_point or buffer.dtype.is_complex):
        sources.fill(padded)
        return
    real = padded.real.clone()
    buffer.copy_(torch.randn(buffer.shape, dtype=torch.float32, device=buffer.device) * magnitude(buffer.dtype))
    padded.real.copy_(real)


def _spread(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two tensors: 0 if all bits agree, infinite if a difference is not finite."""
    if not (one.is_floating_point() or one.is_complex()):
        return 0.0 if torch.equal(one, other) else float("inf")
    same = (one == other) | (one.isnan() & other.isnan())
    if bool(same.all()):
        return 0.0
    difference = (one.to(torch.complex128) - other.to(torch.complex128)).abs().masked_fill(same, 0.0).max()
    return float(difference) if bool(difference.isfinite()) else float("inf")
