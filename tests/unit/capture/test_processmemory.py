"""The pools and recording streams of a process: which memory is its own, and captures that are thrown away."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphpass.capture import Counts
from graphpass.capture.cuda import Capture, CudaDevice, PoolId, ProcessMemory
from graphpass.errors import CaptureError

OURS, GIVEN, THEIRS = (0, 7), (0, 8), (0, 9)
RECORDING, OTHER = 0x51, 0x52
Holds = Callable[..., None]


@pytest.fixture
def holds(monkeypatch: pytest.MonkeyPatch) -> Holds:
    """``holds((stream, pool), ...)``: torch's allocator has these segments."""

    def hold(*segments: tuple[int, PoolId]) -> None:
        found = [{"stream": stream, "segment_pool_id": list(pool)} for stream, pool in segments]
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: found)

    hold()
    return hold


def test_memory_of_others_is_noticed(holds: Holds) -> None:
    process = ProcessMemory()
    process.add_pool(OURS)
    holds((OTHER, OURS), (OTHER, (0, 0)))
    assert process.owns_every_pool()
    holds((OTHER, OURS), (OTHER, THEIRS))
    assert not process.owns_every_pool()


def test_a_recording_streams_memory_is_its_own_in_every_pool_until_the_stream_is_destroyed(holds: Holds) -> None:
    process = ProcessMemory()
    process.add_stream(RECORDING)
    holds((RECORDING, GIVEN))
    assert process.owns_every_pool()
    process.remove_stream(RECORDING)
    assert not process.owns_every_pool()


def test_a_closed_pool_is_its_own_until_its_memory_is_freed(holds: Holds) -> None:
    process = ProcessMemory()
    process.add_pool(OURS)
    holds((OTHER, OURS))
    process.remove_pools({OURS, THEIRS})
    assert process.owns_every_pool(), "outputs that a caller holds lie in it"
    assert process.pools() == {OURS}
    holds()
    assert process.owns_every_pool()
    assert process.pools() == frozenset()


class Stream:
    """A recording stream without a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def take_workspaces(self, pool: Any) -> None:
        assert pool is not None

    def close(self) -> None:
        """Nothing to destroy."""


@pytest.mark.parametrize("given", [None, GIVEN], ids=["own pool", "given pool"])
def test_a_device_removes_the_pools_that_it_created(
    holds: Holds, monkeypatch: pytest.MonkeyPatch, given: PoolId | None
) -> None:
    process, handles = ProcessMemory(), iter([OURS, (0, 10)])
    monkeypatch.setattr("graphpass.capture.cuda.PROCESS_MEMORY", process)
    monkeypatch.setattr("graphpass.capture.cuda.RecordingStream", Stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    process.add_pool(GIVEN)  # another device's
    device = CudaDevice(torch.device("cuda", 0), given)
    for pools in ({OURS, GIVEN}, {(0, 10), GIVEN}):
        device.open()
        assert process.pools() == (pools if given is None else {GIVEN})
        device.close()
        assert process.pools() == {GIVEN}


# A capture that fails at any point: the graph is reset once, and the allocator leaves the pool at most once.


class FakeGraph:
    """A CUDA graph whose capture fails at ``begin`` or ``end``."""

    def __init__(self, fails_at: str) -> None:
        self.fails_at, self.calls = fails_at, [""]

    def capture_begin(self, **_: Any) -> None:
        self._called("begin")

    def capture_end(self) -> None:
        self._called("end")

    def reset(self) -> None:
        self.calls.append("reset")

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails_at:
            raise RuntimeError(name)


@pytest.mark.parametrize(
    ("fails_at", "calls", "leaves", "error"),
    [
        ("", "begin end", False, None),
        ("register", "reset", True, "register"),
        ("begin", "begin reset", True, "begin"),
        ("body", "begin end reset", False, "body"),
        ("end", "begin end reset", True, "end"),
        ("body end", "begin end reset", True, "body"),
    ],
)
def test_what_a_capture_that_fails_leaves(
    monkeypatch: pytest.MonkeyPatch, fails_at: str, calls: str, leaves: bool, error: str | None
) -> None:
    def register(*_: Any) -> None:
        if "register" in fails_at:
            raise RuntimeError("register")

    left: list[str] = []
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *_, name=name: left.append(name), raising=False)
    monkeypatch.setattr("graphpass.capture.cuda.memory.register_generators", register)
    graph: Any = FakeGraph(fails_at)
    capture = Capture(graph, torch.device("cuda", 0), OURS, ())
    with pytest.raises(RuntimeError, match=f"^{error}$") if error else contextlib.nullcontext(), capture:
        if "body" in fails_at:
            raise RuntimeError("body")
    assert graph.calls[1:] == calls.split()
    assert capture.is_invalid is leaves
    assert left == (["_cuda_endAllocateToPool", "_cuda_releasePool"] if leaves else [])


# A throwaway pool: captures in it leave nothing behind, and what was captured before is as it was.


X = torch.arange(8.0)


def test_a_captured_key_is_captured_apart_and_the_first_graph_is_as_it_was(rig: Any) -> None:
    wrapper = rig.captured(rig.wrap(lambda x: x + 1), X)
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
