"""What graphed refuses, by typed errors; what compiles late; errors of the model that stay what they are."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import graphpass as gp
from graphpass import GraphpassError
from graphpass.compat import dynamo
from graphpass.errors import CaptureError, OptionError
from tests.unit.graphed.oracle import graphed
from tests.unit.models import module


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"capture_sizes": [2.5]}, "capture_sizes"),
        ({"dynamic_dims": 3}, "dynamic_dims"),
        ({"padding": {"x": "mirror"}}, "padding"),
        ({"paddings": {}}, "unknown option 'paddings'"),
        ({"padding_check": "sometimes"}, "padding_check"),
        ({"cut": {0: {}}}, "unknown option 'cut'"),
        ({"runtime": 3}, "runtime"),
        ({"warm_start": 3}, "warm_start"),
        ({"dump_dir": 3}, "dump_dir"),
    ],
    ids=str,
)
def test_bad_options_are_refused_when_it_is_made(options: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        gp.graphed(nn.Linear(2, 2), **options)


@pytest.mark.parametrize("model", [5, "layer", None])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(OptionError, match="no model") as raised:
        gp.graphed(model)
    assert raised.value.found == repr(model)


def test_without_the_backend_it_says_what_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "registered_backend", lambda name: None)
    with pytest.raises(OptionError, match="no backend 'cgpass'") as raised:
        gp.graphed(nn.Linear(2, 2))
    assert raised.value.remedy == "import cgpass"


def dual(f: Any, x: torch.Tensor) -> Any:
    with torch.autograd.forward_ad.dual_level():
        return f(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


INSIDE = {"forward-mode AD": "under forward-mode AD"}
TRANSFORMS: dict[str, Any] = {
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda t: f(t).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "forward-mode AD": dual,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("was_called", [False, True])
def test_function_transforms_around_it_are_refused(transform: str, was_called: bool) -> None:
    fast, x = graphed(lambda x: x.sin()), torch.randn(3, 4)
    for _ in range(3 * was_called):
        fast(x)
    with pytest.raises(CaptureError, match=INSIDE.get(transform, "under")) as raised:
        TRANSFORMS[transform](fast, x)
    assert "transform the model itself" in raised.value.remedy or transform in INSIDE
    torch.testing.assert_close(fast(x), x.sin())


def test_errors_of_ours_are_raised_as_themselves() -> None:
    fast = graphed(lambda x: x.sin(), splitting_ops=["aten::no_such_op"])
    with pytest.raises(GraphpassError, match="no_such_op"):
        fast(torch.randn(3))


def test_errors_of_the_model_are_raised_as_themselves() -> None:
    class MineError(Exception):
        pass

    def model(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 2:
            raise MineError("two rows")
        return x.sin()

    fast = graphed(model)
    for n in (3, 2, 3, 2, 3):
        with pytest.raises(MineError, match="two rows") if n == 2 else nullcontext():
            fast(torch.randn(n))


def test_what_torch_cannot_trace_is_a_typed_error_that_is_a_runtime_error() -> None:
    fast = graphed(nn.Linear(4, 4))
    with pytest.raises(RuntimeError) as raised:
        fast(torch.randn(3, 5))
    assert isinstance(raised.value, CaptureError)
    fast(torch.randn(3, 4))
    with pytest.raises(RuntimeError):
        fast(torch.randn(3, 5))


@pytest.mark.parametrize(
    ("sizes", "dims", "says"),
    [([2, 4], {"inptu": 0}, "dynamic_dims names inptu"), ({"inptu[0]": [2, 4]}, None, "capture_sizes names inptu")],
)
def test_a_name_that_no_input_has_is_a_warning(
    sizes: Any, dims: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    fast = gp.graphed(nn.Linear(4, 4), sizes, dims)
    fast(torch.randn(3, 4))
    (record,) = [record for record in caplog.records if record.levelname == "WARNING" and record.name == "graphpass"]
    assert f"{says}, and the graph's inputs are input" in record.getMessage()
    assert says in str(fast.report())


# Calls that compile, or run uncompiled, after the capture: an error where the options ask for it, else counted.


@pytest.mark.parametrize(
    ("args", "found"),
    [
        ((torch.randn(1, 4),), "x.size()"),
        ((torch.randn(3, 4).double(),), "dtype mismatch"),
        ((torch.randn(3, 4), torch.ones(4)), "2 positional arguments"),
    ],
    ids=["size of one", "another type", "another form"],
)
def test_a_call_that_compiles_after_the_capture_is_an_error(args: tuple[torch.Tensor, ...], found: str) -> None:
    fast = strict([2, 4, 8])
    fast.capture(torch.randn(8, 4))
    num_compiled = len(fast.runtime.callables())
    for _ in range(2):
        with pytest.raises(CaptureError, match="compiles while the model serves") as raised:
            fast(*args)
        assert found in raised.value.found
    x = torch.randn(3, 4)
    torch.testing.assert_close(fast(x), fast.layer(x))
    assert len(fast.runtime.callables()) == num_compiled


def scaled_layer(self: Any, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    return self.layer(x) if scale is None else self.layer(x) * scale


def strict(sizes: list[int], on_fallback: str = "error") -> Any:
    model = module(scaled_layer, layer=nn.Linear(4, 4)).eval()
    return graphed(model, sizes, {"x": 0}, on_fallback=on_fallback)


@pytest.mark.parametrize("args", [(torch.randn(1, 4),), (torch.randn(3, 4), torch.ones(4))], ids=["size", "form"])
def test_a_call_that_compiles_after_the_capture_is_reported_once(args: tuple[torch.Tensor, ...]) -> None:
    fast = strict([2, 4, 8], "warn")
    fast.capture(torch.randn(8, 4))
    assert fast.runtime.report().problems == ()
    for _ in range(3):
        torch.testing.assert_close(fast(*args), fast.layer(args[0]))
    late = [p for p in fast.runtime.report().problems if "a call compiles while the model serves" in p.what]
    assert [(problem.times, "capture ahead" in problem.remedy) for problem in late] == [(1, True)]


@pytest.mark.parametrize("rows", [1, 4], ids=["one row", "as many rows as columns"])
def test_an_example_whose_sizes_are_constants_is_an_error(rows: int) -> None:
    fast = strict([2, 4, 8])
    with pytest.raises(CaptureError, match="one size was captured") as raised:
        fast.capture(torch.randn(rows, 4))
    assert raised.value.remedy.endswith("differ from the model's other sizes")


def test_a_padding_function_of_another_shape_is_named_after_its_input() -> None:
    padding = {"input": lambda real, padded_shape: real}
    fast = gp.graphed(nn.Linear(4, 4).eval(), [8], {"input": 0}, padding=padding, compiler="eager", progress=False)
    for _ in range(3):
        fast(torch.randn(3, 4))
    (problem,) = fast.report().problems
    assert "the padding function of input 'input' returned another shape: (3, 4)" in problem.what


@pytest.mark.parametrize("is_graphed", [False, True])
@pytest.mark.parametrize("name", ["input", "args[0]", 0])
def test_an_input_of_a_module_of_torch_is_named_by_parameter_or_position(
    compiled: Any, name: str | int, is_graphed: bool
) -> None:
    model, names = nn.Sequential(nn.Linear(4, 4)).eval(), {"dynamic_dims": {name: 0}, "padding": {name: 0.0}}
    options: dict[str, Any] = {"capture_sizes": [4, 8], **names}
    beside = compiled(model, dynamic=True, make=lambda size: (torch.randn(size, 4),), **options)
    if is_graphed:
        beside.fast = graphed(model, **options)
        beside.rt = beside.fast.runtime
    beside.serve((3, 3, 5, 6))
    assert beside.problems == ()
    assert beside.padded_sizes == {"num_tokens": True}
