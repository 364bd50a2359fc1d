"""The pools and recording streams that graphpass owns in a process: which memory is its own, and until when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphpass.capture.cuda import CudaDevice, PoolId, ProcessMemory

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


def test_an_open_pool_without_memory_is_not_forgotten(holds: Holds) -> None:
    process = ProcessMemory()
    process.add_pool(OURS)
    assert process.owns_every_pool()
    process.add_pool(GIVEN)
    process.remove_pools({GIVEN})
    assert process.pools() == {OURS}


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
