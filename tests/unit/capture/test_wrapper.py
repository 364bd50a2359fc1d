"""The wrapper's table: which call runs the region, which captures, which replays, which fails."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from graphpass import CUDAGraphWrapper
from graphpass.capture import Counts, recorder
from graphpass.context import set_forward_context
from graphpass.errors import CaptureError, OptionError
from graphpass.keys import BatchDescriptor, CUDAGraphMode

X = torch.arange(8.0)


def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


# -- row 2: absent, capture open ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_the_capturing_call_is_one_eager_call(rig: Any, mode: str) -> None:
    def step(x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        buffer.add_(x)
        return buffer * torch.rand(8)

    eager_buffer, buffer = torch.zeros(8), torch.zeros(8)
    torch.manual_seed(3)
    expected = step(X, eager_buffer)
    state = torch.get_rng_state()

    wrapper = rig.wrap(step, mode, static_inputs=[1], mutated_inputs=[1])
    torch.manual_seed(3)
    got = rig.capture(wrapper, X, buffer, at_mode=mode)
    assert torch.equal(got, expected)
    assert torch.equal(buffer, eager_buffer)
    assert torch.equal(torch.get_rng_state(), state)
    assert rig.counts(wrapper) == Counts(warmed=1, captured=1, replayed=1, copied=1, static_sets=1)
    assert wrapper.unwrap().calls == 2  # warm-up and recording; the capturing call's own result is a replay's


def test_a_region_sees_no_attention_metadata_in_a_piecewise_capture(rig: Any) -> None:
    from graphpass.context import get_forward_context

    seen: list[Any] = []

    def region(x: torch.Tensor) -> torch.Tensor:
        seen.append(get_forward_context().attn_metadata)
        return x + 1

    for mode in ("PIECEWISE", "FULL"):
        rig.capture(rig.wrap(region, mode), X, at_mode=mode, at_context={"attn_metadata": "pages"})
    assert seen == [None, None, "pages", "pages"]


# -- row 3: absent, capture closed -------------------------------------------------------------------------------------


def test_a_closed_capture_names_mode_key_and_what_there_is(rig: Any) -> None:
    wrapper = rig.wrap(plus_one, name="g0.full")
    with pytest.raises(CaptureError) as nothing_yet:
        rig.call(wrapper, X)
    for text in ("g0.full", "FULL", "8 tokens", "captured at FULL: nothing", "lazy_capture"):
        assert text in str(nothing_yet.value)
    rig.capture(wrapper, X)
    with pytest.raises(CaptureError, match=r"FULL 16 tokens.*captured at FULL: 8 tokens"):
        rig.call(wrapper, X, at_key=16)
    assert wrapper.captured() == [BatchDescriptor(8)]
    assert BatchDescriptor(16) not in wrapper.counts()
    assert wrapper.unwrap().calls == 2


# -- row 4: present ----------------------------------------------------------------------------------------------------


def test_descriptors_that_differ_in_extra_are_two_keys(rig: Any) -> None:
    wrapper = rig.wrap(plus_one)
    short, long = (BatchDescriptor(8, extra=(("seq_len", n),)) for n in (32, 64))
    with rig.runtime.capturing():
        for key in (short, long):
            with set_forward_context(runtime_mode=CUDAGraphMode.FULL, batch_descriptor=key):
                wrapper(X)
    assert wrapper.captured() == [short, long]


# -- construction and nesting ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "half"])
def test_only_a_runtime_mode_that_captures_is_accepted(rig: Any, mode: str) -> None:
    with pytest.raises(OptionError, match=mode):
        rig.wrap(plus_one, mode)
    with pytest.raises(ValueError, match=mode):
        CUDAGraphWrapper(plus_one, mode, runtime=rig.runtime, name="region")


def test_unwrap_and_attributes_reach_the_innermost_callable(rig: Any) -> None:
    inner = rig.wrap(plus_one)
    outer = CUDAGraphWrapper(inner, "PIECEWISE", runtime=rig.runtime, name="outer")
    region = inner.unwrap()
    region.hidden_size = 12
    assert outer.unwrap() is region
    assert outer.hidden_size == 12
    assert outer.name == "outer"
    with pytest.raises(AttributeError, match="no_such_attribute"):
        outer.no_such_attribute  # noqa: B018


# -- lazy capture ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "refused"), [(None, False), ((8,), False), ((8, 8), True), (torch.tensor([8, 4]), True)]
)
def test_lazy_capture_under_data_parallel_is_refused(rig: Any, ranks: Any, refused: bool) -> None:
    wrapper = rig.wrap(plus_one, lazy=True)
    context = {"num_tokens_across_dp": ranks}
    if not refused:
        assert torch.equal(rig.call(wrapper, X, at_context=context), X + 1)
        return
    with pytest.raises(CaptureError, match=r"lazily under data parallel.*lazy_capture with 2 ranks"):
        rig.call(wrapper, X, at_context=context)
    assert wrapper.captured() == []
    # Every rank captures what it is told to: that is no lazy capture. And what is captured replays.
    assert torch.equal(rig.capture(wrapper, X, at_context=context), X + 1)
    assert torch.equal(rig.call(wrapper, X * 2, at_context=context), X * 2 + 1)


def test_the_time_of_a_launch_is_that_of_the_faster_run(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm-up may load kernels and plan them, as cuDNN does for each new shape: it says nothing of a launch."""
    now = 0.0

    def region(x: torch.Tensor) -> torch.Tensor:
        nonlocal now
        now += 80.0 if wrapper._runnable.calls == 1 else 5.0
        return x + 1

    wrapper = rig.wrap(region)
    monkeypatch.setattr(recorder, "time", SimpleNamespace(perf_counter=lambda: now))
    rig.capture(wrapper, X)
    (use,) = rig.runtime.uses()
    assert (use.captured.least_s, use.captured.seconds) == (5.0, 85.0)


