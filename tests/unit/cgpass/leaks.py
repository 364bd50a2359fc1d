"""Programs over a padded number of rows: some whose results depend on their number, some with masks or row by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import graphpass as gp
from tests.unit import models

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float64: 1e-10}
Make = Callable[[int, torch.dtype], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Program:
    """A function, its arguments for a number of rows and a type, and how it is compiled.

    Attributes:
        function: makes the function, with parameters in the type.
        arguments: makes its arguments.
        options: of the backend.
    """

    function: Callable[[torch.dtype], Callable[..., Any]]
    arguments: Make
    options: Mapping[str, Any] = field(default_factory=lambda: {"dynamic_dims": {"x": 0}, "padding": {"x": 0.0}})


def matrix(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return ((torch.randn(rows, 8) + 2).to(dtype),)


def of(function: Callable[..., Any], arguments: Make = matrix, **options: Any) -> Program:
    """A program without parameters."""
    return Program(lambda dtype: function, arguments, {**Program(of, matrix).options, **options})


def module(make: Callable[[], nn.Module], arguments: Make = matrix, *, training: bool = False) -> Program:
    """A program that is a module; its input has a name."""

    def made(dtype: torch.dtype) -> nn.Module:
        return models.module(lambda self, x: self.inner(x), inner=make().to(dtype).train(training))

    return Program(made, arguments)


GRAPH = MappingProxyType({"dynamic_dims": {"x": 0, "batch": 0}, "padding": {"x": 0.0, "batch": 0}})
NUM_GRAPHS = 4


def graph(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return *matrix(rows, dtype), torch.randint(NUM_GRAPHS, (rows,))


def mean_pooling(x: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """Padded nodes are counted in graph 0."""
    total = torch.zeros(NUM_GRAPHS, x.shape[1], dtype=x.dtype, device=x.device).index_add(0, batch, x)
    count = torch.zeros(NUM_GRAPHS, dtype=x.dtype, device=x.device).index_add(0, batch, torch.ones_like(x[:, 0]))
    return total / count.clamp(min=1)[:, None]


LEAKS: Mapping[str, Program] = {
    "mean pooling": Program(lambda dtype: mean_pooling, graph, GRAPH),
    "mean": of(lambda x: x.mean(0)),
    "centred": of(lambda x: x - x.mean(0, keepdim=True)),
    "softmax": of(lambda x: x.softmax(0).sum(1)),
    "batch norm in training": module(lambda: nn.BatchNorm1d(8), training=True),
    "relative positions": of(lambda x: x + (torch.arange(x.shape[0], device=x.device) / x.shape[0])[:, None]),
    "attention of a query": of(lambda x: F.scaled_dot_product_attention(x[None, :1] / 9, x[None], x[None])),
}


def sum_pooling(x: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """Padded nodes go to a row of their own, which is cut off."""
    empty = torch.zeros(NUM_GRAPHS + 1, x.shape[1], dtype=x.dtype, device=x.device)
    return empty.index_add(0, batch, x)[:NUM_GRAPHS]


def mean_with_a_trash_row(x: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    total = sum_pooling(x, batch)
    return total / sum_pooling(torch.ones_like(x[:, :1]), batch).clamp(min=1)


def masked_rows(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return *matrix(rows, dtype), (torch.rand(rows) > 0.3).to(dtype)


def masked_attention(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    seen, x = (mask > 0)[None, None], x[None, None]
    return F.scaled_dot_product_attention(x, x, x, attn_mask=seen)


def written(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x + 1


TRASH = MappingProxyType({**GRAPH, "padding": {"x": 0.0, "batch": NUM_GRAPHS}})
MASKED = MappingProxyType({"dynamic_dims": {"x": 0, "mask": 0}, "padding": {"x": 0.0, "mask": 0.0}})


RIGHT: Mapping[str, Program] = {
    "mean pooling with a trash row": Program(lambda dtype: mean_with_a_trash_row, graph, TRASH),
    "masked attention": Program(lambda dtype: masked_attention, masked_rows, MASKED),
    "not a number in a row": Program(lambda dtype: lambda x, mask: x / mask[:, None], masked_rows, MASKED),
    "count": Program(lambda dtype: lambda x, mask: mask.sum().long() + x.long(), masked_rows, MASKED),
    "multilayer perceptron": module(lambda: nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))),
    "written": of(written),
}


def agree(
    program: Program, sizes: Sequence[int], dtype: torch.dtype, *, device: str = "cpu", compiler: str = "eager"
) -> Any:
    """Compare the calls of these sizes with eager; returns the runtime."""
    torch.manual_seed(0)
    model = program.function(dtype)
    if isinstance(model, nn.Module):
        model.to(device)
    fast = torch.compile(model, backend="cgpass", options={"compiler": compiler, **program.options})
    # On a GPU the atomic additions of a scatter round in another order in each run: a thousand in bfloat16 by 6 %.
    tolerance = TOLERANCE[dtype] * (1 if device == "cpu" else 15)
    close = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    with torch.no_grad():
        for size in sizes:
            args = [arg.to(device) for arg in program.arguments(size, dtype)]
            expected = model(*[arg.clone() for arg in args])
            torch.testing.assert_close(fast(*args), expected, **close)
    return gp.runtime_of(fast)


def around(size: int) -> list[int]:
    """Sizes of calls, below one of the ladder's."""
    return [size - less for less in (1, 7, 2, 7, 1, 3, 20)]


def refusals(runtime: Any) -> list[str]:
    """What ended padding."""
    return [problem.what for problem in runtime.report().problems if "no longer padded" in problem.what]


def is_padded(runtime: Any) -> bool:
    """Whether some call replayed a larger graph."""
    return any(key.padding for key in runtime.report().figures.keys)
