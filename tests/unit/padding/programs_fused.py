"""Programs of operators that do several things at once, a table an operator; and multiples."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.padding.programs_moved import Case, all_are, special

aten = torch.ops.aten


def projections(w: Tensor) -> tuple[Any, ...]:
    return 8, 2, torch.cat([w, w.t(), w * 2]), w.flatten()[:24], w.t(), w[0]


def layer(x: Tensor, w: Tensor, *masks: Any, gelu: bool = False, norm_first: bool = False) -> Tensor:
    norms = w[1], w[2], w[3], w[4]
    feeds = torch.cat([w, w]), w.flatten()[:16], torch.cat([w, w.t()], 1), w[5]
    return aten._transformer_encoder_layer_fwd(x, *projections(w), gelu, norm_first, 1e-5, *norms, *feeds, *masks)


def attends(x: Tensor, y: Tensor, z: Tensor, w: Tensor, mask: Any, kind: Any, *weights: bool) -> tuple[Tensor, ...]:
    attended, scores = aten._native_multi_head_attention(x, y, z, *projections(w), mask, *weights, kind)
    return (attended, scores) if weights[0] else (attended,)


def among(free: Tensor) -> Tensor:
    """Whether a query may not see a key, for each head."""
    return (free[:, None, :, None] ^ free[:, None, None]).expand(-1, 2, -1, -1)


def resized(x: Tensor, mode: str, **how: Any) -> Tensor:
    return F.interpolate(x, mode=mode, **how)


def up_to_four(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, -x.shape[1] % 4))


# One row for each operator that is read in parts.

FUSED: dict[str, list[Case]] = {
    "_transformer_encoder_layer_fwd": [
        Case("layer", lambda x, w: layer(x, w), proved=("b",)),
        Case("layer, norm first, gelu", lambda x, w: layer(x, w, gelu=True, norm_first=True), proved=("b",)),
        Case("layer, masked keys", lambda x, w, free: layer(x, w, free, 1), proved=("b",)),
        Case("layer, masked scores", lambda x, u, w: layer(x, w, u @ u.T > 1, 0), proved=("b",)),
        Case("layer, a mask of both", lambda x, w, free: layer(x, w, among(free), 2), proved=("b",)),
        Case(
            "layer, no keys",
            lambda x, w, free: layer(x, w, free, 1),
            proved=("b",),
            contents={"free": all_are(True)},
        ),
    ],
    "_native_multi_head_attention": [
        Case("attention alone", lambda x, y, w: attends(x, y, y * 2, w, None, None, False, True), proved=("b",)),
        Case("attention, weights", lambda x, w: attends(x, x, x, w, None, None, True, True), proved=("b",)),
        Case("attention, each head", lambda x, w, free: attends(x, x, x, w, free, 1, True, False), proved=("b",)),
    ],
    "upsample_linear1d": [
        Case("linear by 2", lambda x: resized(x.mT, "linear", scale_factor=2), proved=("b",)),
        Case("linear, corners", lambda x: resized(x.mT, "linear", scale_factor=3, align_corners=True), proved=("b",)),
        Case("linear to 7", lambda x: resized(x.mT, "linear", size=7), proved=("b",), contents={"x": special}),
    ],
    "upsample_bilinear2d": [
        Case("bilinear by 2", lambda c: resized(c, "bilinear", scale_factor=2), proved=("b",)),
        Case("bilinear to the length", lambda im, u: resized(im, "bilinear", size=(u.shape[0], 7)), proved=("b",)),
    ],
    "upsample_bicubic2d": [
        Case("bicubic by 2", lambda c: resized(c, "bicubic", scale_factor=2.0), proved=("b",)),
        Case("bicubic to the length", lambda im, u: resized(im, "bicubic", size=(u.shape[0], 7)), proved=("b",)),
    ],
    "upsample_nearest1d": [
        Case("nearest by 2", lambda x: resized(x.mT, "nearest", scale_factor=2), proved=("b",)),
        Case("nearest by a half", lambda x: resized(x.mT, "nearest", scale_factor=0.5), proved=("b",)),
        Case("nearest to 7", lambda x: resized(x.mT, "nearest", size=7), proved=("b",)),
    ],
    "upsample_nearest2d": [Case("nearest in two", lambda c: resized(c, "nearest", scale_factor=2), proved=("b",))],
    "_upsample_nearest_exact1d": [Case("exact", lambda x: resized(x.mT, "nearest-exact", size=7), proved=("b",))],
    "_upsample_nearest_exact2d": [
        Case("exact in two", lambda c: resized(c, "nearest-exact", size=(7, 3)), proved=("b",))
    ],
    "_adaptive_avg_pool2d": [
        Case("adaptive pool", lambda c: F.adaptive_avg_pool2d(c, (3, 2)), proved=("b",)),
        Case("adaptive pool of one size", lambda x: F.adaptive_avg_pool1d(x.mT, 3), proved=("b",)),
        Case(
            "adaptive pool of large float16",
            lambda half: F.adaptive_avg_pool1d(half.mT, 3),
            proved=("b",),
            contents={"half": all_are(6e4, torch.float16)},
        ),
        Case("adaptive pool that divides", lambda x: F.adaptive_avg_pool1d(x.mT, 5), proved=("b",)),
        Case(
            "adaptive pool, special", lambda x: F.adaptive_avg_pool1d(x.mT, 2), proved=("b",), contents={"x": special}
        ),
    ],
    "_prelu_kernel": [
        Case("prelu, summed", lambda x, p: aten._prelu_kernel(x, p).sum(1), proved=("b",)),
        Case("prelu over merged sizes", lambda x, p: aten._prelu_kernel(x.flatten(0, 1), p).mean(0)),
    ],
}

MULTIPLES = [
    Case("up to a multiple", up_to_four, proved=("b",)),
    Case("sums of four", lambda x: up_to_four(x).unflatten(1, (-1, 4)).sum(2), proved=("b",)),
    Case(
        "windows of four",
        lambda x: up_to_four(x).unflatten(1, (-1, 4)).softmax(2).flatten(1, 2)[:, : x.shape[1]],
        proved=("b",),
    ),
]
