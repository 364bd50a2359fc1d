"""Stock decoder classes over packed batches: the tokens of their own ``generate``, or a typed refusal."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.e2e.decoder_classes import BUILT, COUNTS, TABLE, outcomes, prompts, row_of, seen_of, tried
from tests.e2e.greedy import continued
from tests.e2e.pagetable import TORCH, TRANSFORMERS, is_version_of_page
from tests.e2e.small_decoders import decoder_classes

FEWEST_BUILT = 40
FEW = {
    "GPT2LMHeadModel": ("equal", ""),
    "FalconForCausalLM": ("refused", "Falcon"),
    "BartForCausalLM": ("refused", "BartLearnedPositionalEmbedding"),
    "Lfm2ForCausalLM": ("refused", "Lfm2ShortConv"),
    "MambaForCausalLM": ("refused", "MambaForCausalLM keeps a state"),
}


@pytest.mark.parametrize("name", FEW)
def test_a_class_is_equal_or_refused_by_name(name: str) -> None:
    found = tried(name)
    outcome, sentence = FEW[name]
    assert found.outcome == outcome, found
    assert sentence in found.sentence


def test_texts_that_hide_a_wrong_attention_are_noticed() -> None:
    """A model whose next token depends on its last token alone would be equal however its requests see each other."""

    class LastTokenOnly(torch.nn.Module):
        def generate(self, ids: torch.Tensor, *, max_new_tokens: int, **_: object) -> object:
            steps = [(ids[:, -1:] + 1 + step) % 128 for step in range(max_new_tokens)]
            logits = [torch.nn.functional.one_hot(step[0], 128).float() for step in steps]
            return type("Result", (), {"sequences": torch.cat([ids, *steps], 1), "logits": logits})()

    model = LastTokenOnly()
    references = [continued(model, text, count) for text, count in zip(prompts(), COUNTS, strict=True)]
    assert "0 prompts continue differently" in seen_of(model, references)


def test_the_page_has_every_class_and_none_that_is_wrong() -> None:
    rows = TABLE.rows()
    kinds = Counter(row.partition(" | ")[0] for row in rows.values())
    assert kinds.keys() == {"equal", "refused", "not built"}
    assert kinds["equal"] + kinds["refused"] >= FEWEST_BUILT
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in sorted(kinds))
    assert f"transformers {TRANSFORMERS}, torch {TORCH}: {len(rows)} classes, {counts}." in TABLE.text()
    if is_version_of_page():
        assert sorted(rows) == list(decoder_classes())


@pytest.mark.soak
@pytest.mark.timeout(3 * 3600)
def test_every_class_is_equal_or_refused() -> None:
    found = {outcome.name: outcome for outcome in outcomes(list(decoder_classes()))}
    wrong = [outcome for outcome in found.values() if outcome.outcome not in ("equal", "refused", "not built")]
    assert wrong == []
    assert len([outcome for outcome in found.values() if outcome.outcome in BUILT]) >= FEWEST_BUILT
    if is_version_of_page():
        assert {name: row_of(outcome) for name, outcome in found.items()} == TABLE.rows()
