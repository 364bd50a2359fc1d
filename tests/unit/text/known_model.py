"""A model that is known by heart, in a manager's place, and the loops that generate texts with it.

The model's next token is a function of all tokens before it, which it reads from the pages of its request. So a token
at a wrong position, on a wrong page or in a wrong row changes everything after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from graphpass import Batch, CudagraphDispatcher
from graphpass.text import Generation, GenerationStats, PagedAttention, PagedKVCache, PagedLayer, Request
from graphpass.text.generation import complete, requests_of

VOCABULARY, MAX_LENGTH = 97, 48
STALE = -5

TOKENS = st.integers(0, VOCABULARY - 1)
REQUESTS = st.lists(st.tuples(st.lists(TOKENS, min_size=1, max_size=30), st.integers(1, 16)), max_size=12)
ARRIVALS: dict[str, Any] = {
    "requests": REQUESTS,
    "gaps": st.lists(st.integers(0, 3), min_size=12, max_size=12),
    "cancelled": st.sets(st.integers(0, 11), max_size=3),
}
"""Requests, the steps after each before the next one comes, and those that are cancelled."""


def next_token(text: Sequence[int]) -> int:
    """Depends on every token and its position."""
    return (sum((at + 1) * (token + 3) for at, token in enumerate(text)) * 31 + len(text)) % VOCABULARY


def continued(prompt: Sequence[int], count: int, eos: Sequence[int]) -> list[int]:
    text = list(prompt)
    while len(text) < len(prompt) + count and (len(text) == len(prompt) or text[-1] not in eos):
        text.append(next_token(text))
    return text[len(prompt) :]


class KnownModel:
    """Keeps token ids where others keep keys, and answers for the last 1 + k tokens of each row, in one buffer."""

    vocab_size = VOCABULARY
    timeout_s = None

    def __init__(
        self,
        *,
        max_num_reqs: int,
        max_num_tokens: int,
        page_size: int,
        num_pages: int,
        draft_tokens: int = 0,
        mode: str = "FULL_DECODE_ONLY",
    ) -> None:
        cache = PagedKVCache([PagedLayer(num_kv_heads=1, head_dim=1)], num_pages=num_pages, page_size=page_size)
        self.attention = PagedAttention(
            cache, max_num_reqs=max_num_reqs, max_num_tokens=max_num_tokens, max_seq_len=MAX_LENGTH
        )
        self.model = self
        self.query_len = 1 + draft_tokens
        self.dispatcher = CudagraphDispatcher(
            mode, [max_num_tokens], max_num_reqs=max_num_reqs, uniform_decode_query_len=self.query_len
        )
        tokens = torch.zeros(1, max_num_tokens, dtype=torch.int64)
        self.answers = torch.zeros(max_num_reqs, self.query_len, dtype=torch.int64)
        last_rows = self.answers.clone() if draft_tokens else self.answers[:, 0].clone()
        self.buffers = {"input_ids": tokens, "position_ids": tokens.clone(), "last_rows": last_rows}
        self.kept = np.full((num_pages + 2, page_size), STALE)
        self.batches: list[list[int]] = []  # tokens of each row, batch by batch
        self.num_uniform = 0  # batches that were uniform decodes
        self.num_idle_steps = self.others_work_for = 0

    @property
    def num_steps(self) -> int:
        return len(self.batches)

    @property
    def all_pages_are_free(self) -> bool:
        return bool(self.attention.pages.num_free == self.attention.cache.num_pages)

    def run_idle(self) -> bool:
        """Data-parallel ranks that still have work, for ``others_work_for`` steps."""
        self.num_idle_steps += 1
        return self.num_idle_steps <= self.others_work_for

    def needs_capture(self) -> bool:
        return False

    def unattended(self) -> Any:
        return self

    def attended(self) -> None:
        pass

    def run(self, batch: Batch) -> torch.Tensor:
        assert batch.inputs is not None
        ids, positions, last_rows = (batch.inputs[name] for name in ("input_ids", "position_ids", "last_rows"))
        requests, starts = batch.attention, np.cumsum([0, *batch.attention.query_lens])
        assert ids.shape == positions.shape == (1, batch.num_tokens)
        assert last_rows.shape == (batch.num_reqs, *self.buffers["last_rows"].shape[1:])
        assert batch.uniform_decode == all(count == self.query_len for count in requests.query_lens)
        self.batches.append([int(count) for count in requests.query_lens])
        self.num_uniform += batch.uniform_decode
        self.answers.fill_(STALE)
        for row, (start, end) in enumerate(itertools.pairwise(starts.tolist())):
            length, pages = int(requests.seq_lens[row]), requests.block_tables[row]
            assert positions[0, start:end].tolist() == list(range(length - (end - start), length))
            self.keep(ids[0, start:end].tolist(), positions[0, start:end].tolist(), pages)
            text = self.kept[pages[: -(-length // self.kept.shape[1])]].reshape(-1)[:length].tolist()
            assert STALE not in text
            for column, at in enumerate(range(end - self.query_len, end)):
                assert last_rows.view(len(last_rows), -1)[row, column] == max(start, at)
                self.answers[row, column] = next_token(text[: length - end + max(start, at) + 1])
        return self.answers[: batch.num_reqs] if self.query_len > 1 else self.answers[: batch.num_reqs, 0]

    def keep(self, ids: Sequence[int], positions: Sequence[int], pages: Any) -> None:
        for token, position in zip(ids, positions, strict=True):
            page = pages[position // self.kept.shape[1]]
            assert page >= 2, "a page of the request's own"
            self.kept[page, position % self.kept.shape[1]] = token


def make_model(draft_tokens: int = 0, mode: str = "FULL_DECODE_ONLY", **sizes: int) -> Any:
    given = {"max_num_reqs": 4, "page_size": 4, "num_pages": 48, **sizes}
    given.setdefault("max_num_tokens", max(8, given["max_num_reqs"] * (1 + draft_tokens)))
    return KnownModel(draft_tokens=draft_tokens, mode=mode, **given)


@st.composite
def models(draw: st.DrawFn, draft_tokens: st.SearchStrategy[int]) -> Any:
    most, reqs, page_size = draw(draft_tokens), draw(st.integers(1, 6)), draw(st.sampled_from([1, 4, 16]))
    return make_model(
        most,
        draw(st.sampled_from(["FULL_DECODE_ONLY", "PIECEWISE"])),
        max_num_reqs=reqs,
        max_num_tokens=reqs * (1 + most) + draw(st.integers(0, 20)),
        page_size=page_size,
        num_pages=draw(st.integers(1, 3)) * -(-MAX_LENGTH // page_size),
    )


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    eos_token_id: int | Collection[int] | None = None,
    **options: Any,
) -> list[list[int]]:
    """As ``CausalLM.generate`` makes texts with its manager."""
    return complete(model, requests_of(prompts, max_new_tokens, eos_token_id), progress=False, **options)


def collect(generation: Generation, found: dict[Request, list[int]], ended: list[Request]) -> None:
    """One step."""
    for new in generation.step():
        assert new.request not in ended, "nothing follows the last token"
        found[new.request].append(new.token)
        if new.is_last:
            ended.append(new.request)


def finish(generation: Generation, found: dict[Request, list[int]]) -> None:
    while not generation.is_done():
        collect(generation, found, [])


def check_arrivals(
    model: Any,
    requests: Iterable[tuple[list[int], int]],
    gaps: Sequence[int],
    cancelled: Collection[int],
    run_ahead: bool,
) -> GenerationStats:
    """Each request gets its own text, or the beginning of it if it is cancelled; returns the counts."""
    made = {Request.of(str(index), prompt, count): (prompt, count) for index, (prompt, count) in enumerate(requests)}
    found: dict[Request, list[int]] = {request: [] for request in made}
    ended: list[Request] = []
    with Generation(model, run_ahead=run_ahead) as generation:
        for index, request in enumerate(made):
            generation.add(request)
            for _ in range(gaps[index]):
                collect(generation, found, ended)
            if index in cancelled and request not in ended:
                generation.cancel(request)
                ended.append(request)
        while not generation.is_done():
            collect(generation, found, ended)
        stats = generation.stats()
    assert sorted(ended, key=[*made].index) == [*made]
    for index, (request, (prompt, count)) in enumerate(made.items()):
        expected = continued(prompt, count, [])
        assert found[request] == (expected[: len(found[request])] if index in cancelled else expected)
    assert model.all_pages_are_free
    assert (stats.num_steps, stats.num_tokens) == (model.num_steps, sum(map(len, found.values())))
    return stats
