"""Captures CUDA graphs through torch's public API; the CPU tape (:mod:`graphpass.capture.tape`) has the same methods.

A device belongs to one :class:`~graphpass.capture.runtime.GraphRuntime`, which closes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from graphpass.compat import memory
from graphpass.compat.driver import checked, driver

_log = logging.getLogger("graphpass")

PoolId = tuple[int, int]
_TIMED_REPLAYS = 3
# To tune: warm-ups of a captured function, rounds of replays, duration of a round, and most replays in it.
_WARM_UPS, _ROUNDS, _ROUND_S, _MOST_REPLAYS = 3, 15, 2e-3, 50
_DEFAULT_POOL: PoolId = (0, 0)
_NON_BLOCKING = ctypes.c_uint(1)
"""CU_STREAM_NON_BLOCKING: does not synchronise with the legacy default stream, which stays usable while recording."""

_AUTO_FREE_ON_LAUNCH, _USE_NODE_PRIORITY = 1, 8
_AS_TORCH_MAKES_THEM = ctypes.c_ulonglong(_AUTO_FREE_ON_LAUNCH | _USE_NODE_PRIORITY)


def total_bytes(device: torch.device) -> int:
    """The memory of a GPU; 0 for the CPU, and where the device of fake tensors is not there."""
    is_there = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_properties(device).total_memory if is_there else 0


def device_bytes(device: torch.device) -> tuple[int, int]:
    """(bytes of torch's allocator, bytes of a GPU in use beside it) now; none of the CPU."""
    if device.type != "cuda":
        return 0, 0
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return reserved, int(total - free) - reserved


class CudaDevice:
    """Captures CUDA graphs of one GPU into one memory pool, which lives as long as a graph in it.

    Warm-up runs on the caller's stream, capture on a stream that only this pool uses.
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
        self._dropped: list[tuple[torch.cuda.Event, Any]] = []

    def open(self) -> None:
        """Allocate the memory that the pool needs once for all graphs; :meth:`record` calls this first."""
        if self._recording is not None:
            return
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            PROCESS_MEMORY.add_pool(tuple(self._pool))
        self._recording = RecordingStream(self.device)
        try:
            self._recording.take_workspaces(self._pool)
        except BaseException as error:
            is_given = self._pool == self._given_pool
            self._retire_pool()
            self._drop_stream()
            self._take_out_of_capture(())
            if not is_given or type(error) is not RuntimeError:  # its subclasses are out of memory, a failed device
                raise
            # Some releases of torch refuse a pool whose graphs are all gone.
            _log.warning(
                "graph_pool %s takes no more graphs, these get a pool of their own: keep a graph in it (%s)",
                self._given_pool,
                error,
            )
            self.open()

    def warm_up(self, body: Callable[[], Any]) -> Callable[[], float | None]:
        """Run ``body`` once on the device, and drop its results; returns a function for its seconds, like ``timed``."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        body()
        end.record()
        return lambda: start.elapsed_time(end) / 1e3 if end.query() else None

    def record(
        self, body: Callable[[], Sequence[Any]], generators: Sequence[torch.Generator]
    ) -> tuple[torch.cuda.CUDAGraph, Sequence[Any]]:
        """Record ``body``; returns the graph and the results, tensors at the graph's addresses.

        ``body`` may take effect, depending on the device: callers restore what it mutates. If it raises, the recording
        is discarded.
        """
        self.open()
        self.reset_dropped()
        graph = torch.cuda.CUDAGraph(keep_graph=self._keeps_recordings)
        capture = Capture(graph, self.device, self._pool, generators)
        with self._on_recording_stream(capture), capture:
            outputs = body()
        if self._keeps_recordings:
            graph.instantiate()
            self.recordings.append(graph)
        return graph, outputs

    def timed(self, replay: Callable[[], object]) -> Callable[[], float | None]:
        """Replay a few times; returns a function for the median seconds, None until they are known: nothing waits.

        The first replay uploads the graph and does not count.
        """
        replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(_TIMED_REPLAYS + 1)]
        events[0].record()
        for event in events[1:]:
            replay()
            event.record()

        def seconds() -> float | None:
            if not events[-1].query():
                return None
            return float(statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))) / 1e3

        return seconds

    def reading(self) -> tuple[int, int]:
        """See :func:`device_bytes`."""
        return device_bytes(self.device)

    def drop(self, graph: Any) -> None:
        """Reset a graph that is never replayed again, once the device has finished its replays."""
        event = torch.cuda.Event()
        event.record(self._last_stream or torch.cuda.current_stream(self.device))
        self._dropped.append((event, graph))
        self.reset_dropped()

    def reset_dropped(self) -> None:
        """Reset the dropped graphs whose replays have ended."""
        for event, graph in list(self._dropped):
            if event.query():  # guard: exact_in_flight
                self._dropped.remove((event, graph))
                graph.reset()

    def call(self, runnable: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a region's runnable inside :meth:`warm_up` or :meth:`record`; all regions are called through here."""
        return runnable(*args, **kwargs)

    def without_ownership(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor over the memory of ``tensor`` that does not keep it allocated in the pool."""
        return memory.without_ownership(tensor)

    def refuse_frozen(self, outputs: Sequence[torch.Tensor]) -> None:
        """Does nothing: CUDA refuses to copy Python data to the GPU during a capture."""

    def make_stale(self, outputs: Sequence[torch.Tensor]) -> None:
        """Does nothing: the other graph's kernels overwrite shared memory."""

    def begin_forward(self) -> None:
        """Order all later work after the last forward that used the pool, also across streams."""
        current = memory.current_stream_of(self.device)
        if current == self._last_current:
            return
        memory.refuse_inside_capture(self.device, "a forward")  # guard: no_forward_inside_another
        stream = torch.cuda.current_stream(self.device)
        if self._last_stream is not None:
            stream.wait_stream(self._last_stream)  # guard: cuda_stream_order
        self._last_current, self._last_stream = current, stream

    def pool_bytes(self) -> int:
        """Bytes reserved by the pool now."""
        pools = self._pools()
        segments = torch.cuda.memory_snapshot() if pools else ()
        return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) in pools)

    def close(self) -> None:
        """Free the pool; the device can record again afterwards, into a new pool."""
        while self._dropped:
            event, graph = self._dropped.pop()
            event.synchronize()
            graph.reset()
        self._drop_stream()
        created = self._pools() - (set() if self._given_pool is None else {tuple(self._given_pool)})
        self._pool = self._given_pool
        self._retired_pools.clear()
        self.recordings.clear()
        self._last_current = self._last_stream = None
        torch.cuda.empty_cache()
        PROCESS_MEMORY.remove_pools(created)

    def _pools(self) -> set[PoolId]:
        return {tuple(pool) for pool in (self._pool, *self._retired_pools) if pool is not None}

    @contextlib.contextmanager
    def _on_recording_stream(self, capture: Capture) -> Iterator[None]:
        assert self._recording is not None
        caller, stream = torch.cuda.current_stream(self.device), self._recording.stream
        stream.wait_stream(caller)
        try:
            with torch.cuda.stream(stream):
                yield
        except BaseException:
            caller.wait_stream(stream)
            if capture.is_invalid:
                self._retire_pool()
                self._drop_stream()
                self._take_out_of_capture(capture.generators)  # guard: cuda_random_after_failure
            raise
        caller.wait_stream(stream)

    def _drop_stream(self) -> None:
        if self._recording is not None:
            self._recording.close()
            self._recording = None

    def _retire_pool(self) -> None:
        """Retire the pool of an invalidated capture: no capture can use it again; the next one creates a new pool."""
        self._retired_pools.append(self._pool)
        self._pool = None

    def _take_out_of_capture(self, generators: Sequence[torch.Generator]) -> None:
        """Make the random number generators usable in eager calls again.

        On torch 2.11 one stays in capture mode after a failed capture until a capture with it succeeds.
        """
        number = torch.zeros(1, device=self.device)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream), Capture(graph, self.device, torch.cuda.graph_pool_handle(), generators):
            number.add_(1)
        graph.reset()


