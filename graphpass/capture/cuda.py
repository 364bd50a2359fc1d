"""Captures CUDA graphs through torch's public API."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from graphpass.capture.device import GraphDevice
from graphpass.capture.processmemory import PROCESS_MEMORY, PoolId
from graphpass.capture.recordingstream import RecordingStream
from graphpass.compat import memory

__all__ = ["CudaDevice"]


class CudaDevice(GraphDevice):
    """Captures CUDA graphs of one GPU into one memory pool.

    The pool is created on the first capture and lives as long as a graph captured into it. Warm-up runs on the caller's
    stream, capture on a stream that only this pool uses.

    Args:
        device: a CUDA device with an index.
        pool: a pool handle (``torch.cuda.graph_pool_handle()``) to share; None: a new pool.
        keeps_recordings: whether to store each ``cudaGraph_t``, so that more executables can be instantiated from it.
    """

    def __init__(self, device: torch.device, pool: Any = None, *, keeps_recordings: bool = False) -> None:
        self.device = device
        self.recordings: list[torch.cuda.CUDAGraph] = []
        self._keeps_recordings = keeps_recordings
        self._given_pool = pool
        self._pool = pool
        self._retired_pools: list[Any] = []
        self._recording: RecordingStream | None = None
        self._last_current: Any = None
        self._last_stream: torch.cuda.Stream | None = None

    @override
    def open(self) -> None:
        if self._recording is not None:
            return
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            PROCESS_MEMORY.add_pool(tuple(self._pool))
        self._recording = RecordingStream(self.device)
        self._recording.take_workspaces(self._pool)

    @override
    def warm_up(self, body: Callable[[], Any]) -> None:
        body()

    @override
    def record(
        self, body: Callable[[], Sequence[Any]], generators: Sequence[torch.Generator]
    ) -> tuple[torch.cuda.CUDAGraph, Sequence[Any]]:
        self.open()
        graph = torch.cuda.CUDAGraph(keep_graph=self._keeps_recordings)
        for generator in generators:
            graph.register_generator_state(generator)  # guard: cuda_generator_registered
        with self._on_recording_stream(generators):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = body()
            except BaseException:
                self._abandon(graph)
                raise
            try:
                _end(graph)
            except BaseException:
                self._retire_pool(graph)
                raise
        if self._keeps_recordings:
            graph.instantiate()
            self.recordings.append(graph)
        return graph, outputs

    @override
    def call(self, runnable: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return runnable(*args, **kwargs)

    @override
    def without_ownership(self, tensor: torch.Tensor) -> torch.Tensor:
        return memory.without_ownership(tensor)

    @override
    def refuse_frozen(self, outputs: Sequence[torch.Tensor]) -> None:
        """Does nothing: CUDA refuses to copy Python data to the GPU during a capture."""

    @override
    def make_stale(self, outputs: Sequence[torch.Tensor]) -> None:
        """Does nothing: the other graph's kernels overwrite shared memory."""

    @override
    def begin_forward(self) -> None:
        current = memory.current_stream_of(self.device)
        if current == self._last_current:
            return
        stream = torch.cuda.current_stream(self.device)
        if self._last_stream is not None:
            stream.wait_stream(self._last_stream)  # guard: cuda_stream_order
        self._last_current, self._last_stream = current, stream

    @override
    def pool_bytes(self) -> int:
        pools = self._pools()
        if not pools:
            return 0
        return sum(
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) in pools
        )

    @override
    def close(self) -> None:
        self._drop_stream()
        created = self._pools() - (set() if self._given_pool is None else {tuple(self._given_pool)})
        self._pool = self._given_pool
        self._retired_pools.clear()
        self.recordings.clear()
        self._last_current = self._last_stream = None
        torch.cuda.empty_cache()
        PROCESS_MEMORY.remove_pools(created)

    def _pools(self) -> set[PoolId]:
        """The pool that is captured into, and the retired pools."""
        return {tuple(pool) for pool in (self._pool, *self._retired_pools) if pool is not None}

    @contextlib.contextmanager
    def _on_recording_stream(self, generators: Sequence[torch.Generator]) -> Iterator[None]:
        assert self._recording is not None
        caller, stream = torch.cuda.current_stream(self.device), self._recording.stream
        stream.wait_stream(caller)
        try:
            with torch.cuda.stream(stream):
                yield
        except BaseException:
            caller.wait_stream(stream)
            if self._pool is None:  # retired
                self._drop_stream()
                self._take_out_of_capture(generators)  # guard: cuda_random_after_failure
            raise
        caller.wait_stream(stream)

    def _drop_stream(self) -> None:
        if self._recording is not None:
            self._recording.close()
            self._recording = None

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture whose body raised: the stream leaves capture mode, and the recording is discarded."""
        try:
            _end(graph)
        except RuntimeError:
            self._retire_pool(graph)
        else:
            graph.reset()

    def _retire_pool(self, graph: torch.cuda.CUDAGraph) -> None:
        """Retire the pool of an invalidated capture: no capture can use it again; the next one creates a new pool."""
        memory.forget_failed_capture(self.device, self._pool)
        graph.reset()
        self._retired_pools.append(self._pool)
        self._pool = None

    def _take_out_of_capture(self, generators: Sequence[torch.Generator]) -> None:
        """Make the device's random number generators usable in eager calls again.

        On torch 2.11, a generator stays in capture mode after a failed capture until a capture with it succeeds.
        """
        number = torch.zeros(1, device=self.device)
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            number.add_(1)
            graph.capture_end()
        graph.reset()


def _end(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture, without torch's warning about a graph without kernels: a region may just return its inputs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        graph.capture_end()
