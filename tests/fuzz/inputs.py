"""Where the inputs of each call lie: in new memory, in old memory refilled, in an earlier result, in each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from tests.fuzz.programs import COLUMNS, Call

_Pair = tuple[torch.Tensor, torch.Tensor]


def _memory(*shape: int, device: torch.device) -> torch.Tensor:
    """Memory that both sides fill alike, also where no input lies."""
    return torch.full(shape, 0.125, device=device)


def _offset(rows: int, device: torch.device) -> _Pair:
    memory = _memory(3 + rows * COLUMNS, device=device)
    return memory[3:].view(rows, COLUMNS), _memory(rows, COLUMNS, device=device)


def _columns(rows: int, device: torch.device) -> _Pair:
    base = _memory(rows, 2 * COLUMNS, device=device)
    return base[:, :COLUMNS], base[:, COLUMNS:]


def _overlap(rows: int, device: torch.device) -> _Pair:
    base = _memory(rows + 1, COLUMNS, device=device)
    return base[:rows], base[1:]


def _same(rows: int, device: torch.device) -> _Pair:
    both = _memory(rows, COLUMNS, device=device)
    return both, both


LAYOUTS: Mapping[str, Callable[[int, torch.device], _Pair]] = MappingProxyType(
    {
        "fresh": lambda rows, device: (_memory(rows, COLUMNS, device=device), _memory(rows, COLUMNS, device=device)),
        "same": _same,
        "offset": _offset,
        "rows": lambda rows, device: (
            _memory(2 * rows, COLUMNS, device=device)[::2],
            _memory(rows, COLUMNS, device=device),
        ),
        "transposed": lambda rows, device: (
            _memory(COLUMNS, rows, device=device).t(),
            _memory(rows, COLUMNS, device=device),
        ),
        "columns": _columns,
        "overlap": _overlap,
    }
)
"""How new memory for x and y is laid out."""


class Feed:
    """The inputs of one side of a comparison, call by call; the other side's feed makes the same decisions."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._earlier: dict[int, _Pair] = {}
        self._results: Sequence[Any] = ()

    def inputs(self, call: Call, step: int, module: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x, y and i of a call; ``refill``, ``swapped`` and ``feedback`` are new memory where nothing fits."""
        generator = torch.Generator().manual_seed(1000 + step)
        values = [torch.randn(call.rows, COLUMNS, generator=generator) for _ in range(2)]
        picks = torch.randint(0, min(2, call.rows), (call.rows,), generator=generator)
        x, y = self._memory(call, module)
        y.copy_(values[1])
        if call.layout != "feedback" or not any(result is x for result in self._results):
            x.copy_(values[0])
        if call.layout != "feedback":
            self._earlier[call.rows] = (x, y)
        return x, y, picks.to(self._device)

    def returned(self, results: Sequence[Any]) -> None:
        """Results of the last call, for ``feedback``."""
        self._results = results

    def _memory(self, call: Call, module: Any) -> _Pair:
        earlier = self._earlier.get(call.rows)
        if earlier is not None and call.layout == "refill":
            return earlier
        if earlier is not None and call.layout == "swapped":
            return earlier[1], earlier[0]
        fresh = LAYOUTS.get(call.layout, LAYOUTS["fresh"])(call.rows, self._device)
        if call.layout == "buffer":
            return module.b[: call.rows], fresh[1]
        if call.layout == "feedback":
            fitting = [result for result in self._results if _may_be_input(result, call.rows)]
            return (fitting[0], fresh[1]) if fitting else fresh
        return fresh


def _may_be_input(result: Any, rows: int) -> bool:
    return (
        isinstance(result, torch.Tensor)
        and result.shape == (rows, COLUMNS)
        and result.dtype is torch.float32
        and all(stride for stride, size in zip(result.stride(), result.shape, strict=True) if size > 1)
    )
