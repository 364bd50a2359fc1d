"""Padding of attention that a model writes out, and of torch's transformer layers, which run as one operator each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.cgpass.attended import Make
from tests.unit.compiled import agrees
from tests.unit.models import module

Inputs = Callable[[Tensor], tuple[Any, ...]]
HIDDEN: Inputs = lambda x: (None, torch.arange(x.shape[1]).ge(3 + torch.arange(len(x))[:, None]))  # noqa: E731
CAUSAL: Inputs = lambda x: (torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), None, False)  # noqa: E731
BOTH: Inputs = lambda x: (CAUSAL(x)[0], HIDDEN(x)[1], False)  # noqa: E731
ALL: Inputs = lambda x: (None, torch.ones(x.shape[:2], dtype=torch.bool))  # noqa: E731


def encoder(dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **settings)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval().to(dtype)


def attends(self: Any, x: Tensor, visible: Any = None, hidden: Any = None) -> Any:
    """``nn.MultiheadAttention`` by itself, with its weights."""
    given = {"attn_mask": visible, "key_padding_mask": hidden}
    return self.layer(x, x, x, **given, **self.settings)[: 1 + self.settings.get("need_weights", True)]


def check(
    compiled: Make, model: nn.Module, inputs: Inputs, compiler: str = "aot_eager", dtype: torch.dtype = torch.float32
) -> None:
    """Batch and length pad, and the features, of which Dynamo knows nothing, are no size."""
    fast, close = compiled(model.eval(), dynamic=True, compiler=compiler), 1e-5 if dtype is torch.float32 else 3e-2
    for step in range(9):
        x = torch.randn(2 + step % 3, 23 + 16 * (step % 3) - step // 3, 32, dtype=dtype)
        arguments = (x, *inputs(x))
        with torch.no_grad():
            expected = model(*arguments)
        agrees(fast(*arguments), expected, rtol=close, atol=close, equal_nan=True)
    assert [problem.what for problem in fast.problems if "not padded" in problem.what] == []
    assert fast.is_padded
    assert fast.rt.stats().replayed == 6, "no size recurs, so a replay is a padded one"


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_attention_without_a_mask(compiled: Make, dtype: torch.dtype, compiler: str) -> None:
    check(compiled, encoder(dtype), lambda x: (), compiler, dtype)


MASKED = {"key padding": HIDDEN, "causal": CAUSAL, "both": BOTH, "rows without keys": ALL}


@pytest.mark.parametrize("inputs", MASKED.values(), ids=MASKED)
def test_masks(compiled: Make, inputs: Inputs) -> None:
    check(compiled, encoder(), inputs)


@pytest.mark.parametrize("inputs", [lambda x: (), HIDDEN], ids=["no mask", "mask"])
@pytest.mark.parametrize("settings", [{"need_weights": False}, {}, {"average_attn_weights": False}], ids=str)
def test_attention_by_itself(compiled: Make, settings: dict[str, bool], inputs: Inputs) -> None:
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    check(compiled, module(attends, layer=layer, settings=settings), inputs)


@pytest.mark.parametrize("is_masked", [False, True], ids=["causal alone", "and a mask"])
def test_attention_that_a_model_normalises_again(compiled: Make, is_masked: bool) -> None:
    """Weights of a softmax under a causal mask, divided by their sum over keys; results are pooled by the mask."""

    def model(x: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        scores = (x @ x.mT).masked_fill(~ones.tril(), -torch.inf)
        if is_masked:
            scores = scores.masked_fill(~visible[:, None], -torch.inf)
        weights = scores.softmax(-1)
        mixed = (weights / weights.sum(-1, keepdim=True)) @ x
        return (mixed * visible[..., None]).sum(1) / visible.sum(1, keepdim=True) if is_masked else mixed

    fast = compiled(model, compiler="aot_eager")
    for rows, length in [(rows, length) for length in (4, 7, 5, 9, 6, 11, 13) for rows in (2, 3, 5)]:
        visible = torch.arange(length) < torch.randint(1, length + 1, (rows, 1))
        fast.serve([(torch.randn(rows, length, 8), visible)])
    assert fast.rt.stats().replayed == 6, "each size is new, so a replay is a padded one"
