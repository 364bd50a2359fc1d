"""``debug=True``: the same wrapper and buffers, with the region run eagerly in each replay."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import graphpass as gp
from graphpass.errors import CaptureError, OptionError, ShapeError

X = torch.arange(8.0)


def test_python_that_a_graph_has_frozen_runs_again(rig: Any) -> None:
    scale = [2.0]
    frozen = rig.wrap(lambda x: x * scale[0], name="frozen")
    live = rig.wrap(lambda x: x * scale[0], name="live", debug=True)
    for wrapper in (frozen, live):
        rig.capture(wrapper, X)
    scale[0] = 5.0
    assert torch.equal(rig.call(frozen, X), X * 2)
    assert torch.equal(rig.call(live, X), X * 5)
    assert (rig.counts(live).captured, rig.counts(live).replayed) == (1, 2)


def test_it_checks_and_copies_as_a_graph_would(rig: Any) -> None:
    def region(x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state += x
        return state * 2, x.view(2, 4)

    wrapper = rig.wrap(region, debug=True, mutated_inputs=[1])
    state, moved = torch.zeros(8), X.clone()
    rig.capture(wrapper, moved, state)
    doubled, viewed = rig.call(wrapper, moved, state)
    assert torch.equal(state, X * 2)
    assert torch.equal(doubled, X * 4)
    assert viewed.data_ptr() == moved.data_ptr()
    with pytest.raises(ShapeError, match="does not fit the buffer"):
        rig.call(wrapper, torch.ones(3), state)


def test_ops_that_cannot_be_captured_run(rig: Any) -> None:
    wrapper = rig.wrap(lambda x: x * x.sum().item(), debug=True)
    rig.capture(wrapper, X)
    assert torch.equal(rig.call(wrapper, X + 1), (X + 1) * (X + 1).sum())


@pytest.mark.parametrize("found", ["number", "shape"])
def test_what_a_graph_would_bake_in_is_refused(rig: Any, found: str) -> None:
    given: list[Any] = [3]
    region = (lambda x: (x + 1, given[0])) if found == "number" else (lambda x: x[: given[0]] + 1)
    wrapper = rig.wrap(region, debug=True)
    rig.capture(wrapper, X)
    given[0] = 4
    with pytest.raises(CaptureError, match=r"output \d of region is baked into the graph"):
        rig.call(wrapper, X)


def test_debug_does_not_keep_parameters_alive(rig: Any) -> None:
    linear = torch.nn.Linear(8, 8)
    wrapper = rig.wrap(lambda x, w: x @ w, debug=True, static_inputs=[1])
    with torch.no_grad():
        rig.capture(wrapper, X, linear.weight)
    assert len(wrapper.captured()) == 1
    del linear
    assert wrapper.captured() == []


def test_regions_inside_do_not_capture(rig: Any) -> None:
    inner = rig.wrap(lambda x: x + 1, "PIECEWISE", name="inner")
    outer = rig.wrap(lambda x: inner(x) * 2, debug=True, name="outer")
    rig.capture(outer, X)
    assert torch.equal(rig.call(outer, X + 1), (X + 2) * 2)
    assert set(rig.runtime.counts()) == {("outer", gp.CUDAGraphMode.FULL, gp.BatchDescriptor(8))}


# -- views that outlive their validity


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "graphpass"]


def views(rig: Any) -> Any:
    wrapper = rig.wrap(lambda x: (x + 1, x.long() * 2), outputs="view", debug=True)
    rig.capture(wrapper, X)
    return wrapper


def test_a_view_alive_after_two_replays_is_reported(rig: Any, caplog: pytest.LogCaptureFixture) -> None:
    wrapper = views(rig)
    with caplog.at_level(logging.WARNING, "graphpass"):
        kept = rig.call(wrapper, X)[1][2:]  # a view of the view
        rig.call(wrapper, X + 1)
        assert not said(caplog)
        rig.call(wrapper, X + 2)
        rig.call(wrapper, X + 3)
    assert [text.split(": it")[0] for text in said(caplog)] == [
        "output 1 of region: a view is still held after a later replay overwrote it"
    ]
    (problem,) = rig.runtime.report().problems
    assert problem.places == ("output 1 of region",)
    assert not torch.equal(kept, (X * 2).long()[2:])


def test_views_in_a_loop_are_fine(rig: Any, caplog: pytest.LogCaptureFixture) -> None:
    wrapper = views(rig)
    with caplog.at_level(logging.WARNING, "graphpass"):
        y = X
        for _ in range(5):
            y, n = rig.call(wrapper, y)
    assert torch.equal(y, X + 5)
    assert torch.equal(n, (X + 4).long() * 2)
    assert not said(caplog)


def test_clones_are_not_watched(rig: Any, caplog: pytest.LogCaptureFixture) -> None:
    wrapper = rig.wrap(lambda x: x + 1, debug=True)
    rig.capture(wrapper, X)
    kept = [rig.call(wrapper, X + i) for i in range(4)]
    assert not said(caplog)
    assert all(torch.equal(y, X + i + 1) for i, y in enumerate(kept))


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_the_auto_dispatcher_debugs(mode: str) -> None:
    """With the buffers, keys and padding of a graph."""
    fast = torch.compile(
        lambda x: x * 2, backend="cgpass", options={"compiler": "eager", "mode": mode, "debug": True}, dynamic=True
    )
    with torch.no_grad():
        for size in (5, 6, 7, 5, 6, 7):
            x = torch.randn(size, 3)
            torch.testing.assert_close(fast(x), x * 2)
    report = gp.runtime_of(fast).report()
    assert report.problems == ()
    assert any(key.padding for key in report.figures.keys)


def test_options_are_checked() -> None:
    with pytest.raises(OptionError, match=r"option debug has no such value.*False or True"):
        gp.capture.CapturePolicy(debug="yes")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="option compare has no such value"):
        gp.capture.CapturePolicy(compare=2)  # type: ignore[arg-type]
