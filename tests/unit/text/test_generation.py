"""The generation loop over a model that is known by heart: whatever the batches were, each token follows its own text.

The model's next token is a function of all tokens before it, which it reads from the pages of its request. So a token
at a wrong position, on a wrong page or in a wrong row changes everything behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphpass.engine.batch import Batch
from graphpass.errors import GraphpassError, OptionError, OutOfPagesError, ShapeError
from graphpass.text import Generation, PageAllocator, PagedAttention, PagedKVCache, PagedLayer, Request
from graphpass.text.scheduler import ScheduleLimits, Scheduler
from graphpass.text.step import StepInputs
from tests.unit.text.generated import generate

VOCABULARY, MAX_LENGTH = 97, 48
STALE = -5


def next_token(text: Sequence[int]) -> int:
    """Depends on every token and its position."""
    return (sum((at + 1) * (token + 3) for at, token in enumerate(text)) * 31 + len(text)) % VOCABULARY


def continued(prompt: Sequence[int], count: int, eos: Sequence[int]) -> list[int]:
    text = list(prompt)
    while len(text) < len(prompt) + count and (len(text) == len(prompt) or text[-1] not in eos):
        text.append(next_token(text))
    return text[len(prompt) :]


class KnownModel:
    """In a manager's place: keeps token ids where others keep keys, and leaves its results in one buffer."""

    vocab_size = VOCABULARY

    def __init__(self, *, max_num_reqs: int, max_num_tokens: int, page_size: int, num_pages: int) -> None:
        cache = PagedKVCache([PagedLayer(num_kv_heads=1, head_dim=1)], num_pages=num_pages, page_size=page_size)
        self.attention = PagedAttention(
            cache, max_num_reqs=max_num_reqs, max_num_tokens=max_num_tokens, max_seq_len=MAX_LENGTH
        )
        self.model = self
        tokens = torch.zeros(1, max_num_tokens, dtype=torch.int64)
        rows = torch.zeros(max_num_reqs, dtype=torch.int64)
        self.buffers = {"input_ids": tokens, "position_ids": tokens.clone(), "last_rows": rows}
        self.kept = np.full((num_pages + 2, page_size), STALE)
        self.out = torch.zeros(max_num_reqs, dtype=torch.int64)
        self.num_steps = 0
        self.num_idle_steps = self.others_work_for = 0

    def run_idle(self) -> bool:
        """Data-parallel ranks that still have work, for ``others_work_for`` steps."""
        self.num_idle_steps += 1
        return self.num_idle_steps <= self.others_work_for

    def needs_capture(self) -> bool:
        return False

    def run(self, batch: Batch) -> torch.Tensor:
        assert batch.inputs is not None
        assert batch.num_reqs is not None
        ids, positions, last_rows = (batch.inputs[name] for name in ("input_ids", "position_ids", "last_rows"))
        requests = batch.attention
        assert ids.shape == positions.shape == (1, batch.num_tokens)
        assert batch.uniform_decode == (max(requests.query_lens) == 1)
        assert last_rows.tolist() == (np.cumsum(requests.query_lens) - 1).tolist()
        self.num_steps += 1
        self.out.fill_(STALE)
        starts = np.cumsum(requests.query_lens) - requests.query_lens
        for row in range(batch.num_reqs):
            length, count, pages = requests.seq_lens[row], requests.query_lens[row], requests.block_tables[row]
            for at, position in enumerate(range(length - count, length), start=starts[row]):
                assert positions[0, at] == position
                self.kept[pages[position // self.kept.shape[1]], position % self.kept.shape[1]] = ids[0, at]
            text = self.kept[pages[: -(-length // self.kept.shape[1])]].reshape(-1)[:length]
            self.out[row] = next_token(text.tolist())
        return self.out[: batch.num_reqs]

    @property
    def all_pages_are_free(self) -> bool:
        return bool(self.attention.pages.num_free == self.attention.cache.num_pages)


TOKENS = st.integers(0, VOCABULARY - 1)
REQUESTS = st.lists(st.tuples(st.lists(TOKENS, min_size=1, max_size=30), st.integers(1, 16)), max_size=12)
MODELS = st.builds(
    lambda reqs, spare, page_size, texts: KnownModel(
        max_num_reqs=reqs,
        max_num_tokens=reqs + spare,
        page_size=page_size,
        num_pages=texts * -(-MAX_LENGTH // page_size),
    ),
    st.integers(1, 6),
    st.integers(0, 20),
    st.sampled_from([1, 4, 16]),
    st.integers(1, 3),
)


@given(model=MODELS, requests=REQUESTS, eos=st.lists(TOKENS, max_size=10), run_ahead=st.booleans())
def test_texts_are_those_of_each_request_alone(
    model: Any, requests: list[tuple[list[int], int]], eos: list[int], run_ahead: bool
) -> None:
    prompts, counts = [prompt for prompt, _ in requests], [count for _, count in requests]
    found = generate(model, prompts, max_new_tokens=counts, eos_token_id=eos, progress=False, run_ahead=run_ahead)
    assert found == [continued(prompt, count, eos) for prompt, count in requests]
    assert model.all_pages_are_free


@given(
    model=MODELS,
    requests=REQUESTS,
    gaps=st.lists(st.integers(0, 3), min_size=12, max_size=12),
    cancelled=st.sets(st.integers(0, 11), max_size=3),
    run_ahead=st.booleans(),
)
def test_requests_come_and_go(
    model: Any, requests: list[tuple[list[int], int]], gaps: list[int], cancelled: set[int], run_ahead: bool
) -> None:
    made = [Request.of(str(index), prompt, count) for index, (prompt, count) in enumerate(requests)]
    found: dict[Request, list[int]] = {request: [] for request in made}
    ended: list[Request] = []
    with Generation(model, run_ahead=run_ahead) as generation:
        for index, request in enumerate(made):
            generation.add(request)
            for _ in range(gaps[index]):
                collect(generation, found, ended)
            if index in cancelled and request not in ended:
                generation.cancel(request)
                ended.append(request)
        while not generation.is_done():
            collect(generation, found, ended)
    assert sorted(ended, key=made.index) == made
    for index, (request, (prompt, count)) in enumerate(zip(made, requests, strict=True)):
        expected = continued(prompt, count, [])
        assert found[request] == (expected[: len(found[request])] if index in cancelled else expected)
    assert model.all_pages_are_free


def collect(generation: Generation, found: dict[Request, list[int]], ended: list[Request]) -> None:
    for new in generation.step():
        assert new.request not in ended
        found[new.request].append(new.token)
        if new.is_last:
            ended.append(new.request)


def finish(generation: Generation, found: dict[Request, list[int]]) -> None:
    while not generation.is_done():
        collect(generation, found, [])


@pytest.mark.parametrize(("run_ahead", "num_steps"), [(False, 2), (True, 4)])
def test_an_end_token_makes_room_at_once(run_ahead: bool, num_steps: int) -> None:
    """Running ahead it is seen one step late."""
    model = make_model(max_num_reqs=1)
    prompts = [[1, 2], [3]]
    ends = [next_token(prompt) for prompt in prompts]
    found = generate(model, prompts, max_new_tokens=16, eos_token_id=ends, progress=False, run_ahead=run_ahead)
    assert found == [[ends[0]], [ends[1]]]
    assert model.num_steps == num_steps


@pytest.mark.parametrize("others_work_for", [0, 3])
def test_a_rank_that_is_done_steps_on_with_the_others(others_work_for: int) -> None:
    model = make_model()
    model.others_work_for = others_work_for
    assert generate(model, [[1, 2]], max_new_tokens=2, progress=False) == [continued([1, 2], 2, [])]
    assert (model.num_steps, model.num_idle_steps) == (2, others_work_for + 1)


def make_model(**sizes: int) -> Any:
    return KnownModel(**{"max_num_reqs": 4, "max_num_tokens": 8, "page_size": 4, "num_pages": 24, **sizes})


@pytest.mark.parametrize("run_ahead", [False, True], ids=["in-turn", "ahead"])
def test_two_generations_share_a_manager(run_ahead: bool) -> None:
    model = make_model()
    generations = [Generation(model, run_ahead=run_ahead) for _ in range(2)]
    prompts = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]]
    requests = [Request.of(str(index), prompt, 6) for index, prompt in enumerate(prompts)]
    found: dict[Request, list[int]] = {request: [] for request in requests}
    for index, request in enumerate(requests):
        generations[index % 2].add(request)
    while not all(generation.is_done() for generation in generations):
        for generation in generations:
            collect(generation, found, [])
    assert list(found.values()) == [continued(prompt, 6, []) for prompt in prompts]


@pytest.mark.parametrize("run_ahead", [False, True], ids=["in-turn", "ahead"])
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


@pytest.mark.parametrize("run_ahead", [False, True], ids=["in-turn", "ahead"])
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


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ([], OptionError, "request 1 has an invalid prompt"),
        ([VOCABULARY], OptionError, "request 1 contains a token"),
        ([1] * MAX_LENGTH, ShapeError, "request 1 is too long"),
        ([1] * 10, ShapeError, "request 1 needs more pages"),
    ],
)
def test_nothing_runs_when_one_request_cannot(prompt: list[int], error: type[GraphpassError], words: str) -> None:
    model = make_model(num_pages=3)
    with pytest.raises(error, match=words):
        generate(model, [[1], prompt, [2]], max_new_tokens=3, progress=False)
    assert model.num_steps == 0
    assert model.all_pages_are_free


def test_lengths_are_one_or_one_each() -> None:
    with pytest.raises(OptionError, match="max_new_tokens does not have one value for each prompt"):
        generate(make_model(), [[1], [2]], max_new_tokens=[3], progress=False)


def test_no_prompt_makes_no_text() -> None:
    assert generate(make_model(), [], max_new_tokens=3, progress=False) == []


def test_a_manager_of_another_model_generates_nothing() -> None:
    model = make_model()
    del model.buffers["last_rows"]
    with pytest.raises(OptionError, match="does not generate text"):
        Generation(model)


def test_decode_steps_of_the_same_requests_reuse_their_inputs() -> None:
    pages = PageAllocator(16)
    scheduler = Scheduler(
        pages, ScheduleLimits(num_pages=16, page_size=4, max_num_reqs=4, max_num_tokens=16, max_seq_len=16)
    )
    for index, prompt in enumerate([[1, 2, 3], [4], [5, 6]]):
        scheduler.add(Request.of(str(index), prompt, 6))
    inputs, tokens = StepInputs(16, (4,), torch.device("cpu")), torch.tensor([70, 71, 72, 73])
    plans = [scheduler.plan() for _ in range(4)]
    seen = []
    for plan in plans:
        assert plan is not None
        views = inputs.of(plan, tokens)
        seen.append({name: value.tolist() for name, value in views.items()})
        assert not plan.same_rows or views["input_ids"].data_ptr() == tokens.data_ptr()
    assert seen == [
        {"input_ids": [[1, 2, 3, 4, 5, 6]], "position_ids": [[0, 1, 2, 0, 0, 1]], "last_rows": [2, 3, 5]},
        {"input_ids": [[70, 71, 72]], "position_ids": [[3, 1, 2]], "last_rows": [0, 1, 2]},
        {"input_ids": [[70, 71, 72]], "position_ids": [[4, 2, 3]], "last_rows": [0, 1, 2]},
        {"input_ids": [[70, 71, 72]], "position_ids": [[5, 3, 4]], "last_rows": [0, 1, 2]},
    ]
    assert [plan.same_rows for plan in plans if plan] == [False, False, True, True]
