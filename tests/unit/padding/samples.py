"""One call or more of every operator that has a padding rule, with sizes that may be padded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["SAMPLES", "Drawn", "Sample"]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A tensor argument: its sizes, some of which may be symbolic, and how its entries are drawn."""

    shape: tuple[Any, ...]
    kind: str = "float"
    below: int = 2

    def real(self, shape: tuple[int, ...], generator: torch.Generator, scale: float = 1.0) -> Tensor:
        if self.kind == "int":
            return torch.randint(self.below, shape, generator=generator)
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        if self.kind == "bool":
            return drawn > 0
        if self.kind == "complex":
            return torch.complex(drawn, drawn.flip(-1))
        if self.kind == "float32":
            return drawn.float()
        if self.kind == "share":
            return drawn.sigmoid()
        if self.kind == "sorted":
            return drawn.sort(-1)[0]
        return drawn.abs() + 0.1 if self.kind == "positive" else drawn


@dataclass(frozen=True, slots=True)
class Sample:
    """``op`` is an overload below ``torch.ops``; ``arguments`` makes its arguments from the size that may be padded."""

    op: str
    arguments: Callable[[Any], tuple[Any, ...]]
    keywords: dict[str, Any]

    @property
    def operator(self) -> torch._ops.OpOverload:
        namespace, _, rest = self.op.partition("::")
        name, _, overload = rest.partition(".")
        return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")


def t(*shape: Any) -> Drawn:
    return Drawn(shape)


def pos(*shape: Any) -> Drawn:
    return Drawn(shape, "positive")


def i(below: int, *shape: Any) -> Drawn:
    return Drawn(shape, "int", below)


def b(*shape: Any) -> Drawn:
    return Drawn(shape, "bool")


def f(*shape: Any) -> Drawn:
    return Drawn(shape, "float32")


def s(op: str, arguments: Callable[[Any], tuple[Any, ...]], **keywords: Any) -> Sample:
    return Sample(op if "::" in op else f"aten::{op}", arguments, keywords)


_UNARY = "relu neg sin sigmoid tanh floor round sign erf silu gelu hardtanh elu softplus leaky_relu isnan logical_not"
_POSITIVE = "log sqrt rsqrt reciprocal log1p exp lgamma"
_BINARY = "add.Tensor sub.Tensor mul.Tensor div.Tensor maximum minimum atan2 eq.Tensor lt.Tensor pow.Tensor_Tensor"
_PRIMS = "abs ceil cos erf exp2 expm1 floor neg round sin tanh trunc sign"
_PRIMS_OF_TWO = "add sub mul div maximum minimum atan2 eq lt ge ne fmax fmin"