class Capture:
    """The body of the ``with`` as a graph; where it fails, the graph is reset, and no generator and no stream captures.

    ``is_invalid`` afterwards says that the capture did not begin or was invalidated: the pool cannot be used again.
    """

    def __init__(
        self, graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any, generators: Sequence[torch.Generator]
    ) -> None:
        self._graph, self._device, self._pool, self.generators = graph, device, pool, generators
        self.is_invalid = False

    def __enter__(self) -> None:
        try:
            memory.register_generators(self._graph, self.generators)
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        except BaseException:
            self._forget()
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            with warnings.catch_warnings():  # of a graph without kernels: a region may just return its inputs
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                self._graph.capture_end()
        except BaseException:
            self._forget()
            if error is None:
                raise
        else:
            if error is not None:
                self._graph.reset()

    def _forget(self) -> None:
        self.is_invalid = True
        memory.forget_failed_capture(self._device, self._pool, self._graph)


class RecordingStream:
    """A CUDA stream that runs only the recordings of one pool, see Note [Workspaces] in docs/design."""

    def __init__(self, device: torch.device) -> None:
        self._handle = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.mem_get_info(device)  # makes the device's context current in this thread, for the driver call
            checked(driver().cuStreamCreate(ctypes.byref(self._handle), _NON_BLOCKING), "make a stream")
        PROCESS_MEMORY.add_stream(self._address)
        self._first: torch.cuda.CUDAGraph | None = None
        """The graph that allocated the workspaces; while it lives, the pool is in use and torch does not free it."""
        self.stream = torch.cuda.ExternalStream(self._address, device=device)  # guard: cuda_blas_workspace

    @property
    def _address(self) -> int:
        return self._handle.value or 0

    def take_workspaces(self, pool: Any) -> None:
        """Make torch allocate this stream's cuBLAS workspaces in ``pool`` now, rather than in the first recording."""
        a = torch.ones(64, 64, device=self.stream.device)
        bias = a[0]

        def products() -> None:
            torch.addmm(bias, a, a)  # runs in cuBLASLt, which has a separate workspace
            torch.mm(a, a)

        products()  # the libraries create their handles here, outside of the recording
        self._first = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream), torch.no_grad(), Capture(self._first, self.stream.device, pool, ()):
            products()

    def close(self) -> None:
        """Destroy the stream and free its workspaces; no graph recorded on it may be replayed afterwards.

        torch frees the workspaces of all streams at once, and a graph in a pool outside graphpass may read one: while
        such a pool exists, nothing is freed. The stream stays, too: torch finds workspaces by its handle, which a new
        one could get.
        """
        if self._first is not None:
            self._first.reset()
        if PROCESS_MEMORY.owns_every_pool():  # guard: cuda_others_workspaces
            memory.drop_blas_workspaces()
            checked(driver().cuStreamDestroy_v2(self._handle), "give a stream back")
            PROCESS_MEMORY.remove_stream(self._address)


