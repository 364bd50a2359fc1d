"""What the sizes of a key are: numbers of its input by position, and sizes that data decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphpass import BatchDescriptor
from graphpass.errors import CaptureError, ShapeError
from tests.observed import Observed
from tests.unit.cgpass.attended import COMPILERS, Attended, Make
from tests.unit.compiled import BOTH


@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize("how", ["only symbol", "marked", "declared"])
def test_five_rows_are_no_eight_tokens(keyed: Make, mode: str, how: str) -> None:
    def rows(number: int) -> tuple[torch.Tensor]:
        x = torch.randn(number, 6)
        if how == "marked":
            torch._dynamo.mark_dynamic(x, 0)
        return (x,)

    options: dict[str, Any] = {"dynamic_dims": {"x": 0}} if how == "declared" else {}
    fast = keyed(Attended().eval(), make=rows, dynamic=None if how == "marked" else True, **options)
    for size in (5, 16, 7):
        with pytest.raises(ShapeError, match="'x'") as raised:
            fast.at(mode, 8, *rows(size), capture=True)
        assert str(size) in raised.value.found
        assert fast.captured == 0
    fast.capture(mode, sizes=[8])
    with pytest.raises(ShapeError):
        fast.at(mode, 8, *rows(5))
    fast.check(mode, sizes=[8])


@pytest.mark.parametrize("dims", [{"input": 0}, {}], ids=["a name that no input has", "no names"])
def test_rows_that_are_not_padded_are_the_error_of_the_call_that_has_them(keyed: Make, dims: dict[str, int]) -> None:
    """The loop of the guide: Dynamo calls the input of ``nn.Sequential`` ``args[0]``."""
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU()).eval()
    fast = keyed(model, dynamic=True, splitting_ops=[], dynamic_dims=dims)
    for capture in (True, False):
        with pytest.raises(ShapeError, match="pad the input to the descriptor's size"):
            fast.at("FULL", 8, torch.randn(5, 6), capture=capture)
        fast.check("FULL", sizes=[8], capture=capture)


BY_REQUEST: Callable[..., Any] = lambda x: x.sum(1, keepdim=True) + x  # noqa: E731
REQUESTS: Callable[..., Any] = lambda n: (torch.randn(n, 3, 2),)  # noqa: E731


def images(n: int) -> BatchDescriptor:
    return BatchDescriptor(16, extra=(("images", n),))


@pytest.mark.parametrize(
    ("model", "make", "keys"),
    [
        (
            lambda x: torch.cat([x, x]).relu() * 2,
            lambda n: (torch.randn(n, 6).mul(2),),
            {4: BatchDescriptor(4), 8: BatchDescriptor(8)},
        ),
        (
            lambda x, y: x.repeat_interleave(2, 0) + y,
            lambda n: (torch.randn(n), torch.randn(2 * n)),
            {4: BatchDescriptor(8), 3: BatchDescriptor(6)},
        ),
        (BY_REQUEST, REQUESTS, {4: BatchDescriptor(12, num_reqs=4, uniform=True), 5: BatchDescriptor(15)}),
        (BY_REQUEST, REQUESTS, {4: images(4), 5: images(5)}),
    ],
    ids=["the size", "twice the size", "a product with fixed sizes", "another field"],
)
def test_what_a_key_counts_may_be_another_number_of_the_input(
    keyed: Make, model: Callable[..., Any], make: Any, keys: dict[int, BatchDescriptor]
) -> None:
    fast = keyed(model, make=make, key=keys.__getitem__, dynamic=None)
    marked = make(next(iter(keys)))
    for tensor in marked:
        torch._dynamo.mark_dynamic(tensor, 0)
    fast.at("FULL", next(iter(keys)), *marked, capture=True)
    for size in keys:
        fast.capture("FULL", sizes=[size])
        with pytest.raises((ShapeError, CaptureError)):
            fast.at("FULL", size, *make(7), capture=True)
    fast.check("FULL", sizes=list(keys))
    assert fast.uses("captured", "static_sets") == {(1, 1)}


# Outputs whose size depends on data are returned whole, beside other sizes that are padded.


W = torch.linspace(-1, 1, 12).reshape(3, 4)
CALLS = [(rows, length) for length in (5, 5, 7, 6, 9, 10, 11) for rows in (6, 5, 6)] * 2

# name -> (function of (x, n), whether the second dimension of x is padded).
PROGRAMS: dict[str, tuple[Callable[..., Any], bool]] = {
    "rows by a mask": (lambda x, n: F.linear(x[:, 0], W)[n > 1], True),
    "rows of all": (lambda x, n: F.linear(x, W)[n > 1], False),
    "rows and their views": (lambda x, n: (sel := F.linear(x[:, 0], W)[n > 1], sel[:, 1:], sel[..., 0]), True),
    "nonzero": (lambda x, n: (torch.nonzero(n > 1), x * 2), True),
    "nonzero of padding": (lambda x, n: (torch.nonzero(x[..., 0] > 0), x * 2), False),
    "nonzero, its count": (lambda x, n: ((i := torch.nonzero(n > 1)), i.shape[0], x.relu()), True),
    "count times a size": (lambda x, n: (torch.nonzero(n > 1).shape[0] * x.shape[1], x.relu()), False),
    "masked_select": (lambda x, n: (torch.masked_select(n, n > 0), x + 1), True),
    "masked_select of padding": (lambda x, n: (torch.masked_select(x, x > 0), x + 1), False),
    "unique": (lambda x, n: (*torch.unique(n, return_inverse=True), F.linear(x, W)), True),
    "unique of padding": (lambda x, n: (torch.unique(x.round()), x + 1), False),
    "repeat_interleave": (lambda x, n: (x.repeat_interleave(n, 0), F.linear(x, W)), False),
    "repeat_interleave of rows": (lambda x, n: (x[:, 0].repeat_interleave(n, 0), F.linear(x, W)), False),
    "a product over both": (lambda x, n: (torch.nonzero(n > 1).float() @ x[:1].sum(2), x + 1), False),
    "a slice": (lambda x, n: (n[: n.sum().item() % 3 + 1], x + 1), True),
    "a slice of the input": (lambda x, n: (x[: n.sum().item() % 3 + 1, 0], x + 1), False),
    "a slice from the end": (lambda x, n: (F.linear(x, W)[:, n.sum().item() % 3 - 1 :], x + 1), False),
    "a written input": (lambda x, n: x.add_(1)[n > 1], False),
}


@pytest.fixture
def whole_graphs() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


@pytest.mark.usefixtures("whole_graphs")
@COMPILERS
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_of_ragged_sizes_are_those_of_eager(compiled: Make, name: str, compiler: str) -> None:
    program, is_padded = PROGRAMS[name]
    options: dict[str, Any] = {"compiler": compiler, "dynamic_dims": {"x": {1: "length"}}}
    fast = compiled(program, dynamic=True, fullgraph=True, on_fallback="silent", **options)
    generator = torch.Generator().manual_seed(0)
    for rows, length in CALLS:
        x = torch.randn(rows, length, 4, generator=generator)
        n = torch.randint(1, 4, (rows,), generator=generator)
        x_eager, n_eager = x.clone(), n.clone()
        want = Observed.of(results=program(x_eager, n_eager), x=x_eager, n=n_eager)
        got = Observed.of(results=fast(x, n), x=x, n=n)
        assert got.difference(want) is None, f"{rows} rows of {length}"
    (record,) = fast.rt.callables()
    assert fast.padded_sizes["length"] == is_padded
    is_captured = any(region.kind == "captured" for region in record.regions)
    assert is_captured == (fast.rt.stats().replayed > 0)
