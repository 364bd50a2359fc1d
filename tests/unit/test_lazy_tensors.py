"""Conjugates and negatives are lazy in torch: a bit of the tensor says so, and its memory holds the other numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphpass as gp

Function = Callable[[torch.Tensor], Any]
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.cuda))
INPUTS: dict[str, Function] = {
    "plain": lambda x: x,
    "conjugate": lambda x: x.conj(),
    "negative": lambda x: x.conj().imag,
    "real": lambda x: x.real.clone(),
}


def both_conjugates(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 2
    return y, y.conj()


def parts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 2
    return y, y.conj().imag, y.real


FUNCTIONS: dict[str, Function] = {
    "reads the real part": lambda x: x.real * 2,
    "reads the imaginary part": lambda x: x.imag + 1,
    "computes": lambda x: x * 3,
    "multiplies matrices": lambda x: x @ x.mT,
    "writes": lambda x: x.mul_(2),
    "returns a conjugate": lambda x: (x * 2)[:, 1:].conj(),
    "returns a negative": lambda x: torch._neg_view(x * 2)[:, :2],
    "returns its input's conjugate": lambda x: (x * 2, x.conj()),
    "returns its input's parts": lambda x: (x * 2, x.imag, x.conj().imag),
    "returns both conjugates": both_conjugates,
    "returns the parts": parts,
}
OF_COMPLEX = (FUNCTIONS["reads the imaginary part"], FUNCTIONS["returns its input's parts"], parts)


def numbers(rows: int, device: str) -> torch.Tensor:
    return torch.randn(rows, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(rows)).to(device)


def assert_same(found: Any, expected: Any) -> None:
    """Same values, and the same bits: later views depend on them."""
    for one, other in zip(*([x] if isinstance(x, torch.Tensor) else x for x in (found, expected)), strict=True):
        assert (one.is_conj(), one.is_neg()) == (other.is_conj(), other.is_neg())
        torch.testing.assert_close(one.resolve_conj().resolve_neg(), other.resolve_conj().resolve_neg())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_graphs_see_and_return_lazy_tensors(function: Function, compiler: str, device: str) -> None:
    for made in INPUTS.values():
        if function in OF_COMPLEX and not made(numbers(2, device)).is_complex():
            continue
        torch.compiler.reset()
        fast = gp.graphed(function, compiler=compiler, progress=False)
        for _ in range(3):
            given, same = made(numbers(4, device)), made(numbers(4, device))
            assert_same(fast(given), function(same))
            assert torch.equal(given, same)
        assert fast.runtime.stats().replayed == 2
        fast.close()


@pytest.mark.parametrize("device", DEVICES)
def test_inductor_reads_a_negative_as_it_lies_in_memory(device: str) -> None:
    torch.compiler.reset()
    fast = gp.graphed(lambda x: x * 3, progress=False)
    for _ in range(3):
        x = numbers(4, device).conj().imag
        torch.testing.assert_close(fast(x), x * 3)
    fast.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("function", "is_complex"),
    [
        (both_conjugates, True),
        (parts, True),
        (FUNCTIONS["returns its input's parts"], True),
        (lambda x: (x * 2, torch.view_as_complex(x).conj()), False),
    ],
    ids=["both conjugates", "parts", "an input's parts", "an input as complex numbers"],
)
def test_padded_results_are_cut(function: Function, is_complex: bool, device: str) -> None:
    torch.compiler.reset()
    options = {"on_fallback": "silent", "compiler": "eager", "progress": False}
    fast = gp.graphed(function, [4, 8], {"x": 0}, **options)
    for rows in (4, 4, 3, 3, 7, 5, 5):
        x = numbers(rows, device) if is_complex else torch.randn(rows, 2, device=device)
        found, expected = fast(x), function(x)
        assert_same(found, expected)
        assert [y.stride() for y in found] == [y.stride() for y in expected]
    assert {key.num_tokens for _, _, key in fast.runtime.counts()} == {4, 8}
    fast.close()
