"""DictSlots in dicts that held something at capture, and whether they hold it still."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

__all__ = ["DictSlots"]


@dataclass(frozen=True, slots=True)
class DictSlots:
    """The n-th owner's n-th name held the n-th of what is kept."""

    owners: tuple[dict[str, Any], ...]
    names: tuple[str, ...]
    kept: tuple[Any, ...]

    @classmethod
    def of(cls, found: Iterable[tuple[dict[str, Any], str, Any]]) -> Self:
        """Those of (owner, name, what it holds)."""
        owners, names, kept = zip(*found, strict=True) if (found := tuple(found)) else ((), (), ())
        return cls(owners, names, kept)

    def in_place(self) -> bool:
        """Whether every one still holds what it held."""
        # All of it in C: hundreds of look-ups stand in every call.
        return all(map(operator.is_, map(dict.get, self.owners, self.names), self.kept))
