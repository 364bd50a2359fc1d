"""What gets no graph, is not padded, not checked or captured again: one warning with its remedy, and the report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad as fwad

import cgpass
import graphpass
from graphpass import GraphRuntime


@torch.library.custom_op("cgpasstest::without_rule", mutates_args=())
def without_rule(x: torch.Tensor) -> torch.Tensor:
    return x * 2


without_rule.register_fake(torch.empty_like)

Calls = Callable[[], Iterator[Any]]


def compiled(model: Callable[..., Any], **options: Any) -> tuple[Any, GraphRuntime]:
    runtime = GraphRuntime()
    given = cgpass.options(**{"compiler": "eager", "runtime": runtime, "dispatch": "auto", **options})
    return torch.compile(model, backend="cgpass", options=given, dynamic=True), runtime


def rows(num: int) -> torch.Tensor:
    return torch.randn(num, 6)


def host_read() -> Iterator[Any]:
    fast, runtime = compiled(lambda x: x * 2 + x.sum().item())
    yield runtime
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for _ in range(3):
            fast(rows(4))


def not_whole() -> Iterator[Any]:
    fast, runtime = compiled(lambda x: x * 2 + x.sum().item(), mode="FULL")
    yield runtime
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for _ in range(3):
            fast(rows(4))


def graph_break() -> Iterator[Any]:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    fast, runtime = compiled(model)
    yield runtime
    for _ in range(3):
        fast(rows(4))


def mean_of_batch() -> Iterator[Any]:
    fast, runtime = compiled(lambda x: x - x.mean(0))
    yield runtime
    for num in (4, 5, 4):
        fast(rows(num))


def operator_without_rule() -> Iterator[Any]:
    fast, runtime = compiled(without_rule)
    yield runtime
    for num in (4, 5, 4):
        fast(torch.randn(num))


def gathered() -> Iterator[Any]:
    fast, runtime = compiled(lambda x, index: x[index])
    yield runtime
    for num in (4, 5, 4):
        fast(rows(num), torch.tensor([1, 0, 2]))


def padded_unchecked() -> Iterator[Any]:
    fast, runtime = compiled(lambda x: x - x.mean(0), dynamic_dims={"x": 0}, padding_check="off")
    yield runtime
    for num in (5, 5, 7):
        fast(rows(num))


def many_sizes() -> Iterator[Any]:
    fast, runtime = compiled(lambda x: x - x.mean(0), max_graphs=1)
    yield runtime
    for num in (4, 4, 4, 5, 5, 6, 6):
        fast(rows(num))


def above_the_largest() -> Iterator[Any]:
    fast, runtime = compiled(lambda x: x * 2, capture_sizes=[2, 4], dynamic_dims={"x": 0})
    yield runtime
    for num in (4, 9, 9, 10, 11):
        fast(rows(num))


def shared_inputs() -> Iterator[Any]:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x + y

    fast, runtime = compiled(model, dynamic_dims={"x": 0, "y": 0})
    yield runtime
    fast(rows(5), rows(5))
    for _ in range(3):
        base = rows(10)
        fast(base[:5], base[5:])


def forward_derivative() -> Iterator[Any]:
    fast, runtime = compiled(lambda x: x * 2)
    yield runtime
    fast(rows(4))
    for _ in range(2):
        with fwad.dual_level():
            fast(fwad.make_dual(rows(4), rows(4)))


def replaced_weight() -> Iterator[Any]:
    model = nn.Linear(6, 6)
    fast, runtime = compiled(model)
    yield runtime
    for _ in range(3):
        fast(rows(4))
    model.weight = nn.Parameter(torch.randn(6, 6))
    for _ in range(3):
        fast(rows(4))


def moved_weight() -> Iterator[Any]:
    model = nn.Linear(6, 6)
    fast, runtime = compiled(model)
    yield runtime
    kept = []
    for _ in range(3):
        fast(rows(4))
    for _ in range(2):
        kept.append(torch.randn(6, 6))
        model.weight.data = kept[-1]
        fast(rows(4))


def training() -> Iterator[Any]:
    fast, runtime = compiled(nn.Linear(6, 6))
    yield runtime
    with torch.enable_grad():
        for _ in range(2):
            fast(rows(4))


def nothing_reached() -> Iterator[Any]:
    fast = graphpass.graphed(lambda x: 3, compiler="eager")
    yield fast.runtime
    for _ in range(3):
        fast(1)


SITUATIONS: dict[str, tuple[Calls, str, str]] = {
    "host read": (host_read, "runs eagerly between graphs: host read", "keep the value on the device"),
    "not whole": (not_whole, "the graph cannot be captured whole", "mode='FULL_AND_PIECEWISE'"),
    "graph break": (graph_break, "ends at a graph break", "rewrite that line"),
    "mean of the batch": (mean_of_batch, "is not padded", "from sums under a mask argument"),
    "operator without a rule": (operator_without_rule, "is not padded", "register_padding_rule"),
    "gathered": (gathered, "is not padded", "declare the dimension (dynamic_dims={'x': 0})"),
    "padded without a check": (padded_unchecked, "is padded without a check", "padding_check='declared'"),
    "too many keys": (many_sizes, "keys have graphs already", "raise max_graphs"),
    "above the largest": (above_the_largest, "is above the largest capture size", "to capture_sizes"),
    "inputs share memory": (shared_inputs, "calls are not padded: inputs share memory", "`x.clone()`"),
    "forward derivative": (forward_derivative, "runs without compiled code and graphs", "transform the model itself"),
    "weight replaced": (replaced_weight, "captured again while serving", "write into it in place"),
    "weight moved": (moved_weight, "static inputs moved", "refill them in place"),
    "training": (training, "compiled under autograd: never captured", "torch.inference_mode()"),
    "nothing reached": (nothing_reached, "a call reached no graph", "torch.compiler.disable()"),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_each_situation_is_one_warning_and_a_line_of_the_report(
    situation: str, caplog: pytest.LogCaptureFixture
) -> None:
    calls, phrase, remedy = SITUATIONS[situation]
    running = calls()
    with caplog.at_level(logging.WARNING, "graphpass"), torch.no_grad():
        runtime: GraphRuntime = next(running)
        assert next(running, None) is None
    said = [r.getMessage() for r in caplog.records if r.name == "graphpass" and phrase in r.getMessage()]
    assert len(said) == 1, "once"
    assert remedy in said[0]
    assert said[0] in runtime.notes
    problems = runtime.report().to_dict()["problems"]
    assert any(remedy in problem["remedy"] for problem in problems), "the report says it, too"


@pytest.mark.parametrize("situation", ["host read", "above the largest", "inputs share memory", "mean of the batch"])
def test_silence_is_an_option(
    situation: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = cgpass.options
    monkeypatch.setattr(cgpass, "options", lambda **given: options(**given, on_fallback="silent"))
    calls, phrase, _ = SITUATIONS[situation]
    running = calls()
    with caplog.at_level(logging.WARNING, "graphpass"), torch.no_grad():
        runtime: GraphRuntime = next(running)
        assert next(running, None) is None
    assert not [record for record in caplog.records if record.name == "graphpass"]
    assert any(phrase in text for text in runtime.notes), "the report has it"
