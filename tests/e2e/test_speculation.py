"""Speculative decoding with stock Hugging Face decoders: their own tokens whatever is guessed, in fewer steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from graphpass.errors import OptionError
from graphpass.keys import CUDAGraphMode
from graphpass.serving.manager import CudaGraphManager
from graphpass.text import CausalLM, Drafter, Generation, GenerationStats, NgramDrafter, Request
from graphpass.text.scheduler import Ints
from tests.e2e.engines import Engines, engines_made
from tests.e2e.greedy import Reference, References
from tests.e2e.small_decoders import VOCABULARY
from tests.e2e.test_generate import MAX_LENGTH, MODES, SIZES, all_pages_are_free, make_model, make_prompts, named

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
LADDER: dict[str, Any] = {"capture_sizes": [8, 32], "seq_len_buckets": [32]}

PROMPTS, NEW_TOKENS = make_prompts(1, 16, 24)
NEW_TOKENS[3] = MAX_LENGTH - len(PROMPTS[3])  # it fills the longest sequence


class Mixed:
    """Guesses any number of tokens out of the reference, some of them spoilt; knows the requests by their prompts."""

    def __init__(self, references: Sequence[Reference]) -> None:
        self._seeded = random.Random(0)
        self._known = {tuple(p): r.tokens for p, r in zip(PROMPTS, references, strict=True)}

    def propose(self, request: Request, text: Ints, limit: int) -> list[int]:
        known = self._known[tuple(request.prompt.tolist())]
        at = len(text) - len(request.prompt)
        tokens = known[at : at + self._seeded.randint(0, limit)]
        return [t if self._seeded.random() < 0.8 else self._seeded.randrange(VOCABULARY) for t in tokens]


@pytest.fixture(scope="module")
def references() -> References:
    return References(make_model, PROMPTS, NEW_TOKENS)


def run(manager: CudaGraphManager, drafter: Drafter | None, gaps: int = 0) -> tuple[list[list[int]], GenerationStats]:
    """The texts of the prompts, which arrive ``gaps`` steps apart, and the counts."""
    requests = [Request.of(str(i), p, n) for i, (p, n) in enumerate(zip(PROMPTS, NEW_TOKENS, strict=True))]
    found: dict[Request, list[int]] = {request: [] for request in requests}
    waiting = list(requests)
    with Generation(manager, drafter=drafter, run_ahead=False) as generation:
        while waiting or not generation.is_done():
            if waiting and generation.stats().num_steps >= gaps * (len(requests) - len(waiting)):
                generation.add(waiting.pop(0))
                continue
            for new in generation.step():
                found[new.request].append(new.token)
                assert new.is_last == (len(found[new.request]) == new.request.max_new_tokens)
        return list(found.values()), generation.stats()


class Case(NamedTuple):
    """One way to generate."""

    model: str
    mode: str
    draft_tokens: int
    compiler: str = "eager"
    device: str = "cpu"


CASES = [
    Case("qwen3", "FULL_AND_PIECEWISE", 3, "aot_eager"),
    Case("llama", "FULL", 1),
    Case("mistral", "FULL_DECODE_ONLY", 3),
]
ALL_CASES = [
    Case(model, mode, draft_tokens, compiler)
    for model in ("llama", "qwen3", "mistral")
    for mode in MODES
    for draft_tokens in (1, 2, 3, 7)
    for compiler in ("aot_eager", "inductor")
]
CUDA_CASES = [
    Case("llama", "FULL_AND_PIECEWISE", 3, "inductor", "cuda"),
    Case("mistral", "FULL_AND_PIECEWISE", 1, "eager", "cuda"),
    Case("qwen3", "FULL", 3, "inductor", "cuda"),
    Case("mistral", "FULL_DECODE_ONLY", 3, "eager", "cuda"),
    Case("llama", "PIECEWISE", 1, "inductor", "cuda"),
    Case("qwen3", "NONE", 3, "eager", "cuda"),
]


@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        *(pytest.param(case, marks=pytest.mark.soak) for case in ALL_CASES),
        *(pytest.param(case, marks=pytest.mark.cuda) for case in CUDA_CASES),
    ],
    ids=named,
)
def test_tokens_with_drafts_are_those_of_greedy_decoding(case: Case, engines: Engines, references: References) -> None:
    """Whoever guesses; all pages come back, and every step that has a key replayed."""
    options = {"mode": case.mode, "compiler": case.compiler, "draft_tokens": case.draft_tokens}
    if case.draft_tokens > 3:
        options["max_num_tokens"] = 64
    expected = references.of(case.model, case.device)
    with engines_made() as made:  # no pool outlives its test
        make = engines if case.device == "cpu" else made
        manager = make(make_model, case.model, case.device, **{**SIZES, **LADDER, **options}).manager
        for drafter, gaps in ((Mixed(expected), 1), (NgramDrafter(), 0)):
            before = manager.stats().replays
            found, stats = run(manager, drafter, gaps)
            references.check(found, case.model, case.device)
            assert 0 <= stats.num_accepted < stats.num_drafted
            assert isinstance(drafter, NgramDrafter) or stats.num_accepted > stats.num_drafted / 2
            assert stats.num_tokens == sum(NEW_TOKENS)
            assert all_pages_are_free(manager)
            mode = CUDAGraphMode.parse(case.mode)
            if mode.mixed_mode():
                assert manager.stats().replays - before == stats.num_steps
            assert bool(manager.stats().replays) == bool(mode)
        assert not any("have no graph" in problem.what for problem in manager.report().problems)


def test_keys_that_no_batch_reaches_are_not_made() -> None:
    """A bucket that is shorter than a token with its drafts; a size that is larger than the buffers."""
    sizes = {**SIZES, "max_num_reqs": 2, "max_num_tokens": 10, "capture_sizes": [1, 9, 12], "seq_len_buckets": [3, 8]}
    manager = CausalLM(make_model("llama"), **sizes, draft_tokens=3).manager
    assert {key.num_tokens for key in manager.dispatcher.keys[PIECEWISE]} == {1, 9}
    found = {(key.num_tokens, dict(key.extra)["max_seq_len"]) for key in manager.dispatcher.keys[FULL]}
    assert found == {(tokens, length) for tokens in (4, 8) for length in (8, MAX_LENGTH)}
    manager.close()


def test_a_draft_that_no_text_holds_is_refused() -> None:
    sizes = {**SIZES, **LADDER, "max_num_reqs": 1, "max_num_tokens": 256}
    with pytest.raises(OptionError, match="larger than any text"):
        CausalLM(make_model("llama"), **sizes, draft_tokens=MAX_LENGTH)
