"""Texts of prompts from a stand-in of a manager, as ``CausalLM.generate`` makes them from its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from graphpass.text.generation import complete, requests_of


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    eos_token_id: int | Collection[int] | None = None,
    **options: Any,
) -> list[list[int]]:
    return complete(model, requests_of(prompts, max_new_tokens, eos_token_id), **options)
