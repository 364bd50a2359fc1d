"""The tokens of a model's own greedy ``generate``, as a reference for texts of graphpass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["NEAR_TIE", "Reference", "continued"]

NEAR_TIE = 1e-4


@dataclass(frozen=True, slots=True)
class Reference:
    """What Hugging Face makes of a prompt: tokens, and by how much each one's logit is above the next best."""

    tokens: list[int]
    gaps: list[float]

    def accepts(self, found: Sequence[int]) -> bool:
        """Whether the tokens are the same, or first differ where two logits are nearly equal."""
        at = next((at for at, pair in enumerate(zip(found, self.tokens, strict=False)) if pair[0] != pair[1]), None)
        return len(found) == len(self.tokens) and (at is None or self.gaps[at] < NEAR_TIE)

    def check(self, found: Sequence[int], which: int) -> None:
        """:meth:`accepts` as an assertion."""
        assert self.accepts(found), f"request {which}: {found} is not {self.tokens}"


@torch.no_grad()
def continued(model: Any, prompt: Sequence[int], count: int) -> Reference:
    """What ``generate`` of Transformers makes of one prompt alone."""
    ids = torch.tensor([prompt], device=getattr(model, "device", None))
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = [logits[0].float().topk(2).values for logits in found.logits]
    return Reference(found.sequences[0, len(prompt) :].tolist(), [float(first - second) for first, second in best])
