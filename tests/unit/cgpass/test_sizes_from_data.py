"""Outputs whose size depends on data are returned whole, beside other sizes that are padded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from graphpass import GraphRuntime
from tests.observed import Observed

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


@pytest.fixture(autouse=True)
def _whole_graphs() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("check", ["prove", "declared"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_of_ragged_sizes_are_those_of_eager(rt: GraphRuntime, name: str, check: str, compiler: str) -> None:
    program, is_padded = PROGRAMS[name]
    options = {"compiler": compiler, "runtime": rt, "dispatch": "auto", "padding_check": check}
    options |= {"dynamic_dims": {"x": {1: "length"}}, "on_fallback": "silent"}
    fast = torch.compile(program, backend="cgpass", dynamic=True, fullgraph=True, options=options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for rows, length in CALLS:
            x = torch.randn(rows, length, 4, generator=generator)
            n = torch.randint(1, 4, (rows,), generator=generator)
            x_eager, n_eager = x.clone(), n.clone()
            want = Observed.of(results=program(x_eager, n_eager), x=x_eager, n=n_eager)
            got = Observed.of(results=fast(x, n), x=x, n=n)
            assert got.difference(want) is None, f"{rows} rows of {length}"
    (record,) = rt.callables()
    if check == "prove":
        assert {size.field: size.is_padded for size in record.sizes}["length"] == is_padded
    captured_regions = [region for region in record.regions if region.kind == "captured"]
    assert bool(captured_regions) == any(counts.replayed for counts in rt.counts().values())