POINTWISE = [
    *(s(name, lambda n: (t(n, 3, n),)) for name in _UNARY.split()),
    *(s(name, lambda n: (pos(n, 3),)) for name in _POSITIVE.split()),
    *(s(name, lambda n: (pos(n, 3), pos(n, 3))) for name in _BINARY.split()),
    *(s(name, lambda n: (pos(2, n), pos(n))) for name in _BINARY.split()[:6]),
    *(s(name, lambda n: (pos(n, 1), pos(1, n))) for name in _BINARY.split()[:6]),
    *(s(f"prims::{name}", lambda n: (t(n, 3),)) for name in _PRIMS.split()),
    *(s(f"prims::{name}", lambda n: (t(n, 3), t(n, 3))) for name in _PRIMS_OF_TWO.split()),
    s("add.Tensor", lambda n: (t(n, 3), n)),
    s("mul.Tensor", lambda n: (t(n, 3), n)),
    s("where.self", lambda n: (b(n, 1), t(n, 3), t(n, 3))),
    s("prims::where", lambda n: (b(n, 3), t(n, 3), t(n, 3))),
    s("masked_fill.Scalar", lambda n: (t(2, n), b(2, n), 0.5)),
    s("masked_fill.Tensor", lambda n: (t(2, n), b(n), t())),
    s("floor_divide", lambda n: (i(9, n, 3), 2)),
    s("logical_and", lambda n: (b(n, 3), b(n, 3))),
    s("logical_or", lambda n: (b(n, 3), b(3))),
    s("logical_xor", lambda n: (b(n, 3), b(n, 3))),
    s("bitwise_and.Tensor", lambda n: (b(n, 3), b(n, 3))),
    s("bitwise_or.Tensor", lambda n: (b(n, 3), b(n, 3))),
    s("clamp", lambda n: (t(n, 3), -1.0, 1.0)),
    s("addcmul", lambda n: (t(n, 3), t(n, 3), t(3))),
    s("polar", lambda n: (pos(n, 3), t(n, 3))),
    s("complex", lambda n: (t(n, 3), t(n, 1))),
    s("lerp.Tensor", lambda n: (t(n, 3), t(n, 3), t(n, 1))),
    s("clone", lambda n: (t(n, 3),)),
    s("alias", lambda n: (t(n, 3),)),
    s("detach", lambda n: (t(n, 3),)),
    s("lift_fresh_copy", lambda n: (t(n, 3),)),
    s("_to_copy", lambda n: (t(n, 3),), dtype=torch.float32),
    s("copy", lambda n: (t(n, 3), t(n, 3))),
    s("copy", lambda n: (t(n, 3), t(3))),
    s("prims::convert_element_type", lambda n: (t(n, 3), torch.float32)),
    s("prims::clone", lambda n: (t(n, 3),)),
]

REDUCTIONS = [
    *(s(f"{op}", lambda n, d=d: (t(2, n, 3), [d])) for op in ("sum.dim_IntList", "mean.dim") for d in (0, 1, 2)),
    *(s(f"{op}", lambda n, d=d: (t(2, n, 3), [d], True)) for op in ("amax", "amin") for d in (0, 1, 2)),
    # Named, since torch 2.15's strategy does not read it by position.
    *(s("logsumexp", lambda n, d=d: (t(2, n, 3), [d]), keepdim=True) for d in (0, 1, 2)),
    *(s(f"{op}", lambda n: (t(n, 3),)) for op in ("sum", "mean", "prod", "max", "min", "any", "all", "argmax", "std")),
    *(
        s(f"{op}", lambda n, d=d: (t(2, n), d))
        for op in ("prod.dim_int", "any.dim", "all.dim", "max.dim")
        for d in (0, 1)
    ),
    *(s(f"{op}", lambda n, d=d: (t(2, n), d)) for op in ("argmin", "min.dim", "median.dim", "mode") for d in (0, 1)),
    *(s(f"{op}", lambda n, d=d: (t(2, n), [d])) for op in ("nansum", "var.dim") for d in (0, 1)),
    *(
        s(f"{op}.correction", lambda n, d=d: (t(2, n), [d]))
        for op in ("var", "std", "var_mean", "std_mean")
        for d in (0, 1)
    ),
    *(s("count_nonzero.dim_IntList", lambda n, d=d: (t(2, n), [d])) for d in (0, 1)),
    *(s("linalg_vector_norm", lambda n, p=p: (t(2, n, 3), p, [1])) for p in (2, 1, 0.5, float("inf"), 0, -1)),
    s("linalg_vector_norm", lambda n: (t(2, n, 3), 2, [2])),
    s("norm.ScalarOpt_dim", lambda n: (t(2, n, 3), 2, [1])),
    s("kthvalue", lambda n: (t(n, 3), 2, 1)),
    s("kthvalue", lambda n: (t(3, n), 2, 1)),
    s("aminmax", lambda n: (t(3, n),), dim=1),
    s("aminmax", lambda n: (t(3, n),), dim=0),
    s("nanmedian.dim", lambda n: (t(3, n), 1)),
    s("prims::sum", lambda n: (t(2, n), [1])),
    s("prims::prod", lambda n: (t(2, n), [1])),
    s("prims::amax", lambda n: (t(2, n), [1])),
    s("prims::amin", lambda n: (t(2, n), [1])),
    s("prims::var", lambda n: (t(2, n), [1], 1.0)),
    *(s(op, lambda n, d=d: (t(2, n, 3), d, False)) for op in ("_softmax", "_log_softmax") for d in (0, 1, 2)),
    s("_safe_softmax", lambda n: (t(2, n), 1)),
    *(s(op, lambda n, d=d: (t(2, n, 3), d)) for op in ("cumsum", "cumprod", "logcumsumexp") for d in (1, 2)),
    *(s(op, lambda n, d=d: (t(2, n), d)) for op in ("cummax", "cummin", "sort", "argsort") for d in (0, 1)),
    s("topk", lambda n: (t(n, 3), 2, 1)),
    s("topk", lambda n: (t(3, n), 2, 1)),
    *(s("flip", lambda n, d=d: (t(2, n, 3), [d])) for d in (0, 1)),
    *(s("roll", lambda n, d=d: (t(2, n, 3), [1], [d])) for d in (0, 1)),
    s("roll", lambda n: (t(2, n), [1])),
    s("unfold", lambda n: (t(n, 4), 1, 2, 1)),
    s("glu", lambda n: (t(n, 4), 1)),
    s("_fft_r2c", lambda n: (t(n, 4), [1], 0, True)),
    s("_fft_c2c", lambda n: (Drawn((n, 4), "complex"), [1], 0, True)),
    s("_fft_c2r", lambda n: (Drawn((n, 3), "complex"), [1], 0, 4)),
    s("_fft_r2c", lambda n: (t(4, n), [0], 0, True)),
]


