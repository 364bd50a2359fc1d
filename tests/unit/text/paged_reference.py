"""Plain attention, request by request over contiguous keys, and requests that grow step by step over a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphpass.text.paged.attention import PagedAttention
from graphpass.text.paged.cache import PageAllocator, PagedKVCache, PagedRequests


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of one attention layer."""

    query: int
    kv: int
    dim: int
    window: int = -1

    def __str__(self) -> str:
        return f"{self.query}x{self.kv}x{self.dim}" + (f"-window{self.window}" if self.window > 0 else "")

    @property
    def scale(self) -> float:
        return 1.3 * self.dim**-0.5


def reference(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, heads: Heads) -> torch.Tensor:
    """Causal attention of one request in double precision: its last tokens [q, heads, dim] over all its keys."""
    group = heads.query // heads.kv
    keys, values = (t.double().repeat_interleave(group, 1) for t in (keys, values))
    scores = torch.einsum("qhd,lhd->hql", query.double() * heads.scale, keys)
    positions = torch.arange(len(keys), device=keys.device)
    own = positions[len(keys) - len(query) :].unsqueeze(1)
    seen = positions <= own
    if heads.window > 0:
        seen = seen & (positions > own - heads.window)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hql,lhd->qhd", weights, values)


@dataclass(slots=True)
class Request:
    """One growing request: its pages, and its keys and values of every layer [layers, length, kv heads, dim]."""

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
            num_layers=num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=heads.kv,
            head_dim=heads.dim,
            dtype=dtype,
            device=device,
        )
        self.cache.tensor[:, :, 1:] = torch.nan
        self.allocator = PageAllocator(num_pages)
        taken = self.allocator.allocate(num_pages)
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1)).tolist()
        self.allocator.free([taken[n] for n in order])
        self.attention = PagedAttention(
            self.cache,
            max_num_reqs=max_num_reqs,
            max_num_tokens=max_num_tokens,
            max_seq_len=max_seq_len,
            windows=(heads.window,),
            **options,  # type: ignore[arg-type]
        )
        self._seeded = torch.Generator().manual_seed(0)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._seeded).to(self.device, self.dtype)

    def begin(self) -> Request:
        """A request without tokens."""
        empty = torch.empty(self.cache.num_layers, 0, self.heads.kv, self.heads.dim, device=self.device)
        return Request([], empty.to(self.dtype), empty.to(self.dtype))

    def end(self, request: Request) -> None:
        self.allocator.free(request.pages)

    def grow(self, requests: Sequence[Request], query_lens: Sequence[int]) -> tuple[PagedRequests, list[StepTensors]]:
        """Give each request new tokens: the step, and its tensors of each layer."""
        new = []
        for request, count in zip(requests, query_lens, strict=True):
            shape = (self.cache.num_layers, count, self.heads.kv, self.heads.dim)
            request.keys = torch.cat([request.keys, self.random(*shape)], 1)
            request.values = torch.cat([request.values, self.random(*shape)], 1)
            missing = -(-len(request) // self.cache.page_size) - len(request.pages)
            request.pages += self.allocator.allocate(missing)
            new.append(self.random(self.cache.num_layers, count, self.heads.query, self.heads.dim))
        step = PagedRequests(list(query_lens), [len(r) for r in requests], [list(r.pages) for r in requests])
        tensors = []
        for layer in range(self.cache.num_layers):
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
        out = torch.full_like(self.padded(tensors.query, num_rows, 0.0).contiguous(), torch.nan)
        torch.ops.graphpass.paged_attention(*padded, out, layer, self.heads.scale, self.heads.window)
        return out

    @staticmethod
    def padded(tensor: torch.Tensor, num_rows: int, padding: float) -> torch.Tensor:
        rows = tensor.new_full((num_rows, *tensor.shape[1:]), padding)
        rows[: len(tensor)] = tensor
        return rows.transpose(0, 1).contiguous().transpose(0, 1)
