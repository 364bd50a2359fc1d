"""A leak of 1/n, which is smaller than rounding, is found before a wrong result is handed out; right programs pad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import graphpass as gp
from graphpass.regions import PaddedValue, register_padding_rule
from tests.unit.cgpass.leaks import BOTH, LEAKS, RIGHT, agree, around, is_padded, refusals

DECLARED = {"compiler": "eager", "dynamic_dims": {"x": 0}, "padding_check": "declared"}


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_refused(name: str) -> None:
    runtime = agree(LEAKS[name], around(1024), torch.float32)
    assert len(refusals(runtime)) == 1
    assert not is_padded(runtime)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [64, 1000, 100_000])
@pytest.mark.parametrize("name", BOTH)
def test_a_mean_is_refused_at_any_size_and_type(name: str, size: int, dtype: torch.dtype) -> None:
    runtime = agree(LEAKS[name], around(size), dtype)
    assert len(refusals(runtime)) == 1
    assert not is_padded(runtime)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RIGHT)
def test_what_does_not_leak_is_padded(name: str, dtype: torch.dtype) -> None:
    runtime = agree(RIGHT[name], around(64), dtype)
    assert refusals(runtime) == []
    assert is_padded(runtime)


def test_an_entry_that_cancels_out_is_no_leak() -> None:
    """A multiplication of 33 and of 64 rows rounds otherwise; of a mean of 0 only this rounding is left."""
    torch.manual_seed(0)
    up, down = torch.randn(512, 768), torch.randn(768, 512)

    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        means = x.cumsum(0) / torch.arange(1, x.shape[0] + 1)[:, None]  # not proved
        return F.layer_norm(F.gelu(x @ up) @ down, (512,)).mean(1), means

    fast = torch.compile(model, backend="cgpass", options={**DECLARED, "capture_sizes": [64]})
    with torch.no_grad():
        for size in (33, 37, 41, 33, 61):
            fast(torch.randn(size, 512))
    assert refusals(gp.runtime_of(fast)) == []
    assert is_padded(gp.runtime_of(fast))


@torch.library.custom_op("graphpasstest_leaks::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is torch.float64:
        raise NotImplementedError("doubled has no float64")
    return x * 2


@torch.library.custom_op("graphpasstest_leaks::rough", mutates_args=())
def rough(x: torch.Tensor) -> torch.Tensor:
    """Rounds otherwise for each number of rows."""
    return x * (1 + 1e-6 * torch.randn(x.shape, generator=torch.Generator().manual_seed(len(x)), dtype=x.dtype))


@torch.library.custom_op("graphpasstest_leaks::add_one", mutates_args=("x",))
def add_one(x: torch.Tensor) -> None:
    x.add_(1)


doubled.register_fake(torch.empty_like)
rough.register_fake(torch.empty_like)


def adds(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    add_one(y)
    return y.cumsum(0)


OWN_TYPE = {
    "right": (lambda x: doubled(x).cumsum(0), False),
    "a mean": (lambda x: doubled(x).mean(0), True),
    "rounding": (lambda x: rough(x).cumsum(0), False),
    "rounding and a mean": (lambda x: rough(x).mean(0), True),
    "a reinterpretation": (lambda x: (x * 2).view(torch.int32).view(torch.float32).flip(0).flip(0), False),
    "a write": (adds, False),
}


@pytest.mark.parametrize("name", OWN_TYPE)
def test_an_operator_without_float64_is_compared_in_its_own_type(name: str) -> None:
    function, leaks = OWN_TYPE[name]
    torch.manual_seed(0)
    fast = torch.compile(function, backend="cgpass", options={**DECLARED, "padding": {"x": 0.0}})
    with torch.no_grad():
        for size in (1015, 1015, 1017, 1015):
            x = torch.randn(size, 8) + 2
            torch.testing.assert_close(fast(x), function(x), rtol=1e-4, atol=1e-4)
    problems = [problem.what for problem in gp.runtime_of(fast).report().problems]
    assert any("no float64 for" in what for what in problems)
    assert bool(refusals(gp.runtime_of(fast))) == leaks
    assert is_padded(gp.runtime_of(fast)) != leaks


@torch.library.custom_op("graphpasstest_leaks::normed", mutates_args=())
def normed(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm(dim=1).amin()


normed.register_fake(torch.empty_like)
register_padding_rule("graphpasstest_leaks::normed", lambda call: PaddedValue(call.tensor("x").factors))


@pytest.mark.parametrize("function", [normed, lambda x: normed(x).nan_to_num(1.0, float("inf"))], ids=["nan", "inf"])
def test_what_is_not_finite_is_compared_with_a_run_without_padding(function: Callable[..., Any]) -> None:
    """A rule promises what is not true; the padding of a declared constant has no other contents."""
    fast = torch.compile(lambda x: function(x), backend="cgpass", options={"compiler": "eager", "padding": {"x": 0.0}})
    with torch.no_grad():
        for size in (5, 7, 6, 5, 7, 6, 5):
            x = torch.randn(size, 3)
            torch.testing.assert_close(fast(x), function(x))
    (refusal,) = refusals(gp.runtime_of(fast))
    assert "not finite" in refusal


def test_what_is_not_finite_without_padding_either_is_padded() -> None:
    fast = torch.compile(lambda x: (x / 0, x * 2), backend="cgpass", options={"compiler": "eager"})
    with torch.no_grad():
        for size in (5, 7, 6, 5, 7, 6, 5):
            x = torch.randn(size, 3).relu()
            torch.testing.assert_close(fast(x), (x / 0, x * 2), equal_nan=True)
    assert refusals(gp.runtime_of(fast)) == []
    assert is_padded(gp.runtime_of(fast))


class Counts(torch.nn.Module):
    """Writes to a counter, to a buffer and to its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        self.total.add_(x.flip(0).sum(0))
        x.mul_(2)
        return x + self.total


def test_a_run_in_float64_writes_to_copies() -> None:
    torch.manual_seed(0)
    model, reference = Counts(), Counts()
    fast = torch.compile(model, backend="cgpass", options={**DECLARED, "padding": {"x": 0.0}})
    with torch.no_grad():
        for size in (13, 13, 9, 13, 9, 11):
            x = torch.randn(size, 8)
            given = x.clone()
            torch.testing.assert_close(fast(given), reference(x))
            torch.testing.assert_close(given, x)
            torch.testing.assert_close(model.total, reference.total)
            assert model.calls == reference.calls
    assert refusals(gp.runtime_of(fast)) == []
    assert is_padded(gp.runtime_of(fast))