@contextlib.contextmanager
def executable_copies() -> Iterator[Callable[[Sequence[Any]], bool]]:
    """Makes further executables of recorded graphs, never launched: they show how much device memory executables use.

    The driver reuses memory of earlier ones, so that as many as a ladder has show what it uses. Yields a function that
    instantiates each recording, captured with ``keep_graph=True``, once more; it returns whether all succeeded: a graph
    that allocates memory has one executable.
    """
    made: list[ctypes.c_void_p] = []

    def add(recordings: Sequence[Any]) -> bool:
        for recording in recordings:
            copy, source = ctypes.c_void_p(), ctypes.c_void_p(recording.raw_cuda_graph())
            if driver().cuGraphInstantiateWithFlags(ctypes.byref(copy), source, _AS_TORCH_MAKES_THEM):
                return False
            made.append(copy)
        return True

    try:
        yield add
    finally:
        if made:
            torch.cuda.synchronize()
        for copy in made:
            driver().cuGraphExecDestroy(copy)


# -- tuning ------------------------------------------------------------------------------------------------------------


class CapturedRun:
    """A function that was captured alone; see ``graphpass.compile.tuning.Run``."""

    def __init__(self, graph: torch.cuda.CUDAGraph, results: Sequence[torch.Tensor]) -> None:
        self._graph, self.results, self.replay = graph, results, graph.replay

    def close(self) -> None:
        """Free the graph."""
        torch.cuda.synchronize()
        self.results = ()
        self._graph.reset()


