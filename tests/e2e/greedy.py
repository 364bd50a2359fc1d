"""The tokens of a model's own greedy ``generate``, as a reference for texts of graphpass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

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


@dataclass(frozen=True)
class References:
    """What Hugging Face makes of prompts with each model on each device, computed once."""

    make_model: Callable[[str, str], Any]
    prompts: Sequence[Sequence[int]]
    counts: Sequence[int]
    known: dict[tuple[str, str], list[Reference]] = field(default_factory=dict)

    def of(self, name: str, device: str = "cpu") -> list[Reference]:
        if (name, device) not in self.known:
            model = self.make_model(name, device)
            texts = zip(self.prompts, self.counts, strict=True)
            self.known[name, device] = [continued(model, prompt, count) for prompt, count in texts]
        return self.known[name, device]

    def check(self, found: Sequence[Sequence[int]], name: str, device: str = "cpu") -> None:
        """The texts of the first prompts, as many as are found."""
        for which, (tokens, reference) in enumerate(zip(found, self.of(name, device), strict=False)):
            reference.check(tokens, which)
