"""A capture that fails: state as before, no entry, eager right, and a later capture works."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from graphpass.errors import CaptureError, GraphpassError, PoolBusyError

X = torch.arange(8.0) - 3


class Fails:
    """A region that writes its state, draws a random number, and then does what the test asks for."""

    def __init__(self, trouble: Any, run: int | None = None) -> None:
        self.trouble, self.run, self.runs = trouble, run, 0

    def __call__(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        state.add_(torch.rand(8))
        if self.trouble is not None and self.run in (None, self.runs):
            self.trouble(x)
        return state + x


def raise_it(error: BaseException) -> Any:
    def trouble(_x: torch.Tensor) -> None:
        raise error

    return trouble


TROUBLES = {
    "exception": (raise_it(ValueError("the region is wrong")), CaptureError),
    "out of memory": (raise_it(torch.OutOfMemoryError("no bytes left")), CaptureError),
    "interrupt": (raise_it(KeyboardInterrupt()), KeyboardInterrupt),
    "exit": (raise_it(SystemExit(3)), SystemExit),
    "item": (lambda x: x.sum().item(), CaptureError),
    "bool of a tensor": (lambda x: bool(x.sum() > 0), CaptureError),
    "tolist": (lambda x: x.tolist(), CaptureError),
    "numpy": (lambda x: x.numpy(), CaptureError),
    "equal": (lambda x: torch.equal(x, x), CaptureError),
    "nonzero": (lambda x: x.nonzero(), CaptureError),
    "unique": (lambda x: torch.unique(x), CaptureError),
    "masked_select": (lambda x: x.masked_select(x > 0), CaptureError),
    "mask index": (lambda x: x[x > 0], CaptureError),
    "mask put of many": (lambda x: x.clone().index_put_((x > 0,), torch.ones(4)), CaptureError),
}


@pytest.mark.parametrize("static", [True, False], ids=["static", "staged"])
@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_failed_capture_leaves_everything_as_it_was(rig: Any, trouble: str, static: bool) -> None:
    region = Fails(TROUBLES[trouble][0])
    wrapper = rig.wrap(region, static_inputs=[1] if static else [], mutated_inputs=[1])
    state = torch.ones(8)
    torch.manual_seed(5)
    rng = torch.get_rng_state()
    collecting = gc.isenabled()
    with pytest.raises(TROUBLES[trouble][1]):
        rig.capture(wrapper, X, state)
    assert torch.equal(state, torch.ones(8))
    assert torch.equal(torch.get_rng_state(), rng)
    assert gc.isenabled() is collecting
    assert wrapper.captured() == []
    assert (rig.runtime.stats().captured, rig.runtime.stats().replayed) == (0, 0)

    region.trouble = None
    with torch.random.fork_rng():
        eager_state = torch.ones(8)
        eager = wrapper(X, eager_state)
    got = rig.capture(wrapper, X, state)
    assert torch.equal(got, eager)
    assert torch.equal(state, eager_state)
    assert (rig.counts(wrapper).captured, rig.counts(wrapper).replayed) == (1, 1)


@pytest.mark.parametrize("run", [1, 2], ids=["warm-up", "recording"])
def test_it_may_fail_while_warming_up_and_while_recording(rig: Any, run: int) -> None:
    wrapper = rig.wrap(Fails(raise_it(ValueError("once")), run), mutated_inputs=[1])
    state = torch.ones(8)
    with pytest.raises(CaptureError, match="ValueError: once"):
        rig.capture(wrapper, X, state)
    assert torch.equal(state, torch.ones(8))
    assert rig.counts(wrapper).warmed == run - 1
    torch.manual_seed(1)
    got = rig.capture(wrapper, X, state)
    torch.manual_seed(1)
    assert torch.equal(got, torch.ones(8) + torch.rand(8) + X)


def test_the_error_says_where_what_and_how_many_bytes(rig: Any) -> None:
    wrapper = rig.wrap(Fails(raise_it(torch.OutOfMemoryError("no bytes left"))), name="g0.r3", mutated_inputs=[1])
    with pytest.raises(CaptureError) as failure:
        rig.capture(wrapper, X, torch.ones(8), at_key=24)
    for text in ("g0.r3", "FULL 24 tokens", "OutOfMemoryError: no bytes left", "pool 0 bytes", "buffers 512 bytes"):
        assert text in str(failure.value)
    assert "at test_failures.py:" in str(failure.value)
    assert isinstance(failure.value.__cause__, torch.OutOfMemoryError)


def test_the_bytes_of_a_failed_capture_are_freed(rig: Any) -> None:
    region = Fails(None)
    wrapper = rig.wrap(region, mutated_inputs=[1])
    rig.capture(wrapper, X, torch.ones(8))
    held = rig.runtime.buffer_bytes()
    region.trouble = raise_it(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        rig.capture(wrapper, X.repeat(100), torch.ones(8), at_key=800)
    assert rig.runtime.buffer_bytes() == held
    region.trouble = None
    torch.manual_seed(1)
    got = rig.call(wrapper, X, torch.zeros(8))
    torch.manual_seed(1)
    assert torch.equal(got, torch.rand(8) + X)


def test_other_keys_stay_as_they_are(rig: Any) -> None:
    region = Fails(None)
    wrapper = rig.wrap(region, mutated_inputs=[1])
    rig.capture(wrapper, X, torch.ones(8))
    region.trouble = raise_it(ValueError("bad key"))
    with pytest.raises(CaptureError):
        rig.capture(wrapper, X, torch.ones(8), at_key=16)
    state = torch.zeros(8)
    torch.manual_seed(1)
    got = rig.call(wrapper, X, state)
    torch.manual_seed(1)
    assert torch.equal(state, torch.rand(8))
    assert torch.equal(got, state + X)
    assert wrapper.captured() == [key for key in wrapper.counts() if key.num_tokens == 8]


def test_a_typed_error_of_a_region_stays_what_it_is(rig: Any) -> None:
    error = PoolBusyError("mine", expected="a", found="b", remedy="c")
    with pytest.raises(GraphpassError) as raised:
        rig.capture(rig.wrap(Fails(raise_it(error)), mutated_inputs=[1]), X, torch.ones(8))
    assert raised.value is error


def test_masked_fills_need_no_host_read(rig: Any) -> None:
    def fill(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[x > 0] = 7.0
        return y.masked_fill(x < 0, -7.0)

    wrapper = rig.wrap(fill)
    rig.capture(wrapper, X)
    assert torch.equal(rig.call(wrapper, -X), fill(-X))


def test_a_failed_replay_leaves_the_pool_free(rig: Any) -> None:
    wrapper = rig.wrap(lambda x: x + 1)
    rig.capture(wrapper, X)
    with pytest.raises(ValueError, match="does not fit"):
        rig.call(wrapper, torch.ones(3))
    assert torch.equal(rig.call(wrapper, X), X + 1)
