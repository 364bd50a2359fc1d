"""torch.compile as users use it: graph breaks and dynamic shapes.

Every test compares with eager and counts what was compiled, captured and replayed.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported

import graphpass as gp
from graphpass import GraphRuntime
from graphpass.errors import CaptureError
from tests.unit.cgpass.attended import BOTH, Attended, Run, agrees, compiled_with, endings, expected_counts

# -- fullgraph and graph breaks


def test_fullgraph_is_one_callable(rt: GraphRuntime, at_key: Run, tally: Run) -> None:
    model = Attended()
    compiled = compiled_with(rt, model, fullgraph=True)
    with rt.capturing():
        for mode in BOTH:
            at_key(compiled, mode, 4, torch.randn(4, 6))
    for mode in BOTH * 2:
        x = torch.randn(4, 6)
        agrees(at_key(compiled, mode, 4, x), model(x).detach())
    assert rt.stats().callables == 1
    assert endings(rt) == {}
    for mode in BOTH:
        assert tally(rt, mode) == expected_counts(mode, 4, (1, 3))


def breaks_explicitly(x: torch.Tensor) -> torch.Tensor:
    x = x * 2 + 1
    torch._dynamo.graph_break()
    return x.relu() - 1


def breaks_at_print(x: torch.Tensor) -> torch.Tensor:
    x = x * 2 + 1
    print("rows", x.shape[1])  # noqa: T201 - what users leave in their models
    return x.relu() - 1


@torch.compiler.disable
def not_compiled(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0)


def breaks_at_disabled(x: torch.Tensor) -> torch.Tensor:
    x = x * 2 + 1
    x = not_compiled(x)
    return x.relu() - 1


def breaks_at_a_branch(x: torch.Tensor) -> torch.Tensor:
    x = x * 2 + 1
    if x.sum() > 0:
        return x.relu() - 1
    return x.cos() + 2


BREAKS = [
    (breaks_explicitly, "graph_break"),
    (breaks_at_print, "builtin operator"),
    (breaks_at_disabled, "disable"),
    (breaks_at_a_branch, "jump"),
]


@pytest.mark.parametrize(("model", "why"), BREAKS, ids=[why for _, why in BREAKS])
def test_each_side_of_a_graph_break_has_its_own_full(
    rt: GraphRuntime, at_key: Run, tally: Run, capsys: pytest.CaptureFixture[str], model: Callable[..., Any], why: str
) -> None:
    compiled = compiled_with(rt, model)
    with rt.capturing():
        for size in (8, 4):
            at_key(compiled, "FULL", size, torch.rand(size, 6))
    for size in (4, 8, 4):
        x = torch.rand(size, 6)
        agrees(at_key(compiled, "FULL", size, x), model(x))
    assert tally(rt, "FULL") == {
        ("g0.full", 8): (1, 2), ("g1.full", 8): (1, 2), ("g0.full", 4): (1, 3), ("g1.full", 4): (1, 3)
    }  # fmt: skip
    ((name, reason),) = endings(rt).items()
    assert name == "g0"
    assert why in reason.lower()
    assert f"test_torch_compile_usage.py:{model.__code__.co_firstlineno + 2}" in reason
    assert capsys.readouterr().out.count("rows 6") == (2 + 3 + 3 if model is breaks_at_print else 0)


@pytest.mark.parametrize(("model", "why"), BREAKS[2:], ids=[why for _, why in BREAKS[2:]])
def test_fullgraph_refuses_graph_breaks_before_the_backend(
    rt: GraphRuntime, model: Callable[..., Any], why: str
) -> None:
    with pytest.raises(Unsupported):
        compiled_with(rt, model, fullgraph=True)(torch.rand(4, 6))
    assert rt.callables() == ()


def test_both_branches_are_graphs_of_their_own(rt: GraphRuntime, at_key: Run, tally: Run) -> None:
    compiled = compiled_with(rt, breaks_at_a_branch)
    above, below = torch.rand(4, 6), -torch.rand(4, 6) - 1
    with rt.capturing():
        for mode, x in itertools.product(BOTH, (above, below)):
            agrees(at_key(compiled, mode, 4, x), breaks_at_a_branch(x))
    for mode, x in itertools.product(BOTH, (below * 2, above * 2, below * 3)):
        agrees(at_key(compiled, mode, 4, x), breaks_at_a_branch(x))
    for mode, region in (("FULL", "full"), ("PIECEWISE", "r0")):
        assert tally(rt, mode) == {
            (f"g0.{region}", 4): (1, 5), (f"g1.{region}", 4): (1, 2), (f"g2.{region}", 4): (1, 3)
        }  # fmt: skip


def test_a_branch_that_was_not_captured_is_refused_not_run_eagerly(rt: GraphRuntime, at_key: Run) -> None:
    compiled = compiled_with(rt, breaks_at_a_branch)
    at_key(compiled, "FULL", 4, torch.rand(4, 6), capture=rt)
    below = -torch.rand(4, 6) - 1
    with pytest.raises(CaptureError, match=r"g2\.full has no graph"):
        at_key(compiled, "FULL", 4, below)
    with rt.capturing():
        agrees(at_key(compiled, "FULL", 4, below), breaks_at_a_branch(below))


def test_a_break_in_every_layer_is_two_callables(rt: GraphRuntime, at_key: Run) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            torch._dynamo.graph_break()
            return x.relu()

    model = nn.Sequential(*[Layer() for _ in range(3)])
    compiled = compiled_with(rt, model)
    at_key(compiled, "FULL", 4, torch.randn(4, 6), capture=rt)
    for _ in range(2):
        x = torch.randn(4, 6)
        agrees(at_key(compiled, "FULL", 4, x), model(x).detach())
    assert {region: (c.captured, c.static_sets, c.replayed) for (region, _, _), c in rt.counts().items()} == {
        "g0.full": (3, 3, 9), "g1.full": (1, 1, 9)
    }, "the half with weights once a layer, the other once"  # fmt: skip


# -- dynamic shapes


@pytest.mark.parametrize(
    ("dynamic", "callables"),
    [(True, 2), (False, 4), (None, 3)],
    ids=["True: and size 1", "False: each size", "None: static, dynamic, size 1"],
)
def test_dynamic_true_false_and_none(rt: GraphRuntime, at_key: Run, dynamic: bool | None, callables: int) -> None:
    model = Attended()
    compiled = compiled_with(rt, model, dynamic=dynamic)
    with rt.capturing():
        for size, mode in itertools.product((8, 4, 6, 1), BOTH):
            x = torch.randn(size, 6)
            agrees(at_key(compiled, mode, size, x), model(x).detach())
        # Dynamo's newest code that fits serves: with None, size 8 moves from the static graph to the dynamic one.
        for mode in BOTH:
            at_key(compiled, mode, 8, torch.randn(8, 6))
    assert rt.stats().callables == callables
    captured = rt.stats().captured
    assert captured == (5 if dynamic is None else 4) * 3, "each key once in the code that serves it"
    for size, mode in itertools.product((1, 6, 4, 8, 4), BOTH):
        x = torch.randn(size, 6)
        agrees(at_key(compiled, mode, size, x), model(x).detach())
    assert rt.stats().callables == callables
    assert rt.stats().captured == captured


@pytest.mark.parametrize("mark", [torch._dynamo.mark_dynamic, torch._dynamo.maybe_mark_dynamic])
def test_a_marked_dimension_is_dynamic_from_the_first_call(
    rt: GraphRuntime, at_key: Run, mark: Callable[..., None]
) -> None:
    model = Attended()
    compiled = compiled_with(rt, model, dynamic=None)
    with rt.capturing():
        for size, mode in itertools.product((8, 4, 2), BOTH):
            x = torch.randn(size, 6)
            mark(x, 0)
            agrees(at_key(compiled, mode, size, x), model(x).detach())
    assert (rt.stats().callables, rt.compiled()) == (1, 2)
    for size, mode in itertools.product((2, 8, 4), BOTH):
        x = torch.randn(size, 6)
        agrees(at_key(compiled, mode, size, x), model(x).detach())
    assert rt.stats().callables == 1, "unmarked inputs of these sizes use the same code"
    assert rt.stats().captured == 3 * 3


def test_a_marked_dimension_names_no_other_size(rt: GraphRuntime, at_key: Run) -> None:
    compiled = compiled_with(rt, Attended(), dynamic=None)
    x = torch.randn(8, 6)
    torch._dynamo.mark_dynamic(x, 0)
    at_key(compiled, "FULL", 8, x, capture=rt)
    with pytest.raises((CaptureError, gp.errors.ShapeError)):
        at_key(compiled, "FULL", 8, torch.randn(5, 6))
    assert rt.stats().replayed == 1


def test_maybe_mark_dynamic_yields_to_a_model_that_fixes_the_size(rt: GraphRuntime, at_key: Run, tally: Run) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x.relu() * {4: 2, 8: 3}[x.shape[0]]

    compiled = compiled_with(rt, model, dynamic=None)
    with rt.capturing():
        for size in (8, 4):
            x = torch.randn(size, 6)
            torch._dynamo.maybe_mark_dynamic(x, 0)
            agrees(at_key(compiled, "FULL", size, x), model(x))
    for size in (4, 8):
        x = torch.randn(size, 6)
        agrees(at_key(compiled, "FULL", size, x), model(x))
    assert tally(rt, "FULL") == {("g0.full", 8): (1, 2), ("g1.full", 4): (1, 2)}


# -- advice


def test_nothing_is_logged_twice_for_one_compile(
    rt: GraphRuntime, at_key: Run, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = compiled_with(rt, Attended(), dynamic=None)
    with caplog.at_level(logging.INFO, "graphpass"), rt.capturing():
        for size in (8, 4, 6, 8, 4, 6):
            at_key(compiled, "FULL", size, torch.randn(size, 6))
    said = [record.message for record in caplog.records if record.name == "graphpass"]
    assert len(said) == len(set(said))
