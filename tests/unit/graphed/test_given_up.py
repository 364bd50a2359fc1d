"""Functions that Dynamo runs as they are, because it cannot trace them or has compiled them too often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import graphpass as gp
from graphpass.errors import CaptureError, OptionError
from tests.unit.serving.managed import WIDTH, captured, run

SIZES = (8, 4, 6, 2) * 5
FACTORS = {2: 3.0, 4: 5.0, 6: 7.0, 8: 9.0}


def by_table(x: torch.Tensor) -> torch.Tensor:
    """Each size compiles anew: it is looked up."""
    return x.relu() * FACTORS[x.shape[0]]


def after_a_break(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    torch._dynamo.graph_break()
    return by_table(y)


class Entered:
    def __enter__(self) -> None:
        """Dynamo does not resume inside of one that it does not know."""

    def __exit__(self, *_: object) -> None:
        """Nothing to do."""


def around(x: torch.Tensor) -> torch.Tensor:
    out = x * 2
    with Entered():
        out = inside(out)
        torch._dynamo.graph_break()
    return out


def inside(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def untraced(x: torch.Tensor) -> torch.Tensor:
    with Entered():
        y = x + 1
        torch._dynamo.graph_break()
    return y


# (function, what Dynamo says, the function that it names for torch.compile, calls of 20 in which it runs as it is)
LIMIT, BREAK = "Dynamo is at its recompile limit and runs", "Dynamo gave up on"
CASES: list[tuple[Callable[..., Any], str, str, int]] = [
    (by_table, LIMIT, "by_table (test_given_up.py:", 10),
    (after_a_break, LIMIT, "after_a_break from line", 10),
    (around, BREAK, "around (test_given_up.py:", 20),
    (untraced, BREAK, "untraced (test_given_up.py:", 20),
]
given = pytest.mark.parametrize(
    ("function", "says", "named", "times"), CASES, ids=[function.__name__ for function, *_ in CASES]
)


@pytest.fixture(autouse=True)
def limit_of_two() -> Any:
    with torch._dynamo.config.patch(recompile_limit=2):
        yield


def outcomes(fast: Callable[..., Any], function: Callable[..., Any]) -> list[str]:
    """What came of each call: right results, and otherwise the error."""
    found = []
    for size in SIZES:
        x = torch.randn(size, 6)
        try:
            torch.testing.assert_close(fast(x), function(x))
            found.append("")
        except CaptureError as error:
            found.append(error.found)
    return found


def why(reporting: gp.GraphRuntime | gp.CudaGraphManager, says: str) -> Any:
    (problem,) = [problem for problem in reporting.report().problems if problem.what.startswith(says)]
    return problem


@given
def test_graphed_counts_each_such_call_or_refuses_it(
    function: Callable[..., Any], says: str, named: str, times: int
) -> None:
    fast = gp.graphed(function, compiler="eager", on_fallback="silent")
    assert not any(outcomes(fast, function))
    problem = why(fast.runtime, says)
    assert (problem.kind, problem.times) == ("no graph", times)
    assert ("the model" if function is by_table else named) in problem.what
    assert problem.remedy
    torch.compiler.reset()
    refused = [
        found for found in outcomes(gp.graphed(function, compiler="eager", on_fallback="error"), function) if found
    ]
    assert len(refused) == times
    assert refused[0].startswith(says)
    assert all(found.startswith((LIMIT, BREAK)) for found in refused)


@given
def test_the_report_of_a_compiled_function_names_it_and_says_that_its_calls_are_not_counted(
    function: Callable[..., Any], says: str, named: str, times: int, rt: gp.GraphRuntime
) -> None:
    options = {"runtime": rt, "compiler": "eager", "dispatch": "auto"}
    fast = torch.compile(function, backend="cgpass", options=options)
    with torch.no_grad():
        assert not any(outcomes(fast, function))
    problem = why(gp.runtime_of(fast), says)
    assert (problem.kind, problem.times) == ("no graph", None)
    assert named in problem.what
    assert problem.what.endswith("its later calls are not counted")
    assert says == LIMIT or "graph_break" in problem.what


class Steps(nn.Module):
    """Each step compiles anew, as a number of Python changes: of the whole model, or of what follows a break."""

    def __init__(self, has_break: bool) -> None:
        super().__init__()
        self.has_break, self.num_steps = has_break, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if self.has_break:
            torch._dynamo.graph_break()
        self.num_steps += 1
        return y * self.num_steps


# (breaks, the function that is named, steps of 10 within Dynamo's limit)
steps = pytest.mark.parametrize(("has_break", "named", "traced"), [(False, "the model", 2), (True, "forward from", 1)])


@steps
def test_managers_count_each_such_step(has_break: bool, named: str, traced: int) -> None:
    manager, model = captured(Steps(has_break), sizes=(4,)), Steps(has_break)
    for num_tokens in (4, 3) * 5:
        x = torch.randn(num_tokens, WIDTH)
        torch.testing.assert_close(run(manager, x), model(x))
    problem = why(manager, LIMIT)
    assert (problem.kind, problem.times) == ("no graph", 10 - traced)
    assert named in problem.what
    assert manager.stats().replays == (10 if has_break else traced), "what replays is counted, and nothing else"
    assert sum(manager.stats().histogram.values()) == 10


def test_steps_that_dynamo_is_kept_from_are_no_replays() -> None:
    manager = captured(Steps(has_break=False), sizes=(4,))
    with torch.compiler.set_stance("force_eager"):
        for _ in range(3):
            run(manager, torch.randn(4, WIDTH))
    assert manager.stats().replays == 0
    assert why(manager, "a call reached no graph").times == 3


def test_a_function_without_a_runtime_is_said_to_be_given_up() -> None:
    fast = torch.compile(untraced, backend="cgpass")
    fast(torch.ones(3))
    with pytest.raises(OptionError) as raised:
        gp.runtime_of(fast)
    assert raised.value.found.startswith(BREAK)
