"""Drafts, and their check in one step."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphpass.errors import OptionError
from graphpass.text import Generation, NgramDrafter, Request
from graphpass.text.scheduler import Ints, Scheduler
from tests.unit.text.known_model import (
    MAX_LENGTH,
    REQUESTS,
    TOKENS,
    VOCABULARY,
    collect,
    continued,
    generate,
    make_model,
    models,
)
from tests.unit.text.test_scheduler import CheckedPages

Propose = Callable[[Request, Sequence[int], int], Any]
MODELS = models(st.integers(0, 4))


class Asked:
    """A drafter made of a function, which checks what it is given and counts what it gives."""

    def __init__(self, draft_tokens: int, propose: Propose) -> None:
        self.draft_tokens, self.function = draft_tokens, propose
        self.num_proposed = 0

    def propose(self, request: Request, text: Ints, limit: int) -> Any:
        made = text.tolist()
        assert made[: len(request.prompt)] == request.prompt.tolist()
        assert made[len(request.prompt) :] == continued(request.prompt, len(made) - len(request.prompt), [])
        assert 1 <= limit <= min(self.draft_tokens, request.max_length - len(made) - 1)
        assert not text.flags.writeable
        found = self.function(request, made, limit)
        self.num_proposed += len(found)
        return found


def right(_: Request, text: Sequence[int], limit: int) -> list[int]:
    return continued(text, limit, [])


def wrong(_: Request, text: Sequence[int], limit: int) -> list[int]:
    return [(token + 1) % VOCABULARY for token in continued(text, limit, [])]


def nothing(_request: Request, _text: Sequence[int], _limit: int) -> list[int]:
    return []


def varying(seeded: random.Random) -> Propose:
    """Any number of guesses, each right with a chance of three in four."""

    def propose(_: Request, text: Sequence[int], limit: int) -> list[int]:
        tokens = continued(text, seeded.randint(0, limit), [])
        return [token if seeded.random() < 0.75 else seeded.randrange(VOCABULARY) for token in tokens]

    return propose


@given(model=MODELS, requests=REQUESTS, eos=st.lists(TOKENS, max_size=10), seed=st.integers(0, 1 << 30))
def test_texts_are_those_of_each_request_alone(
    model: Any, requests: list[tuple[list[int], int]], eos: list[int], seed: int
) -> None:
    prompts, counts = [prompt for prompt, _ in requests], [count for _, count in requests]
    has_drafts = model.query_len > 1
    drafter = Asked(model.query_len - 1, varying(random.Random(seed))) if has_drafts else None
    ahead = not has_drafts and seed % 2 == 0
    found = generate(model, prompts, max_new_tokens=counts, eos_token_id=eos, drafter=drafter, run_ahead=ahead)
    assert found == [continued(prompt, count, eos) for prompt, count in requests]
    assert model.all_pages_are_free


PROMPT = [5, 6, 7, 8, 9]


def served(model: Any, drafter: Any, prompts: Sequence[Sequence[int]], counts: Sequence[int], **given: Any) -> Any:
    """The texts, and the generation's counts."""
    requests = [Request.of(str(i), p, n, **given) for i, (p, n) in enumerate(zip(prompts, counts, strict=True))]
    found: dict[Request, list[int]] = {request: [] for request in requests}
    ended: list[Request] = []
    with Generation(model, drafter=drafter) as generation:
        for request in requests:
            generation.add(request)
        while not generation.is_done():
            collect(generation, found, ended)
        return list(found.values()), generation.stats()


