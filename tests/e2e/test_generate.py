"""Text from stock Hugging Face decoders: the tokens of their own ``generate``, whatever the mode, over real batches."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch

from graphpass import DispatchReason
from graphpass.errors import OptionError
from graphpass.keys import CUDAGraphMode
from graphpass.serving.batch import Batch
from graphpass.serving.manager import CudaGraphManager
from graphpass.text import CausalLM, PagedAttention, PagedRequests
from graphpass.text.causallm import default_capture_sizes
from tests.e2e.engines import Engines, engines_made
from tests.e2e.greedy import NEAR_TIE, References
from tests.e2e.small_decoders import VOCABULARY, small_decoder

MAX_LENGTH = 64
# Mistral's window is shorter than most of the texts.
MODELS = {"llama": ("Llama", {}), "qwen3": ("Qwen3", {}), "mistral": ("Mistral", {"sliding_window": 12})}
SOFT_CAPPED = {"gemma2": ("Gemma2", {"sliding_window": 12, "query_pre_attn_scalar": 16})}
MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
SIZES: dict[str, Any] = {"max_num_reqs": 8, "max_num_tokens": 32, "max_seq_len": MAX_LENGTH, "page_size": 4}
LADDER: dict[str, Any] = {"capture_sizes": [2, 8, 32], "seq_len_buckets": [32]}
WHOLE_LADDER: dict[str, Any] = {"capture_sizes": [1, 2, 4, 8, 16, 32], "seq_len_buckets": [16, 32]}


def make_model(name: str, device: str = "cpu") -> torch.nn.Module:
    """A decoder whose logits differ from each other."""
    family, config = {**MODELS, **SOFT_CAPPED}[name]
    model: torch.nn.Module = small_decoder(f"{family}ForCausalLM", **config)
    return model.to(device)


def make_prompts(seed: int, number: int, most_new: int) -> tuple[list[list[int]], list[int]]:
    """Prompts of 1 to 40 tokens, and how many new ones each asks for."""
    seeded = random.Random(seed)
    prompts = [[seeded.randrange(VOCABULARY) for _ in range(seeded.randint(1, 40))] for _ in range(number)]
    return prompts, [seeded.randint(1, most_new) for _ in prompts]


PROMPTS, NEW_TOKENS = make_prompts(0, 64, 12)


@pytest.fixture(scope="module")
def references() -> References:
    return References(make_model, PROMPTS, NEW_TOKENS)


@pytest.fixture
def decoders() -> Iterator[Callable[..., CausalLM]]:
    """Makes decoders and closes them."""
    made: list[CausalLM] = []

    def make(name: str = "llama", device: str = "cpu", **options: Any) -> CausalLM:
        given = {**SIZES, **LADDER, "compiler": "eager", **options}
        made.append(CausalLM(make_model(name, device), **given))
        return made[-1]

    yield make
    for lm in made:
        lm.close()


Decoders = Callable[..., CausalLM]


def paged(manager: CudaGraphManager) -> PagedAttention:
    assert isinstance(manager.attention, PagedAttention)
    return manager.attention


def all_pages_are_free(manager: CudaGraphManager) -> bool:
    return paged(manager).pages.num_free == paged(manager).cache.num_pages


def num_batches(manager: CudaGraphManager) -> int:
    """Batches that a manager has run."""
    stats = manager.stats()
    return stats.replays + sum(stats.fallbacks.values())


class Case(NamedTuple):
    """One way to generate."""

    model: str
    mode: str
    compiler: str
    run_ahead: bool
    max_num_tokens: int = 32
    device: str = "cpu"


def named(case: Sequence[object]) -> str:
    """For the ids of tests."""
    return "-".join(map(str, case))


KINDS = list(itertools.product(enumerate(MODES), enumerate(MODELS)))
# Modes with one model each; models and the other choices take turns. Other tests generate with NONE and FULL.
CASES = [
    Case(model, mode, ("eager", "aot_eager")[(i + j) // 2 % 2], (i + j) % 3 == 0, (32, 8)[i % 2])
    for (i, mode), (j, model) in KINDS
    if i % len(MODELS) == j and mode not in ("NONE", "FULL")
]
ALL_CASES = [
    Case(model, mode, compiler, (i + j + k) % 2 == 0, (32, 8)[(i + k) % 2])
    for (i, mode), (j, model) in KINDS
    for k, compiler in enumerate(("eager", "aot_eager", "inductor"))
]
CUDA_CASES = [
    Case(model, mode, compiler, (i + j) % 2 == 0, device="cuda")
    for (i, mode), (j, model) in KINDS
    for compiler in ("inductor", "eager")
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
def test_tokens_of_hugging_face(case: Case, engines: Engines, references: References) -> None:
    """The tokens are Hugging Face's, all pages come back, and every step that the mode has a key for replayed."""
    ladder = LADDER if case.max_num_tokens < 32 else WHOLE_LADDER
    options = {**SIZES, **ladder, "mode": case.mode, "compiler": case.compiler, "max_num_tokens": case.max_num_tokens}
    with engines_made() as made:  # no pool outlives its test
        make = engines if case.device == "cpu" else made
        check_tokens(make(make_model, case.model, case.device, **options), case, references)