# A capture that fails: state as before, no entry, eager right, and a later capture works.


SHIFTED = torch.arange(8.0) - 3


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
        rig.capture(wrapper, SHIFTED, state)
    assert torch.equal(state, torch.ones(8))
    assert torch.equal(torch.get_rng_state(), rng)
    assert gc.isenabled() is collecting
    assert wrapper.captured() == []
    assert (rig.runtime.stats().captured, rig.runtime.stats().replayed) == (0, 0)

    region.trouble = None
    with torch.random.fork_rng():
        eager_state = torch.ones(8)
        eager = wrapper(SHIFTED, eager_state)
    got = rig.capture(wrapper, SHIFTED, state)
    assert torch.equal(got, eager)
    assert torch.equal(state, eager_state)
    assert (rig.counts(wrapper).captured, rig.counts(wrapper).replayed) == (1, 1)


@pytest.mark.parametrize("run", [1, 2], ids=["warm-up", "recording"])
def test_it_may_fail_while_warming_up_and_while_recording(rig: Any, run: int) -> None:
    wrapper = rig.wrap(Fails(raise_it(ValueError("once")), run), mutated_inputs=[1])
    state = torch.ones(8)
    with pytest.raises(CaptureError, match="ValueError: once"):
        rig.capture(wrapper, SHIFTED, state)
    assert torch.equal(state, torch.ones(8))
    assert rig.counts(wrapper).warmed == run - 1
    torch.manual_seed(1)
    got = rig.capture(wrapper, SHIFTED, state)
    torch.manual_seed(1)
    assert torch.equal(got, torch.ones(8) + torch.rand(8) + SHIFTED)


def test_the_error_says_where_what_and_how_many_bytes(rig: Any) -> None:
    wrapper = rig.wrap(Fails(raise_it(torch.OutOfMemoryError("no bytes left"))), name="g0.r3", mutated_inputs=[1])
    with pytest.raises(CaptureError) as failure:
        rig.capture(wrapper, SHIFTED, torch.ones(8), at_key=24)
    for text in ("g0.r3", "FULL 24 tokens", "OutOfMemoryError: no bytes left", "pool 0 bytes", "buffers 512 bytes"):
        assert text in str(failure.value)
    assert "at test_wrapper.py:" in str(failure.value)
    assert failure.value.where.startswith("at test_wrapper.py:")
    assert isinstance(failure.value.__cause__, torch.OutOfMemoryError)


def test_the_bytes_of_a_failed_capture_are_freed(rig: Any) -> None:
    region = Fails(None)
    wrapper = rig.captured(rig.wrap(region, mutated_inputs=[1]), SHIFTED, torch.ones(8))
    held = rig.runtime.buffer_bytes()
    region.trouble = raise_it(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        rig.capture(wrapper, SHIFTED.repeat(100), torch.ones(8), at_key=800)
    assert rig.runtime.buffer_bytes() == held
    region.trouble = None
    torch.manual_seed(1)
    got = rig.call(wrapper, SHIFTED, torch.zeros(8))
    torch.manual_seed(1)
    assert torch.equal(got, torch.rand(8) + SHIFTED)


def test_a_recording_that_is_not_used_is_reset(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when another rank failed: the error's traceback holds the graph, and a graph its communicator."""
    device, graphs = type(rig.runtime.lease.device_for([X])), list[Any]()
    record = device.record

    def recorded(*given: Any) -> Any:
        graph, outputs = record(*given)
        graphs.append(mock.Mock(wraps=graph))
        return graphs[-1], outputs

    monkeypatch.setattr(device, "record", recorded)
    monkeypatch.setattr(device, "refuse_frozen", mock.Mock(side_effect=[RuntimeError("put in"), None]))
    wrapper = rig.wrap(plus_one)
    with pytest.raises(CaptureError, match="put in"):
        rig.capture(wrapper, X)
    rig.capture(wrapper, X)
    assert [graph.reset.called for graph in graphs] == [True, False]


def test_a_failed_replay_leaves_the_pool_free(rig: Any) -> None:
    wrapper = rig.captured(rig.wrap(lambda x: x + 1), SHIFTED)
    with pytest.raises(ValueError, match="does not fit"):
        rig.call(wrapper, torch.ones(3))
    assert torch.equal(rig.call(wrapper, SHIFTED), SHIFTED + 1)
