"""The padded call that every front runs over a graph: check, fill, replay, hand out.

A front (a compiled callable, a manager) looks up what serves calls of one real size once, and :func:`run` serves each
call of that size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from graphpass.capture.pool import PoolLease
from graphpass.capture.replay import ContextReads, ReplayPlan
from graphpass.context import ForwardContext
from graphpass.ledger import Row


class FilledInputs(Protocol):
    """The inputs of a key, for calls of one real size."""

    def placed(self, given: Any) -> list[Any]:
        """The graph's flat arguments: the key's buffers, and what is not padded."""

    def fill(self, given: Any) -> None:
        """Copy what a call has given into the buffers, and fill the padding."""


class Results(Protocol):
    """What becomes of a graph's flat outputs at a key's size, for calls of one real size."""

    def hand_out(self, outputs: Any, given: Any, lease: PoolLease) -> Any:
        """The caller's result; called while the pool is leased. Writes what the graph wrote to inputs back."""


_Inputs = TypeVar("_Inputs", bound=FilledInputs)
_Results = TypeVar("_Results", bound=Results)


@dataclass(slots=True)
class ServedSize(Generic[_Inputs, _Results]):
    """What serves calls of one real size over the graph of a key."""

    inputs: _Inputs
    results: _Results
    plan: ReplayPlan | None  #: replays the graph; None: a front replays or captures it by other means
    row: Row = field(default_factory=Row)  #: counts the calls of the key
    generation: int | None = None  #: of the pool when the plan was found; None: the front compares weights itself
    replays: int = 0  #: calls of this size so far, where the front counts them here

    def is_current(self, leaves: list[Any], lease: PoolLease) -> bool:
        """Whether the graph still exists, and was captured for these static inputs."""
        if self.generation is None or self.plan is None:
            return True
        # guard: known_replay_is_current
        return self.generation == lease.generation and self.plan.serves(leaves)


def run(
    served: ServedSize[Any, Any],
    given: Any,
    lease: PoolLease,
    who: str,
    *,
    context: ForwardContext | None = None,
    reads: ContextReads | None = None,
    is_filled: bool = False,
    replay: Callable[[list[Any]], Any] | None = None,
) -> Any:
    """Serve one call while holding the pool; None, with nothing done, if its graph is not current any more.

    Args:
        served: what serves calls of this size.
        given: the call's inputs, as ``served.inputs`` and ``served.results`` take them.
        lease: the pool.
        who: the front, for errors.
        context: the forward context that the graph runs under; None if it reads none.
        reads: what of the context is compared with the capture; None: all that the graph reads.
        is_filled: the buffers have the inputs and their padding already.
        replay: replays or captures the graph over its flat arguments; None: the plan does.
    """
    leaves, plan = served.inputs.placed(given), served.plan
    if context is None:
        lease.acquire_for_one_replay(who)
    else:
        lease.acquire(context, leaves, who)
    try:
        if replay is None:
            assert plan is not None, "a size without a plan is replayed by its front"
            if not served.is_current(leaves, lease):
                return None
            plan.check(leaves, context, reads)
        if not is_filled:
            served.inputs.fill(given)
        outputs = plan.run(leaves, lease) if plan is not None and replay is None else replay(leaves)  # type: ignore[misc]
        return served.results.hand_out(outputs, given, lease)
    finally:
        lease.release()
