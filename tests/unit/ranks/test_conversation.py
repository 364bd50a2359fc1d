"""What ranks tell each other, how often, and what they do about one that fails: ranks are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from graphpass import Batch, BatchDescriptor, CudagraphDispatcher, CUDAGraphMode, DispatchReason
from graphpass.errors import AgreementError, CaptureError, OptionError, StaticInputError
from graphpass.ranks import DataParallelAgreement
from graphpass.ranks.conversation import AgreedSteps, RankDecision
from graphpass.ranks.decision import REASONS, RankBatch
from tests.unit.serving.managed import (
    EVENTS,
    FULL,
    NONE,
    PIECEWISE,
    Attends,
    Requests,
    Rows,
    SlotBuilder,
    made,
    of_x,
    rows,
    run,
)

SECONDS = 20
"""A bound on what would hang."""


class Meeting:
    """Where threads exchange values, and how often they did."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks, timeout=SECONDS)
        self.values: list[Any] = [None] * num_ranks
        self.rows, self.objects = 0, 0

    def meet(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


class Thread:
    """One rank's side; stands in for a ``DataParallelAgreement``."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.num_ranks = meeting, rank, len(meeting.values)

    def exchange(self, row: Sequence[int]) -> list[list[int]]:
        self.meeting.rows += self.rank == 0
        return self.meeting.meet(self.rank, list(row))

    def exchange_objects(self, value: object) -> list[Any]:
        self.meeting.objects += self.rank == 0
        return self.meeting.meet(self.rank, value)


def on_each(num_ranks: int, action: Callable[[int], Any]) -> list[Any]:
    """What ``action`` returns or raises on each rank, all at once."""

    def outcome(rank: int) -> Any:
        try:
            return action(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(outcome, range(num_ranks)))


class Ranks:
    """A dispatcher and steps for each of some ranks."""

    def __init__(self, num_ranks: int = 3, *, sizes: Sequence[Sequence[int]] = ((2, 4, 8),), **same: Any) -> None:
        self.meeting = Meeting(num_ranks)
        self.dispatchers = [
            CudagraphDispatcher(same.get("mode", "PIECEWISE"), sizes[rank % len(sizes)], max_num_reqs=8)
            for rank in range(num_ranks)
        ]
        for dispatcher in self.dispatchers:
            for mode, keys in dispatcher.capture_plan():
                for key in keys:
                    dispatcher.mark_captured(mode, key)
        self.steps = [
            AgreedSteps(Thread(self.meeting, rank), dispatcher, {"option": "same"}, idle_tokens=2)  # type: ignore[arg-type]
            for rank, dispatcher in enumerate(self.dispatchers)
        ]

    def each(self, action: Callable[[int], Any]) -> list[Any]:
        return on_each(len(self.steps), action)

    def decide(self, *num_tokens: int | None) -> list[Any]:
        """One step with these batches, None for none."""

        def asked(count: int | None) -> dict[str, Any] | None:
            return None if count is None else {"num_tokens": count}

        return self.each(lambda rank: self.steps[rank].decide(lambda: asked(num_tokens[rank])))

    def sizes(self, *num_tokens: int | None) -> list[tuple[str, int, str]]:
        """(mode, padded size, reason) on each rank."""
        decisions: list[RankDecision] = self.decide(*num_tokens)
        return [(str(d.step.mode), d.step.descriptor.num_tokens, str(d.step.reason)) for d in decisions]


def test_one_collective_a_step() -> None:
    ranks = Ranks()
    for step in range(1, 6):
        assert ranks.sizes(3, 7, None) == [
            ("PIECEWISE", 8, "agreed"),
            ("PIECEWISE", 8, "padded"),
            ("PIECEWISE", 8, "agreed"),
        ]
        assert (ranks.meeting.rows, ranks.meeting.objects) == (step, 0)


def test_keys_that_some_rank_has_not_captured_serve_none() -> None:
    ranks = Ranks()
    ranks.dispatchers[1].forget_captured()
    ranks.dispatchers[1].mark_captured("PIECEWISE", BatchDescriptor(4))
    assert ranks.sizes(2, 2, None)[0] == ("NONE", 2, "agreed")
    assert ranks.sizes(3, 4, None) == [
        ("PIECEWISE", 4, "padded"),
        ("PIECEWISE", 4, "exact"),
        ("PIECEWISE", 4, "agreed"),
    ]
    # Alone, both have a graph: rank 0 one that rank 1 lacks.
    assert ranks.sizes(8, 3, None) == [("NONE", 8, "agreed"), ("NONE", 3, "agreed"), ("NONE", 2, "agreed")]
    assert (ranks.meeting.rows, ranks.meeting.objects) == (3, 1), "what is captured is told once"
    ranks.dispatchers[1].mark_captured("PIECEWISE", BatchDescriptor(4))  # a change that is none, on one rank
    assert ranks.sizes(3, 4, None)[0] == ("PIECEWISE", 4, "padded")
    assert ranks.meeting.objects == 1
    ranks.dispatchers[1].mark_captured("PIECEWISE", BatchDescriptor(8))
    assert ranks.sizes(8, 3, None)[0] == ("PIECEWISE", 8, "exact")
    assert ranks.meeting.objects == 2


def test_ranks_with_other_keys_are_refused_on_all_of_them() -> None:
    ranks = Ranks(sizes=((2, 4), (2, 4), (2, 4, 8)))
    for _ in range(2):
        outcomes = ranks.decide(2, 2, 2)
        assert [type(outcome) for outcome in outcomes] == [AgreementError] * 3
        assert len({str(outcome) for outcome in outcomes}) == 1
        assert outcomes[0].problem == "the ranks are configured differently: keys"
        assert outcomes[0].found == "only on rank 0: nothing; only on rank 2: PIECEWISE 8 tokens"
    for dispatcher in ranks.dispatchers[:2]:
        dispatcher.add_key("PIECEWISE", BatchDescriptor(8))
    assert ranks.sizes(2, 2, 2) == [("PIECEWISE", 2, "exact")] * 3


def test_other_modes_and_options_are_named() -> None:
    ranks = Ranks(mode="FULL_AND_PIECEWISE")
    ranks.dispatchers[2].initialize_keys("PIECEWISE")
    assert ranks.decide(2, 2, 2)[0].problem == "the ranks are configured differently: keys"
    ranks = Ranks(2)
    told = {"option": "other"}
    ranks.steps[1] = AgreedSteps(Thread(ranks.meeting, 1), ranks.dispatchers[1], told, idle_tokens=2)  # type: ignore[arg-type]
    error = ranks.decide(2, 2)[0]
    assert error.problem == "the ranks are configured differently: option"
    assert error.found == "only on rank 0: same; only on rank 1: other"


def test_what_one_rank_cannot_run_is_an_error_on_all_and_the_next_step_goes_on() -> None:
    ranks = Ranks()
    outcomes = ranks.decide(3, -1, None)
    assert [type(outcome).__name__ for outcome in outcomes] == ["AgreementError", "DispatchError", "AgreementError"]
    assert outcomes[0].problem == "rank 1 failed in this step"
    assert outcomes[0].found.startswith("rank 1: DispatchError: a batch has counts")
    assert ranks.sizes(3, 4, None)[0] == ("PIECEWISE", 4, "padded")


def test_a_rank_that_captures_while_others_run() -> None:
    ranks = Ranks()

    outcomes = ranks.each(
        lambda rank: ranks.steps[rank].stops(False, 1) if rank == 2 else ranks.steps[rank].decide(lambda: None)
    )
    assert [type(outcome) for outcome in outcomes] == [AgreementError] * 3
    assert outcomes[0].found == "step on rank 0, step on rank 1, capture on rank 2"


def fails(rank: int, key: int) -> bool:
    """Rank 1, before its third key."""
    if (rank, key) == (1, 2):
        raise MemoryError("none left")
    return False


@pytest.mark.parametrize(
    ("num_keys", "stops", "ends"),
    [
        ([4, 4, 4], lambda rank, key: False, [4, 4, 4]),
        ([4, 4, 4], lambda rank, key: (rank, key) == (1, 2), [2, 2, 2]),
        ([4, 4, 4], fails, "rank 1: MemoryError: none left"),
        ([4, 3, 4], lambda rank, key: False, "4 on rank 0, 3 on rank 1, 4 on rank 2"),
    ],
    ids=["all keys", "one stops all", "one that fails ends all", "other numbers of keys"],
)
def test_captures_begin_and_end_together(
    num_keys: Sequence[int], stops: Callable[[int, int], bool], ends: Sequence[int] | str
) -> None:
    ranks = Ranks()

    def capture(rank: int) -> int:
        with ranks.steps[rank].capturing():
            for key in range(num_keys[rank]):
                if ranks.steps[rank].stops(stops(rank, key), num_keys[rank] - key):
                    return key
            return num_keys[rank]

    outcomes = ranks.each(capture)
    if stops is fails:
        assert isinstance(outcomes.pop(1), MemoryError)
    if isinstance(ends, str):
        assert [(type(outcome), outcome.found) for outcome in outcomes] == [(AgreementError, ends)] * len(outcomes)
    else:
        assert outcomes == ends


# -- one process, the other rank being rows


class Written:
    """The first of two ranks; what the second brings is written in advance. Stands in for an agreement."""

    rank, num_ranks, timeout_s = 0, 2, 60.0

    def __init__(self) -> None:
        self.other = RankBatch()

    def exchange(self, row: Sequence[int]) -> list[list[int]]:
        # What is said about captures is the same on both ranks; in a step each has a batch of its own.
        is_step = row[1] == 1
        return [list(row), [*row[:3], *self.other.to_row()] if is_step else list(row)]


def other(mode: CUDAGraphMode, reason: DispatchReason, num_tokens: int, uniform: int = 0) -> RankBatch:
    return RankBatch(1, mode.value, REASONS.index(reason), num_tokens, uniform=uniform, sizes=(num_tokens,))


OTHERS = {
    "FULL": other(FULL, DispatchReason.PADDED, 3, uniform=1),
    "PIECEWISE": other(PIECEWISE, DispatchReason.PADDED, 3),
    "NONE": other(NONE, DispatchReason.TOO_LARGE, 9),
}


class Counted(Attends):
    """Counts its forwards, and draws a random number in each."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards.add_(1)
        return super().forward(x) + 0 * torch.rand(())


@pytest.mark.parametrize(("mode", "ran"), [("FULL", (FULL, 4)), ("PIECEWISE", (PIECEWISE, 4)), ("NONE", (NONE, 2))])
def test_a_dummy_batch_writes_nothing_live(mode: str, ran: tuple[CUDAGraphMode, int]) -> None:
    written, model, builder = Written(), Counted().eval(), SlotBuilder()
    manager = made(model, "FULL_AND_PIECEWISE", attention=builder, agreement=written)
    manager.capture()
    x, reference = rows(3), Requests(model)
    written.other = OTHERS[mode]
    live, random_state, forwards = builder.sums.clone(), torch.get_rng_state(), model.forwards.clone()
    examples, ops = len(builder.examples), len(EVENTS)
    for _ in range(3):
        assert manager.run_idle()
        assert manager.last_step is not None
        assert (manager.last_step.mode, manager.last_step.descriptor.num_tokens) == ran
        assert manager.last_step.reason is DispatchReason.AGREED
    assert len(builder.examples) == examples + 3
    assert len(EVENTS) > ops
    torch.testing.assert_close(builder.sums[:-1], live[:-1], rtol=0, atol=0)
    torch.testing.assert_close(torch.get_rng_state(), random_state)
    torch.testing.assert_close(model.forwards, forwards)
    empty = manager.run(Batch(0))
    assert empty.shape == (0, 6)
    # With a batch of its own in the same step it runs that.
    for slots in ([0, 1, 2], [0, 2, 1]):
        own = Batch(3, inputs={"x": x}, uniform_decode=mode == "FULL", attention=slots)
        torch.testing.assert_close(manager.run(own), reference.step(x, slots))
    assert manager.last_step.mode is ran[0]
    torch.testing.assert_close(builder.sums[:16], reference.sums)


def test_a_fallback_that_is_refused_is_refused_on_every_rank() -> None:
    written = Written()
    manager = made(Rows().eval(), agreement=written, on_fallback="error")
    manager.capture()
    written.other = OTHERS["NONE"]
    for action in (lambda: manager.run(of_x(rows(3))), manager.run_idle):
        with pytest.raises(CaptureError, match="rank 1 \\(9 tokens\\) has no graph, because the batch is above"):
            action()
    # A mode that is switched off for such batches is what was asked for, here and there.
    manager = made(Rows().eval(), "FULL_DECODE_ONLY", agreement=written, on_fallback="error")
    manager.capture()
    written.other = other(NONE, DispatchReason.DISABLED, 3)
    run(manager, rows(3), uniform_decode=True)
    assert manager.stats().fallbacks == {DispatchReason.AGREED: 1}


# -- one process


def test_torch_distributed_has_to_be_there() -> None:
    with pytest.raises(AgreementError, match="init_process_group") as raised:
        DataParallelAgreement()
    assert isinstance(raised.value, RuntimeError)
    with pytest.raises(OptionError, match="timeout_s"):
        DataParallelAgreement(timeout_s=0)


@pytest.fixture
def alone() -> Any:
    """An agreement of a rank that is the only one."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with DataParallelAgreement() as agreement:
            yield agreement
    finally:
        torch.distributed.destroy_process_group()


def test_a_rank_that_is_the_only_one_runs_as_without_agreement(alone: DataParallelAgreement) -> None:
    model = Rows().eval()
    manager, free = made(model, "FULL_AND_PIECEWISE", agreement=alone), made(model, "FULL_AND_PIECEWISE")
    for one in (manager, free):
        one.capture()
        for num_tokens in (3, 8, 9, 0, 1):
            x = rows(num_tokens)
            result = one.run(of_x(x, uniform_decode=num_tokens < 8))
            torch.testing.assert_close(result, model(x).detach())
        assert not one.run_idle()
    of_graphs = [[(key.captured.descriptor, key.replays) for key in one.stats().keys] for one in (manager, free)]
    assert of_graphs[0] == of_graphs[1]
    assert manager.stats().fallbacks[DispatchReason.TOO_LARGE] == 1
    assert manager.stats().fallbacks[DispatchReason.EMPTY] == 2
    alone.close()


def test_weights_that_were_replaced_are_not_captured_in_a_step(alone: DataParallelAgreement) -> None:
    model = Rows().eval()
    manager = made(model, agreement=alone)
    manager.capture()
    model.inner = torch.nn.Linear(6, 5)
    for action in (lambda: manager.run(of_x(rows(3))), manager.run_idle):
        with pytest.raises(StaticInputError, match="recapture\\(\\) on every rank"):
            action()
    manager.recapture()
    torch.testing.assert_close(manager.run(of_x(rows(3))), model(rows(3)).detach())


def test_a_lazy_dispatcher_is_refused(alone: DataParallelAgreement) -> None:
    dispatcher = CudagraphDispatcher("PIECEWISE", [2], max_num_reqs=2, lazy=True)
    with pytest.raises(OptionError, match="lazy=False"):
        AgreedSteps(alone, dispatcher, {}, idle_tokens=2)
    dispatcher = CudagraphDispatcher("PIECEWISE", {f"field{n}": [2] for n in range(9)}, max_num_reqs=2)
    with pytest.raises(OptionError, match="at most 8 fields"):
        AgreedSteps(alone, dispatcher, {}, idle_tokens=2)


def test_ranks_do_not_adapt_alone() -> None:
    manager = made(Rows().eval(), agreement=Written())
    manager.capture()
    with pytest.raises(OptionError, match="ranks cannot adapt to their own traffic"):
        manager.adapt()
