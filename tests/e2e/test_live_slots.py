"""An engine's loop over a paged KV cache whose padding has a scratch page: nothing but real tokens writes a live slot.

At one key, real rows and the slots they write have the same bits over zeros, noise and NaN in padded rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import cgpass
import graphpass as gp
from graphpass import BatchDescriptor, CUDAGraphMode
from tests.e2e.hugging_face import CPU, CPU_BF16, CUDA, CUDA_F32, Place, cases, difference
from tests.e2e.padding_contents import FLOAT_KINDS, fill_like

PIECEWISE, FULL = CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
WIDTH, LAYERS = 16, 2
NUM_REQUESTS, MAX_LENGTH = 3, 6
SIZES, MAX_TOKENS = [2, 4, 8], 8
LIVE_SLOTS = NUM_REQUESTS * MAX_LENGTH
HISTORY = 2
"""Tokens that each request has in the cache before the batch."""


@dataclass(frozen=True, slots=True)
class Pages:
    """Where attention reads, one row a token."""

    cache: torch.Tensor  #: keys and values, [layers, 2, slots, width]; behind the live slots lies a scratch page
    #: where the token's request keeps each of its positions, [tokens, length]; scratch where it has none yet
    slots: torch.Tensor
    positions: torch.Tensor  #: the token's own position, [tokens]


@torch.library.custom_op("graphpass_live_slots_test::paged_attention", mutates_args=())
def paged_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
    """Write keys and values to the context's slots, then attend to the pages up to the position."""
    context = gp.get_forward_context()
    pages: Pages = context.attn_metadata
    keys, values = pages.cache[layer]
    keys.index_put_((context.slot_mapping,), k)
    values.index_put_((context.slot_mapping,), v)
    scores = (keys[pages.slots] @ q.unsqueeze(-1)).squeeze(-1) / math.sqrt(WIDTH)
    ahead = torch.arange(MAX_LENGTH, device=q.device) > pages.positions.unsqueeze(-1)
    weights = scores.masked_fill(ahead, -math.inf).softmax(-1)
    return (weights.unsqueeze(1) @ values[pages.slots]).squeeze(1)


paged_attention.register_fake(lambda q, *_: torch.empty_like(q))


class Layer(nn.Module):
    def __init__(self, index: int, zeroes: bool) -> None:
        super().__init__()
        self.index, self.zeroes = index, zeroes
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.contiguous() for part in self.qkv(self.norm(x)).chunk(3, -1))
        if self.zeroes:
            k, v = gp.zero_padding(k), gp.zero_padding(v)
        x = x + torch.ops.graphpass_live_slots_test.paged_attention(q, k, v, self.index)
        return x + self.mlp(x)