def heads(*shape: Any) -> tuple[Any, ...]:
    return (t(*shape), t(*shape), t(*shape), 4, 2, t(12, 4), t(12), t(4, 4), t(4))


def encoder_layer(*shape: Any) -> tuple[Any, ...]:
    norms = (t(4), t(4), t(4), t(4))
    return (t(*shape), *heads(*shape)[3:], False, False, 1e-5, *norms, t(8, 4), t(8), t(4, 8), t(4))


PRODUCTS = [
    s("mm", lambda n: (t(n, 3), t(3, 4))),
    s("mm", lambda n: (t(2, 3), t(3, n))),
    s("mm", lambda n: (t(2, n), t(n, 3))),
    s("mm", lambda n: (t(n, 3), t(3, n))),
    s("bmm", lambda n: (t(n, 2, 3), t(n, 3, 4))),
    s("bmm", lambda n: (t(2, n, 3), t(2, 3, n))),
    s("bmm", lambda n: (t(2, 3, n), t(2, n, 3))),
    s("matmul", lambda n: (t(n, 2, 3), t(3, 4))),
    s("mv", lambda n: (t(n, 3), t(3))),
    s("mv", lambda n: (t(3, n), t(n))),
    s("dot", lambda n: (t(n), t(n))),
    s("vdot", lambda n: (t(n), t(n))),
    s("addmm", lambda n: (t(4), t(n, 3), t(3, 4))),
    s("addmm", lambda n: (t(n, 1), t(n, 3), t(3, 4))),
    s("addmm", lambda n: (t(4), t(2, n), t(n, 4))),
    s("baddbmm", lambda n: (t(n, 2, 4), t(n, 2, 3), t(n, 3, 4))),
    s("addmv", lambda n: (t(n), t(n, 3), t(3))),
    s("linear", lambda n: (t(2, n, 3), t(4, 3), t(4))),
    s("outer", lambda n: (t(n), t(3))),
    s("outer", lambda n: (t(n), t(n))),
    *(
        s("scaled_dot_product_attention", lambda n, kw=kw: (t(2, 1, n, 4), t(2, 1, n, 4), t(2, 1, n, 4)), **kw)
        for kw in ({}, {"is_causal": True})
    ),
    s("_scaled_dot_product_flash_attention_for_cpu", lambda n: (t(n, 1, 3, 4), t(n, 1, 3, 4), t(n, 1, 3, 4))),
    s("_scaled_dot_product_attention_math", lambda n: (t(2, 1, 3, 4), t(2, 1, n, 4), t(2, 1, n, 4), t(2, 1, 1, n))),
    s("_scaled_dot_product_attention_math", lambda n: (t(2, 1, 3, 4), t(2, 1, n, 4), t(2, 1, n, 4), b(2, 1, 1, n))),
    s("_transformer_encoder_layer_fwd", lambda n: encoder_layer(n, 3, 4)),
    s("_transformer_encoder_layer_fwd", lambda n: encoder_layer(2, n, 4)),
    s("_transformer_encoder_layer_fwd", lambda n: (*encoder_layer(2, n, 4), b(n, n), 0)),
    s("_transformer_encoder_layer_fwd", lambda n: (*encoder_layer(2, n, 4), b(2, n), 1)),
    s("_transformer_encoder_layer_fwd", lambda n: (*encoder_layer(2, n, 4), b(2, 2, n, n), 2)),
    s("_native_multi_head_attention", lambda n: (*heads(n, 3, 4), None, True)),
    s("_native_multi_head_attention", lambda n: (*heads(2, n, 4), b(2, n), True, True, 1)),
    s("scaled_dot_product_attention", lambda n: (t(n, 1, 3, 4), t(n, 1, 3, 4), t(n, 1, 3, 4)), dropout_p=0.5),
    s("scaled_dot_product_attention", lambda n: (t(2, 1, 3, n), t(2, 1, 3, n), t(2, 1, 3, n))),
    s("scaled_dot_product_attention", lambda n: (t(2, 1, 3, 4), t(2, 1, n, 4), t(2, 1, n, 4), b(2, 1, 3, n))),
    s("scaled_dot_product_attention", lambda n: (t(2, 1, 3, 4), t(2, 1, n, 4), t(2, 1, n, 4), t(2, 1, 3, n))),
    s("native_layer_norm", lambda n: (t(2, n, 3), [3], t(3), t(3), 1e-5)),
    s("layer_norm", lambda n: (t(n, 3), [3])),
    s("_fused_rms_norm", lambda n: (t(n, 3), [3], t(3), 1e-5)),
    s("native_layer_norm", lambda n: (t(2, n), [n], None, None, 1e-5)),
    s("native_group_norm", lambda n: (t(n, 4, 3), None, None, n, 4, 3, 2, 1e-5)),
    s("native_group_norm", lambda n: (t(2, 4, n), None, None, 2, 4, n, 2, 1e-5)),
    s("_native_batch_norm_legit_functional", lambda n: (t(n, 3), None, None, t(3), pos(3), False, 0.1, 1e-5)),
    s("_native_batch_norm_legit.no_stats", lambda n: (t(n, 3, 2), None, None, True, 0.1, 1e-5)),
    s("_native_batch_norm_legit_no_training", lambda n: (t(n, 3), None, None, t(3), pos(3), 0.1, 1e-5)),
    s("convolution", lambda n: (t(n, 2, 4), t(3, 2, 3), None, [1], [1], [1], False, [0], 1)),
    s("convolution", lambda n: (t(2, 2, n), t(3, 2, 3), t(3), [1], [1], [1], False, [0], 1)),
    s("avg_pool1d", lambda n: (t(n, 2, 4), [2])),
    s("avg_pool1d", lambda n: (t(2, 2, n), [2])),
    s("avg_pool2d", lambda n: (t(n, 2, 4, 4), [2, 2])),
    s("avg_pool3d", lambda n: (t(n, 1, 2, 2, 2), [2, 2, 2])),
    s("max_pool2d_with_indices", lambda n: (t(n, 2, 4, 4), [2, 2])),
    s("max_pool3d_with_indices", lambda n: (t(n, 1, 2, 2, 2), [2, 2, 2])),
    s("_adaptive_avg_pool2d", lambda n: (t(n, 2, 4, 4), [2, 2])),
    s("_adaptive_avg_pool2d", lambda n: (t(2, 2, 4, n), [2, 2])),
    s("adaptive_max_pool2d", lambda n: (t(n, 2, 4, 4), [2, 2])),
    s("adaptive_max_pool2d", lambda n: (t(2, 2, n, 4), [1, 2])),
    s("_adaptive_avg_pool3d", lambda n: (t(n, 2, 4, 4, 4), [2, 2, 2])),
    s("_cdist_forward", lambda n: (t(n, 3, 4), t(n, 5, 4), 2.0, None)),
    s("_cdist_forward", lambda n: (t(n, 4), t(5, 4), 1.0, None)),
    s("upsample_nearest1d", lambda n: (t(n, 2, 4), [8])),
    s("upsample_nearest2d", lambda n: (t(n, 2, 4, 4), [8, 8])),
    s("upsample_bilinear2d", lambda n: (t(n, 2, 4, 4), [8, 8], False)),
    s("upsample_bicubic2d", lambda n: (t(n, 2, 4, 4), [8, 8], False)),
    s("upsample_linear1d", lambda n: (t(n, 2, 4), [8], False)),
    s("reflection_pad1d", lambda n: (t(n, 2, 4), [1, 1])),
    s("reflection_pad1d", lambda n: (t(2, 2, n), [1, 1])),
    s("reflection_pad2d", lambda n: (t(n, 2, 4, 4), [1, 1, 1, 1])),
    s("replication_pad2d", lambda n: (t(n, 2, 4, 4), [1, 1, 1, 1])),
    s("grid_sampler_2d", lambda n: (t(n, 2, 4, 4), t(n, 3, 3, 2), 0, 0, False)),
    s("im2col", lambda n: (t(n, 2, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1])),
    s("col2im", lambda n: (t(n, 8, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1])),
    s("channel_shuffle", lambda n: (t(n, 4, 3), 2)),
    s("pixel_shuffle", lambda n: (t(n, 4, 2, 2), 2)),
    s("pixel_unshuffle", lambda n: (t(n, 1, 4, 4), 2)),
]

