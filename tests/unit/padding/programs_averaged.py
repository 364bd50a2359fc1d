"""Programs with statistics and windows over a padded dimension, a table an operator; test_made.py runs them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.padding.programs_moved import BOTH, Case, all_are, special

aten = torch.ops.aten


def batch_norm_in_training(x: Tensor, p: Tensor, mean: Tensor, var: Tensor) -> list[Tensor]:
    results = aten._native_batch_norm_legit_functional(x.mT, p, p, mean, var, True, 0.1, 1e-5)
    return [results[0], results[3], results[4]]


def updated(x: Tensor, p: Tensor, mean: Tensor, var: Tensor) -> list[Tensor]:
    results = aten._batch_norm_with_update_functional(x.mT, p, p, mean, var, 0.1, 1e-5)
    return [results[0], results[4], results[5]]


def bagged(mode: str, **how: int) -> Case:
    def in_bags(ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding_bag(ids % 3, table, mode=mode, **how)

    return Case(f"{mode} of bags {how or ''}".strip(), in_bags, proved=("b",))


BAGGED = [bagged(mode, **how) for mode in ("sum", "mean", "max") for how in ({}, {"padding_idx": 1})]


AVERAGED: dict[str, list[Case]] = {
    "var": [
        Case("var", lambda x: x.var(1), proved=("b",)),
        Case("var of special numbers", lambda x: x.var(1), proved=("b",), contents={"x": special}),
        Case("var of all", lambda x: x.var(correction=0)),
        Case("var by few", lambda x: x[:, 2:].var(1, correction=9), proved=("b",)),
        Case("var of equal entries", lambda x: x.var(1), proved=("b",), contents={"x": all_are(3.0)}),
        Case("var of float16", lambda half: half.var(1), proved=("b",)),
        Case("var of bfloat16", lambda f: f.bfloat16().var(1), proved=("b",)),
        Case("var merged", lambda x: x.flatten(0, 1).var(0, keepdim=True)),
    ],
    "std": [Case("std", lambda x: x.std(1), proved=("b",)), Case("std of both", lambda x: x.std((0, 1)))],
    "var_mean": [Case("var_mean", lambda x: torch.var_mean(x, 1), proved=("b",))],
    "std_mean": [
        Case("std_mean", lambda x: torch.std_mean(x, 1, keepdim=True), proved=("b",)),
        Case("std_mean of float16", lambda half: torch.std_mean(half, 1), proved=("b",)),
    ],
    "native_group_norm": [
        Case("group norm", lambda x, p: F.group_norm(x.mT, 2, p, p), proved=("b",)),
        Case("group norm of bfloat16", lambda f: F.group_norm(f.bfloat16().mT, 4), proved=("b",)),
        Case("group norm of zeros", lambda x: F.group_norm(x.mT, 1), proved=("b",), contents={"x": all_are(0.0)}),
        Case(
            "group norm of what is convolved", lambda x, w: F.group_norm(F.conv1d(x.mT, w[..., None]), 8), proved=("b",)
        ),
    ],
    "native_layer_norm": [
        Case("layer norm", lambda x: F.layer_norm(x, x.shape[1:]), proved=("b",)),
        Case("layer norm with weights", lambda x, u: F.layer_norm(x, x.shape[1:], u, u.cos()), proved=("b",)),
        Case("layer norm of rows", lambda x, p: F.layer_norm(x, (8,), p), proved=BOTH),
    ],
    "_native_batch_norm_legit": [
        Case("instance norm", lambda x: F.instance_norm(x.mT), proved=("b",)),
        Case("instance norm with weights", lambda x, p: F.instance_norm(x.mT, None, None, p, p), proved=("b",)),
        Case("batch norm without statistics", lambda x: F.batch_norm(x.mT, None, None, training=True)),
    ],
    "_native_batch_norm_legit_functional": [Case("batch norm in training", batch_norm_in_training)],
    "_batch_norm_with_update_functional": [Case("batch norm with update", updated)],
    "avg_pool2d": [
        Case("mean pool of what is there", lambda x: pooled(x, count_include_pad=False), proved=("b",)),
        Case("mean pool to the end", lambda x: F.avg_pool1d(x.mT, 3, 2, ceil_mode=True), proved=("b",)),
        Case("mean pool that counts beyond the end", lambda x: pooled(x, ceil_mode=True), ("b",), ("b",)),
        Case("mean pool of an image", lambda g: F.avg_pool2d(g[None], 2, 1, 1, False, False), ("b", "s")),
        Case("mean pool of square windows", lambda g: F.avg_pool2d(g[None], (2,), 1, 1, False, False), ("b", "s")),
        Case(
            "mean pool of large float16",
            lambda half: pooled(half, count_include_pad=False),
            proved=("b",),
            contents={"half": all_are(6e4, torch.float16)},
        ),
    ],
    "avg_pool3d": [
        Case("mean pool of a volume", lambda g: F.avg_pool3d(g[None, None], (1, 2, 2), 1, (0, 1, 1), False, False))
    ],
}


def pooled(x: Tensor, **how: bool) -> Tensor:
    return F.avg_pool1d(x.mT, 3, 2, 1, **how)


def greatest(x: Tensor, **how: bool) -> Tensor:
    return aten.max_pool2d_with_indices(x.mT[:, None], [1, 3], [1, 2], [0, 1], **how)[0]


WINDOWS: dict[str, list[Case]] = {
    "adaptive_max_pool2d": [
        Case("greatest of all", lambda x: F.adaptive_max_pool1d(x.mT, 1), proved=("b",), contents={"x": special}),
        Case("greatest of rows", lambda x: F.adaptive_max_pool2d(x[:, None], (1, 3)), proved=("b",)),
        Case("greatest of parts", lambda x: F.adaptive_max_pool1d(x.mT, 2), ("b",), ("b",)),
        Case("place of the greatest", lambda x: F.adaptive_max_pool2d(x[:, None], 1, True)[1], ("b",), ("b",)),
    ],
    "adaptive_max_pool3d": [
        Case("greatest of a volume", lambda x: F.adaptive_max_pool3d(x[:, None, None], 1), proved=("b",)),
    ],
    "max_pool2d_with_indices": [
        Case("max pool", lambda x: greatest(x), proved=("b",), contents={"x": special}),
        Case("max pool to the end", lambda x: greatest(x, ceil_mode=True), proved=("b",)),
        Case(
            "places of a max pool",
            lambda x: aten.max_pool2d_with_indices(x.mT[:, None], [1, 3], [1, 2], [0, 1])[1],
            ("b",),
            ("b",),
        ),
    ],
    "max_pool3d_with_indices": [
        Case("max pool of a volume", lambda g: F.max_pool3d(g[None, None], (1, 2, 2), 1, (0, 1, 1))),
    ],
    "_low_memory_max_pool_with_offsets": [
        Case(
            "max pool with offsets",
            lambda x: torch.ops.prims._low_memory_max_pool_with_offsets(
                x.mT[:, None], [1, 3], [1, 2], [0, 1], [1, 1], False
            )[0],
            proved=("b",),
        ),
    ],
    "avg_pool2d": [
        Case("mean pool", lambda x: pooled(x), proved=("b",)),
        Case("mean pool of whole windows", lambda x: F.avg_pool1d(x.mT, 3, 2), proved=("b",)),
    ],
    "avg_pool3d": [
        Case("mean pool of a padded volume", lambda g: F.avg_pool3d(g[None, None], (1, 2, 2), 1, (0, 1, 1)))
    ],
    "im2col": [
        Case("columns", lambda x: F.unfold(x.mT[..., None], (3, 1), padding=(1, 0)), proved=("b",)),
        Case(
            "columns of a row",
            lambda x: F.unfold(x.mT[:, :, None], (1, 3), padding=(0, 1), stride=(1, 2)),
            proved=("b",),
        ),
        Case("columns of an image", lambda g: F.unfold(g[None, None], 2, padding=1), ("b",)),
    ],
}