class CudaMeasurement:
    """Captures into a pool of its own and times by events; see ``graphpass.compile.tuning.Measurement``."""

    def __init__(self, device: torch.device) -> None:
        self._device = CudaDevice(device)
        self.now = time.perf_counter

    def capture(self, name: str, body: Callable[[], Sequence[torch.Tensor]]) -> CapturedRun:
        """Call ``body`` a few times, in which its kernels are chosen, and capture it."""
        with torch.cuda.device(self._device.device), torch.profiler.record_function(f"tuning {name}"):
            for _ in range(_WARM_UPS):
                body()
            torch.cuda.synchronize()
            return CapturedRun(*self._device.record(body, ()))

    def seconds(self, runs: Sequence[CapturedRun]) -> list[float]:
        """Medians over rounds of several replays, in which all runs take turns."""
        with torch.cuda.device(self._device.device):
            counts = [min(_MOST_REPLAYS, 1 + int(_ROUND_S / _time(run, 3))) for run in runs]
            rounds = [[_time(run, count) for run, count in zip(runs, counts, strict=True)] for _ in range(_ROUNDS)]
        return [statistics.median(times) for times in zip(*rounds, strict=True)]

    def close(self) -> None:
        """Free the pool."""
        self._device.close()


def _time(run: CapturedRun, count: int) -> float:
    """Seconds of one of ``count`` replays, after one that brings the run's data back into the caches."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run.replay()
    start.record()
    for _ in range(count):
        run.replay()
    end.record()
    end.synchronize()
    return max(float(start.elapsed_time(end)) / 1e3 / count, 1e-9)


def measurement_on(device: object) -> CudaMeasurement | None:
    """A measurement on a GPU; None on the CPU tape, whose replays are no faster than calls."""
    return CudaMeasurement(device.device) if isinstance(device, CudaDevice) else None


# -- memory and driver of the process ----------------------------------------------------------------------------------


class ProcessMemory:
    """The graph pools and recording streams of graphpass in this process, for all devices and runtimes.

    torch frees the workspaces of all streams at once, so before it does, every graph pool has to be graphpass's. A pool
    that its device has closed counts as such until no output in it is held; a stream until the driver has destroyed it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pools: set[PoolId] = set()
        self._closed: set[PoolId] = set()
        self._streams: set[int] = set()

    def add_pool(self, pool: PoolId) -> None:
        """Count ``pool`` as graphpass's own."""
        with self._lock:
            self._pools.add(pool)

    def remove_pools(self, pools: Collection[PoolId]) -> None:
        """Forget ``pools`` that no device captures into again, as soon as none of their memory is in use."""
        with self._lock:
            closed = self._pools.intersection(pools)
            self._pools -= closed
            self._closed |= closed
            if closed:
                self._segments()

    def add_stream(self, handle: int) -> None:
        """Count the segments that the stream with this driver handle allocates as graphpass's own, in any pool."""
        with self._lock:
            self._streams.add(handle)

    def remove_stream(self, handle: int) -> None:
        """Forget a stream that the driver has destroyed; a stream of others may get its handle."""
        with self._lock:
            self._streams.discard(handle)

    def owns_every_pool(self) -> bool:
        """Whether every graph pool with memory in it belongs to graphpass."""
        with self._lock:
            others = {pool for stream, pool in self._segments() if stream not in self._streams}
            return others <= {_DEFAULT_POOL, *self.pools()}  # guard: others_pools

    def pools(self) -> frozenset[PoolId]:
        """The pools that count as graphpass's own."""
        with self._lock:
            return frozenset(self._pools | self._closed)

    def _segments(self) -> list[tuple[int, PoolId]]:
        """(stream handle, pool) of each segment of torch's allocator; forgets closed pools without a segment."""
        segments = [(segment["stream"], tuple(segment["segment_pool_id"])) for segment in torch.cuda.memory_snapshot()]
        self._closed.intersection_update(pool for _, pool in segments)
        return segments


PROCESS_MEMORY = ProcessMemory()
"""Of this process: workspaces belong to the process, and are freed only if no foreign pool exists."""
