"""Programs whose padding is made, a table an operator; test_made.py runs them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graphpass.padding.opcall import words
from tests.unit.padding.programs_averaged import AVERAGED, BAGGED, WINDOWS
from tests.unit.padding.programs_fused import FUSED, MULTIPLES
from tests.unit.padding.programs_moved import MOVED, Case, Contents, all_are, counted, special

aten = torch.ops.aten
BOTH = ("b", "s")


def ends(dtype: torch.dtype) -> Contents:
    """The greatest and least numbers of a type, and those beside them."""
    least, greatest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    numbers = torch.tensor([least, greatest, least + 1, greatest - 1])
    return lambda shape, generator: numbers[torch.randint(4, shape, generator=generator)]


LOWEST, GREATEST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


def three(w: Tensor) -> Tensor:
    return torch.stack([w, w.t(), w * 2], -1)


def convolved(x: Tensor, w: Tensor, **how: Any) -> Tensor:
    return F.conv1d(x.mT, three(w), w[0], **how)


def transposed(x: Tensor, w: Tensor) -> Tensor:
    return F.conv_transpose1d(x.mT, three(w), w[0], stride=2, padding=1, output_padding=1)


IN_PARTS = words(
    "nansum count_nonzero linalg_vector_norm norm matmul im2col std std_mean native_group_norm native_layer_norm",
    "_native_batch_norm_legit _native_batch_norm_legit_functional _batch_norm_with_update_functional",
    "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d",
)
"""Operators without a row of their own, which are repaired in the parts that they consist of."""

# One row for each entry of _OPERANDS, along the length and where batch and length are merged.

OPERANDS: dict[str, list[Case]] = {
    "sum": [
        Case("sum", lambda x: x.sum(1), proved=("b",)),
        Case("sum merged", lambda x: x.flatten(0, 1).sum(0)),
        *BAGGED,
    ],
    "nansum": [
        Case("nansum", lambda x: x.nansum(1), proved=("b",), contents={"x": special}),
        Case("nansum merged", lambda x: x.flatten(0, 1).nansum(0)),
    ],
    "any": [
        Case("any", lambda free: free.any(1), proved=("b",)),
        Case("any merged", lambda x: x.flatten(0, 1).any(0), contents={"x": all_are(0.0)}),
    ],
    "count_nonzero": [
        Case("count_nonzero", lambda i: aten.count_nonzero(i, 1), proved=("b",)),
        Case("count_nonzero of both", lambda free: aten.count_nonzero(free)),
    ],
    "all": [
        Case("all", lambda free: free.all(1), proved=("b",), contents={"free": all_are(True)}),
        Case("all merged", lambda x: x.flatten(0, 1).all(0)),
    ],
    "prod": [
        Case("prod", lambda x: x.prod(1), proved=("b",)),
        Case("prod of integers", lambda i: i.prod(1), proved=("b",), contents={"i": ends(torch.int64)}),
    ],
    "amax": [
        Case("amax", lambda x: x.amax(1), proved=("b",), contents={"x": special}),
        Case("amax merged", lambda x: x.flatten(0, 1).amax(0), contents={"x": all_are(-math.inf)}),
        Case("amax of int64", lambda i: i.amax(1), proved=("b",), contents={"i": all_are(LOWEST)}),
        Case("amax of int64's ends", lambda i: i.amax((0, 1)), contents={"i": ends(torch.int64)}),
        Case("amax of int8", lambda i: i.to(torch.int8).amax(1), proved=("b",), contents={"i": all_are(-128)}),
        Case("amax of uint8", lambda byte: byte.amax(1), proved=("b",)),
        Case("amax of bool", lambda free: free.amax(1), proved=("b",), contents={"free": all_are(False)}),
        Case("amax of float16", lambda half: half.amax(1), proved=("b",)),
    ],
    "max": [Case("max", lambda x: x.max(), contents={"x": special}), Case("max of int64", lambda i: i.max())],
    "argmax": [
        Case("argmax", lambda x: x.argmax(1), proved=("b",), contents={"x": special}),
        Case("argmax of equal entries", lambda x: x.argmax(1), proved=("b",), contents={"x": all_are(-math.inf)}),
        Case("argmax of equal int64", lambda i: i.argmax(1), proved=("b",), contents={"i": all_are(LOWEST)}),
        Case("argmax merged", lambda x: x.flatten(0, 1).argmax(0), ("b",)),
        Case("argmax of all", lambda g: g.argmax(), ()),
        Case("argmax of a row", lambda r: r.argmax(), ("s",)),
    ],
    "amin": [
        Case("amin", lambda x: x.amin(1), proved=("b",), contents={"x": special}),
        Case("amin merged", lambda x: x.flatten(0, 1).amin(0), contents={"x": all_are(math.inf)}),
        Case("amin of int64", lambda i: i.amin(1), proved=("b",), contents={"i": all_are(GREATEST)}),
        Case("amin of int8", lambda i: i.to(torch.int8).amin(1), proved=("b",), contents={"i": all_are(127)}),
        Case("amin of uint8", lambda byte: byte.amin(1), proved=("b",)),
        Case("amin of bool", lambda free: free.amin(1), proved=("b",), contents={"free": all_are(True)}),
    ],
    "min": [Case("min", lambda x: x.min(), contents={"x": special}), Case("min of int64", lambda i: i.min())],
    "argmin": [
        Case("argmin", lambda x: x.argmin(1), proved=("b",), contents={"x": special}),
        Case("argmin of equal int64", lambda i: i.argmin(1), proved=("b",), contents={"i": all_are(GREATEST)}),
        Case("argmin merged", lambda x: x.flatten(0, 1).argmin(0), ("b",)),
    ],
    "logsumexp": [
        Case("logsumexp", lambda x: x.logsumexp(1), proved=("b",)),
        Case("logsumexp of nothing", lambda x: x.logsumexp(1), proved=("b",), contents={"x": all_are(-math.inf)}),
        Case("logsumexp of integers", lambda i: i.logsumexp(1), ("b",), ("b",)),
    ],
    "_softmax": [
        Case("softmax", lambda x: x.softmax(1), proved=("b",), contents={"x": special}),
        Case("softmax merged", lambda x: x.flatten(0, 1).softmax(0), ("b",)),
        Case("softmax of nothing", lambda x: x.softmax(1), proved=("b",), contents={"x": all_are(-math.inf)}),
        Case("softmax of bfloat16", lambda f: f.bfloat16().softmax(1), proved=("b",)),
        Case("weights of NaN, extended", lambda x: F.pad(x.softmax(1), [0, 0, 0, 1]), BOTH, ("b",), {"x": special}),
    ],
    "_log_softmax": [
        Case("log_softmax", lambda x: x.log_softmax(1), proved=("b",)),
        Case(
            "log_softmax of NaN, in part",
            lambda x, free: x.log_softmax(1).masked_fill(free[..., None], 0.0).amax(1),
            proved=("b",),
            contents={"x": special},
        ),
    ],
    "_safe_softmax": [
        Case("safe softmax", lambda x: aten._safe_softmax(x, 1), proved=("b",)),
        Case("safe softmax of nothing", lambda x: aten._safe_softmax(x, 1), BOTH, ("b",), {"x": all_are(-math.inf)}),
    ],
    "linalg_vector_norm": [
        Case("norm", lambda x: torch.linalg.vector_norm(x, 2, 1), proved=("b",)),
        Case("largest norm", lambda x: torch.linalg.vector_norm(x, math.inf, 1), proved=("b",)),
        Case("norm of order 0", lambda x: torch.linalg.vector_norm(x, 0, 1), proved=("b",)),
        Case("norm of order -1", lambda x: torch.linalg.vector_norm(x, -1, 1), proved=("b",)),
        Case("smallest norm", lambda x: torch.linalg.vector_norm(x, -math.inf, 1), proved=("b",)),
    ],
    "norm": [
        Case("older norm", lambda x: aten.norm.ScalarOpt_dim(x, 2, [1]), proved=("b",)),
        Case("older norm of order -1", lambda x: aten.norm.ScalarOpt_dim(x, -1, [1]), proved=("b",)),
    ],
    "mm": [
        Case("mm", lambda u: u.t() @ u, ("s",)),
        Case("mm merged", lambda x, y: x.flatten(0, 1).t() @ y.flatten(0, 1)),
        Case("mm of bfloat16", lambda f: f.bfloat16().flatten(0, 1).t() @ f.bfloat16().flatten(0, 1)),
    ],
    "_int_mm": [
        Case("_int_mm", lambda u: torch._int_mm(u.t().round().to(torch.int8), u.round().to(torch.int8)), ("s",)),
    ],
    "bmm": [
        Case("bmm", lambda x, y: torch.bmm(x.transpose(1, 2), y), proved=("b",)),
        Case("bmm of zeros and infinities", lambda x, y: x.transpose(1, 2) @ y, BOTH, ("b",), {"x": all_are(0.0)}),
        Case("a sum of products", lambda x, y: torch.einsum("bsd,bsd->", x, y)),
    ],
    "matmul": [Case("matmul", lambda u: aten.matmul(u.t(), u), ("s",))],
    "mv": [Case("mv", lambda u, r: aten.mv(u.t(), r), ("s",))],
    "dot": [Case("dot", lambda r: aten.dot(r, r.cos()), ("s",))],
    "vdot": [Case("vdot", lambda r: aten.vdot(r, r.cos()), ("s",))],
    "addmm": [Case("addmm", lambda w, u: aten.addmm(w, u.t(), u), ("s",))],
    "baddbmm": [Case("baddbmm", lambda x, w, y: aten.baddbmm(w, x.transpose(1, 2), y), proved=("b",))],
    "addmv": [Case("addmv", lambda p, u, r: aten.addmv(p, u.t(), r), ("s",))],
    "_scaled_dot_product_flash_attention_for_cpu": [
        Case("attention", lambda q, k, c: F.scaled_dot_product_attention(q, k, c), proved=("b",)),
        Case("scaled attention", lambda q, k, c: F.scaled_dot_product_attention(q, k, c, scale=0.3), proved=("b",)),
        Case(
            "attention with a mask",
            lambda q, k, c, free: F.scaled_dot_product_attention(q, k, c, attn_mask=free[:, None, None]),
            proved=("b",),
        ),
        Case(
            "attention with a mask that hides all",
            lambda q, k, c, free: F.scaled_dot_product_attention(q, k, c, attn_mask=free[:, None, None]),
            proved=("b",),
            contents={"free": all_are(False)},
        ),
        Case(
            "attention with a bias",
            lambda q, k, c, g: F.scaled_dot_product_attention(q, k, c, attn_mask=g[:, None, None]),
            proved=("b",),
        ),
    ],
    "constant_pad_nd": [
        Case("zeros put behind", lambda x: F.pad(x, (0, 0, 0, 1)), proved=("b",)),
        Case("numbers put behind and read", lambda x: F.pad(x, (0, 0, 0, 2), value=3.0)[:, -1], proved=("b",)),
        Case("zeros put in front", lambda x: F.pad(x, (0, 0, 2, 0)).sum(1), proved=("b",)),
    ],
    **WINDOWS,
    "convolution": [
        Case("convolution", lambda x, w: convolved(x, w, padding=1), proved=("b",)),
        Case("convolution of whole windows", lambda x, w: convolved(x, w), proved=("b",)),
        Case(
            "two convolutions", lambda x, w: convolved(convolved(x, w, padding=2).cos().mT, w, padding=1), proved=("b",)
        ),
        Case("convolution with a stride", lambda x, w: convolved(x, w, stride=2, padding=1).mean(2), proved=("b",)),
        Case("dilated convolution", lambda x, w: convolved(x, w, padding=2, dilation=2)[..., -1], proved=("b",)),
        Case("transposed convolution", lambda x, w: transposed(x, w).sum(2), proved=("b",)),
        Case("two transposed convolutions", lambda x, w: transposed(transposed(x, w).mT, w), proved=("b",)),
        Case(
            "convolution over one of two sizes", lambda g, w44: F.conv2d(g.expand(1, 4, -1, -1), w44, padding=1), ("b",)
        ),
        Case("convolution of a merged dimension", lambda x, w: convolved(x.flatten(0, 1)[None], w, padding=1), ()),
    ],
}


# One row for each entry of _REWRITES.


def edges(x: Tensor) -> Tensor:
    """EdgeConv: the greatest difference from the two nearest entries."""
    nearest = torch.cdist(x, x).topk(2, largest=False)[1].flatten(1)
    beside = x.gather(1, nearest[..., None].expand(-1, -1, x.shape[-1])).unflatten(1, (x.shape[1], 2))
    return (beside - x[:, :, None]).amax(2)


REWRITES: dict[str, list[Case]] = {
    "_cdist_forward": [
        Case("distances", lambda x, y: torch.cdist(x, x + 1e-9 * y), proved=("b",)),
        Case("distances of special numbers", lambda x, y: torch.cdist(x, y), proved=("b",), contents={"x": special}),
        Case("distances of rows", lambda u, r: torch.cdist(u, u * r[:, None]), ("s",)),
        Case("nearest entries", edges, proved=("b",)),
    ],
    "mean": [
        Case("mean", lambda x: x.mean(1), proved=("b",), contents={"x": special}),
        Case("mean of both", lambda x: x.mean((0, 1))),
        Case("mean of all", lambda x: x.mean()),
        Case("mean merged", lambda x: x.transpose(0, 1).flatten(0, 1).mean(0)),
        Case("mean taken away", lambda x: x - x.mean(1, keepdim=True), proved=("b",)),
        Case("mean of float16", lambda half: half.mean(1), proved=("b",)),
        Case("mean of bfloat16", lambda f: f.bfloat16().mean(1), proved=("b",)),
        Case("mean of float16 in float32", lambda half: half.mean(1, dtype=torch.float32), proved=("b",)),
        Case("mean of booleans", lambda free: free.mean(1, dtype=torch.float32), proved=("b",)),
        Case("mean behind one more", lambda x, v: torch.cat([v[:, None], x], 1).mean(1), proved=("b",)),
        Case("mean of a part", lambda x: x[:, 1:].mean(1), proved=("b",)),
    ],
    "select": [
        Case("the last", lambda x: x[:, -1], proved=("b",), contents={"x": special}),
        Case("the last but one", lambda x: x[:, -2], proved=("b",)),
        Case("the last row", lambda x: x[-1], proved=("s",)),
        Case("the last of a part", lambda x: x[:, :-1][:, -1], proved=("b",)),
        Case("the last of booleans", lambda free: free[:, -1], proved=("b",)),
        Case("the last merged", lambda x: x.flatten(0, 1)[-1], ("b",)),
        Case("the first", lambda x: x[:, 0], proved=BOTH),
        Case("the middle", lambda x: aten.select(x, 1, x.shape[1] // 2), proved=("b",)),
    ],
    "slice": [
        Case("the last three", lambda x: x[:, -3:], proved=("b",)),
        Case("the last two of a part", lambda x: x[:, 1:][:, -2:].sum(1), proved=("b",)),
        Case("each other of the last", lambda x: x[:, -3::2], proved=("b",)),
        Case("before the last", lambda x: x[:, -3:-1], proved=("b",)),
        Case("as many as there are", lambda u: u[-9:], ()),
        Case("three from the middle on", lambda x: x[:, x.shape[1] // 2 : x.shape[1] // 2 + 3], proved=("b",)),
        Case("the last half, which need not grow", lambda x: x[:, x.shape[1] // 2 :], ("b",), ("b",)),
        Case("each other of four from a size on", lambda u: u[u.shape[0] - 4 :: 2], ("s",)),
    ],
    "add": [
        Case("add", lambda x: x + x.shape[1], proved=("b",)),
        Case("add twice", lambda x: torch.add(x, x.shape[1], alpha=2), proved=("b",)),
        Case("add to a boolean", lambda free: free + free.shape[1], proved=("b",)),
        Case("add to one int32", lambda i: i.int().sum(dtype=torch.int32) + i.shape[1]),
    ],
    "sub": [
        Case("sub", lambda x: x - x.shape[1], proved=("b",)),
        Case("sub of int", lambda i: i - i.shape[1], proved=("b",)),
    ],
    "rsub": [
        Case("rsub", lambda x: torch.rsub(x, x.shape[1], alpha=2), proved=("b",)),
        Case("rsub of float16", lambda half: torch.rsub(half, half.shape[1]), proved=("b",)),
    ],
    "mul": [
        Case("mul by both", lambda x: x * (x.shape[0] * x.shape[1])),
        Case("mul by a half", lambda x: x * (x.shape[1] // 2), proved=("b",)),
        Case("mul of int8", lambda i: i.to(torch.int8) * i.shape[1], proved=("b",)),
        Case("mul of one int8", lambda i: i.to(torch.int8).sum(dtype=torch.int8) * i.shape[1]),
        Case("mul of float16", lambda half: half * half.shape[1], proved=("b",)),
        Case("mul of one float16", lambda half: half.sum() * half.shape[1]),
        Case("mul of bfloat16", lambda f: f.bfloat16() * f.shape[1], proved=("b",)),
        Case("mul of bfloat16 by more than it can say", lambda f: f.bfloat16() * (1001 * f.shape[1]), BOTH, ("b",)),
        Case("mul of complex", lambda z: z * z.shape[1], proved=("b",)),
    ],
    "clamp": [
        Case("clamp below", lambda i: i.clamp(max=i.shape[1]), proved=("b",)),
        Case("clamp between", lambda x: (x * 4).clamp(-2, x.shape[1] - 3), proved=("b",), contents={"x": special}),
        Case("clamp above", lambda i: i.clamp(i.shape[1] - 4, 9), proved=("b",)),
    ],
    "scalar_tensor": [
        Case(
            "scalar_tensor",
            lambda i: torch.where(i > 1, aten.scalar_tensor(i.shape[1], dtype=i.dtype), i),
            BOTH,
            ("b",),
        ),
    ],
    "div": [
        Case("div", lambda x: x.sum(1) / x.shape[1], proved=("b",)),
        Case("div by all", lambda x: x.sum() / x.numel()),
        Case("div of integers", lambda i: i / i.shape[1], proved=("b",)),
        Case("div to an integer", lambda i: torch.div(i, i.shape[1], rounding_mode="floor"), proved=("b",)),
        Case(
            "div of bfloat16", lambda f: torch.div(f.bfloat16() * 50, f.shape[1], rounding_mode="trunc"), BOTH, ("b",)
        ),
    ],
    "_scaled_dot_product_flash_attention_for_cpu": OPERANDS["_scaled_dot_product_flash_attention_for_cpu"][:2],
    **AVERAGED,
    **MOVED,
}

INDICES = [
    Case("an index", lambda u, at: u[at], proved=("b",)),
    Case("an index from the end", lambda u, at: u[-at - 1], proved=("b",)),
    Case("an index by a size", lambda u, at: u[at - u.shape[0]], proved=("b",)),
    Case("indices of both kinds", lambda u, at: u[at], BOTH, ("b",), {"at": counted(-3, 3)}),
    Case("index_select", lambda u, at: u.index_select(0, at), proved=("b",)),
    Case("gather", lambda g, at: g.gather(1, at[:, None]), proved=("b",)),
    Case("embedding by an input", lambda u, at: F.embedding(at, u), proved=("b",)),
    Case("take", lambda u, at: torch.take(u, at), proved=("b",)),
    Case("take from the end", lambda u, at: torch.take(u, at - 3), BOTH, ("b",), {"at": counted(-1, 3)}),
    Case("two indices", lambda x, row, pos: x[row, pos]),
    Case("an index of a merged dimension", lambda x, at: x.flatten(0, 1)[at], ("b",)),
    Case("the first greatest", lambda x, ids: x[torch.arange(x.shape[0]), ids.argmax(1)], proved=("b",)),
    Case("the last that shows", lambda x, free: x[torch.arange(x.shape[0]), free.sum(1) - 1], proved=("b",)),
    Case("positions", lambda x, table: x + F.embedding(torch.arange(x.shape[1]), table), proved=("b",)),
    Case("positions by index", lambda x, table: x + table[torch.arange(x.shape[1])], proved=("b",)),
    Case(
        "a table merged",
        lambda ids, table: F.embedding(ids.flatten(), table).view(*ids.shape, 8).mean(1),
        proved=("b",),
    ),
]

# One row for each operator that writes by an index, with padding among what is written and along what is written to.


def of_rows(u: Tensor, at: Tensor, how: Callable[..., Any]) -> Tensor:
    return how(torch.zeros_like(u), 0, at, u[at])


def into_ten(x: Tensor, ids: Tensor, **how: Any) -> Tensor:
    wide = ids[..., None].expand_as(x)
    return torch.ones(x.shape[0], 11, x.shape[2], dtype=x.dtype).scatter_reduce(1, wide, x, **how)


WRITES: dict[str, list[Case]] = {
    "index_put": [
        Case("put", lambda u, at: torch.zeros_like(u).index_put((at,), u[at])),
        Case("put from the end", lambda u, at: torch.zeros_like(u).index_put((-at - 1,), u[:1])),
        Case(
            "put and add",
            lambda u, at: torch.ones_like(u).index_put((at,), u[at].cos(), accumulate=True),
            contents={"at": counted(-3, 3)},
        ),
        Case(
            "put into a table", lambda ids, x: torch.zeros(11, 8, dtype=x.dtype).index_put((ids,), x, accumulate=True)
        ),
        Case("put by two", lambda x, row, pos: torch.zeros_like(x).index_put((row, pos), x[0].cos())),
        Case(
            "put by two into a table",
            lambda x, ids: torch.zeros(x.shape[0], 11, 8, dtype=x.dtype).index_put(
                (torch.arange(x.shape[0])[:, None], ids), x, accumulate=True
            ),
            proved=("b",),
        ),
        Case("put a number", lambda u, at: u.index_put((at,), torch.tensor(7.0, dtype=u.dtype)).sum(0)),
        Case("put of a merged dimension", lambda x, at: x.flatten(0, 1).index_put((at,), x[:, 0]).sum(), ("b",)),
    ],
    "_unsafe_index_put": [
        Case("put without a check", lambda u, at: aten._unsafe_index_put(torch.zeros_like(u), (at,), u[at].cos())),
    ],
    "scatter": [
        Case(
            "scatter",
            lambda x, ids: torch.zeros(x.shape[0], 11, 8, dtype=x.dtype).scatter(1, ids[..., None].expand_as(x), 2.5),
            proved=("b",),
        ),
        Case("scatter along a size", lambda g, at: g.scatter(1, at[:, None], g[:, :1] * 2).sum(1), proved=("b",)),
        Case("scatter along the last", lambda g, at: g.cos().scatter(-1, at[:, None], 3.0)[:, -1], proved=("b",)),
    ],
    "scatter_add": [
        Case(
            "scatter_add",
            lambda x, ids: torch.zeros(x.shape[0], 11, 8, dtype=x.dtype).scatter_add(1, ids[..., None].expand_as(x), x),
            proved=("b",),
            contents={"x": special},
        ),
    ],
    "scatter_reduce": [
        Case("scatter the mean", lambda x, ids: into_ten(x, ids, reduce="mean"), proved=("b",)),
        Case("scatter the product", lambda x, ids: into_ten(x, ids, reduce="prod"), proved=("b",)),
        Case("scatter the greatest", lambda x, ids: into_ten(x, ids, reduce="amax", include_self=False), proved=("b",)),
        Case(
            "scatter the other mean", lambda x, ids: into_ten(x, ids, reduce="mean", include_self=False), proved=("b",)
        ),
    ],
    "index_add": [Case("index_add", lambda u, at: of_rows(u, at, torch.index_add))],
    "index_copy": [Case("index_copy", lambda u, at: of_rows(u, at, torch.index_copy))],
    "index_fill": [Case("index_fill", lambda u, at: u.index_fill(0, at, 2.0).sum(0))],
}

PRODUCTS = [
    Case("frames", lambda x: x.unfold(1, 3, 2).flip(1), proved=("b",)),
    Case("frames of a merged dimension", lambda x: x.flatten(0, 1).unfold(0, 3, 2), ("b",), ("b",)),
    Case(
        "frames beyond the end",
        lambda g: torch.stft(g, 4, 2, window=torch.ones(4).double(), return_complex=True).abs(),
        proved=("b",),
    ),
    Case("a nearest interpolation", lambda x: F.interpolate(x.mT, scale_factor=2.0)[..., -1], proved=("b",)),
    Case(
        "a linear interpolation",
        lambda x: F.interpolate(x.mT, scale_factor=1.5, mode="linear", recompute_scale_factor=True),
        proved=("b",),
    ),
    Case("products that a mask hides", lambda x, am: (x * am[..., None]).sum(1) + x.mean(1), proved=("b",)),
]

ATTENTION = [
    Case("by hand", lambda q, k, c: torch.softmax(q @ k.transpose(2, 3), -1) @ c, proved=("b",)),
    Case(
        "by hand, all hidden",
        lambda q, k, c, free: (q @ k.transpose(2, 3)).masked_fill(~free[:, None, None], -math.inf).softmax(-1) @ c,
        proved=("b",),
        contents={"free": all_are(False)},
    ),
    Case(
        "by hand, all at the least number",
        lambda q, k, c, free: (
            ((q @ k.transpose(2, 3)).float() + ~free[:, None, None] * torch.finfo(torch.float32).min).softmax(-1)
            @ c.float()
        ),
        proved=("b",),
        contents={"free": all_are(False)},
    ),
    Case("of another length", lambda x, mem: torch.softmax(x @ mem.transpose(1, 2), -1) @ mem, ("b", "s", "t"), BOTH),
    Case("causal", lambda q, k, c: F.scaled_dot_product_attention(q, k, c, is_causal=True), proved=BOTH),
]

CASES = (
    [case for table in (OPERANDS, REWRITES, WRITES, FUSED) for cases in table.values() for case in cases]
    + INDICES
    + PRODUCTS
    + ATTENTION
    + MULTIPLES
)
