"""Both worked examples of the first day, as their audience types them, on the CPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cgpass
import graphpass
import graphpass as gp
from graphpass import BatchDescriptor, CUDAGraphMode, Dispatch, DispatchReason
from tests.observed import reported_regions

WIDTH, VOCABULARY, LAYERS = 16, 50, 2
MAX_REQUESTS, MAX_LENGTH, MAX_TOKENS = 16, 12, 16
SIZES = [1, 2, 4, 8, 16]


@dataclass(frozen=True, slots=True)
class PagedMetadata:
    """Where each token's key and value go; persistent tensors, so that graphs may keep their addresses.

    ``cache`` is [layers, 2, requests + 1, length, width]; the last request is scratch, for padded tokens.
    """

    cache: torch.Tensor
    request: torch.Tensor
    position: torch.Tensor

    @classmethod
    def empty(cls) -> PagedMetadata:
        shape = (LAYERS, 2, MAX_REQUESTS + 1, MAX_LENGTH, WIDTH)
        return cls(
            torch.zeros(shape), torch.full((MAX_TOKENS,), MAX_REQUESTS), torch.zeros(MAX_TOKENS, dtype=torch.long)
        )


@torch.library.custom_op("mylib::paged_attention", mutates_args=())
def paged_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
    """Write keys and values to the cache the forward context names, then attend to everything up to the position."""
    metadata = gp.get_forward_context().attn_metadata
    keys, values = metadata.cache[layer]
    request, position = metadata.request[: len(q)], metadata.position[: len(q)]
    keys.index_put_((request, position), k)
    values.index_put_((request, position), v)
    scores = (keys[request] @ q.unsqueeze(-1)).squeeze(-1) / math.sqrt(WIDTH)
    scores = scores.masked_fill(torch.arange(MAX_LENGTH) > position.unsqueeze(-1), -math.inf)
    return (scores.softmax(-1).unsqueeze(1) @ values[request]).squeeze(1)


paged_attention.register_fake(lambda q, *_: torch.empty_like(q))


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + torch.ops.mylib.paged_attention(q.contiguous(), k.contiguous(), v.contiguous(), self.index)
        return x + self.mlp(x)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """The same layer over a whole sequence at once, without a cache."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ids = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(MAX_LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer(index) for index in range(LAYERS))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.ids(ids) + self.positions(positions)
        for layer in self.layers:
            x = layer(x)
        return x

    def whole(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.ids(ids) + self.positions(torch.arange(len(ids)))
        for layer in self.layers:
            x = layer.whole(x)
        return x


class Buffers:
    """The engine's persistent inputs and attention metadata."""

    def __init__(self) -> None:
        # Longer than the largest batch: torch takes a view as long as its base for another graph.
        self.ids = torch.zeros(MAX_TOKENS + 1, dtype=torch.long)
        self.positions = torch.zeros(MAX_TOKENS + 1, dtype=torch.long)
        self.metadata = PagedMetadata.empty()

    def fill(self, batch: Sequence[tuple[int, int, int]], pad_to: int) -> None:
        """``batch`` is (request, position, token id) of each token; padding goes to the scratch request."""
        padded = [*batch, *[(MAX_REQUESTS, 0, 0)] * (pad_to - len(batch))]
        request, position, ids = torch.tensor(padded).unbind(1)
        self.ids[:pad_to], self.positions[:pad_to] = ids, position
        self.metadata.request[:pad_to], self.metadata.position[:pad_to] = request, position


SEQUENCES = [torch.randint(VOCABULARY, (7,), generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
PROMPTS = [4, 3, 1, 2, 3]
"""Five requests; the prompts are one mixed batch of 13 tokens, the rest is decoded one token each at a time."""


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.soak)])
def test_engine_author_drives_the_parts(compiler: str) -> None:
    torch.manual_seed(0)
    model = Decoder().eval()
    buffers = Buffers()

    def metadata_for(_: object) -> PagedMetadata:
        return buffers.metadata

    rt = gp.GraphRuntime()
    dispatcher = gp.CudagraphDispatcher("FULL_AND_PIECEWISE", SIZES, max_num_reqs=16)
    compiled = torch.compile(model, backend="cgpass", dynamic=True, options=cgpass.options(
        splitting_ops=["mylib::paged_attention"], mode="FULL_AND_PIECEWISE", capture_sizes=SIZES, runtime=rt,
        compiler=compiler))  # fmt: skip

    steps: list[Dispatch] = []

    def forward(batch: Sequence[tuple[int, int, int]], *, uniform_decode: bool) -> torch.Tensor:
        step = dispatcher.dispatch(num_tokens=len(batch), uniform_decode=uniform_decode)
        steps.append(step)
        num_tokens = step.descriptor.num_tokens
        buffers.fill(batch, pad_to=num_tokens)
        with gp.set_forward_context(metadata_for(batch), runtime_mode=step.mode, batch_descriptor=step.descriptor):
            hidden: torch.Tensor = compiled(buffers.ids[:num_tokens], buffers.positions[:num_tokens])[: len(batch)]
        return hidden

    with torch.inference_mode():
        with rt.capturing():
            for mode, descriptors in dispatcher.capture_plan():
                for d in descriptors:
                    with gp.set_forward_context(metadata_for(d), runtime_mode=mode, batch_descriptor=d):
                        compiled(buffers.ids[: d.num_tokens], buffers.positions[: d.num_tokens])
                    dispatcher.mark_captured(mode, d)
        assert_captured_once(rt)
        buffers.metadata.cache.zero_()

        prompts = [(r, p, int(SEQUENCES[r][p])) for r, length in enumerate(PROMPTS) for p in range(length)]
        hidden = forward(prompts, uniform_decode=False)
        got = {(r, p): hidden[row] for row, (r, p, _) in enumerate(prompts)}
        for offset in range(3):
            tokens = [(r, length + offset, int(SEQUENCES[r][length + offset])) for r, length in enumerate(PROMPTS)]
            hidden = forward(tokens, uniform_decode=True)
            got.update({(r, p): hidden[row] for row, (r, p, _) in enumerate(tokens)})

        for request, length in enumerate(PROMPTS):
            want = model.whole(SEQUENCES[request][: length + 3])
            for position in range(length + 3):
                torch.testing.assert_close(got[request, position], want[position], rtol=1e-4, atol=1e-5)

    mixed = Dispatch(CUDAGraphMode.PIECEWISE, BatchDescriptor(16), DispatchReason.PADDED)
    decode = Dispatch(CUDAGraphMode.FULL, BatchDescriptor(8, num_reqs=8, uniform=True), DispatchReason.PADDED)
    assert steps == [mixed, decode, decode, decode]
    counts = rt.counts()
    assert counts["g0.full", CUDAGraphMode.FULL, decode.descriptor].replayed == 1 + 3
    piecewise = {region: c.replayed for (region, mode, key), c in counts.items() if key == mixed.descriptor}
    assert piecewise == dict.fromkeys(captured_regions(rt, "g0"), 1 + 1)
    assert all(c.captured == 1 for c in counts.values()), "the steps only replayed"
    assert buffers.metadata.cache[:, :, MAX_REQUESTS, 1:].eq(0).all(), "padding wrote to its scratch slot only"
    for request, length in enumerate(PROMPTS):
        assert buffers.metadata.cache[:, :, request, length + 3 :].eq(0).all()


