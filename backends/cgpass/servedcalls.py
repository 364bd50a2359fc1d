"""What serves the calls of one callable that have no forward context: key, padded inputs and cuts, by their sizes.

The graph's inputs are padded and its outputs cut; Dynamo has already run the user's Python with the unpadded tensors.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch

from cgpass.cuts import CallResults
from cgpass.keyrules import AutoRules
from cgpass.namedsizes import InputLayout, value_at
from cgpass.wrappers import CallableGraphs
from graphpass.capture.cuda import total_bytes
from graphpass.capture.replay import GraphEntry
from graphpass.capture.staging import storage_id
from graphpass.compat import symbolic
from graphpass.dispatch.owngraphs import (
    MOST_LOSSES,
    NO_ROOM,
    OwnGraphs,
    RecurringSize,
    RecurringSizes,
    bytes_allowed,
)
from graphpass.dispatch.recurring import RecurringKey
from graphpass.keys import CUDAGraphMode
from graphpass.ledger import Row, named_sizes
from graphpass.paddedcalls import PaddedArguments, PaddedInput, PaddedMemory, ServedSize
from graphpass.ranks.lockstep import Lockstep
from graphpass.report.figures import PADDING_BEFORE

_MAX_REMEMBERED, _MAX_KNOWN = 4096, 64
_NO_INPUTS, _AS_IS = PaddedArguments(), CallResults()


ServedReplay = ServedSize[PaddedArguments, CallResults]


@dataclass(slots=True, kw_only=True)
class ServedCall(ServedSize[PaddedArguments, CallResults]):
    """What serves all calls of the same real sizes, through the wrappers or by a replay that is known."""

    key: RecurringKey
    real: tuple[int, ...]  #: the real size of each key field
    seen: tuple[tuple[Counter[int], int], ...]  #: (counts of a field's sizes in all calls, the size in these calls)
    num_real: int = 1  #: product of the real sizes
    num_padded: int = 1  #: product of the key's sizes
    #: {address of the first static input: its replay}, one for each instance of a module that shares the callable
    known: dict[int, ServedReplay] = field(default_factory=dict)
    size: RecurringSize | None = None  #: counts these calls for a graph of their own; None if they never get one
    own: ServedCall | None = None  #: the same over the graph of their own size; None before there is one

    @property
    def needs_check(self) -> bool:
        """Whether these calls have padding, and no padded call of their key was checked."""
        return not self.key.is_checked and self.num_padded != self.num_real

    def know(self, anchor: int, entry: GraphEntry, generation: int, *, clones: bool) -> ServedReplay:
        """Remember the graph of calls whose first static input has this address: they have nothing to look up.

        One that writes to inputs, returns views of them or reads the context goes through its wrapper.
        """
        plan, results = entry.plan, self.results
        reads = plan.reads.values or plan.inputs.pool_inputs
        writes = plan.inputs.written or results.written
        if reads or writes or entry.outputs.viewed_positions or results.views:
            replay = ServedReplay(self.inputs, results, None, generation=generation)
        else:
            replay = ServedReplay(self.inputs, results.known(entry, clones=clones), plan, generation=generation)
        if len(self.known) >= _MAX_KNOWN:
            self.known.clear()
        self.known[anchor] = replay
        return replay


class ServedCalls:
    """Looks up what serves a call. Owns the padded buffers."""

    def __init__(self, rules: AutoRules, graphs: CallableGraphs) -> None:
        self._rules, self._graphs = rules, graphs
        self._name, self._runtime, self._settings = graphs.name, graphs.runtime, graphs.settings
        self._places = tuple(size.place for size in rules.sizes.sizes)
        self._layout_numbers = rules.sizes.layout_numbers
        self._may_share = tuple(dict.fromkeys((*rules.dynamic, *rules.written)))
        self._watches_memory = bool(rules.padded) and bool(rules.written) and len(self._may_share) > 1
        self._memory = PaddedMemory[int]()
        self._calls: dict[tuple[Any, ...], ServedCall] = {}
        self._new = threading.Lock()  # makes calls: two buffers of one key would be two graphs
        self.is_refuted = False  #: the run-time check found that padding changes results: no later call is padded

    @functools.cached_property
    def exact(self) -> ExactGraphs:
        """Which sizes get graphs of their own."""
        made = ExactGraphs(self._rules, self._graphs)
        return vars(self).setdefault("exact", made)  # type: ignore[no-any-return]  # two threads may be first

    def of(self, args: Sequence[Any]) -> ServedCall:
        """What serves calls of the sizes and layouts of ``args``."""
        real = self.sizes(args)
        layout = tuple([args[position] for position in self._layout_numbers])
        # guard: padded_inputs_share_memory
        as_is = self.is_refuted or (self._watches_memory and self._shares_memory(args))
        call = self._calls.get((real, layout, as_is))
        if call is None:
            if len(self._calls) >= _MAX_REMEMBERED:
                self._calls = {}
            call = self._calls[real, layout, as_is] = self._new_call(real, args, as_is=as_is)
        return call

    def row_of(self, key: RecurringKey) -> Row:
        """The counts of a key's calls."""
        return self._runtime.ledger.rows(self._name, "called")[self._rules.mode, key.descriptor]

    def count(self, call: ServedCall) -> None:
        """Count a call that has run over a graph."""
        row, size = call.row, call.size
        if row is None:
            row = call.row = self.row_of(call.key)
        if size is not None:
            size.replays += 1
        row.n += 1
        row.real += call.num_real
        row.padded += call.num_padded

    def own_of(self, call: ServedCall, args: Sequence[Any]) -> ServedCall:
        """What serves the calls like ``call`` over the graph of their own size."""
        if call.own is None:
            call.own = self._new_call(call.real, args, as_is=False, is_exact=True)
            call.own.size = call.size
        return call.own

    def sizes(self, args: Sequence[Any]) -> tuple[int, ...]:
        """The real size of each key field."""
        return symbolic.sizes_at(self._places, args)

    def num_bytes(self) -> int:
        """Bytes of the padded inputs."""
        return self._memory.num_bytes()

    def forget(self) -> None:
        """Drop the buffers and all that was looked up."""
        vars(self).pop("exact", None)
        self._memory.clear()
        self._calls.clear()

    def example_of(self, key: RecurringKey, args: Sequence[Any]) -> tuple[ServedCall, list[Any]]:
        """A call of exactly ``key``, which serves nobody and is not counted, and its arguments."""
        example = self._stretched(args, key.sizes)
        call = self.of(example)
        if key.is_exact and call.key is not key:
            call = self._new_call(key.sizes, example, as_is=False, is_exact=True)
        return replace(call, row=Row()), example

    def _stretched(self, args: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
        """Arguments at other sizes: entries of ``args`` repeated, so that every value is valid."""
        named = self._rules.sizes.named(sizes)
        stretched = list(args)
        for position, number in self._rules.sizes.numbers_at(named).items():
            stretched[position] = number
        for position, layout in self._rules.sizes.layouts.items():
            value = args[position]
            for dim, size in enumerate(layout.shape):
                wanted = value_at(size, named)
                if value.shape[dim] != wanted:
                    value = value.index_select(dim, torch.arange(wanted, device=value.device) % value.shape[dim])
            stretched[position] = value
        return stretched

    # -- looking up --------------------------------------------------------------------------------------------------

    def _shares_memory(self, args: Sequence[Any]) -> bool:
        """Whether inputs share memory: in separate buffers, a write of the graph to one would not reach the others."""
        storages = [storage for position in self._may_share if (storage := storage_id(args[position]))]
        return len(set(storages)) != len(storages)

    def _new_call(
        self, real: tuple[int, ...], args: Sequence[Any], *, as_is: bool, is_exact: bool = False
    ) -> ServedCall:
        with self._new:  # guard: one_buffer_for_threads
            keys = self._rules.keys
            if not self._rules.padded:
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
            strides = {e: args[p] for p, e in self._rules.sizes.numbers.items() if getattr(e, "is_Symbol", False)}
            return ServedCall(
                found,
                self._rules.outputs.results(
                    {**strides, **self._rules.sizes.named(real)},
                    tuple(padded for padded in found.all if padded.is_written),
                ),
                plan=None,
                key=key,
                real=real,
                seen=self._seen(real),
                num_real=math.prod(real),
                num_padded=math.prod(key.sizes),
                size=self.exact.record(key, real),
            )

    def _inputs(self, real: Sequence[int], sizes: Sequence[int], args: Sequence[Any]) -> PaddedArguments | InputLayout:
        """The padded inputs and the numbers at ``sizes``; or the layout of an input that no dense buffer has."""
        graph, rules = self._rules.sizes, self._rules
        padded, unpadded = graph.named(sizes), graph.named(real)
        numbers = graph.dense_numbers(rules.padded, padded)
        if isinstance(numbers, InputLayout):
            return numbers
        inputs = []
        for position, fill in rules.padded.items():
            layout = graph.layouts[position]
            rule = self._settings.padding.get(layout.name, fill)
            shape, real_shape = (tuple([value_at(s, at) for s in layout.shape]) for at in (padded, unpadded))
            buffer = self._memory.view(position, shape, args[position], layout.order)
            is_written = position in rules.written
            inputs.append(PaddedInput.of(position, layout.name, buffer, real_shape, rule, is_written=is_written))
        return PaddedArguments(inputs, tuple({**numbers, **graph.numbers_at(padded)}.items()))

    def _as_is(self, real: tuple[int, ...], why: str, remedy: str) -> ServedCall:
        self._runtime.warn(
            f"calls are not padded: {why}", remedy, at=self._name, is_silent=self._settings.on_fallback == "silent"
        )
        return self._exact(self._rules.keys.key_of(real, as_is=True), real)

    def _exact(self, key: RecurringKey, real: tuple[int, ...]) -> ServedCall:
        return ServedCall(_NO_INPUTS, _AS_IS, plan=None, key=key, real=real, seen=self._seen(real))

    def _seen(self, real: Sequence[int]) -> tuple[tuple[Counter[int], int], ...]:
        of_key = {field.name: size for field, size in zip(self._rules.keys.fields, real, strict=True)}
        named = {**self._rules.sizes.fixed, **of_key}  # torch.compile has a graph of its own for size 1
        return tuple((self._runtime.ledger.sizes[name], size) for name, size in named.items())


# -- sizes that recur -------------------------------------------------------------------------------------------------


class ExactGraphs(RecurringSizes):
    """The graphs of one callable for sizes that recur."""

    def __init__(self, rules: AutoRules, graphs: CallableGraphs) -> None:
        self._graphs, self._name, self._runtime = graphs, graphs.name, graphs.runtime
        self._mode, self._keys, settings = rules.mode, rules.keys, graphs.settings
        # The runs of single regions do not tell how long the whole takes without a graph.
        never_without = settings.on_fallback == "error" or settings.padding_check == "strict"
        self._runs_alone = rules.mode is CUDAGraphMode.FULL and not never_without
        is_timed = graphs.device.type != "cpu"
        self._ranks: Lockstep | None = self._runtime.lockstep.get(self._name)
        compiled = [record.seconds for record in self._runtime.callables() if record.name == self._name]
        super().__init__(
            OwnGraphs.on(graphs.device),
            bytes_allowed(settings.graph_bytes, total_bytes(graphs.device), has_ladder=bool(settings.capture_sizes)),
            is_timed=is_timed,
            spent=sum(map(sum, map(astuple, compiled))) * is_timed,
            plain_s=sum(one.compile for one in compiled) if graphs.plain and is_timed else None,
            most=None if self._ranks is None else self._ranks.most,
        )

    def record(self, key: RecurringKey, real: tuple[int, ...]) -> RecurringSize | None:
        """The record of calls with these sizes, which ``key`` serves; None if it is no larger than they are."""
        if self._graphs.settings.graph_bytes == 0:
            return None
        if key.is_exact:
            return self.find(real)
        (real_rows, group), (key_rows, _) = self._rows(real), self._rows(key.sizes)
        return self.size_of(real, group, real_rows, key_rows) if key_rows != real_rows else None

    def captured(self, key: RecurringKey, size: RecurringSize | None, calls: Row | None, seconds: float) -> None:
        """Record the first capture of a key; its calls count if they may be padded."""
        of_regions = self._graphs.entries_at(self._mode, key.descriptor)
        latest = [entries[-1] for entries in of_regions if entries]
        rows, group = self._rows(key.sizes)
        replayed, run = self.times_of(group)
        if calls is not None:
            self._ran[key.descriptor] = calls, replayed, rows
        timed = functools.partial(_sum_of, [entry.seconds for entry in latest])
        if self._ranks is None:
            replayed.add(rows, timed if self._is_timed else lambda: rows)
        if self._runs_alone and self._ranks is None:
            run.add(rows, latest[0].run_seconds)
        num_bytes = sum(entry.pool_bytes for entry in latest), sum(entry.driver_bytes for entry in latest)
        self.captured_any(seconds, *num_bytes)
        if key.is_exact and size is not None:
            before = self._runtime.ledger.rows(self._name, PADDING_BEFORE)[self._mode, key.descriptor]
            before.seconds += size.cost()
            if not self.captured_own(size, seconds, *num_bytes):
                self.drop(size, MOST_LOSSES)
                self.leave_out(size)

    def recount(self) -> None:
        """Pad the sizes again whose graphs have died."""
        for size in list(self._sizes.values()):
            if size.own_bytes is not None and not self._keys.exact_key(size.real).is_captured:
                self.dropped(size)

    def drop(self, size: RecurringSize, losses: int = 0) -> None:
        """Drop the graph of a size now, or in the thread that ends the present forward of the pool."""

        def drop() -> None:
            if size.own_bytes is not None:
                key = self._keys.exact_key(size.real)
                key.num_graphs = 0
                self.dropped(size, losses)
                self._runtime.lease.drop(
                    [entry.graph for of in self._graphs.wrappers(self._mode) for entry in of.table.take(key.descriptor)]
                )

        self._runtime.lease.turn.when_unused(drop)

    def leave_out(self, size: RecurringSize) -> None:
        """Note a size for whose graph there is no room."""
        at = f"{self._name} {named_sizes(self._keys.named(size.real))}"
        self._runtime.ledger.note(NO_ROOM, at=at, is_problem=True)

    def _rows(self, sizes: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        padded, exact = self._keys.padded_sizes(sizes)
        return math.prod(padded), exact


def _sum_of(timed: Sequence[Callable[[], float | None]]) -> float | None:
    seconds = [one() for one in timed]
    return None if None in seconds else sum(filter(None, seconds))
