"""Key tables: from a real shape to the smallest key that holds it, in a time that does not grow with the keys.

Keys of one mode and kind form a :class:`Route`. Within it, keys with the same adapters and the same ``extra`` beside
the ladder fields form a :class:`KeyFamily`, found by one dictionary read. A family rounds each field up in the ladder
of its own keys; the steps address one cell of a grid that holds the smallest key for every corner.
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
    """One key with everything a dispatch needs to know of it, ready made. Rungs are compared by identity.

    Attributes:
        descriptor: the key's padded shape.
        sizes: padded size of every ladder field.
        capacity: requests the key holds; ``sys.maxsize`` where any number is served.
        exact, padded, relaxed: the decision for this key with that reason.
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
    """Keys that differ in their sizes only: answers which is the smallest one that holds a batch.

    Smaller means fewer tokens, then fewer requests. The grid has one cell for each combination of the sizes in use,
    which for keys made from ladders is one cell a key.

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
        """For each cell the position of the smallest key at or above it in every field; ``len(rungs)`` for none."""
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
        """The smallest key that holds ``num_reqs`` requests of these sizes, or None when none does."""
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
        """The same answer where the request count, not the sizes, decides: more requests than the sizes suggest."""
        start = max(position, bisect_left(self._largest_capacities, num_reqs))
        for rung in self._rungs[start:]:
            if num_reqs <= rung.capacity and all(map(operator.le, sizes, rung.sizes)):
                return rung
        return None


class Route:
    """The keys of one runtime mode that serve one kind of batch, and which of them are captured.

    Args:
        mode: PIECEWISE or FULL.
        uniform: the keys are for uniform decode batches.
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
        """Add a key; one that is there already keeps its state. Its family is rebuilt at the next dispatch."""
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
        """The keys with this number of adapters and this ``extra`` beside the ladder fields."""
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
        """Note that the key's graph exists; False when there is no such key."""
        rung = self._known.get(descriptor)
        if rung is None:
            return False
        self._captured.add(rung)
        return True

    def is_captured(self, descriptor: BatchDescriptor) -> bool:
        """Whether the key's graph exists."""
        return self._known.get(descriptor) in self._captured

    def is_ready(self, rung: Rung) -> bool:
        """Whether the graph of one of this route's rungs exists."""
        return rung in self._captured

    def forget_captured(self) -> None:
        """No key is captured any more."""
        self._captured.clear()
