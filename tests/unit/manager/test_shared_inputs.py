"""Arguments that nobody declared: which of their dimensions are padded, whatever the sizes of the first call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphpass as gp
from graphpass.errors import ShapeError


def gathered(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mask is read by index, as Hugging Face models do: no guard ties its sizes to those of ``ids``."""
    rows, cols = torch.arange(ids.shape[0])[:, None], torch.arange(ids.shape[1])
    return torch.where(mask[rows, cols], ids, -1)


def graphed(model: Any, sizes: Any = (2, 4, 8), dims: Any = None, **options: Any) -> gp.GraphedModel:
    return gp.graphed(
        model, sizes if isinstance(sizes, dict) else list(sizes), dims or {"x": 0}, compiler="eager", **options
    )


@pytest.mark.parametrize("first", [(3, 5), (1, 1), (2, 8), (1, 5), (5, 5), (8, 1)])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_mask_that_is_gathered_from_is_padded_along(first: tuple[int, int], mode: str) -> None:
    fields = {0: "num_reqs", 1: "seq_len"}
    fast = graphed(gathered, {"num_reqs": [2, 4, 8], "seq_len": [4, 8]}, {"ids": fields}, mode=mode)
    for shape in (first, (3, 5), (1, 1), (4, 7), (2, 2), (8, 8)):
        ids, mask = torch.randint(0, 9, shape), torch.rand(*shape) > 0.5
        assert torch.equal(fast(ids, mask), gathered(ids, mask)), shape
    assert fast.runtime.stats().captured > 0


@pytest.mark.parametrize("first", [1, 2, 3, 4])
def test_the_size_of_the_first_call_does_not_matter(first: int) -> None:
    fast = graphed(lambda x, s: x * s[:, None])
    for n in (first, 3, 1, 4, 2):
        x, s = torch.randn(n, 2), torch.randn(n)
        assert torch.equal(fast(x, s), x * s[:, None]), n


@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_mask_with_dimensions_of_size_one_keeps_them(first: int) -> None:
    def scores(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x[:, None, :, None].expand(-1, 3, -1, 5) + mask, -1).sum((1, 3))

    fast = graphed(scores)
    for n in (first, 3, 1, 4):
        x, mask = torch.randn(n, 6), torch.randn(n, 1, 1, 5)
        torch.testing.assert_close(fast(x, mask), scores(x, mask))


@pytest.mark.parametrize(
    "model",
    [
        lambda x, table: x @ table,
        lambda x, table: x.sum(1, keepdim=True) * table.mean(),
        lambda x, table: x + table.sum(),
        lambda x, table: x[:, :1] * table.amax(),
        lambda x, table: torch.nn.functional.embedding(x.abs().long().clamp(max=2), table).sum((1, 2)),
    ],
    ids=["product", "mean", "sum", "maximum", "embedding"],
)
def test_a_table_of_the_batchs_size_by_chance_is_not_padded(model: Any) -> None:
    fast = graphed(model)
    for n in (3, 2, 3, 4):
        x, table = torch.randn(n, 3), torch.randn(3, 3)
        torch.testing.assert_close(fast(x, table), model(x, table))


def test_learning_leaves_inputs_and_random_numbers_alone() -> None:
    def noisy(x: torch.Tensor, mask: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total.add_(1)
        rows = torch.arange(x.shape[0])
        return torch.where(mask[rows], x + torch.rand_like(x), total)

    fast = graphed(noisy)
    total = torch.zeros(2)
    torch.manual_seed(3)
    fast(torch.ones(3, 2), torch.ones(3, 1, dtype=torch.bool), total)
    assert torch.equal(total, torch.ones(2))
    state = torch.get_rng_state()
    torch.manual_seed(3)
    torch.rand(4, 2)  # the padded batch
    assert torch.equal(torch.get_rng_state(), state)


def test_another_size_of_what_is_not_padded_is_refused_by_name() -> None:
    fast = graphed(lambda x, w: x @ w)
    fast(torch.ones(2, 3), torch.ones(3, 6))
    with pytest.raises(ShapeError, match=r"'w'.*expected .*\(3, 6\).*found .*\(3, 7\)"):
        fast(torch.ones(2, 3), torch.ones(3, 7))
    with pytest.raises(ShapeError, match=r"'w'.*expected .*\(3, 6\).*found .*\(3, 7\)"):
        fast(torch.ones(4, 3), torch.ones(3, 7))


def test_a_table_is_no_batch_after_all() -> None:
    def looked_up(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return table[torch.arange(x.shape[0])] * x

    fast = graphed(looked_up)
    x, table = torch.randn(3, 2), torch.randn(3, 2)
    assert torch.equal(fast(x, table), looked_up(x, table))
    x, table = torch.randn(2, 2), torch.randn(5, 2)
    assert torch.equal(fast(x, table), looked_up(x, table))