SHAPES = [
    s("view", lambda n: (t(2, n, 6), [2, n, 2, 3])),
    s("view", lambda n: (t(2, n, 6), [2 * n, 6])),
    s("view", lambda n: (t(n, 2, 6), [2 * n, 6])),
    s("view", lambda n: (t(2, n, 6), [n, 2, 6])),
    s("view", lambda n: (t(n, 6), [6 * n])),
    s("view", lambda n: (t(n, n, 2), [n * n, 2])),
    s("view", lambda n: (t(2 * n, 3), [n, 6])),
    s("view", lambda n: (t(2 * n, 3), [2, n, 3])),
    s("reshape", lambda n: (t(n, 4), [2 * n, 2])),
    s("_unsafe_view", lambda n: (t(n, 4), [n, 2, 2])),
    s("unsqueeze", lambda n: (t(n, 3), 1)),
    s("squeeze.dim", lambda n: (t(n, 1, 3), 1)),
    s("permute", lambda n: (t(2, n, 3), [2, 1, 0])),
    s("transpose.int", lambda n: (t(2, n, 3), 0, 1)),
    s("t", lambda n: (t(n, 3),)),
    s("movedim.int", lambda n: (t(2, n, 3), 1, 0)),
    s("expand", lambda n: (t(1, 3), [n, 3])),
    s("expand", lambda n: (t(n, 1), [2, n, 4])),
    s("repeat", lambda n: (t(n, 3), [2, 1])),
    s("repeat", lambda n: (t(n, 3), [1, 2])),
    *(s(op, lambda n, k=k: (t(n, n), k)) for op in ("tril", "triu") for k in (-2, -1, 0, 1, 2)),
    s("tril", lambda n: (t(2, n, 3),)),
    s("view_as_complex", lambda n: (t(n, 2),)),
    s("view_as_real", lambda n: (Drawn((n, 2), "complex"),)),
    *(
        s("slice.Tensor", lambda n, r=r: (t(2, n, 3), 1, *r))
        for r in ((1,), (0, 2), (0, -1), (-2,), (0, None, 2), (1, -1))
    ),
    s("slice.Tensor", lambda n: (t(n, 4), 1, 1, 3)),
    s("slice.Tensor", lambda n: (t(2 * n), 0, n)),
    s("narrow", lambda n: (t(n, 4), 0, 1, 2)),
    *(s("select.int", lambda n, at=at: (t(2, n, 3), 1, at)) for at in (0, 2, -1)),
    s("select.int", lambda n: (t(n, 3), 1, 1)),
    s("split.Tensor", lambda n: (t(n, 4), 2, 1)),
    s("split_with_sizes", lambda n: (t(n, 4), [1, 3], 1)),
    s("unbind.int", lambda n: (t(n, 3), 1)),
    s("chunk", lambda n: (t(n, 4), 2, 1)),
    s("cat", lambda n: ([t(n, 3), t(n, 2)], 1)),
    s("cat", lambda n: ([t(2, 3), t(n, 3)],)),
    s("cat", lambda n: ([t(n, 3), t(2, 3)],)),
    s("stack", lambda n: ([t(n, 3), t(n, 3)], 1)),
    s("stack", lambda n: ([t(n, 3), t(n, 3)], 0)),
    *(
        s("constant_pad_nd", lambda n, a=a: (t(3, n), a, 0.5))
        for a in ([1, 0], [0, 1], [2, 2], [0, -1], [-1, 0], [0, 0, 1, 1])
    ),
    s("slice_scatter", lambda n: (t(n, 4), t(n, 2), 1, 1, 3)),
    s("slice_scatter", lambda n: (t(n, 4), t(n - 1, 4), 0, 1)),
    s("slice_scatter", lambda n: (t(n, 4), t(n - 1, 4), 0, 0, n - 1)),
    s("select_scatter", lambda n: (t(n, 4), t(4), 0, 1)),
    s("select_scatter", lambda n: (t(n, 4), t(n), 1, -1)),
    s("select_scatter", lambda n: (t(n, 4), t(4), 0, -1)),
]

