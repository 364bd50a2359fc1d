"""Continuous batching: tables of plans, and the promises that hold for any requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpass.errors import GraphpassError, OptionError, ShapeError
from graphpass.text import Request
from graphpass.text.scheduler import Scheduler, StepPlan

PAGE_SIZE, VOCABULARY = 4, 50


class CheckedPages:
    """Pages 2, 3, ... of which each has one owner, the lowest free ones first, so that pages are soon used again."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages, self.free_pages = num_pages, list(range(2, 2 + num_pages))

    @property
    def num_free(self) -> int:
        return len(self.free_pages)

    def allocate(self, num_pages: int) -> list[int]:
        assert num_pages <= self.num_free
        taken, self.free_pages = self.free_pages[:num_pages], self.free_pages[num_pages:]
        return taken

    def free(self, pages: Sequence[int]) -> None:
        assert not set(pages) & set(self.free_pages)
        self.free_pages = sorted([*self.free_pages, *pages])


def make_scheduler(num_pages: int = 16, *, reqs: int = 3, tokens: int = 8) -> Scheduler:
    return Scheduler(
        CheckedPages(num_pages),
        page_size=PAGE_SIZE,
        max_num_reqs=reqs,
        max_num_tokens=tokens,
        max_seq_len=24,
        vocab_size=VOCABULARY,
    )


def make_request(name: str, num_prompt: int, max_new: int) -> Request:
    return Request.of(name, range(num_prompt), max_new)


def run_all(scheduler: Scheduler) -> list[StepPlan]:
    """Every step until nothing is left; a request is finished as soon as its last token is planned."""
    plans = []
    while scheduler.has_work():
        plan = scheduler.plan()
        assert plan is not None
        plans.append(plan)
        for row in np.flatnonzero(plan.ends):
            scheduler.finish(plan.requests[row])
    return plans


def rows_of(plan: StepPlan) -> list[tuple[str, int, int]]:
    """(request, tokens in this step, tokens after it) of each row."""
    return [
        (request.name, int(query), int(seq))
        for request, query, seq in zip(plan.requests, plan.query_lens, plan.seq_lens, strict=True)
    ]


PLANS = {
    "one request": ([("a", 3, 3)], [([("a", 3, 3)], False), ([("a", 1, 4)], True), ([("a", 1, 5)], True)]),
    "a prompt in chunks": (
        [("a", 19, 2)],
        [([("a", 8, 8)], False), ([("a", 8, 16)], False), ([("a", 3, 19)], False), ([("a", 1, 20)], True)],
    ),
    "prompts share the budget in order": (
        [("a", 5, 2), ("b", 6, 1)],
        [([("a", 5, 5), ("b", 3, 3)], False), ([("a", 1, 6), ("b", 3, 6)], False)],
    ),
    "prompts of one token are a uniform decode": (
        [("a", 1, 2), ("b", 1, 1)],
        [([("a", 1, 1), ("b", 1, 1)], True), ([("a", 1, 2)], True)],
    ),
    "the fourth waits for a slot": (
        [("a", 2, 1), ("b", 2, 2), ("c", 2, 2), ("d", 2, 1)],
        [([("a", 2, 2), ("b", 2, 2), ("c", 2, 2)], False), ([("b", 1, 3), ("c", 1, 3), ("d", 2, 2)], False)],
    ),
}


@pytest.mark.parametrize(("requests", "expected"), PLANS.values(), ids=PLANS)
def test_plans(requests: list[tuple[str, int, int]], expected: list[tuple[list[tuple[str, int, int]], bool]]) -> None:
    scheduler = make_scheduler()
    for name, num_prompt, max_new in requests:
        scheduler.add(make_request(name, num_prompt, max_new))
    assert [(rows_of(plan), plan.uniform_decode) for plan in run_all(scheduler)] == expected


def test_decode_steps_repeat_until_a_row_leaves() -> None:
    scheduler = make_scheduler()
    for name, max_new in (("a", 3), ("b", 5)):
        scheduler.add(make_request(name, 2, max_new))
    plans = run_all(scheduler)
    assert [plan.same_rows for plan in plans] == [False, False, True, False, True]
    assert [len(plan.requests) for plan in plans] == [2, 2, 2, 1, 1]


@pytest.mark.parametrize(
    ("prompt", "max_new", "error", "words"),
    [
        ([], 1, OptionError, "invalid prompt"),
        ([[1], [2]], 1, OptionError, "invalid prompt"),
        ([[1], [2, 3]], 1, OptionError, "invalid prompt"),
        ([1.5], 1, OptionError, "invalid prompt"),
        ([-1], 1, OptionError, "invalid prompt"),
        ([True], 1, OptionError, "invalid prompt"),
        ([1], 0, OptionError, "cannot be used"),
        ([1], 1.5, OptionError, "cannot be used"),
        ([VOCABULARY], 1, OptionError, "not in the model's vocabulary"),
        ([1] * 20, 5, ShapeError, "too long"),
        ([1] * 10, 7, ShapeError, "more pages than the KV cache has"),
    ],
)
def test_a_request_that_could_never_run_is_refused_by_name(
    prompt: list[int], max_new: int, error: type[GraphpassError], words: str
) -> None:
    scheduler = make_scheduler(num_pages=4)
    with pytest.raises(error, match=rf"request 7 .*{words}"):
        scheduler.add(Request.of("request 7", prompt, max_new))
    assert not scheduler.has_work()


def test_a_request_is_added_once() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 2, 2)
    scheduler.add(request)
    with pytest.raises(OptionError, match="added twice"):
        scheduler.add(request)


@pytest.mark.parametrize(
    ("given_ids", "kept"), [(None, set()), (3, {3}), ([3, 4], {3, 4}), (np.int64(3), {3}), ((), set())]
)
def test_end_tokens(given_ids: object, kept: set[int]) -> None:
    assert Request.of("a", [1], 1, given_ids).eos_token_ids == kept  # type: ignore[arg-type]


def test_what_is_no_end_token_is_refused() -> None:
    with pytest.raises(OptionError, match="a has an invalid eos_token_id"):
        Request.of("a", [1], 1, "</s>")


# -- for any requests ------------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 8)).filter(lambda pair: sum(pair) <= 24), max_size=12),
    reqs=st.integers(1, 4),
)
def test_requests_are_admitted_in_the_order_of_arrival(sizes: list[tuple[int, int]], reqs: int) -> None:
    """And no page has two owners (:class:`CheckedPages`); that texts are right is tested with the generation."""
    scheduler = make_scheduler(num_pages=8, reqs=reqs, tokens=reqs)
    requests = [make_request(str(i), *pair) for i, pair in enumerate(sizes)]
    for request in requests:
        scheduler.add(request)
    first_seen: list[str] = []
    for plan in run_all(scheduler):
        first_seen += [r.name for r in plan.requests if r.name not in first_seen]
    assert first_seen == [request.name for request in requests]
