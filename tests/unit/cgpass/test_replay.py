"""Which keys of which callables are captured and replayed, and how often, beside graph breaks too; as eager does."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import graphpass as gp
from graphpass.errors import CaptureError, ContextError
from tests.observed import reported_regions
from tests.unit.cgpass.attended import Make, expected_counts
from tests.unit.compiled import BOTH, agrees
from tests.unit.models import module


def through_both(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.second(torch.ops.cgpasstest.attend(torch.ops.cgpasstest.scale(self.first(x))))


def block() -> Any:
    """Two captured regions around one splitting op; ``scale`` has Python inside the first."""
    return module(through_both, first=nn.Linear(6, 6), second=nn.Linear(6, 6)).eval()


@pytest.mark.parametrize(
    ("mode", "runs"),
    [("FULL", []), ("PIECEWISE", ["attend"])],
    ids=["neither the region's Python nor the splitting op's", "only the eager region's Python"],
)
def test_a_replay_runs_only_the_python_of_eager_regions(
    keyed: Make, mode: str, runs: list[str], python_calls: Any
) -> None:
    fast = keyed(block())
    fast.check(mode, capture=True)
    assert fast.tally(mode) == expected_counts(mode, 4, (1, 1))
    for _ in range(3):
        x = torch.randn(4, 6)
        python_calls.clear()
        got = fast.at(mode, 4, x)
        assert python_calls == runs
        agrees(got, fast.model(x).detach())
    assert fast.tally(mode) == expected_counts(mode, 4, (1, 4))
    assert fast.tally("PIECEWISE" if mode == "FULL" else "FULL") == {}, "under FULL no inner wrapper captures"
    if mode == "FULL":
        assert fast.uses("copied", "static_sets") == {(4, 1)}, "one staged input a replay"


@pytest.mark.parametrize(
    ("built", "asked", "expected"),
    [
        ("PIECEWISE", "FULL", "PIECEWISE"),
        ("FULL", "PIECEWISE", "FULL"),
        ("FULL_DECODE_ONLY", "PIECEWISE", "FULL"),
        ("NONE", "FULL", "NONE"),
    ],
)
def test_a_mode_it_was_not_built_for_is_refused(keyed: Make, built: str, asked: str, expected: str) -> None:
    fast = keyed(block(), mode=built)
    with pytest.raises(ContextError, match=f"not built for runtime mode {asked}") as raised:
        fast.capture(asked)
    assert raised.value.found == asked
    assert expected in raised.value.expected
    assert (raised.value.expected == expected) or built != "NONE"
    assert fast.rt.counts() == {}


@pytest.mark.parametrize("context", [None, "NONE"])
def test_without_a_graph_it_is_the_compiler_alone_and_without_context_says_once_how_to_get_graphs(
    keyed: Make, caplog: pytest.LogCaptureFixture, context: str | None
) -> None:
    fast = keyed(block())
    with caplog.at_level(logging.INFO, "graphpass"):
        for _ in range(20):
            x = torch.randn(4, 6)
            if context is None:
                got = fast(x)
            else:
                with gp.set_forward_context(num_tokens=4):
                    got = fast(x)
            assert torch.equal(got, fast.model(x))
    said = [r for r in caplog.records if r.name == "graphpass"]
    advice = [r for r in said if "without a forward context" in r.message]
    if context is None:
        assert [r.levelname for r in advice] == ["WARNING"]
        assert "capturing()" in advice[0].message
        assert "dispatch='auto'" in advice[0].message
    else:
        assert not said
    assert fast.rt.counts() == {}


# -- captures that nobody directed, and the end of a runtime


def test_lazy_capture_captures_at_first_use_with_a_warning(keyed: Make, caplog: pytest.LogCaptureFixture) -> None:
    fast = keyed(block(), lazy_capture=True)
    with caplog.at_level(logging.WARNING, "graphpass"):
        fast.check(*BOTH * 2)
    (warned,) = [record.message for record in caplog.records if record.name == "graphpass"]
    assert "`with runtime.capturing():`" in warned
    places = sorted(place.split()[0] for place in fast.problem("captured while serving").places)
    assert places == ["g0.full", "g0.r0", "g0.r2"], "one a region and key"
    for mode in BOTH:
        assert fast.tally(mode) == expected_counts(mode, 4, (1, 2))


def test_close_drops_graphs_and_capturing_again_works(keyed: Make) -> None:
    fast, x = keyed(block()), torch.randn(4, 6)
    fast.capture()
    fast.check()
    fast.rt.close()
    assert fast.rt.buffer_bytes() == 0
    assert torch.equal(fast(x), fast.model(x))
    for mode in BOTH:
        with pytest.raises(CaptureError, match="has no graph"):
            fast.check(mode)
        fast.capture(mode)
        fast.check(mode)
    assert fast.tally("FULL") == {("g0.full", 4): (2, 4)}


# -- graph breaks


def breaks_explicitly(x: torch.Tensor) -> torch.Tensor:
    x = x * 2 + 1
    torch._dynamo.graph_break()
    return x.relu() - 1


def breaks_at_a_branch(x: torch.Tensor) -> torch.Tensor:
    x = x * 2 + 1
    if x.sum() > 0:
        return x.relu() - 1
    return x.cos() + 2


@pytest.mark.parametrize(("why", "model"), [("graph_break", breaks_explicitly), ("jump", breaks_at_a_branch)])
def test_each_side_of_a_graph_break_has_its_own_full(keyed: Make, why: str, model: Any) -> None:
    fast = keyed(model, dynamic=True, make=lambda size: (torch.rand(size, 6),))
    fast.capture("FULL", sizes=(8, 4))
    fast.check("FULL", sizes=(4, 8, 4))
    assert fast.tally("FULL") == {
        (f"g{graph}.full", size): (1, calls) for size, calls in ((8, 2), (4, 3)) for graph in (0, 1)
    }
    ((name, reason),) = [(name, why) for name, kind, why in reported_regions(fast.rt) if kind == "end"]
    assert name == "g0.end"
    assert why in reason.lower()
    assert f"test_replay.py:{model.__code__.co_firstlineno + 2}" in reason
