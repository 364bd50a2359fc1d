"""Speculative decoding: keeps the texts of running requests, adds drafts to steps and verifies them.

See Note [Draft tokens].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from graphpass.errors import OptionError
from graphpass.text.drafting import Drafter, NgramDrafter
from graphpass.text.request import Ints, Request
from graphpass.text.scheduler import StepPlan
from graphpass.text.steptokens import TextInputs

__all__ = ["GenerationStats", "Speculation", "Verified"]


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """Counts of a generation so far.

    Attributes:
        num_steps: launched steps.
        num_tokens: returned new tokens.
        num_drafted: verified drafts.
        num_accepted: accepted drafts.
    """

    num_steps: int
    num_tokens: int
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def acceptance(self) -> float:
        """The share of drafts that were accepted, 0 to 1; 0 without drafts."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """The new tokens of one request in a step.

    Attributes:
        request: the request.
        tokens: its new tokens, at least one; tokens after an end token are dropped.
        is_ended: the last of these tokens ends the request.
        num_accepted: number of accepted drafts among the tokens.
    """

    request: Request
    tokens: list[int]
    is_ended: bool
    num_accepted: int


class _Text:
    """The tokens of one request: known tokens, then drafts, in an array of the request's maximal length."""

    def __init__(self, request: Request) -> None:
        self.tokens = np.empty(request.max_length, dtype=np.int64)
        self.num_known = len(request.prompt)
        self.tokens[: self.num_known] = request.prompt

    def known(self) -> Ints:
        """Prompt and new tokens so far, read-only."""
        view = self.tokens[: self.num_known]
        view.flags.writeable = False
        return view

    def behind(self) -> Ints:
        """The rest of the array, behind the known tokens; writable."""
        return self.tokens[self.num_known :]


class Speculation:
    """Requests drafts for a scheduler's steps, builds the inputs of the steps, and verifies their results.

    Args:
        drafter: guesses the next tokens.
        max_num_tokens: most tokens of a step.
        last_rows: shape of the model's input of that name, (requests, 1 + k).
        vocab_size: number of token ids; None if it is unknown.
        device: device of the inputs.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        max_num_tokens: int,
        last_rows: Sequence[int],
        vocab_size: int | None,
        device: torch.device,
    ) -> None:
        self._drafter, self._vocab_size = drafter, vocab_size
        self._num_drafted = self._num_accepted = 0
        self._inputs = TextInputs(max_num_tokens, last_rows, device)
        self._num_last = last_rows[1]
        self._texts: dict[Request, _Text] = {}

    @classmethod
    def over(
        cls,
        buffers: Mapping[str, torch.Tensor],
        drafter: Drafter | None,
        vocab_size: int | None,
        *,
        run_ahead: bool | None,
    ) -> Speculation | None:
        """The speculation of a manager with these input buffers; None for a manager without ``draft_tokens``.

        Raises:
            OptionError: a drafter was passed, but the manager has no ``draft_tokens``; or ``run_ahead`` is set, but it
                has.
        """
        last_rows = buffers["last_rows"]
        if last_rows.dim() == 1:
            if drafter is None:
                return None
            raise OptionError(
                "this manager verifies no drafts",
                expected="a manager with draft_tokens=1 or more, or no drafter",
                found=type(drafter).__name__,
                remedy="pass CausalLM(model, draft_tokens=3, ...).manager",
            )
        if run_ahead:
            raise OptionError(
                "a manager with draft_tokens cannot run ahead: drafts depend on the tokens of the step before",
                expected="run_ahead=False or None",
                found=f"run_ahead={run_ahead!r}",
                remedy="leave run_ahead out, or create the model without draft_tokens",
            )
        return cls(
            NgramDrafter() if drafter is None else drafter,
            max_num_tokens=buffers["input_ids"].shape[1],
            last_rows=last_rows.shape,
            vocab_size=vocab_size,
            device=last_rows.device,
        )

    @property
    def draft_tokens(self) -> int:
        """Most drafts of a request in a step."""
        return self._num_last - 1

    def counts(self) -> tuple[int, int]:
        """(verified drafts, accepted drafts) so far."""
        return self._num_drafted, self._num_accepted

    def guess(self, request: Request, limit: int) -> int:
        """Let the drafter guess at most ``limit`` next tokens of a request; returns the number of drafts.

        Raises:
            OptionError: the drafter returned too many values, or values that are not token ids.
        """
        text = self._texts[request]
        drafts = self._checked(self._drafter.propose(request, text.known(), limit), request, limit)
        text.behind()[: len(drafts)] = drafts
        return len(drafts)

    def inputs(self, plan: StepPlan) -> dict[str, torch.Tensor]:
        """A step's inputs, valid until the next call."""
        texts = []
        for request in plan.requests:
            if request not in self._texts:
                self._texts[request] = _Text(request)
            texts.append(self._texts[request].tokens)
        return self._inputs.of(plan, texts)

    def verify(self, plan: StepPlan, answers: Sequence[int]) -> list[Verified]:
        """The new tokens of a step.

        Args:
            plan: the step of the last call of :meth:`inputs`.
            answers: the model's next token after each of the last ``1 + k`` tokens of each row, flat.
        """
        verified = []
        rows = zip(plan.requests, plan.samples.tolist(), plan.num_drafts.tolist(), strict=True)
        for row, (request, samples, num_drafts) in enumerate(rows):
            if samples:
                behind = (row + 1) * self._num_last
                verified.append(self._verified(request, answers[behind - 1 - num_drafts : behind]))
                self._num_drafted += num_drafts
                self._num_accepted += verified[-1].num_accepted
        return verified

    def forget(self, request: Request) -> None:
        """Drop the text of a request that has ended; an unknown request is ignored."""
        self._texts.pop(request, None)

    def close(self) -> None:
        """Drop the texts of all requests."""
        self._texts.clear()

    def _verified(self, request: Request, answers: Sequence[int]) -> Verified:
        """Compare a request's drafts with the answers, and append the accepted tokens to its text."""
        text = self._texts[request]
        drafts = text.behind()[: len(answers) - 1].tolist()
        differs = (at for at, (draft, answer) in enumerate(zip(drafts, answers, strict=False)) if draft != answer)
        num_right = next(differs, len(drafts))
        ends = (at for at, token in enumerate(answers[: num_right + 1]) if token in request.eos_token_ids)
        end = next(ends, None)
        tokens = list(answers[: (num_right if end is None else end) + 1])
        text.behind()[: len(tokens)] = tokens
        text.num_known += len(tokens)
        is_ended = end is not None or text.num_known == request.max_length
        return Verified(request, tokens, is_ended, min(num_right, len(tokens)))

    def _checked(self, proposed: Any, request: Request, limit: int) -> Ints:
        """The drafts as an array.

        Raises:
            OptionError: see :meth:`guess`.
        """
        try:
            drafts = np.asarray(proposed)
        except ValueError:  # ragged
            drafts = np.empty((0, 0))
        if drafts.ndim == 1 and len(drafts) == 0:
            return drafts.astype(np.int64)
        most = np.iinfo(np.int64).max if self._vocab_size is None else self._vocab_size - 1
        is_sound = drafts.ndim == 1 and len(drafts) <= limit and np.issubdtype(drafts.dtype, np.integer)
        if not is_sound or drafts.min() < 0 or drafts.max() > most:
            raise OptionError(
                f"the drafter proposed invalid tokens for {request.name}",
                expected=f"a flat sequence of at most {limit} token ids from 0 to {most}",
                found=repr(proposed)[:200],
                remedy="return at most limit token ids of the model's vocabulary, or none",
            )
        return drafts
