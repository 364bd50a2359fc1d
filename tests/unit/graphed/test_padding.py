"""What padding may not do: reach a result, a buffer, an argument or the generator; each of these once went wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphpass as gp
from graphpass.errors import CaptureError
from tests.unit.graphed.oracle import agree, agree_with, call, each, full_counts, graphed, replays, rows
from tests.unit.models import module

SIZES = (5, 3, 5, 3, 6, 7, 3, 5, 6, 7, 2, 2, 2)


LADDER = ([2, 4, 8], {"x": 0})


def experts(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts the tokens of each expert in a buffer."""
    chosen = self.router(x).argmax(-1)
    self.tokens += (chosen[:, None] == torch.arange(3)).sum(0)
    return torch.einsum("nd,nde->ne", x, self.weights[chosen]), chosen


def of_experts() -> nn.Module:
    weights = nn.Parameter(torch.randn(3, 4, 4))
    return module(experts, router=nn.Linear(4, 3), weights=weights, tokens=torch.zeros(3, dtype=torch.long))


def normed(self: Any, x: torch.Tensor) -> Any:
    return self.norm(x)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "an integer result": lambda x: x.argmax(0),
    "an integer of each row": lambda x: x.argmax(1),
    "all of a bool": lambda x: (x > -1).all(),
    "a threshold": lambda x: torch.where(x.abs() > x.abs().mean(), x, torch.zeros_like(x)),
    "mean over the batch": lambda x: x - x.mean(0),
    "sort": lambda x: x.sort(0)[0],
    "reversed": lambda x: x.flip(0),
    "flattened": lambda x: x.t().flatten(),
    "positions": lambda x: torch.arange(x.shape[0]) / x.shape[0],
    "numbers of the size": lambda x: (x * 2, x.shape[0], 2 * x.shape[0] + 1),
    "random numbers": lambda x: x + torch.rand_like(x),
    "random numbers apart from the rows": lambda x: x + torch.rand(4),
}


def dropped(self: Any, x: torch.Tensor) -> Any:
    return self.drop(self.norm(x))


MODELS: dict[str, Callable[[], Callable[..., Any]]] = {
    **{name: lambda function=function: function for name, function in FUNCTIONS.items()},
    "expert counters": of_experts,
    "batch norm beside dropout": lambda: module(dropped, norm=nn.BatchNorm1d(4), drop=nn.Dropout(0.3)).train(),
    # The batch's own statistics in train mode, kept ones in eval mode.
    "batch norm in training": lambda: module(normed, norm=nn.BatchNorm1d(4)).train(),
    "batch norm in eval": lambda: module(normed, norm=nn.BatchNorm1d(4)).eval(),
}


@pytest.mark.parametrize("declared", [False, True], ids=["plain", "declared"])
@pytest.mark.parametrize("name", MODELS)
def test_padding_reaches_nothing(name: str, declared: bool) -> None:
    agree(MODELS[name], rows(*SIZES), *(LADDER if declared else ()))


@pytest.mark.parametrize("name", ["mean over the batch", "a threshold", "an integer result", "expert counters"])
def test_a_declared_size_that_is_not_proved_runs_exact_and_says_so_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    fast = agree(MODELS[name], rows(5, 3, 5, 3, 5), [4, 8], {"x": 0})
    warned = [r.getMessage() for r in caplog.records if r.name == "graphpass" and r.levelname == "WARNING"]
    assert len([text for text in warned if "num_tokens" in text]) == 1
    assert set(full_counts(fast)) <= {3, 5}


LEAKS = ("mean over the batch", "a threshold", "an integer result", "sort", "reversed")


@pytest.mark.parametrize("name", LEAKS)
def test_strictly_a_size_that_is_not_proved_is_an_error(name: str) -> None:
    fast = graphed(MODELS[name](), [4, 8], {"x": 0}, padding_check="strict")
    with pytest.raises(CaptureError, match="num_tokens cannot be padded") as raised:
        fast(torch.randn(5, 4))
    assert "test_padding.py" in raised.value.found, "with the user's line"


@torch.library.custom_op("graphpass_graphed_test::sees_a_context", mutates_args=())
def sees_a_context(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, float(gp.is_forward_context_available()))


sees_a_context.register_fake(torch.empty_like)


def test_ops_see_no_forward_context_that_nobody_has_set() -> None:
    assert replays(agree_with(lambda x: x + sees_a_context(x), rows(*SIZES))) > 0


def masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention within rows of a padded sequence; a score of NaN times a weight of zero is NaN."""
    x = gp.zero_padding(x, 2)
    bias = torch.zeros(mask.shape).masked_fill(~mask, -1e9)[:, None]
    return F.scaled_dot_product_attention(x, x, x, attn_mask=bias)


@pytest.mark.parametrize("contents", [float("nan"), 1e30])
def test_zero_padding_keeps_anything_out_of_keys_and_values(contents: float) -> None:
    dims = {name: {0: "num_reqs", 1: "seq_len"} for name in ("x", "mask")}
    calls = each(
        lambda shape: call(torch.randn(*shape, 8), torch.ones(shape, dtype=torch.bool)),
        ((3, 5), (3, 5), (1, 8), (2, 3), (4, 7), (3, 5), (2, 3)),
    )
    padding = {"padding": {"x": contents, "mask": False}}
    assert replays(agree_with(masked, calls, {"num_reqs": [2, 4], "seq_len": [4, 8]}, dims, **padding)) > 0


def mean_pooling(self: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Pools over a sequence, by its mask where it has one."""
    x = self.embedding(ids)
    if mask is None:
        return x.mean(1)
    weights = mask[:, :, None].to(x.dtype)
    return (x * weights).sum(1) / weights.sum(1).clamp(min=1)


TOKENS = ({"num_reqs": [2, 4], "seq_len": [8, 512]}, {"ids": {0: "num_reqs", 1: "seq_len"}})


def tokens(*shapes: tuple[int, int], masked: bool) -> Any:
    def made(shape: tuple[int, int]) -> Any:
        ids = torch.randint(30, shape)
        mask = torch.arange(shape[1])[None] < torch.randint(1, shape[1] + 1, (shape[0], 1))
        return call(ids, mask.long()) if masked else call(ids)

    return each(made, shapes)


def token_counts(fast: Any) -> set[int]:
    return {key.num_tokens for _, _, key in fast.runtime.counts()}


SHAPES = ((3, 510), (3, 510), (3, 300), (3, 20), (2, 5), (4, 511), (2, 7), (3, 10), (2, 5))


@pytest.mark.parametrize("masked", [False, True], ids=["without a mask", "with a mask"])
@pytest.mark.parametrize("padding", [{}, {"ids": 0, "mask": 0}], ids=["repeated", "declared"])
def test_mean_pooling(masked: bool, padding: dict[str, int]) -> None:
    """A first call that pads 2 of 512 positions says little about later ones."""
    given = padding if masked else {name: value for name, value in padding.items() if name == "ids"}
    model = lambda: module(mean_pooling, embedding=nn.Embedding(30, 4))  # noqa: E731
    fast = agree(model, tokens(*SHAPES, masked=masked), *TOKENS, padding=given)
    if masked and padding:
        assert token_counts(fast) <= {2 * 8, 4 * 8, 2 * 512, 4 * 512}


@pytest.mark.parametrize("width", [4, 8, 3], ids=["a capture size", "another capture size", "the real size"])
def test_a_width_that_equals_a_size_is_not_cut(width: int) -> None:
    def model(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.inner(x)
        return y, y.t(), self.inner.weight * 2

    calls = rows(3, 4, 7, 8, 3, 7, 3, width=width)
    agree(lambda: module(model, inner=nn.Linear(width, width)), calls, [4, 8], {"x": 0})


def test_a_table_of_the_batchs_size_by_chance_is_not_padded() -> None:
    calls = each(lambda n: call(torch.randn(n, 3), torch.randn(3, 3)), (3, 2, 3, 4, 3, 2, 4))
    agree_with(lambda x, table: x @ table + table.sum(), calls, *LADDER)


def counted(self: Any, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    self.steps.add_(1)
    total.mul_(2).add_(1)
    x.mul_(3)
    return x + self.steps + total


def test_the_run_time_check_leaves_no_trace() -> None:
    calls = each(lambda n: call(torch.randn(n, 4), torch.ones(1)), (5, 5, 3, 5, 3, 3))
    fast = agree(lambda: module(counted, steps=torch.zeros(1)), calls, [4, 8], {"x": 0})
    assert set(full_counts(fast)) == {4, 8}
    assert replays(fast) > 0


def looked_up(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return table[torch.arange(x.shape[0]) % table.shape[0]] * x


def test_what_was_equal_in_the_first_call_may_differ() -> None:
    shapes = ((3, 3), (5, 5), (3, 3), (5, 5), (3, 5), (5, 3), (3, 5), (5, 3), (3, 5), (5, 3), (5, 5))
    calls = each(lambda shape: call(torch.randn(shape[0], 2), torch.randn(shape[1], 2)), shapes)
    agree_with(looked_up, calls)
    agree_with(lambda x, table: (x * 2, table * 3), calls)
    agree_with(lambda x, table: (x * 2, table * 3), calls, [4, 8], {"x": 0})
