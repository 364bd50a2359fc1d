"""The owner of everything a set of graphs shares: pool, capture stream, entries, statistics."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from graphpass.capture.arguments import device_of
from graphpass.capture.counts import Counts, SizesSeen
from graphpass.capture.cuda import CudaDevice
from graphpass.capture.device import Graph, GraphDevice
from graphpass.capture.layout import storage_id
from graphpass.capture.outputs import clone_pool_tensors
from graphpass.capture.pool import PoolLease
from graphpass.capture.recompiles import captured_earlier, left_behind
from graphpass.capture.records import CallableRecord, CaptureScope, RuntimeStats
from graphpass.capture.runtimereport import report_of
from graphpass.capture.sentinel import fill_with_sentinel
from graphpass.capture.surroundings import may_freeze
from graphpass.capture.tape import TapeDevice
from graphpass.capture.traffic import CallTraffic
from graphpass.capture.views import HandedViews
from graphpass.context import ForwardContext
from graphpass.errors import CaptureError, DeviceError
from graphpass.keys import BatchDescriptor
from graphpass.modes import CUDAGraphMode
from graphpass.report import Report

if TYPE_CHECKING:
    from graphpass.capture.entry import GraphEntry

__all__ = ["GraphRuntime"]

_log = logging.getLogger("graphpass")
_Owned = TypeVar("_Owned")


class _Wrapper(Protocol):
    name: str

    @property
    def mode(self) -> CUDAGraphMode: ...
    def counts(self) -> Mapping[BatchDescriptor, Counts]: ...
    def captured(self) -> list[BatchDescriptor]: ...
    def buffer_bytes(self) -> int: ...
    def close(self) -> None: ...
    def hidden(self) -> Callable[[], None]: ...


class GraphRuntime:
    """Owns pool, capture stream, entries and statistics of every callable made with it.

    Use it as a context manager, or call :meth:`close`: graphs and their pool live as long as the runtime holds them.
    Graphs of one runtime share a pool, so one forward runs at a time; see :class:`~graphpass.capture.pool.PoolLease`.

    Args:
        pool: a CUDA graph pool handle to share with others; None for one of its own.
        device: the device its graphs run on; None takes the device of the first captured call.
    """

    def __init__(self, pool: Any = None, *, device: torch.device | str | None = None) -> None:
        self._given_pool = pool
        self._device: GraphDevice | None = None
        self._keeps_recordings = False
        self._turn = PoolLease()
        self._wrappers: list[weakref.ref[_Wrapper]] = []
        self._callables: list[CallableRecord] = []
        self._owned: dict[type, Any] = {}
        self._notes: Counter[str] = Counter()
        self._sizes_seen = SizesSeen()
        self.num_entered = 0
        self.traffic = CallTraffic()
        self._scope: CaptureScope | None = None
        self._scope_lock = threading.Lock()
        self._scope_thread: int | None = None
        self._forward: weakref.ref[ForwardContext] | None = None
        self._forward_storages: set[int] = set()
        self._forward_entries: list[GraphEntry] = []
        self._generations = itertools.count()
        self.generation = next(self._generations)
        self._written: list[torch.Tensor] = []
        self._written_by: weakref.ref[ForwardContext] | None = None
        self._shows_stale = False
        self._views = HandedViews()
        if device is not None:
            self._device = self._make_device(torch.device(device))

    # -- what users call ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def capturing(self, *, reaches: bool = False) -> Iterator[CaptureScope]:
        """Let this thread's calls capture keys that have no graph yet, for the body of the ``with``.

        The garbage collector is kept from looking at what is alive now in the midst of captures, and collects after.

        Args:
            reaches: calls without a forward context run without graphs; the scope lists the callables they reach.

        Raises:
            CaptureError: a scope of this runtime is open already.
        """
        freezes = may_freeze()
        with self.scope_opened() as scope:
            scope.reaches = reaches
            try:
                if freezes:
                    gc.freeze()
                yield scope
                for sentence in left_behind(self._alive(), self._callables):
                    self.note(sentence, level=logging.WARNING)
            finally:
                if freezes:
                    gc.unfreeze()
                gc.collect()

    @contextlib.contextmanager
    def scope_opened(self) -> Iterator[CaptureScope]:
        """:meth:`capturing` for one call: without what pays only over many captures.

        Raises:
            CaptureError: a scope of this runtime is open already.
        """
        if not self._scope_lock.acquire(blocking=False):
            raise CaptureError(
                "this runtime is capturing already",
                expected="one capturing() scope at a time",
                found="a second one, in this or another thread",
                remedy="capture all keys inside one `with runtime.capturing():`",
            )
        with self._scope_held(CaptureScope()) as scope:
            yield scope

    @contextlib.contextmanager
    def _scope_held(self, scope: CaptureScope) -> Iterator[CaptureScope]:
        """Make ``scope`` this thread's; the caller has acquired ``_scope_lock``."""
        self._scope, self._scope_thread = scope, threading.get_ident()
        try:
            yield scope
        finally:
            self._scope = self._scope_thread = None
            self._scope_lock.release()

    @contextlib.contextmanager
    def automatic_scope(self) -> Iterator[CaptureScope | None]:
        """Let this thread's auto dispatcher capture, for one call; None while another scope is open."""
        if not self._scope_lock.acquire(blocking=False):
            yield None
            return
        with self._scope_held(CaptureScope(is_automatic=True)) as scope:
            yield scope

    @contextlib.contextmanager
    def throwaway(self) -> Iterator[CaptureScope]:
        """:meth:`capturing` into a pool of its own, which is given back with all its graphs at the end of the body.

        To its callables nothing is captured in the body; afterwards everything is as it was before: graphs, pool and
        counts. What was compiled in the body stays. No other thread may run a callable of this runtime meanwhile.

        Raises:
            CaptureError: a scope of this runtime is open already.
        """
        freezes = may_freeze()
        with self.scope_opened() as scope, self._pool_set_aside():
            if freezes:
                gc.freeze()
            try:
                yield scope
            finally:
                scope.reached.clear()
                scope.plans.clear()
                gc.collect()  # before the others are unfrozen: there is little to look at
                if freezes:
                    gc.unfreeze()

    @contextlib.contextmanager
    def _pool_set_aside(self) -> Iterator[None]:
        """Another device object of the same device, and wrappers without graphs, for the body."""
        pool = (self._device, self._given_pool, self._views)
        forward = (self._forward, self._forward_storages, self._forward_entries, self._written, self._written_by)
        generation = self.generation
        aside = {id(wrapper): wrapper.hidden() for wrapper in self._alive()}
        self._given_pool, self._views, self._keeps_recordings = None, HandedViews(), True
        self._device = None if self._device is None else self._make_device(self._device.device)
        self._forward, self._forward_storages, self._forward_entries = None, set(), []
        self._written, self._written_by = [], None
        self.entries_dropped()
        in_body = self.generation
        try:
            yield
        finally:
            for wrapper in self._alive():
                if id(wrapper) in aside:
                    aside[id(wrapper)]()
                else:  # compiled in the body, and kept
                    wrapper.close()
                    wrapper.hidden()
            self._forward, self._forward_storages, self._forward_entries, self._written, self._written_by = forward
            used, (self._device, self._given_pool, self._views) = self._device, pool
            self._keeps_recordings = False
            if used is not None:
                used.close()
            if self.generation == in_body:
                self.generation = generation
            else:  # a parameter died: what died with it may be among the graphs that were set aside
                self.entries_dropped()

    def counts(self) -> dict[tuple[str, CUDAGraphMode, BatchDescriptor], Counts]:
        """What happened so far, by (region name, mode, descriptor); regions are ``g0.r3``, a whole is ``g0.full``."""
        return {
            (wrapper.name, wrapper.mode, key): counts
            for wrapper in self._alive()
            for key, counts in wrapper.counts().items()
        }

    def compiled(self) -> int:
        """Compiled artifacts made for this runtime."""
        return sum(record.artifacts for record in self._callables)

    def suggested_sizes(self, limit: int = 16) -> list[int]:
        """Sizes worth a graph: the ones seen most often, at most ``limit``, the largest seen always among them."""
        return self._sizes_seen.suggested(limit)

    def stats(self) -> RuntimeStats:
        """Totals over all callables."""
        counts = list(self.counts().values())
        return RuntimeStats(
            callables=len(self._callables),
            artifacts=self.compiled(),
            captured=sum(c.captured for c in counts),
            replayed=sum(c.replayed for c in counts),
            copied=sum(c.copied for c in counts),
            pool_bytes=self.pool_bytes(),
            buffer_bytes=self.buffer_bytes(),
        )

    def report(self) -> Report:
        """Regions with their reasons, keys with their counts, notes, bytes; ``print`` it."""
        return report_of(
            self.callables(),
            self.counts(),
            self._notes,
            self.traffic,
            pool_bytes=self.pool_bytes(),
            buffer_bytes=self.buffer_bytes(),
            suggested_sizes=self.suggested_sizes(),
        )

    def close(self) -> None:
        """Drop all graphs and give the pool back; callables run on without graphs and can be captured again."""
        for wrapper in self._alive():
            wrapper.close()
        self._written.clear()
        self._forward_storages.clear()
        self._forward_entries.clear()
        self.entries_dropped()
        if self._device is not None:
            self._device.close()

    def __reduce__(self) -> tuple[type[GraphRuntime], tuple[()]]:
        # Graphs cannot be copied: the copy of a compiled model starts with an empty runtime of its own.
        return (GraphRuntime, ())

    def __enter__(self) -> GraphRuntime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def pool_bytes(self) -> int:
        """Bytes of the graph pool; 0 on the CPU tape."""
        return self._device.pool_bytes() if self._device is not None else 0

    def recordings(self) -> Sequence[Graph]:
        """What was captured since :meth:`throwaway` began: more executables can be made of it. None on the CPU tape."""
        return () if self._device is None else tuple(self._device.recordings)

    def buffer_bytes(self) -> int:
        """Bytes of all static input buffers."""
        return sum(wrapper.buffer_bytes() for wrapper in self._alive())

    # -- what wrappers and compilers call --------------------------------------------------------------------------

    def adopt(self, wrapper: _Wrapper, *, shows_stale: bool = False) -> None:
        """Count ``wrapper`` among this runtime's; it is held weakly.

        Args:
            wrapper: what captures and replays.
            shows_stale: overwrite stale outputs with NaN on every device, as ``debug`` wants it.
        """
        self._wrappers.append(weakref.ref(wrapper))
        self._shows_stale |= shows_stale

    def next_callable_name(self) -> str:
        """The name of the callable that is registered next."""
        return f"g{len(self._callables)}"

    def register(self, record: CallableRecord) -> None:
        """Enter a compiled callable into the report."""
        self._callables.append(record)

    def owned(self, kind: type[_Owned]) -> _Owned:
        """The one ``kind()`` that lives as long as this runtime: what a compiler shares among its callables."""
        found = self._owned.get(kind)
        if found is None:
            found = self._owned[kind] = kind()
        return found

    def callables(self) -> tuple[CallableRecord, ...]:
        """The callables registered so far."""
        return tuple(self._callables)

    def recompiled_from(self, name: str, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> str | None:
        """The region that has this key's graph in another compilation of the same function; None when there is none."""
        return captured_earlier(self._alive(), self._callables, name, mode, descriptor)

    def retraced(self, name: str) -> None:
        """Record that torch.compile traced the function of a callable anew, and that the same callable serves it."""
        is_late = not self.capture_is_open() and any(
            wrapper.name.partition(".")[0] == name and wrapper.captured() for wrapper in self._alive()
        )
        advice = ": inputs in serving are of another kind than in capture; make all under torch.inference_mode()"
        self.note(
            f"{name}: torch.compile traced its function once more and got the same graph{advice if is_late else ''}",
            level=logging.WARNING if is_late else logging.INFO,
        )

    def note(self, text: str, *, level: int = logging.INFO) -> None:
        """Record why something happened that a user may wonder about; logged at its first occurrence."""
        if text not in self._notes:
            _log.log(level, "%s", text)
        self._notes[text] += 1

    def saw_size(self, size: int) -> None:
        """Count a batch size, for :meth:`suggested_sizes`."""
        self._sizes_seen[size] += 1

    def scope(self) -> CaptureScope | None:
        """This thread's open capture scope."""
        return self._scope if self._scope_thread == threading.get_ident() else None

    @property
    def device(self) -> torch.device | None:
        """The device its graphs run on; None before the first capture."""
        return None if self._device is None else self._device.device

    def capture_is_open(self) -> bool:
        """Whether this thread is inside :meth:`capturing`."""
        return self._scope_thread == threading.get_ident()

    def device_for(self, leaves: Sequence[Any]) -> GraphDevice:
        """The device that graphs over these arguments run on: the GPU among them, else the CPU.

        Raises:
            DeviceError: the runtime serves another device already.
        """
        if self._device is not None:
            wanted = self._device.device
            if wanted.type == "cpu" or any(isinstance(t, torch.Tensor) and t.device == wanted for t in leaves):
                return self._device
        found = device_of(leaves)
        if self._device is None:
            self._device = self._make_device(found)
        elif self._device.device != found:
            raise DeviceError(
                "one runtime serves one device",
                expected=str(self._device.device),
                found=str(found),
                remedy="give each device a GraphRuntime of its own",
            )
        return self._device

    def enter_forward(self, context: ForwardContext, leaves: Sequence[Any], who: str) -> bool:
        """Take the pool for ``context``; wait for whoever has it. Paired with :meth:`exit_forward`.

        Returns:
            Whether nothing around this call has the pool already: what it returns goes to the caller.

        Raises:
            PoolBusyError: another forward of this thread has the pool.
        """
        device = self.device_for(leaves)
        is_outermost = self._turn.acquire(context, who)
        if is_outermost:
            try:
                if self._forward is None or self._forward() is not context:
                    self._forward = weakref.ref(context)
                    self._forward_storages.clear()
                self._forward_entries.clear()
                device.begin_forward()
            except BaseException:
                self._turn.release()
                raise
        return is_outermost

    def order_after_last_forward(self) -> None:
        """Order the current stream's work behind the last forward: it may still be reading what is written now."""
        if self._device is not None:
            self._device.begin_forward()

    def is_busy(self) -> bool:
        """Whether a capture is under way in some thread, or this thread is inside a forward that has the pool."""
        return self._scope_lock.locked() or self._turn.is_mine()

    def exit_forward(self) -> None:
        """End what :meth:`enter_forward` began."""
        self._turn.release()

    def before_replay(self, entry: GraphEntry) -> None:
        """Outputs of earlier forwards are stale from here on; those of ``entry`` belong to this one."""
        self.before_plan(entry.outputs.pool_storages, entry.outputs.pool_outputs)
        self._forward_entries.append(entry)

    def before_plan(self, pool_storages: frozenset[int], pool_outputs: Sequence[torch.Tensor]) -> None:
        """:meth:`before_replay` for all graphs that a plan is about to replay, by what they write."""
        if self._forward is not self._written_by:
            self.make_stale(self._written)
            self._written.clear()
            for name in self._views.next_forward():
                self._warn_of_held(name)
            self._written_by = self._forward
        self._forward_storages |= pool_storages
        self._written.extend(pool_outputs)

    def make_stale(self, outputs: Sequence[torch.Tensor]) -> None:
        """``outputs`` are no longer valid: overwritten where that helps to find who reads them."""
        assert self._device is not None
        if self._shows_stale:
            fill_with_sentinel(outputs)
        else:
            self._device.make_stale(outputs)

    def watched(self, outputs: Sequence[Any], pool_storages: Collection[int], who: str) -> list[Any]:
        """``outputs`` as views whose holders are named should they keep one for too long; for ``debug``."""
        return self._views.hand_out(outputs, pool_storages, who)

    def _warn_of_held(self, name: str) -> None:
        text = (
            f"a view of {name} is still held after a later replay overwrote it: it was valid until the next replay; "
            "drop it, clone it, or set outputs='clone'"
        )
        self.note(text, level=logging.WARNING)

    def without_stale(self, leaves: Sequence[Any], positions: Sequence[int] | None = None) -> list[Any]:
        """``leaves`` with clones at those ``positions``, all by default, that lie in outputs of an earlier forward.

        The next replay overwrites that memory: nothing can be read from it, or copied back to it, afterwards.
        """
        found = list(leaves)
        if self._forward is not self._written_by and self._written:
            stale = set(map(storage_id, self._written)) - {0}
            positions = range(len(found)) if positions is None else positions
            for position, leaf in zip(
                positions, clone_pool_tensors([leaves[p] for p in positions], stale), strict=True
            ):
                found[position] = leaf
        return found

    def forward_pool_storages(self) -> set[int]:
        """Addresses of pool storages written so far in this forward."""
        return self._forward_storages

    def forward_entries(self) -> list[GraphEntry]:
        """The entries replayed since the pool was last taken, in order."""
        return self._forward_entries

    def entries_dropped(self) -> None:
        """Some graph is gone: whatever was derived from entries before is void (see ``generation``)."""
        self.generation = next(self._generations)

    def _alive(self) -> list[_Wrapper]:
        return [wrapper for reference in self._wrappers if (wrapper := reference()) is not None]

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
