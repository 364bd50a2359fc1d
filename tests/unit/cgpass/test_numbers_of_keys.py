"""Attention that is given the number of real keys, by kernels that stand in for a GPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphpass.compat import operators
from graphpass.padding import lowering, repairs
from tests.unit.cgpass.attended import Make
from tests.unit.compiled import agrees
from tests.unit.models import module

_ROWS = "Tensor? starts_q, Tensor? starts_k, SymInt max_q, SymInt max_k, float dropout"
_FLASH = (
    f"(Tensor q, Tensor k, Tensor v, {_ROWS}, bool causal, bool debug, *, float? scale=None, Tensor? seqused_k=None)"
)
_EFFICIENT = (
    f"(Tensor q, Tensor k, Tensor v, Tensor? bias, {_ROWS}, int mask, bool sums, *, float? scale=None,"
    " Tensor? seqlen_k=None)"
)


def attend(
    q: Tensor, k: Tensor, v: Tensor, starts: tuple[Tensor, Tensor], used: Tensor | None, scale: float | None
) -> Tensor:
    """Rows of sequences, of which so many keys are in use; the others are not read."""
    of_query, of_key = (
        torch.searchsorted(own, torch.arange(len(rows), dtype=own.dtype), right=True) - 1
        for own, rows in zip(starts, (q, k), strict=True)
    )
    used = starts[1].diff() if used is None else used
    in_use = torch.arange(len(k)) - starts[1][of_key] < used[of_key]
    k, v = (torch.where(in_use[:, None, None], rows, 0) for rows in (k, v))
    seen = (of_query[:, None] == of_key) & in_use
    parts = [rows.transpose(0, 1)[None] for rows in (q, k, v)]
    found = F.scaled_dot_product_attention(*parts, attn_mask=seen, scale=scale, enable_gqa=True)
    return found[0].transpose(0, 1).contiguous()


def flash(
    q: Tensor, k: Tensor, v: Tensor, *given: Any, scale: Any = None, seqused_k: Any = None
) -> tuple[Tensor, Tensor]:
    return attend(q, k, v, given[:2], seqused_k, scale), q.new_empty(0)


def efficient(
    q: Tensor, k: Tensor, v: Tensor, _: None, *given: Any, scale: Any = None, seqlen_k: Any = None
) -> tuple[Tensor, Tensor]:
    return attend(q[0], k[0], v[0], given[:2], seqlen_k, scale)[None], q.new_empty(0)


@pytest.fixture(scope="module")
def kernels() -> Iterator[Any]:
    library = torch.library.Library("graphpass_rows", "FRAGMENT")
    for name, schema, run in (("flash", _FLASH, flash), ("efficient", _EFFICIENT, efficient)):
        library.define(f"{name}{schema} -> (Tensor, Tensor)")
        library.impl(name, run, "CPU")
        torch.library.register_fake(
            f"graphpass_rows::{name}", lambda q, *_, **__: (torch.empty_like(q), q.new_empty(0)), lib=library
        )
    yield torch.ops.graphpass_rows
    library._destroy()


@pytest.fixture(autouse=True)
def given_numbers(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "attention_to_lengths", lambda dtype, width: "flash")
    monkeypatch.setattr(repairs, "_ON_CUDA", ("_scaled_dot_product_flash_attention_for_cpu",))
    monkeypatch.setattr(lowering, "_FLASH_ROWS", kernels.flash.default)
    monkeypatch.setattr(lowering, "_EFFICIENT_ROWS", kernels.efficient.default)


def heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def itself(x: Tensor) -> Tensor:
    q = heads(x.sin(), 2)
    return F.scaled_dot_product_attention(q, q.cos(), q * 2).transpose(1, 2).flatten(2)


def scaled(x: Tensor) -> Tensor:
    q = heads(x, 2)
    return F.scaled_dot_product_attention(q, q.exp(), q + 1, scale=0.3).transpose(1, 2).flatten(2)


def infinite_behind(x: Tensor) -> Tensor:
    """The logarithm of padded zeros; nothing is written before the kernel."""
    q = heads((x.abs() * 0.1 + x.sum(-1, keepdim=True) * 0).log(), 2)
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)


def other_keys(x: Tensor) -> Tensor:
    q, k = heads(x, 2), heads(x[:, 1:] * 2, 2)
    return F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)


def halved_keys(x: Tensor) -> Tensor:
    k = heads(F.avg_pool1d(x.mT, 2).mT, 2)
    return F.scaled_dot_product_attention(heads(x, 2), k, k).transpose(1, 2).flatten(2)


def copied(x: Tensor) -> Tensor:
    """In memory by head, so that rows of a length are apart."""
    q = heads(x, 2).contiguous()
    return F.scaled_dot_product_attention(q, q.sin(), heads(x, 2)).transpose(1, 2).flatten(2)


def shared(x: Tensor) -> Tensor:
    k = heads(x[..., :8], 1)
    return F.scaled_dot_product_attention(heads(x, 2), k, k, enable_gqa=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("function", "compiler"),
    [
        *((one, "aot_eager") for one in (itself, scaled, infinite_behind, other_keys, copied, shared)),
        (halved_keys, "inductor"),
    ],
)
def test_real_entries_are_those_of_the_call(
    compiled: Make, function: Callable[..., Any], compiler: str, dtype: torch.dtype
) -> None:
    close = 1e-5 if dtype is torch.float32 else 3e-2
    make = lambda size: (torch.randn(*size, 16, dtype=dtype),)  # noqa: E731
    model = module(lambda self, x: function(self.features(x)), features=nn.Linear(16, 16)).to(dtype)
    fast = compiled(model, make=make, compiler=compiler, dynamic=True, dispatch="auto")
    for size in [(2, 5), (3, 9), (2, 7), (4, 11), (2, 6), (3, 13), (2, 9), (4, 7), (2, 12), (3, 10)] * 2:
        (x,) = make(size)
        agrees(fast(x), model(x).detach(), rtol=close, atol=close)
    assert fast.is_padded
    assert "the number of real keys" in " ".join(str(fast.rt.report()).split())
