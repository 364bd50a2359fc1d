"""What graphed refuses, by typed errors, and errors of the model that stay what they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import graphpass as gp
from graphpass import GraphpassError
from graphpass.compat import dynamo
from graphpass.errors import CaptureError, OptionError
from tests.unit.graphed.oracle import agree, call, graphed, replays


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"capture_sizes": []}, "capture_sizes"),
        ({"capture_sizes": [0]}, "capture_sizes"),
        ({"capture_sizes": [2.5]}, "capture_sizes"),
        ({"dynamic_dims": {"x": "rows"}}, "dynamic_dims"),
        ({"dynamic_dims": 3}, "dynamic_dims"),
        ({"padding": {"x": "mirror"}}, "padding"),
        ({"mode": "SOMETIMES"}, "SOMETIMES"),
        ({"paddings": {}}, "unknown option 'paddings'"),
        ({"padding_check": "sometimes"}, "padding_check"),
        ({"cut": {0: {}}}, "unknown option 'cut'"),
        ({"runtime": 3}, "runtime"),
    ],
    ids=str,
)
def test_bad_options_are_refused_when_it_is_made(options: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        gp.graphed(nn.Linear(2, 2), **options)


def test_without_the_backend_it_says_what_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "registered_backend", lambda name: None)
    with pytest.raises(OptionError, match="no backend 'cgpass'") as raised:
        gp.graphed(nn.Linear(2, 2))
    assert raised.value.remedy == "import cgpass"


def test_a_backend_that_nobody_registered_is_none() -> None:
    assert dynamo.registered_backend("graphpass_no_such_backend") is None


TRANSFORMS: dict[str, Any] = {
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda t: f(t).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("was_called", [False, True])
def test_function_transforms_around_it_are_refused(transform: str, was_called: bool) -> None:
    fast = graphed(lambda x: x.sin())
    x = torch.randn(3, 4)
    for _ in range(3 * was_called):
        fast(x)
    with pytest.raises(CaptureError, match="inside") as raised:
        TRANSFORMS[transform](fast, x)
    assert "transform the model itself" in raised.value.remedy
    torch.testing.assert_close(fast(x), x.sin())


def test_forward_mode_ad_around_it_is_refused() -> None:
    fast = graphed(lambda x: x.sin())
    x = torch.randn(3)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones(3))
        with pytest.raises(CaptureError, match="inside forward-mode AD"):
            fast(dual)
    torch.testing.assert_close(fast(x), x.sin())


def test_a_transform_inside_of_the_model_is_graphed() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(lambda row: row * row.sum())(x)

    fast = agree(lambda: model, [lambda n=n: call(torch.randn(n, 4)) for n in (5, 3, 5, 3, 5, 3)])
    assert replays(fast) > 0


def conditional(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def lists(x: torch.Tensor) -> list[float]:
    return x[:, 0].tolist()


def sizes_by_contents(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]


@pytest.mark.parametrize("model", [conditional, lists, sizes_by_contents])
@pytest.mark.parametrize("declared", [False, True])
def test_control_flow_and_host_reads_are_right_or_typed(model: Any, declared: bool) -> None:
    given: tuple[Any, ...] = ([2, 4, 8], {"x": 0}) if declared else ()
    fast = graphed(model, *given)
    for n in (5, 3, 5, 3, 5, 6):
        x = torch.randn(n, 4)
        with torch.no_grad():
            want = model(x)
        try:
            found = fast(x)
        except GraphpassError:
            continue
        torch.testing.assert_close(found, want)


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
        if n == 2:
            with pytest.raises(MineError, match="two rows"):
                fast(torch.randn(n))
        else:
            fast(torch.randn(n))


def test_what_torch_cannot_trace_is_a_typed_error_that_is_a_runtime_error() -> None:
    fast = graphed(nn.Linear(4, 4))
    with pytest.raises(RuntimeError) as raised:
        fast(torch.randn(3, 5))
    assert isinstance(raised.value, CaptureError)
    fast(torch.randn(3, 4))
    with pytest.raises(RuntimeError):
        fast(torch.randn(3, 5))


def test_a_subclass_that_wraps_tensors_is_refused_or_right() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    fast = graphed(lambda x: x.sin())
    with pytest.raises(GraphpassError, match="subclass"):
        fast(TwoTensor(torch.ones(3), torch.ones(3)))


def test_a_name_in_dynamic_dims_that_no_input_has_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    fast = gp.graphed(nn.Linear(4, 4), [2, 4], {"inptu": 0})
    fast(torch.randn(3, 4))
    (record,) = [record for record in caplog.records if record.levelname == "WARNING" and record.name == "graphpass"]
    assert "dynamic_dims names inptu, and the graph's inputs are input" in record.getMessage()
    assert "dynamic_dims names inptu" in str(fast.report())
