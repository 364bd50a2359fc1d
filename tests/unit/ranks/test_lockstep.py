"""Ranks in lockstep: what they agree on while they capture, and that a failure of one is one of all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

import cgpass.callable
import graphpass as gp
from cgpass import keyrules, paddingcheck
from graphpass.compat import processgroups
from graphpass.errors import AgreementError, CaptureError, OptionError
from graphpass.ranks.group import wait_for
from graphpass.ranks.lockstep import Lockstep, LockstepGroups, would_hang
from tests.unit.cgpass.test_padding_contents import lie
from tests.unit.ranks.test_conversation import Meeting, Thread, on_each

READY, WARM, END = range(3)
FACTS = {"node": "a", "nccl": "2.27.7", "is_warm": True, "is_symmetric": False}


@pytest.fixture(autouse=True)
def facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process group is there to be asked."""
    monkeypatch.setattr(processgroups, "facts_of", lambda group: FACTS)


class Threads:
    """Two ranks as threads."""

    def __init__(self) -> None:
        self.meeting = Meeting(2)
        self.ranks = [Lockstep("", Thread(self.meeting, rank)) for rank in range(2)]  # type: ignore[arg-type]

    def each(self, action: Callable[[Lockstep, int], Any]) -> list[Any]:
        """What the action returns on each rank, or the type of its error."""
        found = on_each(2, lambda rank: action(self.ranks[rank], rank))
        return [type(one) if isinstance(one, Exception) else one for one in found]

    def capture(self, *failing: tuple[int, int], what: tuple[str, str] = ("key", "key")) -> list[Any]:
        """A capture of all ranks; ``failing`` are (rank, how far it comes)."""

        def captured(ranks: Lockstep, rank: int) -> str:
            with ranks.capturing("a manager"), ranks.capturing(what[rank]):
                for step in range(3):
                    if (rank, step) in failing:
                        raise ZeroDivisionError
                    if step < END:
                        ranks.passed()
            return "captured"

        return self.each(captured)


@pytest.mark.parametrize("step", [READY, END])
def test_a_capture_that_fails_on_one_rank_fails_on_all_and_the_next_one_succeeds(step: int) -> None:
    threads = Threads()
    assert threads.capture((1, step)) == [CaptureError, ZeroDivisionError]
    assert threads.capture() == ["captured"] * 2


def test_a_rank_that_fails_between_its_collectives_ends_all() -> None:
    threads = Threads()
    assert threads.capture((0, WARM)) == [AgreementError] * 2
    assert threads.capture() == [AgreementError] * 2


def test_ranks_that_fail_at_the_same_place_go_on() -> None:
    threads = Threads()
    assert threads.capture((0, WARM), (1, WARM)) == [ZeroDivisionError] * 2
    assert threads.capture() == ["captured"] * 2


def test_ranks_that_capture_something_else_are_apart() -> None:
    assert Threads().capture(what=("one key", "another")) == [AgreementError] * 2


def test_the_greatest_number_of_all_ranks_counts() -> None:
    threads = Threads()
    assert threads.each(lambda ranks, rank: ranks.most(rank - 5)) == [-4, -4]
    assert threads.each(lambda ranks, rank: ranks.stops(rank == 1, 3)) == [True, True]


@pytest.mark.parametrize(
    ("others", "operators", "found"),
    [
        ({}, (), []),
        ({"node": "b", "nccl": "2.28.9"}, (), ["different versions of NCCL: 2.27.7 on a, 2.28.9 on b"]),
        ({"is_warm": False}, (), ["would make the communicator of rank 1"]),
        ({}, ("symm_mem.one_shot_all_reduce",), ["symm_mem.one_shot_all_reduce would register symmetric memory"]),
    ],
)
def test_what_would_hang_is_known_before_a_capture(
    others: dict[str, Any], operators: tuple[str, ...], found: list[str]
) -> None:
    reasons = list(would_hang([FACTS, FACTS | others], operators))
    assert [part in str(reason) for part, reason in zip(found, reasons, strict=True)] == [True] * len(found)
    threads = Threads()
    threads.ranks[0].symmetric = threads.ranks[1].symmetric = set(operators)
    if operators:
        assert threads.capture() == [CaptureError] * 2


def test_variants_are_not_tuned_in_lockstep() -> None:
    with pytest.raises(OptionError, match="each rank would keep another variant"):
        gp.options.options(ranks="lockstep", tune="measure")


