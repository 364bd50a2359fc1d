"""A graph pool and the rule that one forward at a time uses it.

See Note [Pool rule] in docs/design.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphpass.capture.cuda import CudaDevice
from graphpass.capture.outputs import clone_pool_tensors, fill_with_sentinel, over_new_storages
from graphpass.capture.staging import storage_id
from graphpass.capture.tape import TapeDevice
from graphpass.context import ForwardContext
from graphpass.errors import DeviceError, PoolBusyError
from graphpass.ledger import Ledger, Reason

GraphDevice = CudaDevice | TapeDevice
_STALE_VIEW = Reason(
    "a view is still held after a later replay overwrote it: it was valid until the next replay",
    "drop it, clone it, or set outputs='clone'",
)


class PoolTurn:
    """A lock that one forward at a time holds. A forward runs in one thread; it may acquire the lock repeatedly."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._forward: object = None
        self._depth = 0
        self._deferred = collections.deque[Callable[[], None]]()

    def acquire(self, forward: object, who: str) -> bool:
        """Wait for the pool; True if this starts a forward, which its context identifies, False inside it."""
        thread = threading.get_ident()
        if self._thread == thread:
            if self._forward is not forward:  # guard: pool_busy
                raise PoolBusyError(
                    f"{who} started a forward inside another forward of the same pool",
                    expected="one forward at a time in a pool",
                    found="a second forward context, set inside the first forward",
                    remedy="give the inner model a GraphRuntime of its own, or run it with runtime mode NONE",
                )
            self._depth += 1
            return False
        self._lock.acquire()
        self._thread, self._forward, self._depth = thread, forward, 1
        return True

    @contextlib.contextmanager
    def unused(self) -> Iterator[bool]:
        """Keep forwards from beginning during the body, if none is under way; yields whether none is."""
        is_free = self._lock.acquire(blocking=False)
        try:
            yield is_free
        finally:
            if is_free:
                self._lock.release()
                self._run_deferred()

    def when_unused(self, action: Callable[[], None]) -> None:
        """Run ``action`` while no forward is under way: now, or in the thread that ends the present forward."""
        self._deferred.append(action)
        self._run_deferred()

    def _run_deferred(self) -> None:
        while self._deferred and self._lock.acquire(blocking=False):
            try:
                while self._deferred:
                    self._deferred.popleft()()
            finally:
                self._lock.release()

    def is_mine(self) -> bool:
        """Whether a forward of this thread is using the pool."""
        return self._thread == threading.get_ident()

    def release(self) -> None:
        """End what the matching :meth:`acquire` began."""
        self._depth -= 1
        if not self._depth:
            self._thread = self._forward = None
            self._lock.release()
            if self._deferred:  # guard: deferred_drops
                self._run_deferred()