class Decoder(nn.Module):
    """Takes embeddings, so that padding can be NaN."""

    def __init__(self, zeroes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(index, zeroes) for index in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Engine:
    """Persistent inputs and metadata, a cache in which every live slot holds something, and the compiled model."""

    def __init__(self, mode: CUDAGraphMode, compiler: str, place: Place, *, zeroes: bool = True) -> None:
        self._seeded = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        self.model = Decoder(zeroes).eval().to(place.device, place.dtype)
        self.mode, self.place = mode, place
        self.runtime = gp.GraphRuntime()
        self.dispatcher = gp.CudagraphDispatcher(mode, SIZES, max_num_reqs=MAX_TOKENS)
        options = cgpass.options(
            splitting_ops=["graphpass_live_slots_test::paged_attention"],
            mode=mode,
            capture_sizes=SIZES,
            compiler=compiler,
            runtime=self.runtime,
        )
        self.compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(
            self.model, backend="cgpass", dynamic=True, options=options
        )
        # One row more than the largest batch: torch takes a view as long as its base for another graph.
        rows = MAX_TOKENS + 1
        self.hidden = torch.zeros(rows, WIDTH, device=place.device, dtype=place.dtype)
        self.slot_mapping = torch.zeros(rows, dtype=torch.long, device=place.device)
        self.is_padding = torch.ones(rows, dtype=torch.bool, device=place.device)
        self.positions = torch.zeros(rows, dtype=torch.long, device=place.device)
        self.slots = torch.zeros(rows, MAX_LENGTH, dtype=torch.long, device=place.device)
        shape = (LAYERS, 2, LIVE_SLOTS + MAX_TOKENS, WIDTH)
        self.initial = torch.randn(shape, generator=self._seeded).to(self.hidden)
        self.cache = self.initial.clone()
        # Live pages lie in no order, so that a slot that is off by one is another request's.
        self.table = torch.randperm(LIVE_SLOTS, generator=self._seeded).view(NUM_REQUESTS, MAX_LENGTH)
        self.scratch = LIVE_SLOTS + torch.arange(MAX_TOKENS)

    def slots_of(self, request: int, position: int) -> torch.Tensor:
        """Where the request keeps its tokens up to the position; scratch behind."""
        slots = self.scratch[:MAX_LENGTH].clone()
        slots[: position + 1] = self.table[request, : position + 1]
        return slots

    def fill(self, tokens: Sequence[tuple[int, int]], hidden: torch.Tensor, num_tokens: int, kind: str) -> None:
        """Tokens are (request, position), with one row of ``hidden`` each; ``kind`` is what padded rows hold."""
        real, shape = len(tokens), (num_tokens, WIDTH)
        self.hidden[:num_tokens] = fill_like(self.hidden, shape, kind, self._seeded)
        self.hidden[:real] = hidden
        self.is_padding[:num_tokens] = torch.arange(num_tokens) >= real
        self.slot_mapping[:num_tokens] = self.scratch[:num_tokens]
        self.slots[:num_tokens] = self.scratch[:MAX_LENGTH]
        self.positions[:num_tokens] = 0
        for row, (request, position) in enumerate(tokens):
            self.slot_mapping[row] = self.table[request, position]
            self.slots[row] = self.slots_of(request, position)
            self.positions[row] = position

    def forward(
        self, run: Callable[[torch.Tensor], torch.Tensor], num_tokens: int, key: BatchDescriptor | None
    ) -> torch.Tensor:
        """Call the model over what the first ``num_tokens`` rows hold, over a graph where there is a key."""
        pages = Pages(self.cache, self.slots[:num_tokens], self.positions[:num_tokens])
        context = gp.set_forward_context(
            pages,
            runtime_mode=CUDAGraphMode.NONE if key is None else self.mode,
            batch_descriptor=key,
            num_tokens=num_tokens,
            slot_mapping=self.slot_mapping[:num_tokens],
            is_padding=self.is_padding[:num_tokens],
        )
        with context:
            return run(self.hidden[:num_tokens])

    def capture(self, kind: str = "NaN") -> None:
        """Capture every key over padding alone, and look at the live slots after each."""
        with self.runtime.capturing():
            for mode, keys in self.dispatcher.capture_plan():
                for key in keys:
                    self.fill([], self.hidden[:0], key.num_tokens, kind)
                    self.forward(self.compiled, key.num_tokens, key)
                    self.assert_live_slots_kept()
                    self.dispatcher.mark_captured(mode, key)

    def step(self, tokens: Sequence[tuple[int, int]], hidden: torch.Tensor, kind: str) -> torch.Tensor:
        """One padded batch over its graph, from the initial cache; its real rows."""
        self.cache.copy_(self.initial)
        key = self.dispatcher.dispatch(len(tokens)).descriptor
        self.fill(tokens, hidden, key.num_tokens, kind)
        return self.forward(self.compiled, key.num_tokens, key)[: len(tokens)]

    def unpadded(self, tokens: Sequence[tuple[int, int]], hidden: torch.Tensor) -> torch.Tensor:
        """The same batch by the model itself, without padding or graph."""
        self.cache.copy_(self.initial)
        self.fill(tokens, hidden, len(tokens), "zero")
        return self.forward(self.model, len(tokens), None)

    def written(self, tokens: Sequence[tuple[int, int]]) -> torch.Tensor:
        """A copy of what the cache holds of these tokens, [layers, 2, tokens, width]."""
        return self.cache[:, :, [int(self.table[token]) for token in tokens]]

    def assert_live_slots_kept(self, tokens: Sequence[tuple[int, int]] = ()) -> None:
        """No live slot but those of ``tokens`` holds other bits than at first; those all do, in every layer."""
        changed = (self.cache != self.initial)[:, :, :LIVE_SLOTS].any(-1)
        expected = torch.zeros_like(changed)
        expected[:, :, [int(self.table[token]) for token in tokens]] = True
        assert torch.equal(changed, expected)


def batch(engine: Engine, num_tokens: int) -> tuple[list[tuple[int, int]], torch.Tensor]:
    """The requests' next tokens, one each in turn, and their rows."""
    tokens = [(n % NUM_REQUESTS, HISTORY + n // NUM_REQUESTS) for n in range(num_tokens)]
    rows = torch.randn(num_tokens, WIDTH, generator=torch.Generator().manual_seed(num_tokens))
    return tokens, rows.to(engine.hidden)


@pytest.mark.parametrize(
    ("mode", "compiler", "place"),
    cases(
        [(FULL, "eager", CPU), (PIECEWISE, "eager", CPU), (FULL, "aot_eager", CPU_BF16), (PIECEWISE, "aot_eager", CPU)],
        (FULL, PIECEWISE), ("eager", "aot_eager", "inductor"), (CPU, CPU_BF16, CUDA, CUDA_F32),
    ),
)  # fmt: skip
def test_padding_warm_up_and_capture_write_no_live_slot(mode: CUDAGraphMode, compiler: str, place: Place) -> None:
    """At every size; real tokens write what they write without padding, whatever padded rows hold."""
    engine = Engine(mode, compiler, place)
    with torch.inference_mode():
        engine.capture()
        for num_tokens in range(1, MAX_TOKENS + 1):
            tokens, hidden = batch(engine, num_tokens)
            expected = engine.unpadded(tokens, hidden)
            engine.assert_live_slots_kept(tokens)
            expected_written = engine.written(tokens)
            results = []
            for kind in FLOAT_KINDS:
                results.append((engine.step(tokens, hidden, kind), engine.written(tokens)))
                engine.assert_live_slots_kept(tokens)
                for found, first in zip(results[-1], results[0], strict=True):
                    assert torch.equal(found, first), (num_tokens, kind)
            for found, wanted in zip(results[0], (expected, expected_written), strict=True):
                assert difference(found, wanted) < place.tolerance
    counts = engine.runtime.counts()
    assert {(key.num_tokens, c.captured, c.replayed) for (_, _, key), c in counts.items()} == {
        (2, 1, 1 + 2 * 3),
        (4, 1, 1 + 2 * 3),
        (8, 1, 1 + 4 * 3),
    }
    assert {level for _, level, _ in counts} == {mode}
    engine.runtime.close()


@pytest.mark.parametrize("mode", [FULL, PIECEWISE])
def test_without_zeroing_nan_comes_back_through_the_scratch_page(mode: CUDAGraphMode) -> None:
    """Pages that a request does not use yet are scratch too: weight zero there, and zero times NaN is NaN."""
    engine = Engine(mode, "eager", CPU, zeroes=False)
    with torch.inference_mode():
        engine.capture("zero")
        tokens, hidden = batch(engine, 3)
        assert engine.step(tokens, hidden, "zero").isfinite().all()
        assert engine.step(tokens, hidden, "NaN").isnan().all()
        engine.assert_live_slots_kept(tokens)
    engine.runtime.close()
