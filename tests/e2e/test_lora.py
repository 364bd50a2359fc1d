"""Requests with different LoRA adapters in one batch: each one's text is that of the model with its adapter merged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from graphpass import LoraKeys
from graphpass.errors import OptionError
from graphpass.text import CausalLM, Generation, LoraAdapters, Request
from tests.e2e.greedy import Reference, continued
from tests.e2e.small_decoders import small_decoder
from tests.e2e.test_generate import PROMPTS, SIZES
from tests.unit.text.adapted import Adapter

TARGETS = ("q_proj", "v_proj", "down_proj")
NAMES = ("polite", "terse", "rhymed")
MAX_RANK, NEW_TOKENS = 4, 4
LADDER: dict[str, Any] = {"capture_sizes": [8, 32], "seq_len_buckets": []}
# Each adapter and none, in prompts that are decoded together and in chunks beside each other.
MIX = [(None, *NAMES)[n % 4] for n in range(7)] + ["terse", "terse", None]
PROMPT_OF = PROMPTS[: len(MIX)]


def make_model(device: str = "cpu") -> torch.nn.Module:
    """A decoder of one layer."""
    return small_decoder("LlamaForCausalLM", num_hidden_layers=1).to(device)  # type: ignore[no-any-return]


def adapters_of(model: torch.nn.Module) -> dict[str, Adapter]:
    paths = [path for path, _ in model.named_modules() if path.endswith(TARGETS)]
    return {name: Adapter.random(model, paths, (1, MAX_RANK, 3)[n], seed=n) for n, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def references() -> list[Reference]:
    """What Hugging Face makes of each prompt with its adapter merged."""
    model = make_model()
    merged = {None: model, **{name: adapter.merged(model) for name, adapter in adapters_of(model).items()}}
    return [continued(merged[name], prompt, NEW_TOKENS) for name, prompt in zip(MIX, PROMPT_OF, strict=True)]


class Adapted:
    """A decoder that generates text, and its adapters, of which the last is not loaded yet."""

    def __init__(self, mode: str, compiler: str = "eager", lora: LoraKeys | None = None, device: str = "cpu") -> None:
        model = make_model(device)
        self.known = adapters_of(model)
        self.adapters = LoraAdapters(model, TARGETS, max_loras=3, max_rank=MAX_RANK)
        for name in NAMES[:-1]:
            self.load(name)
        self.lm = CausalLM(
            model, mode=mode, compiler=compiler, adapters=self.adapters, lora=lora, **{**SIZES, **LADDER}
        )

    def load(self, name: str) -> None:
        self.adapters.load(name, self.known[name].pairs, scaling=self.known[name].scaling)

    def generate(self, names: Sequence[str | None], **options: Any) -> list[list[int]]:
        return self.lm.generate(
            PROMPT_OF[: len(names)], max_new_tokens=NEW_TOKENS, adapters=names, progress=False, **options
        )

    def counts_that_replayed(self) -> set[int]:
        return {key.captured.descriptor.num_active_loras for key in self.lm.stats().keys if key.replays}


@pytest.fixture
def closed() -> Iterator[list[Adapted]]:
    made: list[Adapted] = []
    yield made
    for adapted in made:
        adapted.lm.close()


@pytest.mark.parametrize(
    ("mode", "compiler", "lora", "run_ahead", "counts"),
    [
        ("FULL_AND_PIECEWISE", "aot_eager", LoraKeys(3, per_count=True), True, {0, 1, 2, 4}),
        ("FULL", "eager", None, False, {0, 4}),
        pytest.param("PIECEWISE", "eager", LoraKeys(3, without=False), True, {4}, marks=pytest.mark.soak),
        pytest.param("NONE", "eager", None, False, set(), marks=pytest.mark.soak),
    ],
)
def test_each_request_is_the_merged_model(
    mode: str,
    compiler: str,
    lora: LoraKeys | None,
    run_ahead: bool,
    counts: set[int],
    references: list[Reference],
    closed: list[Adapted],
) -> None:
    adapted = Adapted(mode, compiler, lora)
    closed.append(adapted)
    if mode != "NONE":
        adapted.lm.capture()
    adapted.load(NAMES[-1])
    for which, tokens in enumerate(adapted.generate(MIX, run_ahead=run_ahead)):
        references[which].check(tokens, which)
    for names in ([None], ["polite"], ["polite", "terse"]):
        adapted.generate(names, run_ahead=run_ahead)
    assert adapted.counts_that_replayed() == counts
    stats = adapted.lm.stats()
    assert bool(stats.fallbacks) == (mode == "NONE")


def test_an_adapter_of_an_open_request_stays(references: list[Reference], closed: list[Adapted]) -> None:
    adapted = Adapted("NONE")
    closed.append(adapted)
    requests = [Request.of(str(n), PROMPT_OF[n], NEW_TOKENS, adapter="polite") for n in (1, 5)]
    with Generation(adapted.lm.manager, run_ahead=True) as generation:
        for request in requests:
            generation.add(request)
        found: list[int] = []
        while not generation.is_done():
            with pytest.raises(OptionError, match="'polite' is in use"):
                adapted.adapters.unload("polite")
            adapted.adapters.unload("terse")  # nobody's
            adapted.load("terse")
            found += [new.token for new in generation.step() if new.request is requests[0]]
        references[1].check(found, 1)
        adapted.adapters.unload("polite")
        with pytest.raises(OptionError, match="'polite' is not loaded"):
            generation.add(Request.of("late", [1], 1, adapter="polite"))
        adapted.load("polite")
        cancelled = Request.of("cancelled", [1], 1, adapter="polite")
        generation.add(cancelled)
        generation.cancel(cancelled)
        adapted.adapters.unload("polite")
        adapted.load("polite")
        generation.add(Request.of("given up", [1], 1, adapter="polite"))
    adapted.adapters.unload("polite")


def test_what_cannot_generate_is_refused(closed: list[Adapted]) -> None:
    adapted = Adapted("NONE")
    closed.append(adapted)
    with pytest.raises(OptionError, match="adapters does not have one value for each prompt"):
        adapted.lm.generate([[1], [2]], max_new_tokens=1, adapters=["polite"], progress=False)
    with pytest.raises(OptionError, match=r"'polit' is not loaded.*did you mean 'polite'"):
        adapted.generate(["polit"])
    stock = CausalLM(make_model(), mode="NONE", compiler="eager", **SIZES)
    with pytest.raises(OptionError, match="has an adapter, but the manager has no adapters"):
        stock.generate([[1]], max_new_tokens=1, adapters=["polite"], progress=False)
    model = make_model()
    head = LoraAdapters(model, ("q_proj", "lm_head"), max_loras=1, max_rank=1)
    with pytest.raises(OptionError, match="the head among its layers"):
        CausalLM(model, adapters=head, **SIZES)
    with pytest.raises(OptionError, match="layers of another model"):
        CausalLM(make_model(), adapters=adapted.adapters, **SIZES)
    with pytest.raises(OptionError, match="3 slots, and keys for 2"):
        Adapted("FULL", lora=LoraKeys(2))
    with pytest.raises(OptionError, match="0 slots, and keys for 2"):
        CausalLM(make_model(), lora=LoraKeys(2), **SIZES)


def test_keys_of_one_token_are_for_one_adapter_at_most() -> None:
    lm = CausalLM(
        model := make_model(),
        adapters=LoraAdapters(model, TARGETS, max_loras=3, max_rank=1),
        lora=LoraKeys(3, per_count=True),
        **{**SIZES, **LADDER, "capture_sizes": [1, 8]},
    )
    counts = Counter(
        (key.num_tokens, key.num_active_loras) for keys in lm.manager.dispatcher.keys.values() for key in keys
    )
    assert sorted(count for num_tokens, count in counts if num_tokens == 1) == [0, 1]
    assert sorted(count for num_tokens, count in counts if num_tokens == 8) == [0, 1, 2, 4]
