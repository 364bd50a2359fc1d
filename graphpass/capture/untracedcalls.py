"""The functions of a runtime that Dynamo runs as they are, and the calls that reach them where someone counts calls."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterable

from graphpass.compat import untraced
from graphpass.compat.untraced import UNKNOWN, GivenUp, Place
from graphpass.ledger import Reason

_SEE_WHAT_DIFFERS = (
    "see what differs (TORCH_LOGS=recompiles): name a dimension that varies in dynamic_dims, and keep a Python number "
    "that changes in a buffer, or pass it as a tensor"
)
_REWRITE = "rewrite what it names so that torch.compile traces it; torch.compile(model, fullgraph=True) raises there"


def against_recompiling() -> str:
    """What a user can do about recompiles of the function that is being compiled."""
    line = untraced.fixed_at()
    if line:  # guard: remedy_where_a_size_is_fixed
        return (
            "leave the operation that makes a constant of what differs out of the compiled model "
            f"(torch.compiler.disable): {line}"
        )
    return _SEE_WHAT_DIFFERS


class GivenUpFunctions:
    """Why Dynamo runs functions of a runtime as they are.

    At its recompile limit a function still runs earlier graphs, so ``entered`` tells its calls apart.
    """

    def __init__(self) -> None:
        self.entered: Counter[str] = Counter()  #: {callable: how often it was called}
        self._compiled: dict[int, tuple[Place, int]] = {}  # frame -> function, µs of its first compilation
        self._callables: dict[Place, set[str]] = {}
        self._against: dict[Place, str] = {}  # what to do about its recompiles
        self._known: set[Place] = set()
        self._found: dict[Place, Reason] = {}

    def compiles(self, frame: int | None, code: types.CodeType | None, name: str) -> None:
        """Record that callable ``name`` is compiled for a function, and which functions are under way around it."""
        if frame is None or code is None:
            return
        place = untraced.place_of(code)
        if self._compiled.get(frame, (None,))[0] != place:  # ids begin anew after torch.compiler.reset()
            self._compiled[frame] = place, untraced.now_us()
        self._callables.setdefault(place, set()).add(name)
        self._against[place] = against_recompiling()
        self._known |= untraced.running()

    def serves(self, code: types.CodeType | None) -> list[Reason]:
        """Record that a function is one of the runtime's; returns why Dynamo runs it as it is."""
        if code is not None:
            self._known.add(untraced.place_of(code))
        self._look(untraced.given_up())
        return list(self._found.values())

    def watch(self) -> Callable[[], tuple[bool, list[Reason]]]:
        """Watch a call that comes now; the returned function says whether it entered a graph, and why parts did not."""
        num_entered, num_tried, at_us = self.entered.total(), untraced.num_tried(), untraced.now_us()
        before = {place: self._times(place) for place in self._found} if self._found else {}

        def seen() -> tuple[bool, list[Reason]]:
            has_entered, has_tried = self.entered.total() != num_entered, untraced.num_tried() != num_tried
            if has_entered and not has_tried and not before:
                return True, []
            times = {UNKNOWN: num_entered, **before}
            own = (one for one in untraced.given_up() if one.at_us >= at_us) if has_tried else ()
            new = self._look(own, is_own=True)
            return has_entered, [
                why
                for place, why in self._found.items()
                if self._times(place) == times.get(place) or place in new - {UNKNOWN}
            ]

        return seen

    def reasons(self, counted: Iterable[str]) -> list[Reason]:
        """Those that no call was counted for."""
        self.serves(None)
        counts = {self._found[UNKNOWN].why if UNKNOWN in self._found else "", *counted}
        return [reason for reason in self._found.values() if reason.why not in counts]

    def _times(self, place: Place) -> int:
        if place == UNKNOWN:
            return self.entered.total()
        return sum(self.entered[name] for name in self._callables.get(place, ()))

    def _look(self, given_up: Iterable[GivenUp], *, is_own: bool = False) -> set[Place]:
        """Find what Dynamo gave up of this runtime, which ``is_own`` says of all; returns the new functions."""
        new = set()
        for one in given_up:
            place, since_us = self._compiled.get(one.frame, (one.place, 0))
            is_limit = one.place == UNKNOWN
            if not is_limit:
                place = one.place
            is_mine = is_own or (since_us > 0 and one.at_us >= since_us if is_limit else place in self._known)
            if is_mine and place not in self._found:
                against = self._against.get(place, _SEE_WHAT_DIFFERS)
                self._found[place] = _reason(place, one, against if is_limit else None)
                new.add(place)
        return new


def _reason(place: Place, one: GivenUp, against_limit: str | None) -> Reason:
    function = untraced.shown(place)
    if against_limit is not None:
        return Reason(f"Dynamo is at its recompile limit and runs {function} as it is", against_limit)
    return Reason(f"Dynamo gave up on {function} and runs it as it is: {one.reason}", _REWRITE, one.where)