def check_tokens(lm: CausalLM, case: Case, references: References) -> None:
    before, num_before = lm.stats(), num_batches(lm.manager)
    found = lm.generate(PROMPTS, max_new_tokens=NEW_TOKENS, progress=False, run_ahead=case.run_ahead)
    assert len(found) == len(PROMPTS)
    references.check(found, case.model, case.device)
    stats = lm.stats()
    mode = CUDAGraphMode.parse(case.mode)
    assert num_batches(lm.manager) - num_before > sum(map(len, PROMPTS)) // case.max_num_tokens
    assert (stats.replays > before.replays) == bool(mode)
    if mode.mixed_mode():
        assert stats.fallbacks == before.fallbacks
    assert all_pages_are_free(lm.manager)


def test_reference_logits_have_room(references: References) -> None:
    """Were most tokens nearly tied, a wrong one would go unseen."""
    for name in MODELS:
        gaps = sorted(gap for reference in references.of(name) for gap in reference.gaps)
        assert gaps[len(gaps) // 2] > 1000 * NEAR_TIE
        assert sum(gap < NEAR_TIE for gap in gaps) <= 1


# -- keys ------------------------------------------------------------------------------------------------------------


def run_batch(manager: CudaGraphManager, query_lens: Sequence[int], seq_lens: Sequence[int]) -> torch.Tensor:
    """Run token 1 at the last positions of requests of these lengths, on pages of their own."""
    attention = paged(manager)
    pages = [attention.pages.allocate(-(-length // attention.cache.page_size)) for length in seq_lens]
    positions = [p for q, n in zip(query_lens, seq_lens, strict=True) for p in range(n - q, n)]
    device = manager.buffers["input_ids"].device
    inputs = {
        "input_ids": torch.ones(1, len(positions), dtype=torch.int64, device=device),
        "position_ids": torch.tensor([positions], device=device),
        "last_rows": torch.tensor(query_lens, device=device).cumsum(0) - 1,
    }
    tokens: torch.Tensor = manager.run(
        Batch(
            len(positions),
            inputs=inputs,
            num_reqs=len(query_lens),
            uniform_decode=max(query_lens) == 1,
            attention=PagedRequests(query_lens, seq_lens, pages),
        )
    )
    for taken in pages:
        attention.pages.free(taken)
    return tokens


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[] if mode == "FULL_AND_PIECEWISE" else pytest.mark.soak) for mode in MODES[1:]]
)
def test_every_key_is_reached_and_every_batch_replays(mode: str, engines: Engines) -> None:
    name, compiler = next(((c.model, c.compiler) for c in CASES if c.mode == mode), ("llama", "eager"))
    manager = engines(make_model, name, **{**SIZES, **WHOLE_LADDER, "mode": mode, "compiler": compiler}).manager
    assert not manager.needs_capture()
    before = manager.stats()
    longest = (16, 32, MAX_LENGTH)
    batches = [([1] * count, [length] * count) for count in range(1, 9) for length in longest]
    if CUDAGraphMode.parse(mode).mixed_mode():
        batches += [([count], [length]) for count in range(1, 33) for length in longest if length >= count]
        batches += [([16, 16], [16, 16])]
        batches += [([1] * count + [32 - count], [length] * (count + 1)) for count in range(8) for length in (32, 64)]
    for query_lens, seq_lens in batches:
        assert run_batch(manager, query_lens, seq_lens).shape == (len(query_lens),)
    stats = manager.stats()
    used = zip(stats.keys, before.keys, strict=True)
    assert [str(key.captured) for key, earlier in used if key.replays == earlier.replays] == []
    assert stats.replays - before.replays == len(batches)
    assert stats.fallbacks == before.fallbacks


def test_no_key_is_made_that_no_batch_reaches(decoders: Decoders) -> None:
    keys = decoders(**WHOLE_LADDER).manager.dispatcher.keys
    assert sorted(key.num_tokens for key in keys[CUDAGraphMode.PIECEWISE]) == [2, 4, 8, 16, 32]
    lengths = Counter(key.num_tokens for key in keys[CUDAGraphMode.FULL])
    assert lengths == {1: 3, 2: 3, 4: 3, 8: 3}


@pytest.mark.parametrize(
    ("device", "compiler"), [("cpu", "eager"), pytest.param("cuda", "inductor", marks=pytest.mark.cuda)]
)
def test_an_engine_for_one_request_compiles_prompts_once_they_recur(
    device: str, compiler: str, decoders: Decoders, references: References
) -> None:
    sizes = {"max_num_reqs": 1, "max_num_tokens": 6, "capture_sizes": None, "seq_len_buckets": []}
    lm = decoders("qwen3", device, compiler=compiler, **sizes)
    lm.capture()
    assert {key.num_tokens for _, keys in lm.manager.dispatcher.capture_plan() for key in keys} == {1}
    compiled = lm.manager.runtime.compiled()

    def agrees(num_requests: int) -> dict[DispatchReason, int]:
        found = lm.generate(PROMPTS[:num_requests], max_new_tokens=NEW_TOKENS[:num_requests], progress=False)
        references.check(found, "qwen3", device)
        return dict(lm.manager.stats().fallbacks)

    lm.generate([[5, 6, 7]] * 2, max_new_tokens=2, progress=False)
    assert lm.adapt() == ()  # not often enough
    assert "or adapt() between requests" not in str(lm.report())
    without = agrees(2)
    assert without.keys() == {DispatchReason.TOO_LARGE}
    assert lm.manager.runtime.compiled() == compiled
    assert "or adapt() between requests" in str(lm.report())
    adapted = lm.adapt()
    assert [(str(mode), key.num_tokens) for mode, key in adapted] == [("PIECEWISE", n) for n in (6, 4, 3, 2)]
    assert lm.manager.runtime.compiled() > compiled
    assert agrees(2) == without
    assert "or adapt() between requests" not in str(lm.report())
    assert lm.adapt() == ()


def test_a_failure_while_prompts_are_compiled_leaves_them_uncompiled(
    decoders: Decoders, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = decoders(max_num_reqs=1, max_num_tokens=16, capture_sizes=None, seq_len_buckets=[])
    one, new = PROMPTS[:1], NEW_TOKENS[:1]
    for _ in range(2):
        references.check(lm.generate(one, max_new_tokens=new, progress=False), "llama")
    with monkeypatch.context() as patched:
        patched.setattr(lm.manager, "capture", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            lm.adapt()
    assert not lm.manager.needs_capture()
    references.check(lm.generate(one, max_new_tokens=new, progress=False), "llama")


@pytest.mark.parametrize("options", [{"capture_sizes": [1, 8]}, {"mode": "FULL"}, {"draft_tokens": 1}])
def test_declared_sizes_of_prompts_are_compiled_at_once(options: dict[str, Any], decoders: Decoders) -> None:
    given = {"max_num_reqs": 1, "max_num_tokens": 8, "capture_sizes": None, "seq_len_buckets": [], **options}
    plan = decoders(**given).manager.dispatcher.capture_plan()
    assert max(key.num_tokens for _, keys in plan for key in keys) == 8


def test_a_declared_single_token_is_no_size_of_prompts(decoders: Decoders) -> None:
    lm = decoders(max_num_reqs=1, capture_sizes=[1], seq_len_buckets=[])
    assert [mode for mode, _ in lm.manager.dispatcher.capture_plan()] == [CUDAGraphMode.FULL]


@pytest.mark.parametrize(
    ("largest", "sizes"), [(1, [1]), (5, [1, 2, 3, 4, 5]), (32, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32])]
)
def test_default_capture_sizes(largest: int, sizes: list[int]) -> None:
    assert default_capture_sizes(largest) == sizes


# -- the loop --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buckets", [[0], [True], [1.5]])
def test_a_bucket_is_a_length(buckets: list[Any], decoders: Decoders) -> None:
    with pytest.raises(OptionError, match="seq_len_buckets"):
        decoders(seq_len_buckets=buckets)
