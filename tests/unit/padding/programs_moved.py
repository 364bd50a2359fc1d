"""Programs whose entries move along a padded dimension, a table an operator; test_made.py runs them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
BOTH = ("b", "s")
Contents = Callable[[tuple[int, ...], torch.Generator], Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """A program, the key fields that can be padded with repairs, and those that can without."""

    name: str
    function: Callable[..., Any]
    fields: tuple[str, ...] = BOTH
    proved: tuple[str, ...] = ()
    contents: Mapping[str, Contents] = field(default_factory=dict)  #: input -> its real entries


def all_are(number: float | bool, dtype: torch.dtype | None = None) -> Contents:
    dtype = dtype or (torch.float64 if isinstance(number, float) else None)
    return lambda shape, generator: torch.full(shape, number, dtype=dtype)


def special(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A real entry in four is NaN or infinite, and many are equal."""
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64).round()
    numbers = torch.tensor([math.nan, math.inf, -math.inf], dtype=torch.float64)
    chosen = numbers[torch.randint(3, shape, generator=generator)]
    return torch.where(torch.rand(shape, generator=generator) < 0.25, chosen, drawn)


def counted(least: int, end: int) -> Contents:
    return lambda shape, generator: torch.randint(least, end, shape, generator=generator)


def distances(size: int) -> Tensor:
    """From the largest to the smallest."""
    return torch.arange(size - 1, -size, -1)


def relative_scores(q: Tensor) -> Tensor:
    """Scores of each query and each distance."""
    embedded = torch.cos(distances(q.shape[2])[:, None] * torch.arange(1, 5)).to(q.dtype)
    return q @ embedded.t()


def shifted(q: Tensor) -> Tensor:
    """The relative shift of Transformer-XL: a column in front, a view, a row cut off, a view, the first columns."""
    scores = relative_scores(q)
    size = scores.shape
    columns = F.pad(scores, (1, 0)).view(size[0], size[1], -1, size[2])
    return columns[:, :, 1:].view(size)[..., : size[2]]


def shifted_back(q: Tensor) -> Tensor:
    """The same by views alone, with a distance more, and an index at the end."""
    size = q.shape
    distances = torch.arange(size[2], -size[2], -1.0, dtype=torch.int64).cos()[:, None]
    scores = q @ (distances * torch.ones(4)).t().to(q.dtype)
    rows = scores.reshape(size[0], size[1], 2 * size[2], size[2])[:, :, 1:]
    rows = rows.reshape(size[0], size[1], size[2], 2 * size[2] - 1)
    return torch.index_select(rows, 3, torch.arange(size[2]))


def visible_from_end(am: Tensor) -> Tensor:
    """A mask in which all entries up to the last visible one are visible."""
    return am.flip([-1]).cumsum(-1).flip([-1]).bool()


def extended(mode: str, rank: int) -> Callable[[Tensor], Tensor]:
    """A signal, an image or a volume, whose rows are padded, extended at both ends."""
    amounts = ((2, 1), (1, 1, 2, 1), (1, 1, 2, 1, 0, 0))[rank - 1]
    return lambda x: F.pad(x.mT if rank == 1 else x[(slice(None), *[None] * (rank - 1))], amounts, mode=mode)


def summed(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x).sum(-2)


VIEWS = [
    Case("relative shift", shifted, proved=("b",)),
    Case("relative shift by views", shifted_back, proved=("b",)),
    Case("relative shift in a softmax", lambda q, c: shifted(q).softmax(-1) @ c, proved=("b",)),
    Case("view of two sizes exchanged", lambda x: x.view(x.shape[0], 8, x.shape[1]), proved=("b",)),
    Case("view of padded sizes exchanged", lambda x: x.view(x.shape[1], x.shape[0], 8)),
    Case("view of all", lambda x: x.view(8, x.shape[1], x.shape[0]), contents={"x": special}),
    Case("view in pieces", lambda x: x.view(x.shape[0], 2, -1, 4).sum(2), proved=("b",)),
    Case("view of integers", lambda i: torch.stack([i, i], 2).view(i.shape[0], 2, i.shape[1]), proved=("b",)),
    Case("view of a merged dimension", lambda x: x.flatten(0, 1).view(8, -1).sum(1), ("b",)),
]

