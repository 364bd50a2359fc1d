"""Ranks that make the same calls in the same order agree while they capture, and never while they replay."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from graphpass.compat import processgroups
from graphpass.errors import AgreementError, CaptureError
from graphpass.ledger import Reason
from graphpass.ranks.group import DataParallelAgreement, failures_of

_WARMING = 1
"""The agreements before a warm-up, which runs collectives; there is one after it, and at a capture's end."""
_FINE, _FAILED, _FAILED_BETWEEN = range(3)


class Lockstep:
    """The ranks whose collectives are in a graph. They capture it together, and a failure of one is one of all.

    A replay waits for nobody: all ranks choose the graph by the calls and their sizes.

    Args:
        group: name of the group of the collectives; empty for all ranks.
        agreement: of these ranks; None: created when they first agree.
    """

    def __init__(self, group: str = "", agreement: DataParallelAgreement | None = None) -> None:
        self._group, self._agreement = group, agreement
        self._what, self._passed, self._is_checked = "", 0, False
        self.symmetric: set[str] = set()  #: operators over symmetric memory in the graphs
        self._apart: AgreementError | None = None  # why no call can be made together any more
        self._raised: CaptureError | None = None  # on all ranks but those that failed

    @contextlib.contextmanager
    def capturing(self, what: str = "the capture of a manager") -> Iterator[None]:
        """A capture on all ranks, of the same ``what``, which ends together."""
        outer = self._what, self._passed
        self._what, self._passed = what, 0
        try:
            yield
            self.passed()
        except BaseException as error:
            if error is not self._raised and not isinstance(error, AgreementError):
                self._exchange(error)  # guard: lockstep_failure_told
            raise
        finally:
            self._what, self._passed = outer
            self._raised = None

    def passed(self) -> None:
        """Wait until every rank is as far in its capture; raises if one has failed."""
        self._exchange()
        if self._passed == _WARMING and not self._is_checked:
            for reason in would_hang(self.facts(), self.symmetric):
                raise self._failure("would hang", reason.why, reason.remedy)
            self._is_checked = True
        self._passed += 1

    def facts(self) -> list[Any]:
        """Of each rank, see :func:`would_hang`."""
        return self._agreed().exchange_objects(processgroups.facts_of(processgroups.group_named(self._group)))

    def most(self, number: int) -> int:
        """The greatest number of all ranks."""
        return self._exchange(number=number)

    def stops(self, wants_to: bool, num_left: int) -> bool:
        """Whether a rank wants to stop capturing keys."""
        return bool(self.most(int(wants_to)))

    def _agreed(self) -> DataParallelAgreement:
        if self._agreement is None:
            group = processgroups.group_named(self._group)
            self._agreement = DataParallelAgreement(group, timeout_s=processgroups.timeout_s(group))
        return self._agreement

    def _exchange(self, error: BaseException | None = None, number: int = 0) -> int:
        if self._apart is not None:
            raise self._apart
        place, state = zlib.crc32(f"{self._what}, {self._passed}".encode()), _FINE
        if error is not None:
            state = _FAILED_BETWEEN if self._passed == _WARMING else _FAILED
        try:
            rows = self._agreed().exchange([state, place, number])
            failed, found = failures_of(self._agreed(), rows, error)
            # guard: lockstep_between_collectives
            if len(failed) < len(rows) and any(row[0] == _FAILED_BETWEEN for row in rows):
                raise _apart("a rank failed between its collectives, where the others wait for it", found)
            others = [rank for rank, row in enumerate(rows) if row[1] != place]
            if others and not failed:  # guard: lockstep_same_calls
                raise _apart("the ranks make other calls", f"{self._what or 'a replay'} here, not on rank {others[0]}")
        except AgreementError as apart:
            self._apart = apart
            raise apart from error
        if failed and error is None:
            raise self._failure(f"failed on rank {failed[0]}, so it fails on all", found, "fix the error of that rank")
        return max(row[2] for row in rows)

    def _failure(self, problem: str, found: str, remedy: str) -> CaptureError:
        """The error that every rank raises for itself."""
        expected = "a capture that succeeds on every rank"
        self._raised = CaptureError(f"{self._what} {problem}", expected=expected, found=found, remedy=remedy)
        return self._raised


class LockstepGroups(dict[str, Lockstep]):
    """{name of a group: its ranks} of a runtime."""

    def of(self, nodes: Sequence[fx.Node] = ()) -> Lockstep:
        """The ranks whose collectives are among the nodes; by default all."""
        ranks = self.setdefault(group := processgroups.group_of(nodes), Lockstep(group))
        ranks.symmetric |= {str(node.target) for node in nodes if "symm_mem" in str(node.target)}
        return ranks


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


def _apart(problem: str, found: str) -> AgreementError:
    return AgreementError(
        problem,
        expected="the same calls in the same order on every rank, as ranks='lockstep' says",
        found=found,
        remedy="restart all ranks; leave the option out for ranks that make other calls",
    )