class PoolLease:
    """One graph pool: its device, the forward that uses it, the entries it replayed, and which outputs are stale."""

    def __init__(
        self,
        ledger: Ledger,
        pool: Any = None,
        device: torch.device | None = None,
        *,
        keeps_recordings: bool = False,
    ) -> None:
        self._ledger = ledger
        self._given_pool = pool
        self._keeps_recordings = keeps_recordings
        self._generations = itertools.count()
        self.turn = PoolTurn()
        #: changes when an entry is dropped; data derived from entries is valid while it stays the same
        self.generation = next(self._generations)
        #: addresses of the pool storages written so far in this forward
        self.forward_storages: set[int] = set()
        #: the graph entries that wrappers replayed since the pool was last acquired, in order
        self.forward_entries: list[Any] = []
        #: overwrite stale outputs with NaN on every device; ``compare`` sets this
        self.shows_stale = False
        self._forward: object = None  # identity of the forward that began last: the weak reference to its context
        self._written: list[torch.Tensor] = []
        self._written_by: object = None
        # With ``compare``, (name, storage) of the views that were returned since the last forward began, and before it.
        self._handed: list[tuple[str, StorageWeakRef]] = []
        self._handed_before: list[tuple[str, StorageWeakRef]] = []
        self._is_given = device is not None
        self._device = None if device is None else self._make_device(device)

    def fork_empty(self) -> PoolLease:
        """A lease of a new, empty pool on the same device, which keeps its recordings.

        The two share ``turn``, and their generation numbers never coincide.
        """
        other = PoolLease(self._ledger, device=self.device, keeps_recordings=True)
        other.turn, other._generations, other.shows_stale = self.turn, self._generations, self.shows_stale
        other._is_given = self._is_given
        other.entries_dropped()  # guard: throwaway_generation
        return other

    @property
    def device(self) -> torch.device | None:
        """The device that graphs run on; None before the first capture."""
        return None if self._device is None else self._device.device

    def device_for(self, leaves: Sequence[Any]) -> GraphDevice:
        """The device for graphs over these arguments: the GPU that a tensor is on, else the CPU.

        Tapes of a part of a model on the CPU give way to the graphs of a GPU.
        """
        if self._device is not None:
            wanted = self._device.device
            if wanted.type == "cpu" and (self._is_given or not torch.cuda.is_initialized()):
                return self._device
            if wanted.type != "cpu" and any(isinstance(t, torch.Tensor) and t.device == wanted for t in leaves):
                return self._device
        found = device_of(leaves)
        if self._device is None:
            self._device = self._make_device(found)
        elif self._device.device.type == "cpu" != found.type:
            self._device = self._make_device(found)
            self.entries_dropped()
        elif self._device.device != found:
            raise DeviceError(
                "one runtime serves one device",
                expected=str(self._device.device),
                found=str(found),
                remedy="give each device a GraphRuntime of its own",
            )
        return self._device

    def pool_bytes(self) -> int:
        """Bytes of the pool; 0 on the CPU tape."""
        return self._device.pool_bytes() if self._device is not None else 0

    def recordings(self) -> Sequence[Any]:
        """The recorded graphs, from which more executables can be instantiated; empty on the CPU or if not kept."""
        return () if self._device is None else tuple(self._device.recordings)

    def acquire(self, context: ForwardContext, leaves: Sequence[Any], who: str) -> bool:
        """Acquire the pool for ``context``, after waiting for other threads. Pair it with :meth:`release`."""
        device = self.device_for(leaves)
        is_outermost = self.turn.acquire(context, who)
        if is_outermost:
            try:
                forward = weakref.ref(context)  # the same object for the same context
                if self._forward is not forward:
                    self._begin(forward)
                self.forward_entries.clear()
                device.begin_forward()
            except BaseException:
                self.turn.release()
                raise
        return is_outermost

    def acquire_for_one_replay(self, who: str) -> None:
        """:meth:`acquire` for a forward that is one replay, without a context; not within another forward."""
        forward = object()
        self.turn.acquire(forward, who)
        self._begin(forward)
        self.forward_entries.clear()
        self.order_after_last_forward()

    def _begin(self, forward: object) -> None:
        self._forward = forward
        self.forward_storages.clear()

    def release(self) -> None:
        """End what the matching :meth:`acquire` began."""
        self.turn.release()

    def order_after_last_forward(self) -> None:
        """Make the current stream wait for the last forward, which may still read memory about to be overwritten."""
        if self._device is not None:
            self._device.begin_forward()

    def before_replay(self, pool_storages: frozenset[int], pool_outputs: Sequence[torch.Tensor]) -> None:
        """Mark outputs of earlier forwards as stale, and add to this forward what the next replays write."""
        if self._forward is not self._written_by:
            self.make_stale(self._written)  # guard: stale_outputs
            self._written.clear()
            # In a loop `y = step(x)`, `y` lives until the next result is assigned: the second replay after it tells.
            for name in [name for name, storage in self._handed_before if not storage.expired()]:
                # guard: held_views_named
                self._ledger.note(_STALE_VIEW, at=name, level=logging.WARNING, is_problem=True)
            self._handed_before, self._handed = self._handed, []
            self._written_by = self._forward
        self.forward_storages |= pool_storages
        self._written.extend(pool_outputs)

    def make_stale(self, outputs: Sequence[torch.Tensor]) -> None:
        """Mark ``outputs`` as invalid; on the CPU, or with ``shows_stale``, overwrite them so that late reads show."""
        assert self._device is not None
        if self.shows_stale:
            fill_with_sentinel(outputs)
        else:
            self._device.make_stale(outputs)

    def tracking_views(self, outputs: Sequence[Any], pool_storages: Collection[int], who: str) -> list[Any]:
        """``outputs`` as views over new storages; a note names each view still alive too late. For ``compare``."""
        views = over_new_storages(outputs, pool_storages)
        for index, (view, output) in enumerate(zip(views, outputs, strict=True)):
            if view is not output:
                self._handed.append((f"output {index} of {who}", StorageWeakRef(view.untyped_storage())))
        return views

    def without_stale(self, leaves: Sequence[Any], positions: Sequence[int]) -> list[Any]:
        """``leaves`` with clones at those ``positions`` that lie in outputs of an earlier forward, which go stale."""
        found = list(leaves)
        if self._forward is not self._written_by and self._written:
            stale = set(map(storage_id, self._written)) - {0}
            clones = clone_pool_tensors([leaves[p] for p in positions], stale)
            for position, leaf in zip(positions, clones, strict=True):
                found[position] = leaf  # guard: stale_arguments
        return found

    def entries_dropped(self) -> None:
        """Start a new ``generation``: a graph was dropped, so data derived from entries before is invalid."""
        self.generation = next(self._generations)

    def drop(self, graphs: Iterable[Any]) -> None:
        """Drop graphs that no table contains any more, while no forward uses the pool."""
        assert self._device is not None
        for graph in graphs:
            self._device.drop(graph)
        self.entries_dropped()

    def close(self) -> None:
        """Free the pool, after all its graphs are dropped; the lease can capture again, into a new pool."""
        self._written.clear()
        self.forward_storages.clear()
        self.forward_entries.clear()
        self.entries_dropped()
        if self._device is not None:
            self._device.close()

    def _make_device(self, device: torch.device) -> GraphDevice:
        if device.type == "cpu":
            return TapeDevice()
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            found = torch.device("cuda", index)
            return CudaDevice(found, self._given_pool, keeps_recordings=self._keeps_recordings)
        raise DeviceError(
            "graphs cannot be captured on this device",
            expected="a CUDA device or the CPU",
            found=str(device),
            remedy="move the model, or run it with runtime mode NONE",
        )


def device_of(leaves: Sequence[Any]) -> torch.device:
    """The GPU of the tensors among ``leaves``, of which a capture refuses those elsewhere; the CPU without any."""
    devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return min((device for device in devices if device.type != "cpu"), key=str, default=torch.device("cpu"))
