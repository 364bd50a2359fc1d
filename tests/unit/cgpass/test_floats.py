"""A Python float that varies is an input of the graph: as many compilations as torch.compile, then replays alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from tests.observed import calls_with_graph
from tests.unit.cgpass.attended import Make

VALUES = [0.1 + 0.07 * step for step in range(20)]
Program = Callable[[torch.Tensor, float], Any]

PROGRAMS: dict[str, Program] = {
    "product": lambda x, thr: x * thr,
    "difference": lambda x, thr: x.sub(thr, alpha=2),
    "difference from the number": lambda x, thr: thr - x,
    "quotient of the number": lambda x, thr: thr / x,
    "power": lambda x, thr: x.abs() ** thr,
    "comparison": lambda x, thr: torch.stack([x > thr, thr >= x, x.eq(thr)]),
    "where": lambda x, thr: torch.where(x > thr, x, thr),
    "clamp": lambda x, thr: x.clamp(-thr, thr),
    "clamp by both": lambda x, thr: torch.clamp(x, min=thr, max=3.0),
    "masked_fill": lambda x, thr: x.masked_fill(x > 0, thr),
    "item assignment": lambda x, thr: assigned(x.clone(), thr),
    "in place": lambda x, thr: x.clone().mul_(thr).sub_(thr),
    "in place by an operator": lambda x, thr: scaled(x.clone(), thr),
    "tensor": lambda x, thr: x + torch.tensor(thr),
    "arithmetic": lambda x, thr: x * (thr * 2 + 1) / (3 - thr),
    "functions": lambda x, thr: x * math.sqrt(thr) + abs(-thr) + max(thr, 0.5) - min(0.2, thr),
    "temperature": lambda x, thr: torch.softmax(x / thr, -1),
    "a size": lambda x, thr: x * (thr * x.shape[0]),
    "a scalar": lambda x, thr: x.sum() * thr,
    "a branch": lambda x, thr: x * thr if thr > 0.5 else x + thr,
    "a result": lambda x, thr: (x * thr, thr * 2),
}


def assigned(x: torch.Tensor, thr: float) -> torch.Tensor:
    x[0] = thr
    return x


def scaled(x: torch.Tensor, thr: float) -> torch.Tensor:
    x *= thr
    x += thr
    return x


def inputs(dtype: torch.dtype, count: int = len(VALUES)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(3 * torch.randn(5, 4, generator=generator)).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_many_compilations_as_torch_compile(compiled: Make, name: str, dynamic: bool | None) -> None:
    program, plain = PROGRAMS[name], CompileCounterWithBackend("eager")
    fast = compiled(program, dynamic=dynamic)
    of_torch = torch.compile(program, backend=plain, dynamic=dynamic)
    with torch.no_grad():
        for x, thr in zip(inputs(torch.float32), VALUES, strict=True):
            torch.testing.assert_close(fast(x.clone(), thr), program(x.clone(), thr))
        replayed = calls_with_graph(fast.rt)
        torch.compiler.reset()
        for x, thr in zip(inputs(torch.float32), VALUES, strict=True):
            of_torch(x, thr)
    assert fast.rt.stats().callables == plain.frame_count
    assert replayed == len(VALUES) - fast.rt.stats().callables


@pytest.mark.parametrize(
    ("compiler", "dtype"),
    [
        ("aot_eager", torch.float64),
        ("eager", torch.float16),
        ("eager", torch.bfloat16),
        ("aot_eager", torch.bfloat16),
        ("eager", torch.int64),
    ],
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_have_type_and_values_of_eager(compiled: Make, name: str, compiler: str, dtype: torch.dtype) -> None:
    if dtype is torch.int64 and ("in place" in name or name in ("item assignment", "masked_fill")):
        pytest.skip("not defined for integers")
    program = PROGRAMS[name]
    fast = compiled(program, dynamic=True, compiler=compiler)
    with torch.no_grad():
        for x, thr in zip(inputs(dtype, 6), VALUES[:18:3], strict=True):
            want = program(x.clone(), thr)
            torch.testing.assert_close(fast(x.clone(), thr), want, equal_nan=True)
    assert calls_with_graph(fast.rt) >= 3


@pytest.mark.parametrize(
    ("op", "program"),
    [
        ("dropout", lambda x, thr: F.dropout(x, thr, training=False)),
        ("layer_norm", lambda x, thr: F.layer_norm(x, (4,), eps=thr)),
        ("full", lambda x, thr: x + torch.full((4,), thr)),
        ("leaky_relu", lambda x, thr: F.leaky_relu(x * thr, thr)),
        ("add", lambda x, thr: torch.add(x, x, alpha=thr)),
        ("sym_int", lambda x, thr: x * int(thr * 100)),
    ],
)
def test_where_an_operator_takes_numbers_each_value_is_compiled_apart_and_that_is_said(
    compiled: Make, op: str, program: Any
) -> None:
    fast = compiled(program)
    with torch.no_grad():
        for x, thr in zip(inputs(torch.float32, 3), (0.1, 0.2, 0.3), strict=True):
            torch.testing.assert_close(fast(x, thr), program(x, thr))
    assert fast.rt.stats().callables == 3
    problem = fast.problem("each value is compiled apart").what
    assert "the float thr is a constant" in problem
    assert op in problem


def test_results_that_share_memory_share_it_beside_a_float(compiled: Make) -> None:
    def program(x: torch.Tensor, number: float) -> tuple[torch.Tensor, torch.Tensor]:
        moved = x + number
        return moved, moved[1:]

    fast = compiled(program, dynamic=True)
    for rows, number in zip([7, 8, 7, 8, 7, 8], VALUES, strict=False):
        whole, part = fast(torch.randn(rows), number)
        whole.fill_(5.0)
        assert part.tolist() == [5.0] * (rows - 1)
    assert fast.rt.stats().replayed > 0
