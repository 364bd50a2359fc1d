"""Decides whether a graph can be captured as a whole."""

from __future__ import annotations

from graphpass.regions.split import Partition

__all__ = ["never_full"]


def never_full(partition: Partition) -> str | None:
    """The first region that cannot be captured, with its reason; None if there is none.

    A region that is eager only because of ``splitting_ops`` can be captured.
    """
    for region in partition.regions:
        for reason in region.reasons:
            if not reason.captures_whole:
                return f"{region.name}: {reason}"
    return None
