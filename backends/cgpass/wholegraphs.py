"""Whether a graph can be captured as a whole."""

from __future__ import annotations

from graphpass.regions.split import Partition

__all__ = ["never_full"]


def never_full(partition: Partition) -> str | None:
    """The first region that no graph can hold, with its reason; splitting ops can be captured in a whole."""
    for region in partition.regions:
        for reason in region.reasons:
            if not reason.captures_whole:
                return f"{region.name}: {reason}"
    return None
