"""One captured graph with everything that a replay needs, and the table of the captured graphs of one wrapper.

An entry is complete when it is created.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphpass.capture.arguments import Call
from graphpass.capture.device import Graph
from graphpass.capture.outputs import OutputPlan
from graphpass.capture.regioncalls import Observed
from graphpass.capture.replayplan import ReplayPlan
from graphpass.keys import BatchDescriptor
from graphpass.report.records import RegionId

__all__ = ["EntryTable", "GraphEntry"]

_ANY_ADDRESS = 0


@dataclass(frozen=True, slots=True)
class GraphEntry:
    """One captured graph of one wrapper at one key, static-input set and alias pattern.

    Attributes:
        spec: structure of the arguments at capture.
        build_result: turns the flat outputs into the structure that the region returns.
        graph: the captured graph.
        plan: the plan that replays the graph alone; its arguments are the flat arguments of the region.
        outputs: how to build results.
        observed: under ``compare``, the tensors into which each replay writes the results of the regions inside.
        written: positions of the arguments that the region writes to.
        owner_ids: :meth:`Call.owner_ids <graphpass.capture.arguments.Call.owner_ids>` at capture, to count the sets of
            a module instance. Addresses alone decide what an entry serves.
    """

    region: RegionId
    spec: Any
    build_result: Callable[[list[Any]], Any]
    graph: Graph
    plan: ReplayPlan
    outputs: OutputPlan
    observed: tuple[Observed, ...] = field(repr=False)
    written: tuple[int, ...]
    owner_ids: tuple[int, ...]

    def serves(self, leaves: list[Any], spec: Any) -> bool:
        """Whether this entry was captured for these static inputs and this alias pattern."""
        return (spec is self.spec or spec == self.spec) and self.plan.serves(leaves)

    def reads_pool_at(self, leaves: Sequence[Any]) -> bool:
        """Whether all inputs in pool memory have their addresses at capture."""
        # guard: pool_input_moved
        return all(leaves[position].data_ptr() == address for position, address in self.plan.checks.pool_inputs)


@dataclass(slots=True, weakref_slot=True, eq=False)
class EntryTable:
    """Looks up the few entries that can serve a call, without a search through the entries of other module instances.

    Dynamo shares one callable among the instances of a class, so a decoder compiled block by block has one entry for
    each block at each key. The address of one parameter, the anchor, selects the instance; entries with the same anchor
    are tried in order.
    """

    _entries: dict[BatchDescriptor, dict[int, list[GraphEntry]]] = field(default_factory=dict)
    _anchor: int | None = None

    def add(self, descriptor: BatchDescriptor, call: Call, entry: GraphEntry) -> None:
        """Add the entry that was captured for ``call``."""
        if self._anchor is None:
            self._anchor = min(call.module_owned, default=-1)
        # An entry that stages the anchor serves every address.
        address = self._address(call.leaves) if self._anchor in entry.plan.statics.positions else _ANY_ADDRESS
        self._entries.setdefault(descriptor, {}).setdefault(address, []).append(entry)

    def candidates(self, descriptor: BatchDescriptor, leaves: Sequence[Any]) -> Sequence[GraphEntry]:
        """The entries of a key that may serve these arguments."""
        by_anchor = self._entries.get(descriptor)
        if not by_anchor:
            return ()
        address = self._address(leaves)
        anywhere = by_anchor.get(_ANY_ADDRESS, []) if address != _ANY_ADDRESS else []
        return by_anchor.get(address, []) + anywhere

    def at(self, descriptor: BatchDescriptor) -> list[GraphEntry]:
        """All entries of a key."""
        return [entry for entries in self._entries.get(descriptor, {}).values() for entry in entries]

    def descriptors(self) -> list[BatchDescriptor]:
        """The keys that have an entry."""
        return [descriptor for descriptor in self._entries if self.at(descriptor)]

    def drop(self, descriptor: BatchDescriptor, entry_id: int) -> GraphEntry | None:
        """Remove and return the entry with this ``id()``; None if it is not in the table."""
        for entries in self._entries.get(descriptor, {}).values():
            for position, entry in enumerate(entries):
                if id(entry) == entry_id:
                    return entries.pop(position)
        return None

    def clear(self) -> list[GraphEntry]:
        """Empty the table; returns the removed entries."""
        dropped = [entry for descriptor in self._entries for entry in self.at(descriptor)]
        self._entries.clear()
        return dropped

    def _address(self, leaves: Sequence[Any]) -> int:
        anchor = self._anchor
        if anchor is None or anchor < 0 or anchor >= len(leaves):
            return _ANY_ADDRESS
        leaf = leaves[anchor]
        return leaf.data_ptr() if isinstance(leaf, torch.Tensor) else _ANY_ADDRESS
