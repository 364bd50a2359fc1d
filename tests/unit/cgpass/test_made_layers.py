"""Padding of attention that a model writes out, and of torch's transformer layers, which run as one operator each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphpass as gp
from tests.unit.cgpass.leaks import is_padded
from tests.unit.models import module

pytestmark = pytest.mark.usefixtures("closed_runtimes")

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


def served(model: nn.Module, inputs: Inputs, compiler: str, dtype: torch.dtype = torch.float32) -> gp.GraphRuntime:
    runtime, close = gp.GraphRuntime(), 1e-5 if dtype is torch.float32 else 3e-2
    options = {"compiler": compiler, "dispatch": "auto", "runtime": runtime}
    fast = torch.compile(model.eval(), backend="cgpass", dynamic=True, options=options)
    with torch.no_grad():
        for step in range(9):
            x = torch.randn(2 + step % 3, 23 + 16 * (step % 3) - step // 3, 32, dtype=dtype)
            arguments = (x, *inputs(x))
            expected = model(*arguments)
            torch.testing.assert_close(fast(*arguments), expected, rtol=close, atol=close, equal_nan=True)
    return runtime


def check(runtime: gp.GraphRuntime) -> None:
    """Batch and length pad, and the features, of which Dynamo knows nothing, are no size."""
    assert [problem.what for problem in runtime.report().problems if "not padded" in problem.what] == []
    assert is_padded(runtime)
    assert runtime.stats().replayed == 6, "no size recurs, so a replay is a padded one"


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_attention_without_a_mask(dtype: torch.dtype, compiler: str) -> None:
    check(served(encoder(dtype), lambda x: (), compiler, dtype))


MASKED = {"key padding": HIDDEN, "causal": CAUSAL, "both": BOTH, "rows without keys": ALL}


@pytest.mark.parametrize("inputs", MASKED.values(), ids=MASKED)
def test_masks(inputs: Inputs) -> None:
    check(served(encoder(), inputs, "aot_eager"))


@pytest.mark.parametrize("inputs", [lambda x: (), HIDDEN], ids=["no mask", "mask"])
@pytest.mark.parametrize("settings", [{"need_weights": False}, {}, {"average_attn_weights": False}], ids=str)
def test_attention_by_itself(settings: dict[str, bool], inputs: Inputs) -> None:
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    check(served(module(attends, layer=layer, settings=settings), inputs, "aot_eager"))


@pytest.mark.parametrize("is_masked", [False, True], ids=["causal alone", "and a mask"])
def test_attention_that_a_model_normalises_again(is_masked: bool) -> None:
    """Weights of a softmax under a causal mask, divided by their sum over keys; results are pooled by the mask."""

    def model(x: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        scores = (x @ x.mT).masked_fill(~ones.tril(), -torch.inf)
        if is_masked:
            scores = scores.masked_fill(~visible[:, None], -torch.inf)
        weights = scores.softmax(-1)
        mixed = (weights / weights.sum(-1, keepdim=True)) @ x
        return (mixed * visible[..., None]).sum(1) / visible.sum(1, keepdim=True) if is_masked else mixed

    torch.compiler.reset()
    fast = torch.compile(model, backend="cgpass", options={"compiler": "aot_eager", "progress": False})
    generator = torch.Generator().manual_seed(0)
    sizes = [(rows, length) for length in (4, 7, 5, 9, 6, 11, 13) for rows in (2, 3, 5)]
    with torch.no_grad():
        for rows, length in sizes:
            x = torch.randn(rows, length, 8, generator=generator)
            visible = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=generator)
            torch.testing.assert_close(fast(x, visible), model(x, visible))
    assert gp.runtime_of(fast).stats().replayed == 6, "each size is new, so a replay is a padded one"
