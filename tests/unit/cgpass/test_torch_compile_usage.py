"""torch.compile as users use it: graph breaks and dynamic shapes.

Every test compares with eager and counts what was compiled, captured and replayed.
"""

from __future__ import annotations

import pytest
import torch

from graphpass import GraphRuntime
from tests.observed import reported_regions
from tests.unit.cgpass.attended import Attended, Make

# -- fullgraph and graph breaks


def endings(rt: GraphRuntime) -> dict[str, str]:
    """{callable: why Dynamo ended its graph} for those that a graph break ended."""
    return {name.removesuffix(".end"): why for name, _, why in reported_regions(rt) if name.endswith(".end")}


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
