"""Key tables: look up the smallest key for a real shape, in time independent of the number of keys.

The keys of one mode and kind form a :class:`Route`. Its keys with the same number of adapters and the same other pairs
in ``extra`` form a :class:`KeyFamily`, which one dictionary look-up finds. A family rounds each field up in the ladder
of its keys; the resulting indices address one cell of a grid, which has the smallest key for these sizes.
"""

from __future__ import annotations

import operator
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from graphpass.dispatch.decision import Dispatch, DispatchReason
from graphpass.dispatch.grid import Extra
from graphpass.dispatch.sizes import Ladder
from graphpass.keys import BatchDescriptor
from graphpass.modes import CUDAGraphMode

__all__ = ["KeyFamily", "Route", "Rung"]


@dataclass(frozen=True, slots=True, eq=False)
class Rung:
    """One key with all precomputed values for dispatch. Rungs are compared by identity.

    Attributes:
        descriptor: the key's padded shape.
        sizes: padded size of every ladder field.
        capacity: the largest number of requests; ``sys.maxsize`` if any number is served.
        exact: the decision for this key with the reason EXACT.
        padded: the decision with the reason PADDED.
        relaxed: the decision with the reason RELAXED.
    """

    descriptor: BatchDescriptor
    sizes: tuple[int, ...]
    capacity: int
    exact: Dispatch
    padded: Dispatch
    relaxed: Dispatch

    @staticmethod
    def of(mode: CUDAGraphMode, descriptor: BatchDescriptor, sizes: tuple[int, ...]) -> Rung:
        """The rung of one key."""
        return Rung(
            descriptor=descriptor,
            sizes=sizes,
            capacity=sys.maxsize if descriptor.num_reqs is None else descriptor.num_reqs,
            exact=Dispatch(mode, descriptor, DispatchReason.EXACT),
            padded=Dispatch(mode, descriptor, DispatchReason.PADDED),
            relaxed=Dispatch(mode, descriptor, DispatchReason.RELAXED),
        )


class KeyFamily:
    """Keys that differ in their sizes only; finds the smallest key that can serve a batch.

    Keys are compared by tokens, then by requests. The grid has one cell for each combination of sizes. That is one cell
    for each key if the keys come from ladders.

    Args:
        rungs: the keys, at least one, in any order.
    """

    __slots__ = ("_axes", "_cells", "_ladders", "_largest_capacities", "_none", "_rungs", "_strides")

    def __init__(self, rungs: Sequence[Rung]) -> None:
        self._rungs = sorted(rungs, key=lambda rung: (rung.descriptor.num_tokens, rung.capacity, rung.sizes))
        self._largest_capacities = list(accumulate((rung.capacity for rung in self._rungs), max))
        self._ladders = tuple(Ladder(sizes) for sizes in zip(*(rung.sizes for rung in rungs), strict=True))
        strides = [1]
        for ladder in reversed(self._ladders):
            strides.append(strides[-1] * len(ladder))
        self._strides = tuple(reversed(strides[:-1]))
        self._axes = tuple(
            (ladder.index_above, len(ladder), stride)
            for ladder, stride in zip(self._ladders, self._strides, strict=True)
        )
        self._none = len(self._rungs)
        self._cells = self._smallest_by_cell(strides[-1])

    def _smallest_by_cell(self, num_cells: int) -> list[int]:
        """For each cell the position of the smallest key at least as large in every field; ``len(rungs)`` for none."""
        cells = [self._none] * num_cells
        for position in reversed(range(len(self._rungs))):
            sizes = self._rungs[position].sizes
            steps = (ladder.index_above(size) for ladder, size in zip(self._ladders, sizes, strict=True))
            cells[sum(map(operator.mul, steps, self._strides))] = position
        for ladder, stride in zip(self._ladders, self._strides, strict=True):
            for cell in reversed(range(num_cells)):
                if cell // stride % len(ladder) + 1 < len(ladder):
                    cells[cell] = min(cells[cell], cells[cell + stride])
        return cells

    def smallest(self, sizes: tuple[int, ...], num_reqs: int) -> Rung | None:
        """The smallest key for ``num_reqs`` requests of these sizes; None if there is none."""
        cell = 0
        for (step_to, num_steps, stride), size in zip(self._axes, sizes):  # noqa: B905  # hot path
            step = step_to(size)
            if step == num_steps:
                return None
            cell += step * stride
        position = self._cells[cell]
        if position == self._none:
            return None
        rung = self._rungs[position]
        return rung if num_reqs <= rung.capacity else self._smallest_from(position, sizes, num_reqs)

    def _smallest_from(self, position: int, sizes: tuple[int, ...], num_reqs: int) -> Rung | None:
        """The result of ``smallest`` by search, if the key in the cell has too little capacity for the requests."""
        start = max(position, bisect_left(self._largest_capacities, num_reqs))
        for rung in self._rungs[start:]:
            if num_reqs <= rung.capacity and all(map(operator.le, sizes, rung.sizes)):
                return rung
        return None


class Route:
    """The keys of one runtime mode for one kind of batch, and which of them are captured.

    Args:
        mode: PIECEWISE or FULL.
        uniform: whether the keys are for uniform decode batches.
    """

    __slots__ = ("_captured", "_families", "_known", "_rungs", "_stale", "mode", "uniform")

    def __init__(self, mode: CUDAGraphMode, *, uniform: bool) -> None:
        self.mode = mode
        self.uniform = uniform
        self._known: dict[BatchDescriptor, Rung] = {}
        self._rungs: dict[tuple[int, Extra], list[Rung]] = {}
        self._families: dict[tuple[int, Extra], KeyFamily] = {}
        self._stale: set[tuple[int, Extra]] = set()
        self._captured: set[Rung] = set()

    def add(self, descriptor: BatchDescriptor, sizes: Mapping[str, int]) -> None:
        """Add a key; an existing key keeps its state. The next dispatch rebuilds the key's family."""
        if descriptor in self._known:
            return
        rest = tuple(sorted((pair for pair in descriptor.extra if pair[0] not in sizes), key=lambda pair: pair[0]))
        identity = (descriptor.num_active_loras, rest)
        self._known[descriptor] = rung = Rung.of(self.mode, descriptor, tuple(sizes.values()))
        self._rungs.setdefault(identity, []).append(rung)
        self._stale.add(identity)

    def __len__(self) -> int:
        return len(self._known)

    def family(self, identity: tuple[int, Extra]) -> KeyFamily | None:
        """The keys with this number of adapters and these other pairs in ``extra``."""
        if self._stale:
            self._rebuild()
        return self._families.get(identity)

    def _rebuild(self) -> None:
        for identity in tuple(self._stale):
            self._families[identity] = KeyFamily(self._rungs[identity])
            self._stale.discard(identity)

    def descriptors(self) -> list[BatchDescriptor]:
        """Every key, in the order they were added."""
        return list(self._known)

    def mark_captured(self, descriptor: BatchDescriptor) -> bool:
        """Record that the key's graph exists. Returns False if the route has no such key."""
        rung = self._known.get(descriptor)
        if rung is None:
            return False
        self._captured.add(rung)
        return True

    def is_captured(self, descriptor: BatchDescriptor) -> bool:
        """Whether the key's graph exists."""
        return self._known.get(descriptor) in self._captured

    def is_ready(self, rung: Rung) -> bool:
        """Whether the graph of this rung exists."""
        return rung in self._captured

    def forget_captured(self) -> None:
        """Mark all keys as not captured."""
        self._captured.clear()
