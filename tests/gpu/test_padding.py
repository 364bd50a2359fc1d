"""Padding on a GPU: leaks, floats that are inputs, negative indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphpass as gp
from tests.observed import calls_with_graph
from tests.unit.cgpass.leaks import LEAKS, RIGHT, agree, around, is_padded, refusals
from tests.unit.cgpass.test_negative_indices import NUM_CALLS, compiled, num_padded, run
from tests.unit.cgpass.test_negative_indices import PROGRAMS as INDEXING

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("closed_runtimes")]

LEAKING = (
    "mean pooling",
    "mean",
    "softmax",
    "batch norm in training",
    "centred in place",
    "attention of a query",
    "relative positions",
)
STAY = ("masked attention", "multilayer perceptron", "convolution of each row", "mean pooling with a trash row")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.mark.parametrize("name", LEAKING)
def test_what_inductor_makes_of_a_leak_is_right(name: str, cuda: torch.device) -> None:
    """It is padded, or exact."""
    runtime = agree(LEAKS[name], around(1024), torch.float32, device=str(cuda), compiler="inductor")
    assert refusals(runtime) == []


@DTYPES
@pytest.mark.parametrize("name", STAY)
def test_what_does_not_leak_is_padded(name: str, dtype: torch.dtype, cuda: torch.device) -> None:
    runtime = agree(RIGHT[name], around(1024), dtype, device=str(cuda), compiler="inductor")
    assert refusals(runtime) == []
    assert is_padded(runtime)


# Python floats that vary are filled into tensors on the GPU, and the graphs read those.


PROGRAMS: dict[str, Callable[[torch.Tensor, float], Any]] = {
    "arithmetic": lambda x, thr: (x * thr - thr) / (thr * 2 + 1) + thr / x,
    "in place": lambda x, thr: x.clone().mul_(1 - thr * 1e-4).add_(thr),
    "comparison": lambda x, thr: torch.where(x > thr, x, thr).clamp(-thr, 2.0),
    "a scalar": lambda x, thr: x.sum() * thr,
    "a result": lambda x, thr: (x * thr, thr * 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_replays_read_the_floats_of_their_call(name: str, compiler: str, dtype: torch.dtype) -> None:
    program, runtime = PROGRAMS[name], gp.GraphRuntime()
    options = {"compiler": compiler, "runtime": runtime, "dispatch": "auto"}
    fast = torch.compile(program, backend="cgpass", dynamic=True, options=options)
    # Inductor rounds to 16 bits once, eager after each operation.
    close = {"rtol": 1e-2, "atol": 1e-2} if compiler == "inductor" and dtype is not torch.float32 else {}
    with torch.no_grad():
        for step in range(12):
            x, thr = torch.rand(64, 32, device="cuda").add(0.5).to(dtype), 0.1 + 0.07 * step
            torch.testing.assert_close(fast(x, thr), program(x, thr), **close)
    if name != "a result":  # a number that the function returns is read on the host
        assert len(runtime.callables()) == 1
        assert calls_with_graph(runtime) == 11


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_float_is_not_rounded_to_16_bits_before_it_is_used(dtype: torch.dtype) -> None:
    """1 - 1e-4 is 1 in bfloat16: a product with it would change nothing."""
    program = lambda x, thr: x * (1 - thr)  # noqa: E731
    fast = torch.compile(program, backend="cgpass", dynamic=True, options={"compiler": "eager"})
    x = torch.rand(4096, device="cuda", dtype=dtype)
    with torch.no_grad():
        for step in range(1, 7):
            assert torch.equal(fast(x, step * 1e-4), program(x, step * 1e-4))


# Negative indices from data on real graphs: the real size is an input on the device of the index.


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("name", ["x[i]", "x[i, j]", "take", "index_fill"])
def test_negative_indices_count_from_the_real_end(name: str, mode: str, compiler: str) -> None:
    fast = compiled(INDEXING[name], compiler=compiler, mode=mode)
    assert run(INDEXING[name], fast, "cuda") == 0
    assert num_padded(fast) == NUM_CALLS - 1
