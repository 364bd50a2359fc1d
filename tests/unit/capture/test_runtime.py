"""The runtime: one forward at a time, capture scopes, closing, counts and reports."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from graphpass import CUDAGraphWrapper, GraphRuntime
from graphpass.capture import CallableRecord, SizeRecord
from graphpass.errors import CaptureError, DeviceError, PoolBusyError
from graphpass.keys import BatchDescriptor, CUDAGraphMode

X = torch.arange(8.0)
FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


# -- the pool rule -----------------------------------------------------------------------------------------------------


def test_counts_are_read_while_another_thread_captures(rig: Any) -> None:
    uses = rig.captured(rig.wrap(plus_one), X).table.uses(rig.runtime.ledger)
    first = next(uses)
    rig.capture(rig.wrap(plus_one, name="region"), X[:4], at_key=4)  # what the other thread does meanwhile
    assert [use.key for use in (first, *uses)] == [BatchDescriptor(8)]


def test_a_forward_inside_a_forward_is_refused(rig: Any) -> None:
    inner = rig.captured(rig.wrap(plus_one, name="inner"), X, at_key=4)
    outer = rig.wrap(lambda x: rig.call(inner, x, at_key=4), name="outer")
    with pytest.raises(PoolBusyError, match=r"inner started a forward inside another forward.*GraphRuntime of its own"):
        rig.capture(outer, X)
    assert outer.captured() == []
    assert torch.equal(rig.call(inner, X, at_key=4), X + 1)  # the pool is free again
    with GraphRuntime() as own:
        apart = CUDAGraphWrapper(plus_one, "FULL", runtime=own, name="apart")
        alone = rig.wrap(lambda x: rig.call(apart, x, at_mode="NONE") * 2, name="alone")
        assert torch.equal(rig.capture(alone, X), (X + 1) * 2)


# -- capture scopes ----------------------------------------------------------------------------------------------------


def test_one_scope_at_a_time(rig: Any) -> None:
    with rig.runtime.capturing():
        with pytest.raises(CaptureError, match="capturing already"), rig.runtime.capturing():
            pass
        with ThreadPoolExecutor(1) as threads, pytest.raises(CaptureError, match="this or another thread"):
            threads.submit(rig.capture, rig.wrap(plus_one), X).result(10)
        assert torch.equal(rig.call(rig.wrap(plus_one), X), X + 1)  # the first one is still open
    with rig.runtime.capturing() as scope:
        assert rig.runtime.scopes.current() is scope
    assert rig.runtime.scopes.current() is None


def test_a_scope_closes_when_its_body_raises(rig: Any) -> None:
    with pytest.raises(KeyboardInterrupt), rig.runtime.capturing():
        raise KeyboardInterrupt
    with pytest.raises(CaptureError, match="capture is closed"):
        rig.call(rig.wrap(plus_one), X)
    with rig.runtime.capturing():
        pass


@pytest.mark.usefixtures("frozen_are_counted")
@pytest.mark.parametrize("frozen_before", [False, True])
def test_the_collector_is_frozen_in_a_scope_and_as_it_was_after(rig: Any, frozen_before: bool) -> None:
    gc.unfreeze()
    if frozen_before:
        gc.freeze()
    seen: list[bool] = []

    def region(x: torch.Tensor) -> torch.Tensor:
        seen.append(gc.isenabled())
        return x + 1

    wrapper = rig.wrap(region)
    with rig.runtime.capturing():
        assert gc.get_freeze_count() > 10_000
        rig.call(wrapper, X)
        assert gc.isenabled()
    assert seen == [False, False]
    assert (gc.get_freeze_count() > 10_000) is frozen_before
    gc.freeze()


# -- lifetimes ---------------------------------------------------------------------------------------------------------


class Memory(bytearray):
    """Memory whose end can be watched; a tensor over it keeps it."""


def test_closing_drops_the_graphs_memory(rig: Any) -> None:
    memory = Memory(32)
    static, gone = torch.frombuffer(memory, dtype=torch.float32), weakref.ref(memory)
    wrapper = rig.wrap(lambda x, w: x + w, static_inputs=[1])
    rig.capture(wrapper, X, static)
    del static, memory
    gc.collect()
    assert gone() is not None
    rig.runtime.close()
    gc.collect()
    assert gone() is None


def test_the_counts_of_a_dead_wrapper_go(rig: Any) -> None:
    kept = rig.captured(rig.wrap(plus_one, name="kept"), X)
    for name in ("first", "first", "second"):  # the second one of a name starts to count anew
        wrapper = rig.captured(rig.wrap(plus_one, name=name), X)
        assert rig.counts(wrapper).captured == 1
        del wrapper
        gc.collect()
    rig.wrap(plus_one, name="last")
    assert {str(region) for region, _ in rig.runtime.ledger.tables} == {"kept"}
    assert rig.counts(kept).captured == 1


# -- one device --------------------------------------------------------------------------------------------------------


def test_a_runtime_can_name_its_device() -> None:
    with GraphRuntime(device="cpu") as runtime:
        assert runtime.lease.device_for([]).device == torch.device("cpu")
    with pytest.raises(DeviceError, match="meta"):
        GraphRuntime(device="meta")


# -- what it tells -----------------------------------------------------------------------------------------------------


def test_no_sizes_are_suggested_where_nothing_is_padded(rig: Any) -> None:
    rig.runtime.register(CallableRecord("g0", (), 1, sizes=(SizeRecord("seq", "s0", 4, 2, None, is_padded=False),)))
    rig.runtime.ledger.sizes["seq"].update([3, 3, 8])
    assert rig.runtime.stats().histograms == {"seq": {3: 2, 8: 1}}
    assert rig.runtime.suggested_sizes() == {}


@pytest.mark.parametrize(("release", "problems"), [("2.15.3", 0), ("2.16.0+cu130", 1), ("3.0.0a0", 1)])
def test_a_torch_newer_than_the_tested_ones_is_a_warning(
    release: str, problems: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", release)
    with GraphRuntime() as runtime:
        found = [problem for problem in runtime.report().problems if "newer" in problem.what]
    assert len(found) == len(caplog.records) == problems
    assert all(problem.remedy == "if something fails, install torch 2.15" for problem in found)