@pytest.mark.parametrize("num_new", [1, 2, 3, 4, 5, 12, 13])
@pytest.mark.parametrize("draft_tokens", [1, 3])
def test_right_guesses_take_one_step_for_all(draft_tokens: int, num_new: int) -> None:
    model = make_model(draft_tokens, max_num_tokens=16)
    found, stats = served(model, Asked(draft_tokens, right), [PROMPT], [num_new])
    assert found == [continued(PROMPT, num_new, [])]
    num_decodes = -(-(num_new - 1) // (1 + draft_tokens))
    assert model.batches == [[5], *[[1 + draft_tokens]] * num_decodes]
    assert (stats.num_steps, stats.num_tokens) == (1 + num_decodes, num_new)
    assert stats.num_accepted == stats.num_drafted == num_new - 1 - num_decodes
    assert stats.acceptance == (1.0 if stats.num_drafted else 0.0)


def test_guesses_are_filled_to_uniform_decodes() -> None:
    """Also where one fewer guess fits than there are, and where a row has none; a text of 3 tokens is too short."""
    model = make_model(3, max_num_tokens=16)
    drafters = {"0": right, "1": nothing, "2": wrong}
    drafter = Asked(3, lambda request, text, limit: drafters[request.name](request, text, limit))
    served(model, drafter, [PROMPT, [1], [2, 3, 4]], [12, 12, 12])
    assert model.batches[:4] == [[5, 1, 3], [4, 1, 4], [4, 1, 4], [4, 4, 4]]
    assert model.num_uniform == model.num_steps - 3


def test_without_decode_graphs_nothing_is_filled() -> None:
    model = make_model(3, mode="PIECEWISE", max_num_tokens=16)
    served(model, Asked(3, nothing), [PROMPT, [1]], [4, 4])
    assert model.batches == [[5, 1], [1, 1], [1, 1], [1, 1]]


def test_tokens_behind_an_end_token_are_not_accepted() -> None:
    """Answers 1 to 4 come in one step; the third is the end: three guesses, of which two are text besides it."""
    model = make_model(3, max_num_tokens=16)
    end = continued(PROMPT, 12, [])[3]
    _, stats = served(model, Asked(3, right), [PROMPT], [12], eos_token_id=end)
    assert (stats.num_tokens, stats.num_drafted, stats.num_accepted) == (4, 3, 3)
    end = continued(PROMPT, 12, [])[2]
    _, stats = served(model, Asked(3, right), [PROMPT], [12], eos_token_id=end)
    assert (stats.num_tokens, stats.num_drafted, stats.num_accepted) == (3, 3, 2)


@pytest.mark.parametrize("drafter", [right, wrong, nothing])
@pytest.mark.parametrize("num_prompt", [1, 3, 40, 47])
def test_the_longest_text_on_exactly_its_pages(num_prompt: int, drafter: Propose) -> None:
    model = make_model(3, max_num_reqs=1, max_num_tokens=8, page_size=1, num_pages=MAX_LENGTH)
    prompt = list(range(num_prompt))
    found, _ = served(model, Asked(3, drafter), [prompt], [MAX_LENGTH - num_prompt])
    assert found == [continued(prompt, MAX_LENGTH - num_prompt, [])]


def test_ngrams_are_what_is_guessed_with_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of a model that goes round in circles."""
    monkeypatch.setattr("tests.unit.text.known_model.next_token", lambda text: (text[-1] + 1) % 5)
    model = make_model(3, max_num_tokens=16)
    assert generate(model, [[0]], max_new_tokens=21) == [[(n + 1) % 5 for n in range(21)]]
    # Once round, one token a step, then four.
    assert model.num_steps == 5 + 4


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "guesses", [[VOCABULARY], [-1], [1, 2, 3, 4], [1.5], [[1]], [[1], [2, 3]], ["a"], [True], 7, None], ids=str
)
def test_what_is_no_guess_is_refused_by_name(guesses: Any) -> None:
    class Careless:
        def propose(self, _request: Request, _text: Ints, _limit: int) -> Any:
            return guesses

    model = make_model(3, max_num_tokens=16)
    generation = Generation(model, drafter=Careless())
    generation.add(Request.of("request 7", PROMPT, 9))
    generation.step()
    with pytest.raises(OptionError, match="the drafter proposed invalid tokens for request 7") as caught:
        generation.step()
    assert caught.value.expected == f"a flat sequence of at most 3 token ids from 0 to {VOCABULARY - 1}"
    assert generation.is_done()
    assert model.all_pages_are_free


@pytest.mark.parametrize("guesses", [(), (4,), np.array([4, 5]), np.array([], dtype=np.int32), torch.tensor([4])])
def test_guesses_come_in_any_sequence(guesses: Any) -> None:
    class Given:
        def propose(self, _request: Request, _text: Ints, _limit: int) -> Any:
            return guesses[:_limit]

    found, _ = served(make_model(2, max_num_tokens=16), Given(), [PROMPT], [6])
    assert found == [continued(PROMPT, 6, [])]


def test_a_manager_that_verifies_no_drafts_takes_no_drafter() -> None:
    with pytest.raises(OptionError, match="verifies no drafts"):
        Generation(make_model(), drafter=Asked(3, right))


def test_steps_with_drafts_do_not_run_ahead() -> None:
    with pytest.raises(OptionError, match="cannot run ahead"):
        Generation(make_model(3), run_ahead=True)
    assert Generation(make_model(3), run_ahead=False).is_done()


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"max_num_reqs": 0}, "max_num_reqs"),
        ({"max_num_reqs": True}, "max_num_reqs"),
        ({"max_num_reqs": 9}, "max_num_tokens is too small"),
        ({"draft_tokens": -1}, "draft_tokens is not valid"),
        ({"draft_tokens": True}, "draft_tokens is not valid"),
        ({"draft_tokens": 1.5}, "draft_tokens is not valid"),
        ({"draft_tokens": 2}, "max_num_tokens is too small"),
    ],
)
def test_the_budget_holds_all_requests_and_drafts(sizes: dict[str, Any], words: str) -> None:
    given = {"page_size": 4, "max_num_reqs": 3, "max_num_tokens": 8, "max_seq_len": 16, **sizes}
    with pytest.raises(OptionError, match=words):
        Scheduler(CheckedPages(4), **given)


# Guesses out of a text's own past, against a search from the definition.


def searched(text: Sequence[int], limit: int, max_ngram: int, min_ngram: int) -> list[int]:
    """The longest ending that stood before, at its latest place; what followed goes on as long as is asked for."""
    for length in range(min(max_ngram, len(text) - 1), min_ngram - 1, -1):
        ending = text[len(text) - length :]
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == ending:
                made = list(text)
                for at in range(start + length, start + length + limit):
                    made.append(made[at])
                return made[len(text) :]
    return []


def proposed(drafter: NgramDrafter, request: Request, text: Sequence[int], limit: int) -> list[int]:
    found: list[int] = drafter.propose(request, np.array(text, dtype=np.int64), limit).tolist()
    return found


LENGTHS = st.tuples(st.integers(1, 3), st.integers(0, 3)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    growth=st.lists(st.integers(1, 5), max_size=40),
    limit=st.integers(1, 6),
    lengths=LENGTHS,
)
def test_guesses_are_those_of_a_search(
    text: list[int], growth: list[int], limit: int, lengths: tuple[int, int]
) -> None:
    """However much the text has grown since the last guess."""
    shortest, longest = lengths
    drafter, request, size = NgramDrafter(max_ngram=longest, min_ngram=shortest), Request.of("a", [0], 1), 1
    for more in [*growth, 0]:
        expected = searched(text[:size], limit, longest, shortest)
        found = proposed(drafter, request, text[:size], limit)
        assert found == expected
        assert len(found) in (0, limit)
        size = min(size + more, len(text))


def test_requests_do_not_mix_and_may_start_again() -> None:
    drafter = NgramDrafter()
    first, second = Request.of("a", [1], 1), Request.of("b", [1], 1)
    assert proposed(drafter, first, [1, 2, 1], 1) == [2]
    assert proposed(drafter, second, [1, 3, 1], 1) == [3]
    assert proposed(drafter, first, [4, 1], 1) == []
    assert proposed(drafter, first, [4, 1, 4], 1) == [1]


@pytest.mark.parametrize("lengths", [(3, 0), (0, 0), (1, 2), (True, True), (2.0, 1)])
def test_lengths_are_checked(lengths: tuple[Any, Any]) -> None:
    with pytest.raises(OptionError, match="lengths of n-grams"):
        NgramDrafter(max_ngram=lengths[0], min_ngram=lengths[1])