# One row for each entry of _REWRITES that moves entries.
MOVED: dict[str, list[Case]] = {
    "view": VIEWS,
    "_unsafe_view": [Case("unsafe view", lambda x: aten._unsafe_view(x, [x.shape[0], 8, x.shape[1]]), proved=("b",))],
    "reshape": VIEWS,
    "flip": [
        Case("flip", lambda x: x.flip(1), proved=("b",), contents={"x": special}),
        Case("flip both", lambda x: x.flip(0, 1)),
        Case("flip all", lambda x: x.flip(0, 1, 2)),
        Case("flip merged", lambda x: x.flatten(0, 1).flip(0), ("b",)),
        Case("flip features", lambda x: x.flip(2), proved=BOTH),
        Case("sum from the end", lambda x: x.flip(1).cumsum(1).flip(1), proved=("b",)),
        Case("mask up to the last", lambda g: visible_from_end(g > 0), proved=("b",)),
    ],
    "rev": [Case("rev", lambda x: torch.ops.prims.rev(x, [1]), proved=("b",))],
    "sort": [
        Case("sort", lambda x: x.sort(1), proved=("b",)),
        Case("sort of special numbers", lambda x: x.sort(1)[0], proved=("b",), contents={"x": special}),
        Case("sort down", lambda x: x.sort(1, True)[0], proved=("b",), contents={"x": special}),
        Case(
            "places of a stable sort", lambda x: x.sort(dim=1, stable=True)[1], proved=("b",), contents={"x": special}
        ),
        Case("a stable sort of integers", lambda i: i.sort(dim=1, descending=True, stable=True), proved=("b",)),
        Case("sort merged", lambda x: x.flatten(0, 1).sort(0)[0], ()),
        Case("entries in order", lambda x: x.gather(1, x.argsort(1)).cumsum(1), proved=("b",)),
    ],
    "topk": [
        Case("topk", lambda x: x.topk(3, 1), proved=("b",)),
        Case("topk of special numbers", lambda x: x.topk(4, 1)[0], proved=("b",), contents={"x": special}),
        Case("the least two", lambda x: x.topk(2, 1, largest=False)[0], proved=("b",), contents={"x": special}),
        Case("topk of equal entries", lambda x: x.topk(2, 1)[0], proved=("b",), contents={"x": all_are(-math.inf)}),
        Case("what topk names", lambda x: x.gather(1, x.topk(2, 1)[1]), proved=("b",)),
        Case("topk by a size", lambda x: x.topk(x.shape[1] - 2, 1)[0], ("b",), ("b",)),
    ],
    "roll": [
        Case("roll", lambda x: x.roll(2, 1), proved=("b",), contents={"x": special}),
        Case("roll back", lambda x: x.roll(-7, 1), proved=("b",)),
        Case("roll both", lambda x: x.roll((1, 1), (0, 1))),
        Case("roll by a size", lambda x: x.roll(x.shape[1] // 2, 1), proved=("b",)),
        Case("roll flat", lambda x: x.roll(1), ()),
    ],
    "slice_scatter": [
        Case("circular", lambda x: F.pad(x.mT, (2, 1), mode="circular"), proved=("b",)),
        Case(
            "another in the middle",
            lambda x, y: torch.slice_scatter(x, y[:, :2], 1, x.shape[1] - 3, x.shape[1] - 1),
            proved=("b",),
        ),
    ],
    "select_scatter": [
        Case("another last", lambda x, v: torch.select_scatter(x, v, 1, -1), proved=("b",), contents={"x": special}),
    ],
    "arange": [
        Case("distances", lambda r: distances(r.shape[0]), ("s",)),
        Case("distances twice", lambda r: (distances(r.shape[0]), r * 2, distances(r.shape[0])), ("s",)),
        Case("numbers from a size on", lambda x: x + torch.arange(x.shape[1], x.shape[1] + 8), proved=("b",)),
        Case("numbers down to one", lambda u: u + torch.arange(u.shape[0], 0, -1.0)[:, None], ("s",)),
        Case("numbers by a size", lambda r: torch.arange(0, r.shape[0] * r.shape[0], r.shape[0]), ("s",)),
        Case("numbers of 16 bits", lambda r: torch.arange(r.shape[0], 0, -1, dtype=torch.float16), ()),
        Case("rows of a table from a size on", lambda x, table: table[torch.arange(2, x.shape[1] + 2)], proved=("b",)),
    ],
    "iota": [
        Case(
            "iota",
            lambda r: torch.ops.prims.iota(
                r.shape[0], start=r.shape[0], step=-1, dtype=torch.int64, device="cpu", requires_grad=False
            ),
            ("s",),
        ),
    ],
    "cat": [
        Case("cat behind merged sizes", lambda x, v: torch.cat([v, x.flatten(0, 1)]).softmax(0)),
        Case("cat of merged sizes", lambda x, y: torch.cat([x.flatten(0, 1), y.flatten(0, 1)]).mean(0)),
        Case("one behind", lambda x, v: torch.cat([x, v[:, None]], 1), proved=("b",), contents={"x": special}),
        Case("one behind and summed", lambda x, v: torch.cat([x, v[:, None]], 1).mean(1), proved=("b",)),
        Case("one in front", lambda x, v: torch.cat([v[:, None], x], 1), proved=BOTH),
        Case("another behind", lambda x, mem: torch.cat([x, mem], 1), ("b", "s", "t"), ("b", "t")),
        Case("three", lambda x, y, v: torch.cat([x, y, v[:, None], x], 1)[:, -2:], proved=("b",)),
        Case("rows behind", lambda x, y: torch.cat([x, y]), proved=("s",)),
        Case("booleans behind", lambda free, m: torch.cat([free, m], 1), proved=("b",)),
        Case("of two types", lambda x, f: torch.cat([x, f], 1), ("b",), ("b",)),
    ],
    **{
        f"{name}ion_pad{rank}d": [
            Case(f"{mode} in {rank} dimensions", extended(mode, rank), proved=("b",)),
            Case(f"{mode} in {rank} dimensions and sum", summed(extended(mode, rank)), proved=("b",)),
        ]
        for mode, name in (("reflect", "reflect"), ("replicate", "replicat"))
        for rank in (1, 2, 3)
    },
}
