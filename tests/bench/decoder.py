"""The model of the decoder benchmarks: one decode step over a fixed key-value cache, attention an opaque in-place op.

The forward is written as a sequence of regions with the attention op between them (:meth:`Decoder.opening`,
:meth:`Decoder.between`, :meth:`Decoder.closing`), so that a benchmark can also run the regions by themselves: what a
partition at the op makes of the model, done by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from graphpass.regions import register_padding_rule

SPLITTING_OP = "graphpass_bench::decode_attention"

Regional = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key, value, and the memory that attention writes its result to."""


@torch.library.custom_op(SPLITTING_OP, mutates_args=("out", "key_cache", "value_cache"))
def decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write one token's key and value into the cache and attend over all of it: four aten calls that launch, and views.

    Query and ``out`` are (batch, heads, head dim), the caches (requests, cache tokens, key-value heads, head dim), of
    which a smaller batch uses the first requests'; ``slots`` are places in them with two dimensions flattened.
    """
    batch = len(query)
    if batch < len(slots):
        key_cache, value_cache, slots = key_cache[:batch], value_cache[:batch], slots[:batch]
    key_cache.flatten(0, 1).index_copy_(0, slots, key)
    value_cache.flatten(0, 1).index_copy_(0, slots, value)
    mixed = F.scaled_dot_product_attention(
        query.unsqueeze(2), key_cache.transpose(1, 2), value_cache.transpose(1, 2), enable_gqa=True
    )
    out.copy_(mixed.squeeze(2))


@decode_attention.register_fake
def _(*_: torch.Tensor) -> None:
    return None


register_padding_rule(SPLITTING_OP, lambda call: tuple(map(call.tensor, ("key_cache", "value_cache", "out"))))
"""A row attends to its own cache."""


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """Sizes of the decoder; the defaults are those of the published figures."""

    num_layers: int = 28  #: decoder layers; the attention op stands once in each
    hidden: int = 1024  #: width of the residual stream
    num_heads: int = 16  #: query heads
    num_kv_heads: int = 8  #: key and value heads; divides ``num_heads``
    head_dim: int = 64  #: width of a head, even
    intermediate: int = 3072  #: width of the feed-forward
    cache_tokens: int = 256  #: static length of the cache, the token of the step included

    @classmethod
    def small(cls, num_layers: int) -> DecoderSizes:
        """Sizes for counting layers, not for timing kernels."""
        return cls(num_layers, hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate=128, cache_tokens=16)


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm in float32, as decoder models write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Rotary(torch.nn.Module):
    """Cosines and sines of rotary position embeddings, looked up by position: (batch, 1, head dim) each."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        frequencies = 10_000.0 ** (-torch.arange(0, sizes.head_dim, 2) / sizes.head_dim)
        angles = torch.arange(sizes.cache_tokens)[:, None] * frequencies.repeat(2)[None]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x`` (batch, heads, head dim) turned by its position."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class DecoderLayer(torch.nn.Module):
    """Norm, attention, norm, SwiGLU, with residuals; attention is left to the caller, between two methods."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor

    def __init__(self, sizes: DecoderSizes, batch: int) -> None:
        super().__init__()
        self.widths = [sizes.num_heads * sizes.head_dim, *2 * [sizes.num_kv_heads * sizes.head_dim]]
        self.head_dim = sizes.head_dim
        self.input_norm = RMSNorm(sizes.hidden)
        self.qkv = torch.nn.Linear(sizes.hidden, sum(self.widths), bias=False)
        self.project = torch.nn.Linear(self.widths[0], sizes.hidden, bias=False)
        self.post_norm = RMSNorm(sizes.hidden)
        self.gate_up = torch.nn.Linear(sizes.hidden, 2 * sizes.intermediate, bias=False)
        self.down = torch.nn.Linear(sizes.intermediate, sizes.hidden, bias=False)
        cache = (batch, sizes.cache_tokens, sizes.num_kv_heads, sizes.head_dim)
        self.register_buffer("key_cache", torch.empty(cache), persistent=False)
        self.register_buffer("value_cache", torch.empty(cache), persistent=False)

    def before_attention(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Regional:
        """Query, key, value and the memory for attention's result."""
        mixed = self.qkv(self.input_norm(hidden)).split(self.widths, -1)
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in mixed)
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        return query, key, value, torch.empty_like(query)

    def attend(self, regional: Regional, slots: torch.Tensor) -> None:
        """The splitting op; writes ``regional``'s last tensor and this layer's cache."""
        query, key, value, out = regional
        torch.ops.graphpass_bench.decode_attention(query, key, value, self.key_cache, self.value_cache, slots, out)

    def after_attention(self, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The layer's hidden states, from those it was given and attention's result."""
        hidden = hidden + self.project(out.flatten(1))
        gate, up = self.gate_up(self.post_norm(hidden)).chunk(2, -1)
        return hidden + self.down(F.silu(gate) * up)


class Decoder(torch.nn.Module):
    """One decode step: ``forward(hidden, positions)`` takes and returns (batch, width) hidden states.

    A step writes each request's last cache slot, the same one in every step, so repeated steps agree and any number of
    compiled forms of one instance can take turns.
    """

    slots: torch.Tensor

    def __init__(self, sizes: DecoderSizes, batch: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.rotary = Rotary(sizes)
        self.layers = torch.nn.ModuleList([DecoderLayer(sizes, batch) for _ in range(sizes.num_layers)])
        self.norm = RMSNorm(sizes.hidden)
        slots = torch.arange(1, batch + 1) * sizes.cache_tokens - 1
        self.register_buffer("slots", slots, persistent=False)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin, *regional = self.opening(hidden, positions)
        for index, layer in enumerate(self.layers):
            layer.attend(tuple(regional), self.slots)
            if index + 1 < len(self.layers):
                hidden, *regional = self.between(index, hidden, regional[-1], cos, sin)
        return self.closing(hidden, regional[-1])

    def opening(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The region before the first attention: cosines, sines, and the first layer's :data:`Regional`."""
        cos, sin = self.rotary(positions)
        return cos, sin, *self.layers[0].before_attention(hidden, cos, sin)

    def between(
        self, index: int, hidden: torch.Tensor, out: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The region behind attention ``index``: hidden states, and the next layer's :data:`Regional`."""
        hidden = self.layers[index].after_attention(hidden, out)
        return hidden, *self.layers[index + 1].before_attention(hidden, cos, sin)

    def closing(self, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The region behind the last attention."""
        return self.norm(self.layers[-1].after_attention(hidden, out))

    def poison_slots(self) -> None:
        """NaN where a step has to write its keys and values: one that does not write them cannot go unseen."""
        for layer in self.layers:
            for cache in (layer.key_cache, layer.value_cache):
                cache[:, -1] = float("nan")

    def call_attention(self, index: int, regional: Regional) -> Callable[[], None]:
        """A bare call of layer ``index``'s splitting op on fixed tensors."""
        layer, op = self.layers[index], torch.ops.graphpass_bench.decode_attention.default
        query, key, value, out = regional
        arguments = (query, key, value, layer.key_cache, layer.value_cache, self.slots, out)
        return lambda: op(*arguments)


class SixInputs(torch.nn.Module):
    """A decoder with four more inputs of one number a token, as an engine's model has them: all read, all zero here."""

    names = ("hidden", "positions", "first", "second", "third", "fourth")

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        return self.decoder(hidden + sum(others.values())[:, None], positions)  # type: ignore[index]


def make_decoder(
    sizes: DecoderSizes, batch: int, device: torch.device, *, dtype: torch.dtype = torch.bfloat16
) -> tuple[Decoder, torch.Tensor, torch.Tensor]:
    """A decoder with seeded weights and a filled cache, and its inputs.

    The inputs are hidden states (batch, width) and positions (batch,): every token is the last one of its cache. Call
    it outside of inference mode: forms that run under ``no_grad`` write to the cache, too.
    """
    with torch.device(device):
        model = Decoder(sizes, batch).to(dtype).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            # What is added to the residual stream shrinks with depth, as in trained models: rounding stays small.
            depth = 2 * sizes.num_layers if name.endswith(("project.weight", "down.weight")) else 1
            parameter.normal_(std=(depth * parameter.shape[1]) ** -0.5, generator=generator)
    for layer in model.layers:
        layer.key_cache.normal_(generator=generator)
        layer.value_cache.normal_(generator=generator)
    hidden = torch.randn(batch, sizes.hidden, device=device, dtype=dtype, generator=generator)
    positions = torch.full((batch,), sizes.cache_tokens - 1, device=device)
    return model, hidden, positions
