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

from graphpass import GraphRuntime
from graphpass.errors import CaptureError, ShapeError
from tests.observed import reported_regions
from tests.unit.cgpass.attended import Attended, Make, expected_counts
from tests.unit.compiled import BOTH, agrees
from tests.unit.models import module

# -- fullgraph and graph breaks


def endings(rt: GraphRuntime) -> dict[str, str]:
    """{callable: why Dynamo ended its graph} for those that a graph break ended."""
    return {name.removesuffix(".end"): why for name, _, why in reported_regions(rt) if name.endswith(".end")}


def test_fullgraph_is_one_callable(keyed: Make) -> None:
    fast = keyed(Attended(), fullgraph=True)
    fast.capture()
    fast.check(*BOTH * 2)
    assert fast.rt.stats().callables == 1
    assert endings(fast.rt) == {}
    for mode in BOTH:
        assert fast.tally(mode) == expected_counts(mode, 4, (1, 3))


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


BREAKS = {
    "graph_break": breaks_explicitly,
    "builtin operator": breaks_at_print,
    "disable": breaks_at_disabled,
    "jump": breaks_at_a_branch,
}


@pytest.mark.parametrize("why", BREAKS)
def test_each_side_of_a_graph_break_has_its_own_full(keyed: Make, capsys: pytest.CaptureFixture[str], why: str) -> None:
    model = BREAKS[why]
    fast = keyed(model, dynamic=True, make=lambda size: (torch.rand(size, 6),))
    fast.capture("FULL", sizes=(8, 4))
    fast.check("FULL", sizes=(4, 8, 4))
    assert fast.tally("FULL") == {
        (f"g{graph}.full", size): (1, calls) for size, calls in ((8, 2), (4, 3)) for graph in (0, 1)
    }
    ((name, reason),) = endings(fast.rt).items()
    assert name == "g0"
    assert why in reason.lower()
    assert f"test_torch_compile_usage.py:{model.__code__.co_firstlineno + 2}" in reason
    assert capsys.readouterr().out.count("rows 6") == (2 + 3 + 3 if model is breaks_at_print else 0)


@pytest.mark.parametrize("why", ["disable", "jump"])
def test_fullgraph_refuses_graph_breaks_before_the_backend(keyed: Make, why: str) -> None:
    fast = keyed(BREAKS[why], fullgraph=True)
    with pytest.raises(Unsupported):
        fast(torch.rand(4, 6))
    assert fast.rt.callables() == ()


def test_both_branches_are_graphs_of_their_own(keyed: Make) -> None:
    fast = keyed(breaks_at_a_branch)
    above, below = torch.rand(4, 6), -torch.rand(4, 6) - 1
    for inputs, capture in (((above, below), True), ((below * 2, above * 2, below * 3), False)):
        for mode, x in itertools.product(BOTH, inputs):
            agrees(fast.at(mode, 4, x, capture=capture), breaks_at_a_branch(x))
    for mode, region in (("FULL", "full"), ("PIECEWISE", "r0")):
        assert fast.tally(mode) == {(f"g{n}.{region}", 4): (1, calls) for n, calls in enumerate((5, 2, 3))}


def test_a_branch_that_was_not_captured_is_refused_not_run_eagerly(keyed: Make) -> None:
    fast, below = keyed(breaks_at_a_branch), -torch.rand(4, 6) - 1
    fast.at("FULL", 4, torch.rand(4, 6), capture=True)
    with pytest.raises(CaptureError, match=r"g2\.full has no graph"):
        fast.at("FULL", 4, below)
    agrees(fast.at("FULL", 4, below, capture=True), breaks_at_a_branch(below))


def breaks_after_a_layer(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.inner(x)
    torch._dynamo.graph_break()
    return x.relu()


def test_a_break_in_every_layer_is_two_callables(keyed: Make) -> None:
    fast = keyed(nn.Sequential(*[module(breaks_after_a_layer, inner=nn.Linear(6, 6)) for _ in range(3)]))
    fast.capture("FULL")
    fast.check("FULL", "FULL")
    counts = {region: (c.captured, c.static_sets, c.replayed) for (region, _, _), c in fast.rt.counts().items()}
    # The half with weights once a layer, the other once.
    assert counts == {"g0.full": (3, 3, 9), "g1.full": (1, 1, 9)}


# -- dynamic shapes


@pytest.mark.parametrize(
    ("dynamic", "callables"),
    [(True, 2), (False, 4), (None, 3)],
    ids=["True: and size 1", "False: each size", "None: static, dynamic, size 1"],
)
def test_dynamic_true_false_and_none(keyed: Make, dynamic: bool | None, callables: int) -> None:
    fast = keyed(Attended(), dynamic=dynamic)
    for size in (8, 4, 6, 1):
        fast.check(sizes=[size], capture=True)
    # Dynamo's newest code that fits serves: with None, size 8 moves from the static graph to the dynamic one.
    fast.capture(sizes=[8])
    assert fast.rt.stats().callables == callables
    captured = (5 if dynamic is None else 4) * 3
    assert fast.captured == captured, "each key once in the code that serves it"
    fast.check(sizes=(1, 6, 4, 8, 4))
    assert fast.rt.stats().callables == callables
    assert fast.captured == captured


@pytest.mark.parametrize("mark", [torch._dynamo.mark_dynamic, torch._dynamo.maybe_mark_dynamic])
def test_a_marked_dimension_is_dynamic_from_the_first_call(keyed: Make, mark: Callable[..., None]) -> None:
    fast = keyed(Attended(), dynamic=None)
    unmarked = fast.make

    def marked(size: int) -> tuple[torch.Tensor, ...]:
        (x,) = unmarked(size)
        mark(x, 0)
        return (x,)

    fast.make = marked
    fast.capture(sizes=(8, 4, 2))
    fast.check(sizes=(8, 4, 2))
    assert (fast.rt.stats().callables, fast.rt.compiled()) == (1, 2)
    fast.make = unmarked
    fast.check(sizes=(2, 8, 4))
    assert fast.rt.stats().callables == 1, "unmarked inputs of these sizes use the same code"
    assert fast.captured == 3 * 3


def test_a_marked_dimension_names_no_other_size(keyed: Make) -> None:
    fast, x = keyed(Attended(), dynamic=None), torch.randn(8, 6)
    torch._dynamo.mark_dynamic(x, 0)
    fast.at("FULL", 8, x, capture=True)
    with pytest.raises((CaptureError, ShapeError)):
        fast.at("FULL", 8, torch.randn(5, 6))
    assert fast.rt.stats().replayed == 1


def test_maybe_mark_dynamic_yields_to_a_model_that_fixes_the_size(keyed: Make) -> None:
    fast = keyed(lambda x: x.relu() * {4: 2, 8: 3}[x.shape[0]], dynamic=None)
    for size in (8, 4):
        x = torch.randn(size, 6)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        agrees(fast.at("FULL", size, x, capture=True), fast.model(x))
    fast.check("FULL", sizes=(4, 8))
    assert fast.tally("FULL") == {("g0.full", 8): (1, 2), ("g1.full", 4): (1, 2)}


def test_nothing_is_logged_twice_for_one_compile(keyed: Make, caplog: pytest.LogCaptureFixture) -> None:
    fast = keyed(Attended(), dynamic=None)
    with caplog.at_level(logging.INFO, "graphpass"):
        fast.capture("FULL", sizes=(8, 4, 6, 8, 4, 6))
    said = [record.message for record in caplog.records if record.name == "graphpass"]
    assert len(said) == len(set(said))
