"""A request: a prompt to continue, and the conditions that end it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from graphpass.checks import positive
from graphpass.errors import OptionError

__all__ = ["Ints", "Request"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Request:
    """A prompt to continue. Requests are compared by identity.

    Attributes:
        name: name in error messages.
        prompt: token ids, int64 (tokens,).
        max_new_tokens: most tokens to generate.
        eos_token_ids: tokens that end the request; the end token is part of the generated text.
        adapter: name of the LoRA adapter; None for the model without adapters.
    """

    name: str
    prompt: Ints
    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    adapter: str | None = None

    @staticmethod
    def of(
        name: str,
        prompt: Sequence[int] | Ints,
        max_new_tokens: int,
        eos_token_id: int | Collection[int] | None = None,
        *,
        adapter: str | None = None,
    ) -> Request:
        """Create a request from plain values; the prompt is copied.

        Raises:
            OptionError: the prompt is not a flat, non-empty sequence of token ids, ``max_new_tokens`` is below 1, or
                an end token is not an integer.
        """
        try:
            tokens = np.array(prompt)
        except ValueError:  # ragged
            tokens = np.empty((0, 0))
        if tokens.ndim != 1 or not len(tokens) or not np.issubdtype(tokens.dtype, np.integer) or tokens.min() < 0:
            raise OptionError(
                f"{name} has an invalid prompt",
                expected="a flat sequence of at least 1 token id, each an integer of at least 0",
                found=_shortened(prompt),
                remedy="pass the token ids of one prompt",
            )
        remedy = "leave the request out, or raise max_new_tokens"
        max_new_tokens = positive(max_new_tokens, f"max_new_tokens of {name}", remedy=remedy)
        return Request(name, tokens.astype(np.int64), max_new_tokens, _token_ids(name, eos_token_id), adapter)

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and generated text together."""
        return len(self.prompt) + self.max_new_tokens


def _token_ids(name: str, eos_token_id: int | Collection[int] | None) -> frozenset[int]:
    if eos_token_id is None:
        return frozenset()
    tokens = eos_token_id if isinstance(eos_token_id, Collection) else (eos_token_id,)
    if any(isinstance(token, bool) or not isinstance(token, int | np.integer) for token in tokens):
        raise OptionError(
            f"{name} has an invalid eos_token_id",
            expected="a token id, a collection of token ids, or None",
            found=repr(eos_token_id),
            remedy="pass the tokenizer's eos_token_id, or leave it out",
        )
    return frozenset(int(token) for token in tokens)


def _shortened(prompt: Any) -> str:
    text = repr(prompt)
    return text if len(text) <= 60 else f"{text[:57]}..."
