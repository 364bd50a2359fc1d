"""The generation loop over a model that is known by heart: whatever the batches, each token follows its own text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpass.errors import OptionError, OutOfPagesError, ShapeError
from graphpass.text import Generation, Request
from tests.unit.text.known_model import (
    ARRIVALS,
    check_arrivals,
    continued,
    finish,
    generate,
    make_model,
    models,
    next_token,
)

MODELS = models(st.just(0))
AHEAD = pytest.mark.parametrize("run_ahead", [False, True], ids=["in-turn", "ahead"])


@given(model=MODELS, run_ahead=st.booleans(), **ARRIVALS)
def test_requests_come_and_go(model: Any, run_ahead: bool, **arrivals: Any) -> None:
    stats = check_arrivals(model, **arrivals, run_ahead=run_ahead)
    assert (stats.num_drafted, stats.num_accepted, stats.acceptance) == (0, 0, 0.0)


@pytest.mark.parametrize(("run_ahead", "num_steps"), [(False, 2), (True, 4)])
def test_an_end_token_makes_room_at_once(run_ahead: bool, num_steps: int) -> None:
    """Running ahead it is seen one step late."""
    model = make_model(max_num_reqs=1)
    prompts = [[1, 2], [3]]
    ends = [next_token(prompt) for prompt in prompts]
    found = generate(model, prompts, max_new_tokens=16, eos_token_id=ends, run_ahead=run_ahead)
    assert found == [[ends[0]], [ends[1]]]
    assert model.num_steps == num_steps


@pytest.mark.parametrize("others_work_for", [0, 3])
def test_a_rank_that_is_done_steps_on_with_the_others(others_work_for: int) -> None:
    model = make_model()
    model.others_work_for = others_work_for
    assert generate(model, [[1, 2]], max_new_tokens=2) == [continued([1, 2], 2, [])]
    assert (model.num_steps, model.num_idle_steps) == (2, others_work_for + 1)


@AHEAD
def test_a_failing_step_gives_all_pages_back(run_ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    generation = Generation(model, run_ahead=run_ahead)
    generation.add(Request.of("a", [1, 2, 3], 4))
    generation.step()
    with monkeypatch.context() as patch:
        patch.setattr(model, "run", lambda batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generation.step()
    assert generation.is_done()
    assert model.all_pages_are_free
    again = Request.of("b", [1, 2, 3], 4)
    found: dict[Request, list[int]] = {again: []}
    generation.add(again)
    finish(generation, found)
    assert found == {again: continued([1, 2, 3], 4, [])}


@AHEAD
def test_what_waits_for_pages_of_others_goes_on_waiting(run_ahead: bool) -> None:
    model = make_model(num_pages=3)
    foreign = model.attention.pages.allocate(1)
    short, long = Request.of("short", [1], 4), Request.of("long", [2], 10)
    found: dict[Request, list[int]] = {short: [], long: []}
    generation = Generation(model, run_ahead=run_ahead)
    generation.add(short)
    generation.add(long)
    with pytest.raises(OutOfPagesError, match="long waits for pages"):
        finish(generation, found)
    assert found == {short: continued([1], 4, []), long: []}
    model.attention.pages.free(foreign)
    finish(generation, found)
    assert found[long] == continued([2], 10, [])


def test_nothing_runs_when_one_request_cannot() -> None:
    model = make_model(num_pages=3)
    with pytest.raises(ShapeError, match="request 1 needs more pages"):
        generate(model, [[1], [1] * 10, [2]], max_new_tokens=3)
    assert model.num_steps == 0
    assert model.all_pages_are_free


def test_lengths_are_one_or_one_each() -> None:
    with pytest.raises(OptionError, match="max_new_tokens does not have one value for each prompt"):
        generate(make_model(), [[1], [2]], max_new_tokens=[3])


def test_a_manager_of_another_model_generates_nothing() -> None:
    model = make_model()
    del model.buffers["last_rows"]
    with pytest.raises(OptionError, match="does not generate text"):
        Generation(model)
