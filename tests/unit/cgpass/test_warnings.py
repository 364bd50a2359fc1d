"""What gets no graph, is not padded, not checked or captured again: one warning with its remedy, and the report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad as fwad

import graphpass as gp
from tests.unit.cgpass.attended import Make


def rows(num: int) -> torch.Tensor:
    return torch.randn(num, 6)


@dataclass
class Situation:
    """A model, calls by number of rows or of the compiled callable, and what the one warning and its remedy say."""

    model: Callable[..., Any]
    calls: Sequence[int] | Callable[[Any], object]
    phrase: str
    remedy: str
    options: dict[str, Any] = field(default_factory=dict)


def breaking(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    torch._dynamo.graph_break()
    return y + 1


def writing(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x + y


def over_one_memory(fast: Any) -> None:
    fast(rows(5), rows(5))
    for _ in range(3):
        base = rows(10)
        fast(base[:5], base[5:])


def under_a_derivative(fast: Any) -> None:
    fast(rows(4))
    for _ in range(2):
        with fwad.dual_level():
            fast(fwad.make_dual(rows(4), rows(4)))


def with_a_new_weight(fast: Any) -> None:
    for number in range(6):
        if number == 3:
            fast.weight = nn.Parameter(torch.randn(6, 6))
        fast(rows(4))


def with_moving_weights(fast: Any) -> None:
    kept = []
    for number in range(5):
        if number >= 3:
            kept.append(torch.randn(6, 6))
            fast.weight.data = kept[-1]
        fast(rows(4))


def under_autograd(fast: Any) -> None:
    with torch.enable_grad():
        for _ in range(2):
            fast(rows(4))


def centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0)


def reading(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + x.sum().item()


DECLARED: dict[str, Any] = {"dynamic_dims": {"x": 0}}
SITUATIONS: dict[str, Situation] = {
    "host read": Situation(reading, [4] * 3, "runs eagerly between graphs: host read", "keep the value on the device"),
    "graph break": Situation(breaking, [4] * 3, "ends at a graph break", "rewrite that line"),
    "too many keys": Situation(
        centred, (4, 4, 4, 5, 5, 6, 6), "keys have graphs already", "raise max_graphs", {"max_graphs": 1}
    ),
    "above the largest": Situation(
        lambda x: x * 2,
        (4, 9, 9, 10, 11),
        "is above the largest capture size",
        "to capture_sizes",
        {**DECLARED, "capture_sizes": [2, 4]},
    ),
    "inputs share memory": Situation(
        writing,
        over_one_memory,
        "calls are not padded: inputs share memory",
        "`x.clone()`",
        {"dynamic_dims": {"x": 0, "y": 0}},
    ),
    "forward derivative": Situation(
        lambda x: x * 2,
        under_a_derivative,
        "runs without compiled code and graphs",
        "transform the model itself",
    ),
    "weight replaced": Situation(
        nn.Linear(6, 6), with_a_new_weight, "captured again while serving", "write into it in place"
    ),
    "weight moved": Situation(nn.Linear(6, 6), with_moving_weights, "static inputs moved", "refill them in place"),
    "training": Situation(
        nn.Linear(6, 6), under_autograd, "compiled under autograd: never captured", "torch.inference_mode()"
    ),
}


def warned(fast: Any, case: Situation, caplog: pytest.LogCaptureFixture) -> list[str]:
    scalars = torch._dynamo.config.patch(capture_scalar_outputs=True) if case.model is reading else nullcontext()
    with caplog.at_level(logging.WARNING, "graphpass"), torch.no_grad(), scalars:
        if callable(case.calls):
            case.calls(fast)
        else:
            for num in case.calls:
                fast(rows(num))
    return [r.getMessage() for r in caplog.records if r.name == "graphpass"]


def assert_said_once(said: list[str], phrase: str, remedy: str, runtime: gp.GraphRuntime) -> None:
    (text,) = [text for text in said if phrase in text]
    assert remedy in text
    assert text in runtime.notes
    problems = runtime.report().to_dict()["problems"]
    assert any(remedy in problem["remedy"] for problem in problems), "the report says it, too"


@pytest.mark.parametrize("situation", SITUATIONS)
def test_each_situation_is_one_warning_and_a_line_of_the_report(
    compiled: Make, situation: str, caplog: pytest.LogCaptureFixture
) -> None:
    case = SITUATIONS[situation]
    fast = compiled(case.model, dynamic=True, **case.options)
    assert_said_once(warned(fast.fast, case, caplog), case.phrase, case.remedy, fast.rt)


def test_a_graphed_call_that_reaches_no_graph_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    phrase, remedy = "a call reached no graph", "torch.compiler.disable()"
    fast = gp.graphed(lambda x: 3, compiler="eager")
    case = Situation(fast, lambda fast: [fast(1) for _ in range(3)], phrase, remedy)
    assert_said_once(warned(fast, case, caplog), phrase, remedy, fast.runtime)


@pytest.mark.parametrize("situation", ["host read", "above the largest", "inputs share memory"])
def test_silence_is_an_option(compiled: Make, situation: str, caplog: pytest.LogCaptureFixture) -> None:
    case = SITUATIONS[situation]
    fast = compiled(case.model, dynamic=True, on_fallback="silent", **case.options)
    assert warned(fast.fast, case, caplog) == []
    assert any(case.phrase in text for text in fast.rt.notes), "the report has it"
