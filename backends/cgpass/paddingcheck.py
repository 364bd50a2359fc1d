"""The run-time check of padding: other contents there must leave every real entry as it is, bit by bit.

A control replay with the same contents comes first: where that differs already (atomic additions), the comparison
allows for its spread. Then the padding of each input that nobody declared gets other finite contents, small and large.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from cgpass.cutting import OutputCuts
from cgpass.paddedinputs import PaddedInput
from graphpass.capture.snapshot import state_kept

__all__ = ["PaddedCall", "padding_reaches", "real_entries"]

_LARGE: Mapping[torch.dtype, float] = MappingProxyType({torch.float16: 1e2, torch.bfloat16: 1e2})
_LARGE_OTHERWISE = 1e4
_SPREADS_ALLOWED = 4.0


@dataclass(frozen=True, slots=True)
class PaddedCall:
    """One call at a key larger than its real sizes, which can be repeated.

    Attributes:
        inputs: the padded inputs.
        declared: positions of inputs whose padding the user declared; it stays as it is.
        args: the caller's arguments.
        written: what the graph writes to and the call restores: padded buffers and the caller's other tensors.
        generators: random number generators among the arguments.
        cuts: how to cut the outputs.
        replay: replays over what the buffers hold; the flat outputs, uncut.
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
        """Copies of all real entries that a replay leaves; the state is as before afterwards.

        Args:
            magnitude: scale of other contents in the padding; None for the contents that the rules give.
        """
        for padded in self.inputs:
            padded.fill(self.args[padded.position])
            if magnitude is not None and padded.position not in self.declared:
                _scramble(padded, self.args[padded.position], magnitude)
        with state_kept([tensor for _, tensor in self.written], self.generators, self.device):
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
    """What depends on the padding, or None; and whether the control replay differed already."""
    with state_kept((), call.generators, call.device):  # other contents are drawn from the default generator
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


def _scramble(padded: PaddedInput, value: torch.Tensor, magnitude: Callable[[torch.dtype], float]) -> None:
    """Other finite contents in the padding: integers are values of real entries, so that indices stay valid."""
    buffer = padded.buffer
    if buffer.dtype is torch.bool:  # a mask says what is padding
        return
    real = padded.real.clone()
    if buffer.dtype.is_floating_point or buffer.dtype.is_complex:
        scale = magnitude(buffer.dtype)
        buffer.copy_(torch.randn(buffer.shape, dtype=torch.float32, device=buffer.device) * scale)
    else:
        flat = value.reshape(-1)
        buffer.copy_(flat[torch.randint(len(flat), buffer.shape, device=buffer.device)])
    padded.real.copy_(real)


def _spread(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two tensors; infinite where only one of them is a number, 0 where all bits agree."""
    if not (one.is_floating_point() or one.is_complex()):
        return 0.0 if torch.equal(one, other) else float("inf")
    same = (one == other) | (one.isnan() & other.isnan())
    if bool(same.all()):
        return 0.0
    difference = (one.to(torch.complex128) - other.to(torch.complex128)).abs().masked_fill(same, 0.0).max()
    return float(difference) if bool(difference.isfinite()) else float("inf")
