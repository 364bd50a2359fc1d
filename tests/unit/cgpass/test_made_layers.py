"""Padding of torch's own transformer layers, which run as one operator each where no gradient is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphpass as gp
from tests.unit.cgpass.leaks import is_padded, refusals
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


def test_a_layer_whose_batch_alone_is_padded_stays_one_operator() -> None:
    model, runtime = encoder(), gp.GraphRuntime()
    options = {"compiler": "aot_eager", "dispatch": "auto", "runtime": runtime}
    fast = torch.compile(model, backend="cgpass", dynamic=False, options=options)
    with torch.no_grad():
        for rows in (6, 5, 8, 7):
            x = torch.randn(rows, 9, 32)
            torch._dynamo.mark_dynamic(x, 0)
            assert torch.equal(fast(x), model(x))
    assert is_padded(runtime)
    assert refusals(runtime) == []
