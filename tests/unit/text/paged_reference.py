"""Plain attention, request by request over contiguous keys, and requests that grow step by step over a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import graphpass as gp
from graphpass import BatchDescriptor
from graphpass.compat import operators
from graphpass.text import LayerMask, PageAllocator, PagedAttention, PagedKVCache, PagedLayer, PagedRequests
from graphpass.text.paged import kernels, pagedattention
from graphpass.text.paged.metadata import PagedMetadata

TOLERANCE = {
    ("cpu", torch.float32): {"rtol": 1e-4, "atol": 1e-5},
    ("cuda", torch.float32): {"rtol": 1e-3, "atol": 1e-4},
    ("cuda", torch.bfloat16): {"rtol": 2e-2, "atol": 2e-2},
}


def attend_by(function: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a function in the place of torch's flash attention, which then serves every plain layer on every device."""
    monkeypatch.setattr(operators, "flash_attention", function)
    for module in (pagedattention, kernels):
        monkeypatch.setattr(module, "flash_obstacle", lambda *_: None)
    kernels.fault_in_place.cache_clear()


def kind_of(metadata: PagedMetadata) -> str:
    """How the keys of a step are gathered."""
    if isinstance(metadata, kernels.BatchedKeys):
        return "batched"
    assert isinstance(metadata, kernels.FlashKeys)
    return "in place" if metadata.slots is None else "packed"


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of one attention layer, its mask and its scores. 0 is none."""

    query: int
    kv: int
    dim: int
    window: int = 0
    chunk: int = 0
    value_dim: int = 0
    softcap: float = 0.0
    has_sinks: bool = False

    def __str__(self) -> str:
        more = [
            f"{name}{value}" for name in ("window", "chunk", "value_dim", "softcap") if (value := getattr(self, name))
        ]
        return "-".join([f"{self.query}x{self.kv}x{self.dim}", *more, *(["sinks"] if self.has_sinks else [])])

    @property
    def scale(self) -> float:
        return 1.3 * self.dim**-0.5

    @property
    def sinks(self) -> torch.Tensor | None:
        """One score for each query head."""
        return torch.linspace(-1.0, 2.0, self.query) if self.has_sinks else None

    @property
    def values(self) -> int:
        return self.value_dim or self.dim

    def layer(self) -> PagedLayer:
        return PagedLayer(
            num_kv_heads=self.kv,
            head_dim=self.dim,
            value_dim=self.value_dim,
            mask=LayerMask(window=self.window, chunk=self.chunk),
            is_plain=not self.softcap and not self.has_sinks,
        )


def reference(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, heads: Heads) -> torch.Tensor:
    """Causal attention of one request in double precision: its last tokens [q, heads, dim] over all its keys."""
    group = heads.query // heads.kv
    keys, values = (t.double().repeat_interleave(group, 1) for t in (keys, values))
    scores = torch.einsum("qhd,lhd->hql", query.double() * heads.scale, keys)
    if heads.softcap:
        scores = heads.softcap * torch.tanh(scores / heads.softcap)
    seen = torch.zeros(len(query), len(keys), dtype=torch.bool)
    for row in range(len(query)):
        own = len(keys) - len(query) + row
        first = own - own % heads.chunk if heads.chunk else 0
        first = max(first, own + 1 - heads.window) if heads.window else first
        seen[row, first : own + 1] = True
    scores = scores.masked_fill(~seen.to(scores.device), -torch.inf)
    if heads.sinks is not None:
        sinks = heads.sinks.to(scores).view(-1, 1, 1).expand(-1, len(query), 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hql,lhd->qhd", weights, values)


@dataclass(slots=True)
class Request:
    """One growing request: its pages, and its keys and values of every layer [layers, length, kv heads, size]."""

    pages: list[int]
    keys: torch.Tensor
    values: torch.Tensor

    def __len__(self) -> int:
        return self.keys.shape[1]


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One layer of a step: what the op takes, and what it is to return, [tokens, heads, dim]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    expected: torch.Tensor


class Paged:
    """A cache with live requests. Pages come in no order, and every free slot holds NaN."""

    def __init__(
        self,
        heads: Heads,
        *,
        num_layers: int = 2,
        page_size: int = 4,
        num_pages: int = 40,
        max_num_reqs: int = 6,
        max_num_tokens: int = 48,
        max_seq_len: int = 32,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        **options: object,
    ) -> None:
        self.heads, self.dtype, self.device = heads, dtype, torch.device(device)
        self.cache = PagedKVCache(
            [heads.layer()] * num_layers, num_pages=num_pages, page_size=page_size, dtype=dtype, device=device
        )
        for pages in self.pages():
            pages[1:] = torch.nan
        self.allocator = PageAllocator(num_pages)
        taken = self.allocator.allocate(num_pages)
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1)).tolist()
        self.allocator.free([taken[n] for n in order])
        self.attention = PagedAttention(
            self.cache,
            max_num_reqs=max_num_reqs,
            max_num_tokens=max_num_tokens,
            max_seq_len=max_seq_len,
            **options,  # type: ignore[arg-type]
        )
        self._seeded = torch.Generator().manual_seed(0)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._seeded).to(self.device, self.dtype)

    def pages(self) -> list[torch.Tensor]:
        """Views of the cache, [pages + 2, page_size, kv heads, size]: each layer's keys, each layer's values."""
        memories = [memory for memory in self.cache.memories if memory is not None]
        slots = [tensor for memory in memories for tensor in (memory.keys, memory.values)]
        return [tensor.unflatten(0, (-1, self.cache.page_size)) for tensor in slots]

    def begin(self) -> Request:
        """A request without tokens."""
        keys, values = (
            torch.empty(len(self.cache.layers), 0, self.heads.kv, size, device=self.device, dtype=self.dtype)
            for size in (self.heads.dim, self.heads.values)
        )
        return Request([], keys, values)

    def end(self, request: Request) -> None:
        self.allocator.free(request.pages)

    def grow(self, requests: Sequence[Request], query_lens: Sequence[int]) -> tuple[PagedRequests, list[StepTensors]]:
        """Give each request new tokens: the step, and its tensors of each layer."""
        new = []
        for request, count in zip(requests, query_lens, strict=True):
            shape = (len(self.cache.layers), count, self.heads.kv)
            request.keys = torch.cat([request.keys, self.random(*shape, self.heads.dim)], 1)
            request.values = torch.cat([request.values, self.random(*shape, self.heads.values)], 1)
            missing = -(-len(request) // self.cache.page_size) - len(request.pages)
            request.pages += self.allocator.allocate(missing)
            new.append(self.random(len(self.cache.layers), count, self.heads.query, self.heads.dim))
        step = PagedRequests(list(query_lens), [len(r) for r in requests], [list(r.pages) for r in requests])
        tensors = []
        for layer in range(len(self.cache.layers)):
            last = [(r.keys[layer, -n:], r.values[layer, -n:]) for r, n in zip(requests, query_lens, strict=True)]
            results = [
                reference(query[layer], r.keys[layer], r.values[layer], self.heads)
                for query, r in zip(new, requests, strict=True)
            ]
            tensors.append(
                StepTensors(
                    torch.cat([query[layer] for query in new]),
                    torch.cat([key for key, _ in last]),
                    torch.cat([value for _, value in last]),
                    torch.cat(results).to(self.dtype),
                )
            )
        return step, tensors

    def call(self, tensors: StepTensors, layer: int, num_rows: int, padding: float = torch.nan) -> torch.Tensor:
        """The op under the current context, over tensors of ``num_rows`` whose rows behind the real ones are padding.

        They lie in memory as Hugging Face's models lay them: heads before tokens.
        """
        padded = [self.padded(t, num_rows, padding) for t in (tensors.query, tensors.key, tensors.value)]
        out = torch.full_like(self.padded(tensors.expected, num_rows, 0.0).contiguous(), torch.nan)
        heads, sinks = self.heads, self.heads.sinks
        sinks = None if sinks is None else sinks.to(self.device)
        torch.ops.graphpass.paged_attention(*padded, out, layer, heads.scale, heads.window or -1, heads.softcap, sinks)
        return out

    @staticmethod
    def padded(tensor: torch.Tensor, num_rows: int, padding: float) -> torch.Tensor:
        rows = tensor.new_full((num_rows, *tensor.shape[1:]), padding)
        rows[: len(tensor)] = tensor
        return rows.transpose(0, 1).contiguous().transpose(0, 1)


def uniform_key(num_reqs: int, query_len: int = 1, max_seq_len: int | None = None) -> BatchDescriptor:
    extra = () if max_seq_len is None else (("max_seq_len", max_seq_len),)
    return BatchDescriptor(num_reqs * query_len, num_reqs=num_reqs, uniform=True, extra=extra)


def run(
    paged: Paged, tensors: Sequence[StepTensors], metadata: Any, num_rows: int, padding: float = torch.nan
) -> list[torch.Tensor]:
    """The op of every layer under one context."""
    with gp.set_forward_context(metadata, slot_mapping=metadata.slot_mapping):
        return [paged.call(layer, n, num_rows, padding) for n, layer in enumerate(tensors)]


def assert_right(outs: Sequence[torch.Tensor], tensors: Sequence[StepTensors], *, padded: bool = True) -> None:
    """Real rows are the reference's; ``padded``: the others are zero."""
    for out, layer in zip(outs, tensors, strict=True):
        real = len(layer.expected)
        torch.testing.assert_close(out[:real], layer.expected, **TOLERANCE[out.device.type, out.dtype])
        assert not padded or torch.equal(out[real:], torch.zeros_like(out[real:]))


def run_eager(paged: Paged, requests: Sequence[Request], query_lens: Sequence[int]) -> None:
    """A step without a graph."""
    step, tensors = paged.grow(requests, query_lens)
    assert_right(run(paged, tensors, paged.attention.build(step, None), sum(query_lens)), tensors)
