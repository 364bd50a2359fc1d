"""Calls that compile, or run uncompiled, after the capture: an error where the options ask for it, else counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphpass as gp
from graphpass.errors import CaptureError


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return self.layer(x) if scale is None else self.layer(x) * scale


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
    fast = gp.graphed(Scaled().eval(), [2, 4, 8], {"x": 0}, on_fallback="error", compiler="eager")
    fast.capture(torch.randn(8, 4))
    num_compiled = len(fast.runtime.callables())
    for _ in range(2):
        with pytest.raises(CaptureError, match="would compile while the model serves") as raised:
            fast(*args)
        assert found in raised.value.found
    x = torch.randn(3, 4)
    torch.testing.assert_close(fast(x), fast.layer(x))
    assert len(fast.runtime.callables()) == num_compiled


def test_the_remedy_of_a_late_compilation() -> None:
    """Size 1 is in the ladder, and the other form is captured too."""
    fast = gp.graphed(Scaled().eval(), [1, 2, 4, 8], {"x": 0}, on_fallback="error", compiler="eager")
    fast.capture(torch.randn(8, 4))
    fast.capture(torch.randn(8, 4), torch.ones(4))
    for args in ((torch.randn(1, 4),), (torch.randn(3, 4), torch.ones(4))):
        torch.testing.assert_close(fast(*args), fast.layer(args[0]))


def test_before_a_capture_and_after_close_calls_compile() -> None:
    fast = gp.graphed(Scaled().eval(), [2, 4, 8], {"x": 0}, on_fallback="error", compiler="eager")
    fast(torch.randn(3, 4))
    fast.capture(torch.randn(8, 4))
    fast.close()
    fast(torch.randn(1, 4))
    fast(torch.randn(3, 4), torch.ones(4))


def test_calls_past_the_recompile_limit_are_counted_and_the_argument_is_named() -> None:
    def scaled(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * len(name)

    fast = gp.graphed(scaled, compiler="eager", on_fallback="silent")
    for length in range(1, 13):
        x = torch.randn(3, 4)
        torch.testing.assert_close(fast(x, "n" * length), x * length)
    limit = torch._dynamo.config.recompile_limit
    problems = {problem.what: problem for problem in fast.report().problems}
    (uncompiled,) = [problem for what, problem in problems.items() if "runs the model as it is" in what]
    assert uncompiled.times == 12 - limit
    (recompiled,) = [what for what in problems if "has compiled a function" in what]
    assert "name == " in recompiled
    assert "test_late_compilations.py" in recompiled


def test_calls_under_autograd_are_counted() -> None:
    layer, runtime = nn.Linear(4, 4), gp.GraphRuntime()
    options = {"compiler": "eager", "runtime": runtime, "dispatch": "auto"}
    fast = torch.compile(layer, backend="cgpass", options=options)
    for _ in range(3):
        fast(torch.randn(2, 4)).sum().backward()
    (row,) = [row for row in runtime.report().figures.uncaptured if "autograd" in row.reason.why]
    assert row.n == 3


@pytest.mark.parametrize("is_graphed", [False, True])
@pytest.mark.parametrize("name", ["input", "args[0]", 0])
def test_an_input_of_a_module_of_torch_is_named_by_parameter_or_position(name: str | int, is_graphed: bool) -> None:
    model, names = nn.Sequential(nn.Linear(4, 4)).eval(), {"dynamic_dims": {name: 0}, "padding": {name: 0.0}}
    options = {"compiler": "eager", "capture_sizes": [4, 8], **names}
    if is_graphed:
        fast = gp.graphed(model, **options)
        runtime = fast.runtime
    else:
        runtime = gp.GraphRuntime()
        options |= {"runtime": runtime, "dispatch": "auto"}
        fast = torch.compile(model, backend="cgpass", dynamic=True, options=options)
    with torch.no_grad():
        for rows in (3, 3, 5, 6):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(fast(x), model[0](x))
    assert runtime.report().problems == ()
    (record,) = runtime.callables()
    assert [(size.field, size.is_padded) for size in record.sizes] == [("num_tokens", True)]


@pytest.mark.parametrize(
    "options",
    [{"dynamic_dims": {"inptu": 0}}, {"padding": {"inptu": 0.0}}, {"capture_sizes": {"rows": [4, 8], "columns": [4]}}],
    ids=str,
)
def test_a_name_that_no_input_of_a_module_of_torch_has_is_said(options: dict[str, object]) -> None:
    runtime = gp.GraphRuntime()
    options = {"compiler": "eager", "runtime": runtime, "dispatch": "auto", **options}
    fast = torch.compile(nn.Sequential(nn.Linear(4, 4)).eval(), backend="cgpass", dynamic=True, options=options)
    with torch.no_grad():
        fast(torch.randn(3, 4))
    assert any("and the graph's inputs are args[0]" in problem.what for problem in runtime.report().problems)


def test_a_size_or_stride_of_a_tensor_is_no_number() -> None:
    runtime = gp.GraphRuntime()
    options = {"compiler": "eager", "runtime": runtime, "dispatch": "auto"}
    fast = torch.compile(
        lambda x, t: x.unflatten(1, (t.size(0), -1)).sum(2) * t.stride(0),
        backend="cgpass",
        dynamic=True,
        options=options,
    )
    with torch.no_grad():
        for groups in (2, 2, 2, 4, 4, 4):
            x, t = torch.randn(3, 8), torch.randn(groups, 5)
            torch.testing.assert_close(fast(x, t), x.unflatten(1, (groups, -1)).sum(2) * 5)
    assert not any("Python number" in problem.what for problem in runtime.report().problems)
    assert sum(counts.replayed for counts in runtime.counts().values()) == 4
