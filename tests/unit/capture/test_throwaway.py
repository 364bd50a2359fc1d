"""A throwaway pool: captures in it leave nothing behind, and what was captured before is as it was."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from graphpass.capture import Counts
from graphpass.errors import CaptureError

X = torch.arange(8.0)


def test_a_captured_key_is_captured_apart_and_the_first_graph_is_as_it_was(rig: Any) -> None:
    wrapper = rig.wrap(lambda x: x + 1)
    rig.capture(wrapper, X)
    before, generation = rig.counts(wrapper), rig.runtime.lease.generation
    with rig.runtime.throwaway():
        assert rig.runtime.counts() == {}
        assert torch.equal(rig.call(wrapper, X * 2), X * 2 + 1)
        assert rig.counts(wrapper) == Counts(1, 1, 1, 1, 1)
        assert rig.runtime.lease.generation != generation
        assert rig.runtime.buffer_bytes() > 0
    assert wrapper.unwrap().calls == 4, "a warm-up and a recording, twice"
    assert (rig.counts(wrapper), rig.runtime.lease.generation) == (before, generation)
    assert torch.equal(rig.call(wrapper, X * 3), X * 3 + 1)
    assert rig.counts(wrapper).replayed == before.replayed + 1
    assert wrapper.unwrap().calls == 4


def test_what_was_captured_in_it_is_gone(rig: Any) -> None:
    wrapper = rig.wrap(lambda x: x + 1)
    with rig.runtime.throwaway():
        rig.call(wrapper, X)
        made_inside = rig.wrap(lambda x: x * 2, name="made inside")
        rig.call(made_inside, X)
    assert rig.runtime.counts() == {}
    assert rig.runtime.buffer_bytes() == 0
    for either in (wrapper, made_inside):
        with pytest.raises(CaptureError, match="captured at FULL: nothing"):
            rig.call(either, X)
    assert torch.equal(rig.capture(made_inside, X), X * 2)


def test_everything_is_put_back_when_the_body_raises(rig: Any) -> None:
    wrapper = rig.wrap(lambda x: x + 1)
    rig.capture(wrapper, X)
    before = rig.runtime.counts()

    def body() -> None:
        with rig.runtime.throwaway():
            rig.call(wrapper, X)
            raise KeyError("on purpose")

    with pytest.raises(KeyError, match="on purpose"):
        body()
    assert rig.runtime.counts() == before
    assert rig.runtime.scopes.current() is None
    assert torch.equal(rig.call(wrapper, X), X + 1)


def test_views_of_the_last_forward_stay_valid(rig: Any) -> None:
    """Other graphs of the runtime would overwrite them; those of another pool do not."""
    wrapper = rig.wrap(lambda x: x + 1, outputs="view")
    rig.capture(wrapper, X)
    view = rig.call(wrapper, X)
    with rig.runtime.throwaway():
        for key in (4, 8):
            rig.call(wrapper, X[:key], at_key=key)
    assert torch.equal(view, X + 1)
    rig.capture(wrapper, X[:4], at_key=4)
    assert view.isnan().all()


def test_a_parameter_that_dies_meanwhile_takes_its_graph_along(rig: Any) -> None:
    wrapper = rig.wrap(lambda x, w: x * w)
    with torch.no_grad():
        first, second = (torch.nn.Parameter(torch.full((8,), value)) for value in (2.0, 3.0))
        rig.capture(wrapper, X, first)
        rig.capture(wrapper, X, second)
        generation = rig.runtime.lease.generation
        with rig.runtime.throwaway():
            rig.call(wrapper, X, second)
            del first
            gc.collect()
        assert rig.counts(wrapper).static_sets == 1
        assert rig.runtime.lease.generation > generation, "plans may hold what was dropped"
        assert torch.equal(rig.call(wrapper, X, second), X * 3)


def test_no_generation_comes_twice(rig: Any) -> None:
    wrapper, seen = rig.wrap(lambda x: x + 1), [rig.runtime.lease.generation]
    for _ in range(2):
        with rig.runtime.throwaway():
            rig.call(wrapper, X)
            seen.append(rig.runtime.lease.generation)
    rig.runtime.close()
    seen.append(rig.runtime.lease.generation)
    assert len(set(seen)) == len(seen)


def test_another_scope_inside_is_refused(rig: Any) -> None:
    with rig.runtime.throwaway(), pytest.raises(CaptureError, match="capturing already"), rig.runtime.capturing():
        pass
    with rig.runtime.capturing(), pytest.raises(CaptureError, match="capturing already"), rig.runtime.throwaway():
        pass