def captured_regions(rt: gp.GraphRuntime, name: str) -> list[str]:
    return [region for region, kind, _ in reported_regions(rt) if kind == "captured" and region.startswith(name)]


def assert_captured_once(rt: gp.GraphRuntime) -> None:
    """Every size has each region of its callable once, and its FULL graph once; size 1 is a callable of its own."""
    counts = rt.counts()
    assert {(c.captured, c.replayed) for c in counts.values()} == {(1, 1)}
    for size in SIZES:
        name = "g1" if size == 1 else "g0"
        regions = {region for region, mode, key in counts if mode is CUDAGraphMode.PIECEWISE and key.num_tokens == size}
        assert regions == set(captured_regions(rt, name)), size
        assert len(regions) == LAYERS + 1
        full = {region for region, mode, key in counts if mode is CUDAGraphMode.FULL and key.num_tokens == size}
        assert full == {f"{name}.full"}


class MyEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_model_user_types_three_lines() -> None:
    torch.manual_seed(0)
    model = MyEncoder().eval()
    fast = graphpass.graphed(model, capture_sizes=[1, 2, 4, 8, 16, 32], dynamic_dims={"x": 0})
    fast.capture(torch.randn(32, 128))
    x = torch.randn(5, 128)
    y = fast(x)
    torch.testing.assert_close(y, model(x).detach(), rtol=1e-4, atol=1e-5)
    counts = {key.num_tokens: c for (region, _, key), c in fast.runtime.counts().items() if region.endswith(".full")}
    assert {size: (c.captured, c.replayed) for size, c in counts.items()} == {
        1: (1, 1), 2: (1, 1), 4: (1, 1), 8: (1, 2), 16: (1, 1), 32: (1, 1)
    }  # fmt: skip
    text = str(fast.report())
    for piece in ("Keys", "num_tokens=8", "37.5%", "buffers"):
        assert piece in text


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Mapping[str, torch.Tensor]:
        x = self.embedding(input_ids)
        visible = attention_mask.bool()[:, None, None, :]
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in qkv(x).chunk(3, -1))
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
            x = x + out(attended.transpose(1, 2).flatten(2))
        return {"last_hidden_state": x, "pooled": x[:, 0]}


def test_model_user_pads_two_dimensions_and_splits_at_attention() -> None:
    torch.manual_seed(0)
    bert = Bert().eval()
    fast = graphpass.graphed(
        bert,
        capture_sizes={"num_reqs": [1, 4, 16], "seq_len": [32, 64, 128]},
        dynamic_dims={"input_ids": {0: "num_reqs", 1: "seq_len"}},
        padding={"attention_mask": 0, "input_ids": 0},
        splitting_ops=["torch.nn.functional.scaled_dot_product_attention"],
        mode="PIECEWISE",
        compiler="eager",
    )
    fast.capture(torch.randint(VOCABULARY, (3, 40)), torch.ones(3, 40, dtype=torch.long))
    captured = fast.runtime.stats().captured
    for num_reqs, seq_len in ((3, 40), (16, 128), (2, 33)):
        ids = torch.randint(VOCABULARY, (num_reqs, seq_len))
        mask = torch.ones_like(ids)
        mask[0, seq_len // 2 :] = 0
        got = fast(input_ids=ids, attention_mask=mask)
        want = bert(input_ids=ids, attention_mask=mask)
        assert got["last_hidden_state"].shape == (num_reqs, seq_len, WIDTH)
        torch.testing.assert_close(got, {name: t.detach() for name, t in want.items()}, rtol=1e-4, atol=1e-5)
    assert fast.runtime.stats().captured == captured
    counts = fast.runtime.counts()
    replayed = {(region, key.num_tokens) for (region, _, key), c in counts.items() if c.replayed > c.captured}
    regions = {region for region, _ in replayed}
    assert len(regions) == LAYERS + 1
    assert replayed == {(region, size) for region in regions for size in (4 * 64, 16 * 128)}
