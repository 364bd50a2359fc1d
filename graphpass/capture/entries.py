"""The entries of one wrapper by key, and within a key by the address of one parameter of the calling module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphpass.capture.arguments import Call
from graphpass.capture.entry import GraphEntry
from graphpass.keys import BatchDescriptor

__all__ = ["EntryTable"]

_ANY = 0


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
        address = self._address(call.leaves) if self._anchor in entry.statics.positions else _ANY
        self._entries.setdefault(descriptor, {}).setdefault(address, []).append(entry)

    def candidates(self, descriptor: BatchDescriptor, leaves: Sequence[Any]) -> Sequence[GraphEntry]:
        """The entries of a key that may serve these arguments."""
        by_anchor = self._entries.get(descriptor)
        if not by_anchor:
            return ()
        address = self._address(leaves)
        anywhere = by_anchor.get(_ANY, []) if address != _ANY else []
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
            return _ANY
        leaf = leaves[anchor]
        return leaf.data_ptr() if isinstance(leaf, torch.Tensor) else _ANY