SHAPES += [
    s("prims::broadcast_in_dim", lambda n: (t(n, 3), [n, 2, 3], [0, 2])),
    s("prims::broadcast_in_dim", lambda n: (t(3), [n, 3], [1])),
    s("prims::transpose", lambda n: (t(2, n, 3), [1, 0, 2])),
    s("prims::squeeze", lambda n: (t(n, 1, 3), [1])),
    s("prims::rev", lambda n: (t(n, 3), [1])),
    s("prims::rev", lambda n: (t(n, 3), [0])),
    s("prims::cat", lambda n: ([t(n, 3), t(n, 3)], 1)),
    s("prims::split_dim", lambda n: (t(n, 6), 1, 2)),
    s("prims::collapse_view", lambda n: (t(n, 2, 3), 1, 2)),
]

INDEXED = [
    s("index.Tensor", lambda n: (t(n, 3), [i(3, n)])),
    s("index.Tensor", lambda n: (t(n, 3), [None, i(3, 2)])),
    s("index.Tensor", lambda n: (t(4, 3), [i(4, n)])),
    s("index.Tensor", lambda n: (t(4, 3, n), [i(4, 2), i(3, 2)])),
    s("take", lambda n: (t(4, 3), i(12, n))),
    s("embedding", lambda n: (t(4, 3), i(4, 2, n))),
    s("_embedding_bag_forward_only", lambda n: (t(4, 3), i(4, n), i(1, 3))),
    s("_embedding_bag", lambda n: (t(4, 3), i(4, 6), i(1, n))),
    s("embedding", lambda n: (t(n, 3), i(4, 2))),
    s("index_select", lambda n: (t(n, 3), 1, i(3, 2))),
    s("index_select", lambda n: (t(n, 3), 0, i(3, 2))),
    s("gather", lambda n: (t(n, 3), 1, i(3, n, 2))),
    s("gather", lambda n: (t(n, 3), 0, i(3, 2, 3))),
    s("gather", lambda n: (t(4, n), 0, i(4, 2, n))),
    s("bucketize.Tensor", lambda n: (t(n, 3), Drawn((4,), "sorted"))),
    s("isin.Tensor_Tensor", lambda n: (i(9, n), i(9, 3))),
    s("scatter.src", lambda n: (t(n, 3), 1, i(1, n, 1), t(n, 1))),
    s("scatter.value", lambda n: (t(n, 3), 0, i(3, 2, 3), 1.0)),
    s("scatter_add", lambda n: (t(4, 3), 0, i(4, n, 3), t(n, 3))),
    s("scatter_reduce.two", lambda n: (t(4, n), 0, i(4, 2, n), t(2, n), "sum")),
    s("index_add", lambda n: (t(4, n), 0, i(4, 3), t(3, n))),
    s("index_add", lambda n: (t(4, 3), 0, i(4, n), t(n, 3))),
    s("index_copy", lambda n: (t(n, 4), 1, i(1, 1), t(n, 1))),
    s("index_fill.int_Scalar", lambda n: (t(n, 4), 1, i(4, 2), 0.5)),
    s("index_put", lambda n: (t(n, 4), [None, i(4, 1)], t(n, 1))),
    s("index_put", lambda n: (t(4, 3), [i(4, n)], t(n, 3), True)),
    s("_unsafe_index.Tensor", lambda n: (t(n, 3), [None, i(3, 2)])),
    s("zeros_like", lambda n: (t(n, 3),)),
    s("ones_like", lambda n: (t(n, 3),)),
    s("full_like", lambda n: (t(n, 3), 2.0)),
    s("fill.Scalar", lambda n: (t(n, 3), 2.0)),
    s("new_zeros", lambda n: (t(n, 3), [n, 2])),
    s("new_ones", lambda n: (t(n, 3), [n])),
    s("new_full", lambda n: (t(n, 3), [n], 3.0)),
    s("new_full", lambda n: (t(n, 3), [2], n)),
    s("bernoulli", lambda n: (Drawn((n, 3), "share"),)),
    s("rand_like", lambda n: (t(n, 3),)),
    s("native_dropout", lambda n: (t(n, 3), 0.5, True)),
    s("native_dropout", lambda n: (t(n, 3), 0.5, False)),
    s("multinomial", lambda n: (pos(n, 3), 1)),
]

CREATED = [
    s("arange", lambda n: (n,)),
    s("arange.start", lambda n: (1, n)),
    s("arange.start", lambda n: (n, 2 * n)),
    s("arange.start_step", lambda n: (0, 2 * n, 2)),
    s("linspace", lambda n: (0, 1, n)),
    s("eye", lambda n: (n,)),
    s("eye.m", lambda n: (n, 3)),
    s("full", lambda n: ([n, 2], 3.0)),
    s("full", lambda n: ([2], n)),
    s("zeros", lambda n: ([n, n],)),
    s("ones", lambda n: ([2, n],)),
    s("scalar_tensor", lambda n: (n,)),
    s("rand", lambda n: ([n, 2],)),
    s("randperm", lambda n: (n,)),
]

SAMPLES = [*POINTWISE, *REDUCTIONS, *PRODUCTS, *SHAPES, *INDEXED, *CREATED]
