"""What kinds of batches keys serve, and how: the groups in which their memory is told."""

from __future__ import annotations

from collections.abc import Iterable

from graphpass.ladder.estimate import Key

__all__ = ["group_of", "keys_by_group"]


def group_of(key: Key) -> str:
    """``mixed PIECEWISE``, ``mixed FULL`` or ``decode FULL``."""
    mode, descriptor = key
    return f"{'decode' if descriptor.uniform else 'mixed'} {mode}"


def keys_by_group(keys: Iterable[Key]) -> dict[str, list[Key]]:
    """The keys of each group, in their order."""
    groups: dict[str, list[Key]] = {}
    for key in keys:
        groups.setdefault(group_of(key), []).append(key)
    return groups
