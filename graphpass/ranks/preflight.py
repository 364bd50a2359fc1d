"""What would make the replay of a captured collective hang, found before the capture."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from graphpass.ledger import Reason


def would_hang(of_ranks: Sequence[Mapping[str, Any]], symmetric: Collection[str] = ()) -> Iterator[Reason]:
    """Why graphs with collectives of these ranks would hang.

    Args:
        of_ranks: of each rank its ``node``, its version of NCCL (``nccl``, empty for another backend), and whether the
            group has run a collective (``is_warm``) and has symmetric memory (``is_symmetric``).
        symmetric: the operators over symmetric memory that are captured.
    """
    nodes = {facts["nccl"]: facts["node"] for facts in of_ranks}
    if len(nodes) > 1:  # guard: preflight_versions
        found = ", ".join(f"{version or 'none'} on {node}" for version, node in sorted(nodes.items()))
        yield Reason(f"the ranks have different versions of NCCL: {found}", "install one version on every node")
    cold = [str(rank) for rank, facts in enumerate(of_ranks) if not facts["is_warm"]]
    if cold:  # guard: preflight_communicators
        why = f"a capture would make the communicator of rank {', '.join(cold)}, which waits for all ranks"
        yield Reason(why, "run a collective over the group before: torch.distributed.barrier(group)")
    if symmetric and not all(facts["is_symmetric"] for facts in of_ranks):  # guard: preflight_symmetric
        why = f"{', '.join(sorted(symmetric))} would register symmetric memory in a capture, which waits for all ranks"
        yield Reason(why, "allocate and rendezvous the buffers before: torch.distributed._symmetric_memory")
