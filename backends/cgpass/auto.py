"""Decides how calls without a forward context run: by which key, with which padded inputs, and how results are cut.

The first call of a key runs the compiled regions without a graph and warms them up, the second captures, later calls
replay. A size whose padding cannot change real entries is rounded up to the next size of its ladder: the graph's inputs
are padded and its outputs cut. Dynamo has already run the user's Python with the unpadded tensors, so the user's code
never sees padding.

The decision about a call is an :class:`AutoCall`, which the callable runs. It is kept for later calls of equal sizes.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cgpass.exactgraphs import ExactGraphs
from cgpass.keyrules import AutoRules
from cgpass.nograph import (
    BUSY,
    EMPTY,
    FASTER_WITHOUT,
    FIRST_CALLS,
    NUMBER_IN_KEY,
    ON_THE_CPU,
    OTHER_INPUTS,
    FailedCaptures,
    refused,
)
from cgpass.outputs import OutputCuts, TensorCut
from cgpass.sizes import InputLayout, value_at
from graphpass.capture.pool import PoolLease
from graphpass.capture.replay import GraphEntry
from graphpass.capture.runtime import GraphRuntime
from graphpass.capture.scope import CaptureScope
from graphpass.capture.staging import storage_id
from graphpass.capture.wrapper import CUDAGraphWrapper
from graphpass.compat import memory
from graphpass.dispatch.owngraphs import MOST_LOSSES, RecurringSize, Serve
from graphpass.dispatch.recurring import RecurringKey
from graphpass.keys import BatchDescriptor
from graphpass.ledger import CountedReason, Reason, Row, named_sizes
from graphpass.options import Settings
from graphpass.paddedinputs import PaddedArguments, PaddedInput, PaddedMemory
from graphpass.saved.files import UsedKeys

_MAX_REMEMBERED = 4096
_NO_INPUTS = PaddedArguments()


@dataclass(slots=True)
class AutoCall:
    """The decision about all calls of the same real sizes: their key, inputs and cuts."""

    key: RecurringKey
    real: tuple[int, ...]  #: the real size of each key field
    counts: Row  #: of the key, for calls
    seen: tuple[tuple[Counter[int], int], ...]  #: (counts of a field's sizes in all calls, the size in these calls)
    num_real: int = 1  #: product of the real sizes
    num_padded: int = 1  #: product of the key's sizes
    inputs: PaddedArguments = _NO_INPUTS
    written: tuple[PaddedInput, ...] = ()  #: those of ``inputs`` that the graph writes to
    numbers: tuple[tuple[int, int], ...] = ()  #: (position, value) of the int arguments that depend on the key's sizes
    cuts: OutputCuts | None = None  #: None if nothing is padded, and the wrapper stages the inputs
    #: {address of the first static input: its replay}, one for each instance of a module that shares the callable
    known: dict[int, KnownReplay] = field(default_factory=dict)
    size: RecurringSize | None = None  #: counts these calls for a graph of their own; None if they never get one
    own: AutoCall | None = None  #: the same over the graph of their own size; None before there is one

    @property
    def needs_check(self) -> bool:
        """Whether these calls have padding, and no padded call of their key was checked."""
        return not self.key.is_checked and self.num_padded != self.num_real

    def count(self) -> None:
        """Count a call that has run over a graph."""
        counts, size = self.counts, self.size
        if size is not None:
            size.replays += 1
        counts.n += 1
        counts.real += self.num_real
        counts.padded += self.num_padded

    def placed(self, args: Sequence[Any]) -> list[Any]:
        """The graph's arguments at the key's sizes: the padded buffers, and the other arguments."""
        placed = list(args)
        for padded in self.inputs.all:
            placed[padded.position] = padded.buffer
        for position, number in self.numbers:
            placed[position] = number
        return placed

    def filled(self, args: Sequence[Any]) -> list[Any]:
        """Fill the padded buffers; the graph's arguments at the key's sizes."""
        filled = self.placed(args)
        self.inputs.fill(args)
        return filled


@dataclass(frozen=True, slots=True)
class KnownReplay:
    """A FULL graph that has served calls of known sizes and weights: the next such call has nothing to look up.

    It fills the padded buffers, compares the static inputs with those of the graph, replays, and copies the results.
    Every other call goes through the wrappers.
    """

    entry: GraphEntry
    generation: int  #: of the pool lease when the entry was found: after a graph is dropped, it is looked up again
    #: (cut, view of the real part) of the outputs that are cut and share no storage
    apart: Sequence[tuple[TensorCut, torch.Tensor]]
    is_direct: bool  #: False if the graph writes to inputs, returns views of them or reads the context

    @classmethod
    def of(cls, entry: GraphEntry, generation: int, call: AutoCall) -> KnownReplay:
        """The replay of ``entry``, which a lease of ``generation`` has, for calls like ``call``."""
        plan, outputs, cuts = entry.plan, entry.outputs, call.cuts
        reads = plan.reads.numbers or plan.reads.paths or plan.inputs.pool_inputs
        writes = plan.inputs.mutates or call.written
        returns_views = outputs.viewed_positions or (cuts is not None and cuts.views)
        is_direct = not (reads or writes or returns_views)
        apart = cuts.apart(outputs.build(())) if cuts is not None and is_direct else ()
        return cls(entry, generation, apart, is_direct)

    def run(self, call: AutoCall, args: Sequence[Any], lease: PoolLease, who: str, *, clones_outputs: bool) -> Any:
        """What the graph returns, cut; None, with nothing done, if it does not serve these static inputs any more."""
        entry, plan, leaves = self.entry, self.entry.plan, call.placed(args)
        lease.acquire_for_one_replay(who)
        try:
            # guard: known_replay_is_current
            if self.generation != lease.generation or not plan.serves(leaves):
                return None
            plan.inputs.check(leaves)
            call.inputs.fill(args)
            outputs = plan.run(leaves, lease)
            if call.cuts is None:
                outputs = entry.outputs.for_caller(outputs, clone=clones_outputs)
            else:
                outputs = call.cuts.apply(outputs, args, lease.forward_storages, self.apart)
        finally:
            lease.release()
        return entry.build_result(outputs)


class AutoDispatcher:
    """Decides about the calls of one callable that have no forward context. Owns the padded buffers."""

    def __init__(
        self,
        name: str,
        runtime: GraphRuntime,
        rules: AutoRules,
        settings: Settings,
        wrappers: Sequence[CUDAGraphWrapper],
        device: torch.device,
    ) -> None:
        self.rules = rules
        self._device = device  # of the arguments
        self.is_strict = settings.padding_check == "strict"  #: whether a call without a graph is an error
        self._settings, self._is_silent = settings, settings.on_fallback == "silent"
        self._wrappers = wrappers  # of the graphs of each key
        self._name, self._runtime = name, runtime
        self._places = tuple(size.place for size in rules.sizes.sizes)
        self._layout_numbers = rules.sizes.layout_numbers
        self._may_share = tuple(dict.fromkeys((*rules.dynamic, *rules.written)))
        self._watches_memory = bool(rules.padded) and bool(rules.written) and len(self._may_share) > 1
        self._memory = PaddedMemory[int]()
        self._calls: dict[tuple[Any, ...], AutoCall] = {}
        self._new = threading.Lock()  # makes calls: two buffers of one key would be two graphs
        self._own: ExactGraphs | None = None
        self._refused: dict[str, CountedReason] = {}
        self._failures = FailedCaptures(name)
        self._is_refuted = False
        self._generation = runtime.lease.generation
        self.used: UsedKeys | None = None  #: with ``warm_start``: written when the graphs are dropped
        runtime.adopt_dispatcher(self)

    def decide(self, args: Sequence[Any], scope: CaptureScope | None) -> AutoCall | Reason:
        """How a call runs over a graph, or why it runs without one now."""
        reason = self._never_or_not_now(scope)
        if reason is not None:
            return reason
        for position in self.rules.dynamic:
            if not args[position].numel():
                return EMPTY
        call, keys = self._call_of(args), self.rules.keys
        for seen, size in call.seen:
            seen[size] += 1
        if call.size is not None and scope is None:  # guard: exact_in_scopes
            served = self._serving(call, call.size, args)
            if isinstance(served, Reason):
                return served
            call = served
        if scope is not None or call.key.is_exact:
            return call
        if call.key.is_captured:
            call.key.calls += 1
            return call
        is_warm, refusal = keys.counted(call.key), keys.refusal(call.key)
        if refusal is not None:
            return self._unless_error(refusal)
        if is_warm or self.is_strict:
            return call
        numbers = keys.numbers(call.key)
        return replace(NUMBER_IN_KEY, sizes=numbers) if numbers else FIRST_CALLS

    def _never_or_not_now(self, scope: CaptureScope | None) -> Reason | None:
        """Why no call, or none for the moment, runs over a graph; None if calls do."""
        off = self.rules.off
        if off is not None:
            return off if off.is_expected else self._unless_error(off)
        if self._is_beside_a_gpu():
            return ON_THE_CPU
        lease, scopes = self._runtime.lease, self._runtime.scopes
        is_busy = scopes.is_any_open() if scope is None else scope.is_automatic
        # guard: another_capture
        if is_busy or lease.turn.is_mine() or memory.is_capturing_stream(self._device):
            return BUSY
        return None

    def _is_beside_a_gpu(self) -> bool:
        """Whether the arguments are on the CPU, but the graphs of the runtime on a GPU."""
        device = self._runtime.lease.device
        return self._device.type == "cpu" and device is not None and device.type != "cpu"

    def without_graph(self, reason: Reason) -> None:
        """Count a call that runs without a graph under ``reason``, and report the reason the first time."""
        calls = self._refused.get(reason.why)
        if calls is None:
            calls = self._refused[reason.why] = self._runtime.ledger.without_graph(self._name, reason)
        if calls.count_call(reason) and not reason.is_expected:
            self._warn(reason)
        if self.is_strict:
            raise refused(self._name, reason, "padding_check is 'strict'", "set padding_check='prove'")

    def _unless_error(self, reason: Reason) -> Reason:
        if self._settings.on_fallback == "error":
            raise refused(self._name, reason, "on_fallback is 'error'", "set on_fallback='warn'")
        return reason

    def failed(self, key: RecurringKey, error: BaseException) -> Reason:
        """Record that the capture of a key failed; its later calls run without a graph for the returned reason."""
        key.refusal = self._failures.failed(self.rules.keys.named(key.sizes), error)
        size = self._own.find(key.sizes) if self._own is not None and key.is_exact else None
        if self._own is not None and size is not None:
            self._own.dropped(size, MOST_LOSSES)
        return key.refusal

    def failed_in_parts(self, key: RecurringKey, error: BaseException) -> None:
        """:meth:`failed`, and report it, for a call that has nevertheless run to its end."""
        self._warn(self.failed(key, error))

    def refute(self) -> None:
        """Pad no further call: the run-time check found that padding changes results."""
        self._is_refuted = True

    def _warn(self, reason: Reason) -> None:
        at = f"{self._name} {named_sizes(reason.sizes)}".rstrip()
        text = f"runs without a graph: {reason.why}"
        self._runtime.warn(text, reason.remedy, at=at, is_silent=self._is_silent, is_recorded=True)

    # -- sizes that get graphs of their own ----------------------------------------------------------------------------

    def captured(self, key: RecurringKey) -> None:
        """Record the graphs that a key has now."""
        self.rules.keys.captured(key, self._num_graphs(key.descriptor))

    def first_captured(self, call: AutoCall, seconds: float) -> None:
        """Record what the first capture of the key of a call took, within ``seconds`` of that call."""
        if self._own is not None:
            self._own.captured(call.key, call.size, seconds)

    def instead(self, call: AutoCall, args: Sequence[Any], reason: Reason) -> AutoCall | Reason:
        """What serves a call whose graph cannot be captured or replayed now: padding, or no graph for this reason."""
        if not call.key.is_exact:
            return reason
        if self._own is not None and call.size is not None and reason is OTHER_INPUTS and call.key.is_captured:
            self._own.drop(call.size, losses=1)
        return self._call_of(args)

    def _serving(self, call: AutoCall, size: RecurringSize, args: Sequence[Any]) -> AutoCall | Reason:
        """What serves a call of a size that may recur: padding, its own graph, or none."""
        is_due, has_own = size.replays >= size.asks_at, size.own_bytes is not None
        if self._own is None or not (is_due or has_own):
            return call
        if not has_own and self._num_graphs(call.key.descriptor) != 1:  # guard: exact_for_one_instance
            size.asks_at = 2 * size.replays
            return call
        serve = self._own.serve(size)
        if serve is Serve.PADDED:
            return call
        if serve is Serve.WITHOUT:
            return replace(FASTER_WITHOUT, sizes=self.rules.keys.named(call.real))
        if call.own is None:
            call.own = self._new_call(call.real, args, as_is=False, is_exact=True)
            call.own.size = size
        return call.own

    def _exact_graphs(self, args: Sequence[Any]) -> ExactGraphs | None:
        if self._own is None and self._settings.graph_bytes != 0:
            device = self._runtime.lease.device_for(args).device
            self._own = ExactGraphs(self._name, self._runtime, self.rules, self._settings, self._wrappers, device)
        return self._own

    def _num_graphs(self, descriptor: BatchDescriptor) -> int:
        """How many graphs a key has: one for each set of static inputs; 0 if a region has none."""
        return min([len(wrapper.entries_at(descriptor)) for wrapper in self._wrappers], default=0)

    # -- what the runtime asks ----------------------------------------------------------------------------------------

    def buffer_bytes(self) -> int:
        """Bytes of the padded inputs."""
        return self._memory.num_bytes()

    def close(self) -> None:
        """Drop keys, buffers and all remembered calls; called when the graphs are dropped."""
        problem = None if self.used is None else self.used.write(self.rules.keys.used(lambda key: self._counts(key).n))
        if problem is not None:
            self._runtime.ledger.note(problem, at=self._name, is_problem=True)
        self._own = None
        self._memory.clear()
        self._calls.clear()
        self.rules.keys.forget()

    # -- ahead of the calls -------------------------------------------------------------------------------------------

    def ladder(self, args: Sequence[Any]) -> list[RecurringKey]:
        """The keys of all capture sizes, largest first; without capture sizes, the key of ``args`` alone.

        With ``warm_start``, also the keys that traffic used in an earlier process.
        """
        if self.rules.off is not None or self._is_beside_a_gpu():
            return []
        used = () if self.used is None else self.used.keys
        return self.rules.keys.ladder_keys(self._read(args), used)

    def example_of(self, key: RecurringKey, args: Sequence[Any]) -> tuple[AutoCall, list[Any]]:
        """A call of exactly ``key``, which serves nobody and is not counted, and its arguments."""
        example = self._stretched(args, key.sizes)
        call = self._call_of(example)
        if key.is_exact and call.key is not key:
            call = self._new_call(key.sizes, example, as_is=False, is_exact=True)
        return replace(call, counts=Row()), example

    def _stretched(self, args: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
        """Arguments at other sizes: entries of ``args`` repeated, so that every value is valid."""
        named = self.rules.sizes.named(sizes)
        stretched = list(args)
        for position, number in self.rules.sizes.numbers_at(named).items():
            stretched[position] = number
        for position, layout in self.rules.sizes.layouts.items():
            value = args[position]
            for dim, size in enumerate(layout.shape):
                wanted = value_at(size, named)
                if value.shape[dim] != wanted:
                    value = value.index_select(dim, torch.arange(wanted, device=value.device) % value.shape[dim])
            stretched[position] = value
        return stretched

    # -- decisions ----------------------------------------------------------------------------------------------------

    def _read(self, args: Sequence[Any]) -> tuple[int, ...]:
        return tuple([args[p] if dim is None else args[p].shape[dim] for p, dim in self._places])

    def _call_of(self, args: Sequence[Any]) -> AutoCall:
        """The decision about calls of the sizes and layouts of ``args``."""
        if self._generation != self._runtime.lease.generation:  # some graph was dropped: count the remaining graphs
            self._generation = self._runtime.lease.generation
            self.rules.keys.recount(self._num_graphs)
            if self._own is not None:
                self._own.recount()
        real = self._read(args)
        layout = tuple([args[position] for position in self._layout_numbers])
        # guard: padded_inputs_share_memory
        as_is = self._is_refuted or (self._watches_memory and self._shares_memory(args))
        call = self._calls.get((real, layout, as_is))
        if call is None:
            if len(self._calls) >= _MAX_REMEMBERED:
                self._calls = {}
            call = self._calls[real, layout, as_is] = self._new_call(real, args, as_is=as_is)
        return call

    def _shares_memory(self, args: Sequence[Any]) -> bool:
        """Whether inputs share memory: in separate buffers, a write of the graph to one would not reach the others."""
        storages = [storage for position in self._may_share if (storage := storage_id(args[position]))]
        return len(set(storages)) != len(storages)

    def _new_call(self, real: tuple[int, ...], args: Sequence[Any], *, as_is: bool, is_exact: bool = False) -> AutoCall:
        with self._new:  # guard: one_buffer_for_threads
            keys = self.rules.keys
            if not self.rules.padded:
                return self._exact(keys.key_of(real), real)
            if keys.differs(real):  # guard: sizes_of_one_name_differ
                remedy = "give each a name of its own in dynamic_dims"
                return self._as_is(real, "sizes of one key field differ in a call", remedy)
            if self._watches_memory and as_is and self._shares_memory(args):
                remedy = "pass a copy (`x.clone()`) of the input that the model only reads"
                return self._as_is(real, "inputs share memory, and the graph writes to an input", remedy)
            if as_is:
                return self._exact(keys.key_of(real, as_is=True), real)
            key = keys.exact_key(real) if is_exact else keys.key_of(real)
            found = self._inputs(real, key.sizes, args)
            if isinstance(found, InputLayout):
                remedy = f"make it contiguous (`{found.name}.contiguous()`)"
                return self._as_is(real, f"no dense buffer has the strides of {found.name}", remedy)
            inputs, numbers = found
            strides = {e: args[p] for p, e in self.rules.sizes.numbers.items() if getattr(e, "is_Symbol", False)}
            counts, exact = self._counts(key), self._exact_graphs(args)
            size = None if exact is None else exact.record(key, real, counts)
            return AutoCall(
                key,
                real,
                counts,
                self._seen(real),
                num_real=math.prod(real),
                num_padded=math.prod(key.sizes),
                inputs=inputs,
                written=tuple(padded for padded in inputs.all if padded.is_written),
                numbers=numbers,
                cuts=self.rules.outputs.cuts({**strides, **self.rules.sizes.named(real)}),
                size=size,
            )

    def _inputs(
        self, real: Sequence[int], sizes: Sequence[int], args: Sequence[Any]
    ) -> tuple[PaddedArguments, tuple[tuple[int, int], ...]] | InputLayout:
        """The padded inputs and the numbers at ``sizes``; or the layout of an input that no dense buffer has."""
        graph, rules = self.rules.sizes, self.rules
        padded, unpadded = graph.named(sizes), graph.named(real)
        numbers = graph.dense_numbers(rules.padded, padded)
        if isinstance(numbers, InputLayout):
            return numbers
        inputs = []
        for position, rule in rules.padded.items():
            layout = graph.layouts[position]
            shape, real_shape = (tuple([value_at(s, at) for s in layout.shape]) for at in (padded, unpadded))
            buffer = self._memory.view(position, shape, args[position], layout.order)
            is_written = position in rules.written
            inputs.append(PaddedInput.of(position, layout.name, buffer, real_shape, rule, is_written=is_written))
        return PaddedArguments(inputs), tuple({**numbers, **graph.numbers_at(padded)}.items())

    def _as_is(self, real: tuple[int, ...], why: str, remedy: str) -> AutoCall:
        """The decision about calls that cannot be padded, which is reported."""
        self._runtime.warn(f"calls are not padded: {why}", remedy, at=self._name, is_silent=self._is_silent)
        return self._exact(self.rules.keys.key_of(real, as_is=True), real)

    def _exact(self, key: RecurringKey, real: tuple[int, ...]) -> AutoCall:
        return AutoCall(key, real, self._counts(key), self._seen(real))

    def _seen(self, real: Sequence[int]) -> tuple[tuple[Counter[int], int], ...]:
        of_key = {field.name: size for field, size in zip(self.rules.keys.fields, real, strict=True)}
        named = {**self.rules.sizes.fixed, **of_key}  # torch.compile has a graph of its own for size 1
        return tuple((self._runtime.ledger.sizes[name], size) for name, size in named.items())

    def _counts(self, key: RecurringKey) -> Row:
        return self._runtime.ledger.rows(self._name, "called")[self.rules.mode, key.descriptor]