class Another:
    """Stands in for an agreement with a rank that reports these numbers."""

    def __init__(self, number: int) -> None:
        self.number, self.num_exchanges = number, 0

    def exchange(self, row: list[int]) -> list[list[int]]:
        self.num_exchanges += 1
        return [row, [0, row[1], self.number]]

    def exchange_objects(self, value: object) -> list[object]:
        return [value, value]


class InLockstep:
    """A model whose graph counts as one with collectives, beside another rank."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, model: Callable[..., Any], number: int = 0, **options: Any
    ) -> None:
        for module in (keyrules, cgpass.callable):
            monkeypatch.setattr(module, "calls_collectives", lambda parts: True)
        self.runtime, self.other, self.seen = gp.GraphRuntime(), Another(number), list[str]()
        self.runtime.owned(LockstepGroups)[""] = Lockstep("", self.other)  # type: ignore[arg-type]
        given = {"compiler": "eager", "runtime": self.runtime, "dispatch": "auto", "ranks": "lockstep", **options}
        self.fast = torch.compile(model, backend="cgpass", dynamic=True, options=given)
        for name in ("observed", "unpadded"):
            original = getattr(paddingcheck.PaddedCall, name)
            monkeypatch.setattr(paddingcheck.PaddedCall, name, self.noted(name, original))

    def noted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            self.seen.append(name)
            return original(*args)

        return called

    def serve(self, *sizes: int) -> None:
        with torch.no_grad():
            for size in sizes:
                self.fast(torch.randn(size, 6))


def test_without_the_option_the_reason_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = InLockstep(monkeypatch, torch.relu, ranks=None)
    model.serve(5, 5, 5)
    (record,) = model.runtime.callables()
    assert record.off is not None
    assert "pass options={'ranks': 'lockstep'}" in record.off.remedy
    assert not model.runtime.stats().captured


def test_a_runtime_is_closed_once_before_groups_end(monkeypatch: pytest.MonkeyPatch) -> None:
    world: Any = distributed.distributed_c10d._world
    at_exit = list[Any]()
    monkeypatch.setattr(world, "_comms", [], raising=False)
    monkeypatch.setattr(processgroups, "atexit", SimpleNamespace(register=at_exit.append))
    model = InLockstep(monkeypatch, lambda x: x.relu() if x.dim() == 2 else x.tanh())
    model.serve(5, 5, 1, 1)
    assert len(model.runtime.callables()) == 2
    assert len(at_exit) == 1
    if hasattr(world, "comms"):
        assert [closing.finalize for closing in world.comms] == at_exit


@pytest.mark.parametrize(("model", "number", "is_padded"), [(torch.relu, 0, True), (torch.relu, 1, False)])
def test_ranks_check_padding_together(
    monkeypatch: pytest.MonkeyPatch, model: Any, number: int, is_padded: bool
) -> None:
    ranks = InLockstep(monkeypatch, model, number)
    ranks.serve(5, 7, 9, 9, 9)
    assert ("no longer padded" not in str(list(ranks.runtime.notes))) is is_padded


def test_a_fault_of_padding_ends_no_check_early(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = InLockstep(monkeypatch, lambda x: lie(x, "mean"))
    ranks.serve(5, 5, 5)
    assert ranks.seen == ["observed"] * 4 + ["unpadded"], "as without a fault"
    assert "no longer padded" in str(list(ranks.runtime.notes))


def test_no_replay_waits_for_another_rank_and_a_size_gets_its_graph_by_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = InLockstep(monkeypatch, torch.relu)
    seen = []
    for _ in range(60):
        ranks.serve(7)
        seen.append((ranks.runtime.stats().captured, ranks.other.num_exchanges))
    changed = [call for call, (one, other) in enumerate(itertools.pairwise(seen), 1) if one != other]
    assert changed == [1, 17], seen
    assert seen[-1][0] == 2


class Event:
    """An event of the device that comes after so many questions."""

    def __init__(self, polls: float) -> None:
        self.polls, self.is_waited = polls, False

    def query(self) -> bool:
        self.polls -= 1
        return self.polls < 0

    def synchronize(self) -> None:
        self.is_waited = True


def test_a_step_that_waits_for_a_rank_that_is_gone_is_an_error() -> None:
    alone, late, never = Event(0), Event(3), Event(math.inf)
    wait_for(alone, None)
    wait_for(late, 60)
    assert alone.is_waited
    assert late.polls == -1
    with pytest.raises(AgreementError, match=r"the device has waited 0\.01 s"):
        wait_for(never, 0.01)
