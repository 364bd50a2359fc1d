"""One captured graph with everything that a replay needs, and the table of the captured graphs of one wrapper.

An entry is complete when it is created. Static inputs are compared by address, see Note [Address rule]; copied inputs
by the way they share memory, see Note [Alias patterns] in docs/design.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphpass.capture.arguments import Call
from graphpass.capture.checks import InputChecks
from graphpass.capture.contextreads import ContextReads
from graphpass.capture.device import Graph
from graphpass.capture.layout import storage_id
from graphpass.capture.outputs import OutputPlan
from graphpass.capture.records import RegionId, RunningCounts
from graphpass.capture.regioncalls import Observed
from graphpass.capture.staging import Staging, alias_pattern
from graphpass.compat import memory
from graphpass.keys import BatchDescriptor

__all__ = ["EntryTable", "GraphEntry", "StaticSet"]

_ANY_ADDRESS = 0


@dataclass(frozen=True, slots=True)
class StaticSet:
    """The static inputs baked into a graph.

    Attributes:
        positions: positions of the static inputs. A list, as the native comparison requires; never changed.
        addresses: for each argument its address at capture, None if it is not static. A list for the same reason.
        storages: addresses of the storages of the static inputs.
    """

    positions: list[int]
    addresses: list[int | None]
    storages: frozenset[int]

    @classmethod
    def of(cls, leaves: Sequence[Any], positions: Sequence[int]) -> StaticSet:
        """The set formed by ``leaves`` at ``positions``."""
        addresses: list[int | None] = [None] * len(leaves)
        for position in positions:
            addresses[position] = leaves[position].data_ptr()
        return cls(list(positions), addresses, frozenset(storage_id(leaves[p]) for p in positions))

    def matches(self, leaves: list[Any]) -> bool:
        """Whether every static input has its address at capture; one native call."""
        return memory.data_ptrs_equal(leaves, self.addresses, self.positions)

    def moved(self, leaves: Sequence[Any]) -> list[int]:
        """Positions whose address differs from the one at capture."""
        return [p for p in self.positions if leaves[p].data_ptr() != self.addresses[p]]


@dataclass(frozen=True, slots=True)
class GraphEntry:
    """One captured graph of one wrapper at one key, static-input set and alias pattern.

    Attributes:
        spec: structure of the arguments at capture.
        build_result: turns the flat outputs into the structure that the region returns.
        graph: the captured graph.
        statics: the static inputs that were baked in.
        checks: the other checks of the arguments; references static inputs that have no other owner.
        staging: buffers of all other inputs.
        outputs: how to build results.
        reads: the values that the graph read from the forward context.
        observed: under ``compare``, the tensors into which each replay writes the results of the regions inside.
        written: positions of the arguments that the region writes to.
        tally: counts of the wrapper at this key.
        owner_ids: :meth:`Call.owner_ids <graphpass.capture.arguments.Call.owner_ids>` at capture. The entry is dropped
            when one of these tensors dies, so a reused id never matches.
    """

    region: RegionId
    spec: Any
    build_result: Callable[[list[Any]], Any]
    graph: Graph
    statics: StaticSet
    checks: InputChecks = field(repr=False)
    staging: Staging
    outputs: OutputPlan
    reads: ContextReads = field(repr=False)
    observed: tuple[Observed, ...] = field(repr=False)
    written: tuple[int, ...]
    tally: RunningCounts
    owner_ids: tuple[int, ...]

    def serves(self, leaves: list[Any], spec: Any) -> bool:
        """Whether this entry was captured for these static inputs and this alias pattern."""
        return (
            (spec is self.spec or spec == self.spec)
            and self.statics.matches(leaves)
            and alias_pattern(leaves, self.staging.positions) == self.staging.pattern
            and not self._staged_input_is_static(leaves)
        )

    def _staged_input_is_static(self, leaves: Sequence[Any]) -> bool:
        """Whether a staged input shares memory with a static input: a copy would hide that."""
        storages = self.statics.storages
        return bool(storages) and any(storage_id(leaves[p]) in storages for p in self.staging.positions)

    def reads_pool_at(self, leaves: Sequence[Any]) -> bool:
        """Whether all inputs in pool memory have their addresses at capture."""
        return all(leaves[position].data_ptr() == address for position, address in self.checks.pool_inputs)

    def check(self, leaves: Sequence[Any]) -> None:
        """Refuse arguments that the graph cannot read as it was captured.

        Raises:
            CaptureError: a number or flag differs from the one baked in.
            ShapeError: a staged input has another shape, dtype or device; a static input another layout.
            StaticInputError: an input in pool memory has another address.
        """
        self.checks.check(leaves)
        self.staging.check(leaves)

    def run(self, leaves: Sequence[Any], *, clone: bool, before_replay: Callable[[GraphEntry], None]) -> list[Any]:
        """Copy in, replay, copy back; returns the flat outputs. ``before_replay`` runs after the inputs are copied."""
        with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():
            self.staging.copy_in(leaves)
            before_replay(self)
            self.tally.replayed += 1
            self.tally.copied += len(self.staging.positions)
            return self._replay_read(leaves, clone=clone)

    def replay(self, leaves: Sequence[Any]) -> list[Any]:
        """:meth:`run` inside a plan, which has already counted and announced the replay; outputs stay in the pool."""
        with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():
            self.staging.copy_in(leaves)
            return self._replay_read(leaves, clone=False)

    def _replay_read(self, leaves: Sequence[Any], *, clone: bool) -> list[Any]:
        self.graph.replay()
        self.staging.copy_back(leaves)
        return self.outputs.build(leaves, clone=clone)


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
        address = self._address(call.leaves) if self._anchor in entry.statics.positions else _ANY_ADDRESS
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
