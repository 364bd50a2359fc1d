"""Negative indices from data count from the real end of a declared size, also in calls that no check looks at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import graphpass as gp

SIZE, NUM_CALLS = 7, 14
UNCHECKED = {4, 6, 7, 8, 10, 11, 12}
"""Calls that no run-time check looks at: it looks at padded calls 1, 2, 4 and 8, and the first call has no graph."""


def put(x: Tensor, at: Any, value: Any) -> Tensor:
    x = x.clone()
    x[at] = value
    return x


def add(x: Tensor, at: Any, value: Any) -> Tensor:
    x[at] += value
    return x * 2


def mean_of_neighbours(x: Tensor, i: Tensor) -> Tensor:
    source, target = i, i.flip(0)
    total = torch.zeros_like(x).index_put((target,), x[source], accumulate=True)
    count = torch.zeros_like(x[:, 0]).index_put((target,), torch.ones_like(x[source, 0]), accumulate=True)
    return total / count.clamp(min=1)[:, None]


PROGRAMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "x[i]": lambda x, i: x[i] * 2,
    "x[i] of two dimensions": lambda x, i: x[i[:, None]],
    "x[i] of 32 bits": lambda x, i: x[i.int()],
    "x[i, j]": lambda x, i: x[i, i % 3],
    "x[i, 1:]": lambda x, i: x[i, 1:],
    "x[None, i]": lambda x, i: x[None, i],
    "x[..., i]": lambda x, i: x.t()[..., i],
    "x[:, i] of a sum of sizes": lambda x, i: torch.cat([x[:1] * 0, x]).t()[:, i],
    "x[arange, j]": lambda x, i: x[torch.arange(x.shape[0]), i[:1] % 3] + x[i][0, 0],
    "flattened": lambda x, i: x.flatten()[i * 2],
    "take": lambda x, i: torch.take(x, i * 2),
    "x[i] = number": lambda x, i: put(x, i, 1.0),
    "x[i, 1:] = tensor": lambda x, i: put(x, (i, slice(1, None)), x[i, 1:] * 2),
    "index_put": lambda x, i: x.index_put((i,), torch.ones(3), accumulate=True),
    "index_put_ by name": lambda x, i: x.clone().index_put_(indices=[i], values=torch.ones(3)),
    "index_fill": lambda x, i: x.index_fill(0, i, 7.0),
    "neighbours": mean_of_neighbours,
}


def run(function: Callable[..., Any], graphed: Any, device: str = "cpu") -> int:
    """How many of the calls with indices below zero in between differ from eager."""
    torch.manual_seed(0)
    different = 0
    with torch.no_grad():
        for call in range(1, NUM_CALLS + 1):
            x, i = torch.randn(SIZE, 3, device=device), torch.randint(0, SIZE, (4,), device=device)
            i = i - SIZE if call in UNCHECKED else i
            mine, other = x.clone(), x.clone()
            same = torch.equal(graphed(mine, i), function(other, i)) and torch.equal(mine, other)
            different += not same
    return different


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    torch._dynamo.reset()
    options = {"compiler": "aot_eager", "dynamic_dims": {"x": 0}, "on_fallback": "silent", "graph_bytes": 0, **options}
    return torch.compile(function, backend="cgpass", dynamic=True, options=options)


def num_padded(fast: Any) -> int:
    return sum(key.replays for key in gp.runtime_of(fast).report().figures.keys if key.padding)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_negative_indices_count_from_the_real_end(name: str, mode: str) -> None:
    fast = compiled(PROGRAMS[name], mode=mode)
    assert run(PROGRAMS[name], fast) == 0
    assert num_padded(fast) == NUM_CALLS - 1


def test_other_sizes_of_a_key_have_their_own_end() -> None:
    fast = compiled(PROGRAMS["x[i]"], capture_sizes=[8], compiler="aot_eager")
    with torch.no_grad():
        for size in (5, 8, 6, 7, 5, 8, 6, 3):
            x, i = torch.randn(size, 3), torch.randint(-size, size, (4,))
            assert torch.equal(fast(x, i), x[i] * 2)
    assert num_padded(fast) >= 5


def unproved(fast: Any, verdict: str = "unproved") -> list[str]:
    records = gp.runtime_of(fast).report().figures.callables
    return [size.remedy for record in records for size in record.sizes if size.verdict == verdict and size.remedy]


@pytest.mark.parametrize(
    ("function", "compiler"),
    [
        (PROGRAMS["x[i]"], "eager"),
        (lambda x, i: torch.vmap(lambda row: x[row])(i), "eager"),
        (lambda x, i: add(x, i, 1), "aot_eager"),
    ],
    ids=["without an aten graph", "inside vmap", "where an argument is written"],
)
def test_an_index_that_is_not_rewritten_is_not_padded(function: Callable[..., Any], compiler: str) -> None:
    fast = compiled(function, compiler=compiler)
    assert run(function, fast) == 0
    assert num_padded(fast) == 0


def test_an_index_into_flattened_sizes_is_not_padded_and_its_remedy_works() -> None:
    def flattened(x: Tensor, i: Tensor) -> Tensor:
        return x.flatten()[i % 3]

    sizes = {"x": {0: "rows", 1: "columns"}}
    fast = compiled(flattened, mode="FULL", dynamic_dims=sizes, capture_sizes={"rows": [8], "columns": [4]})
    assert run(flattened, fast) == 0
    assert any(text.startswith("index each size by itself: `x[i, j]`") for text in unproved(fast))

    def followed(x: Tensor, i: Tensor) -> Tensor:
        return x[0, i % 3]

    fast = compiled(followed, mode="FULL", dynamic_dims=sizes, capture_sizes={"rows": [8], "columns": [4]})
    assert run(followed, fast) == 0
    assert unproved(fast) == []
    assert num_padded(fast) == NUM_CALLS - 1
