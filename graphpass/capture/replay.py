"""One replay, in the order in which it happens: find, check, copy in, launch, copy back.

A wrapper finds the entry of a call by descriptor and arguments (:class:`EntryTable`): static inputs by address, see
Note [Address rule] in docs/design; copied ones by the way they share memory, see Note [Alias patterns]. The entry's
plan does the rest (:class:`ReplayPlan`, Note [Why a plan]). A compiled callable joins the plans of its regions.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from graphpass.capture.outputs import OutputPlan
from graphpass.capture.pool import PoolLease
from graphpass.capture.regioncalls import Observed
from graphpass.capture.staging import (
    AliasPattern,
    BufferArena,
    Copies,
    Layouts,
    alias_pattern,
    distinct_elements,
    grouped_copies,
    storage_id,
)
from graphpass.compat import memory, operators
from graphpass.context import ForwardContext
from graphpass.errors import CaptureError, ShapeError, StaticInputError
from graphpass.keys import BatchDescriptor, CUDAGraphMode
from graphpass.ledger import Ledger, Row
from graphpass.report.records import Counts, RegionId, RegionUse

#: what a wrapper counts for its region, in the ledger
WRAPPER_EVENTS = ("warmed", "captured", "replayed")
ANY_ADDRESS = 0
_FEW_REPLAYS = 8
_REMEMBERED_SETS = 256


class Graph(Protocol):
    """One captured region at one key: reads and writes fixed addresses."""

    def replay(self) -> None:
        """Run the recorded work, ordered after all work that the caller has enqueued."""

    def reset(self) -> None:
        """Free the recording; it must not be replayed again."""


def without_grad() -> contextlib.AbstractContextManager[object]:
    """``torch.no_grad()`` if grad mode is on; else a context that does nothing, which is cheaper."""
    return torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext()


# -- what an entry is found by ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StaticSet:
    """The static inputs baked into the graphs of a plan."""

    positions: list[int]  #: a list, as the native comparison requires; never changed
    addresses: list[int | None]  #: for each argument its address at capture, None if it is not static; likewise
    storages: frozenset[int]  #: addresses of the storages of the static inputs
    spec: Any = None  #: structure of the arguments of a wrapper's call
    owner_ids: tuple[int, ...] = ()  #: ids of the module's tensors, which tell the module's instances apart

    @classmethod
    def of(
        cls, leaves: Sequence[Any], positions: Sequence[int], spec: Any = None, owner_ids: tuple[int, ...] = ()
    ) -> StaticSet:
        """The set formed by ``leaves`` at ``positions``."""
        addresses: list[int | None] = [None] * len(leaves)
        for position in positions:
            addresses[position] = leaves[position].data_ptr()
        storages = frozenset(storage_id(leaves[p]) for p in positions)
        return cls(list(positions), addresses, storages, spec, owner_ids)

    def moved(self, leaves: Sequence[Any]) -> list[int]:
        """Positions whose address differs from the one at capture."""
        return [p for p in self.positions if leaves[p].data_ptr() != self.addresses[p]]


@dataclass(frozen=True, slots=True)
class GraphEntry:
    """One captured graph of one wrapper at one key, static-input set and alias pattern; complete when it is created."""

    region: RegionId
    build_result: Callable[[list[Any]], Any]  #: turns the flat outputs into the structure that the region returns
    graph: Graph
    plan: ReplayPlan  #: replays the graph alone; its arguments are the flat arguments of the region
    outputs: OutputPlan
    #: under ``compare``, the tensors into which each replay writes the results of the regions inside
    observed: tuple[Observed, ...] = field(repr=False)
    written: tuple[int, ...]  #: positions of the arguments that the region writes to
    run_seconds: Callable[[], float | None]  #: device seconds of the warm-up; None before they are known
    seconds: Callable[[], float | None]  #: median device seconds of a replay; None before, or where none is measured
    pool_bytes: int  #: growth of the pool by the capture; 0 where it is not measured, as the next
    driver_bytes: int  #: growth of the driver's memory, for its executable
    watches: list[Any] = field(default_factory=list, repr=False)  #: weak references to the storages of module tensors

    def reads_pool_at(self, leaves: Sequence[Any]) -> bool:
        """Whether all inputs in pool memory have their addresses at capture."""
        # guard: pool_input_moved
        return all(leaves[position].data_ptr() == address for position, address in self.plan.inputs.pool_inputs)


@dataclass(slots=True, weakref_slot=True)
class KeyEntries:
    """The graphs of one wrapper at one key, and what became of them."""

    by_anchor: dict[int, list[GraphEntry]] = field(default_factory=dict)
    freed: set[int] = field(default_factory=set)  #: positions of static inputs freed since the last capture
    freed_soon: Counter[int] = field(default_factory=Counter)  #: {position: how often it was freed after few replays}
    #: what dropped graphs read; ``weight.data = new`` frees memory of a module that lives on, so these sets count, too
    freed_sets: deque[StaticSet] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_SETS))

    def __iter__(self) -> Iterator[GraphEntry]:
        # Another thread may capture meanwhile.
        return (entry for entries in list(self.by_anchor.values()) for entry in list(entries))

    def drop_freed(self, entry_id: int, position: int, num_replays: int) -> bool:
        """Drop the entry with this ``id()``, whose static input at ``position`` was freed after so many replays."""
        for entries in self.by_anchor.values():
            for index, entry in enumerate(entries):
                if id(entry) == entry_id:
                    del entries[index]
                    self.freed.add(position)
                    self.freed_soon[position] += num_replays < _FEW_REPLAYS
                    self.freed_sets.append(entry.plan.statics)
                    entry.graph.reset()
                    return True
        return False


@dataclass(slots=True, weakref_slot=True, eq=False)
class EntryTable:
    """All that one wrapper has captured; its runtime counts, hides and closes it.

    Dynamo shares one callable among the instances of a class, so a decoder compiled block by block has an entry for
    each block at each key. The address of one parameter, the anchor, selects the instance; entries of one anchor are
    tried in order.
    """

    region: RegionId
    mode: CUDAGraphMode
    keys: dict[BatchDescriptor, KeyEntries] = field(default_factory=dict)
    arena: BufferArena = field(default_factory=BufferArena)
    _anchor: int | None = None

    def find(
        self, descriptor: BatchDescriptor, leaves: list[Any], spec: Any
    ) -> tuple[GraphEntry | None, GraphEntry | None]:
        """(The entry that serves these arguments; one that would, if its inputs in pool memory had not moved)."""
        key, elsewhere = self.keys.get(descriptor), None
        if key is None:
            return None, None
        address = self._address(leaves)
        entries = key.by_anchor.get(address, ())
        if address != ANY_ADDRESS and ANY_ADDRESS in key.by_anchor:
            entries = [*entries, *key.by_anchor[ANY_ADDRESS]]
        for entry in entries:
            plan = entry.plan
            if (spec is plan.statics.spec or spec == plan.statics.spec) and plan.serves(leaves):
                if entry.reads_pool_at(leaves):
                    return entry, None
                elsewhere = elsewhere or entry
        return None, elsewhere

    def at(self, descriptor: BatchDescriptor) -> Sequence[GraphEntry]:
        """All entries of a key."""
        return tuple(self.keys.get(descriptor, ()))

    def descriptors(self) -> list[BatchDescriptor]:
        """The keys that have an entry."""
        return [descriptor for descriptor, key in self.keys.items() if any(key.by_anchor.values())]

    def uses(self, ledger: Ledger) -> Iterator[RegionUse]:
        """Counts and costs so far, for each key."""
        warmed, captured, replayed = (ledger.rows(self.region, event) for event in WRAPPER_EVENTS)
        for (mode, key), row in list(warmed.items()):  # another thread may capture meanwhile
            if mode is self.mode:
                made, run = captured.get((mode, key), Row()), replayed.get((mode, key), Row())
                static_sets = len({tuple(entry.plan.statics.addresses) for entry in self.at(key)})
                counts = Counts(row.n, made.n, run.n, run.items, static_sets)
                yield RegionUse(self.region, mode, key, counts, replace(made), replace(run))

    def add(self, key: KeyEntries, leaves: Sequence[Any], module_owned: Iterable[int], entry: GraphEntry) -> None:
        """Add the entry that was captured for ``leaves`` to a key."""
        if self._anchor is None:
            self._anchor = min(module_owned, default=-1)
        # An entry that stages the anchor serves every address.
        address = self._address(leaves) if self._anchor in entry.plan.statics.positions else ANY_ADDRESS
        key.by_anchor.setdefault(address, []).append(entry)
        key.freed.clear()

    def take(self, descriptor: BatchDescriptor) -> Sequence[GraphEntry]:
        """Remove all entries of a key, and return them for their graphs to be dropped."""
        return tuple(self.keys.pop(descriptor, ()))

    def buffer_bytes(self) -> int:
        """Bytes of the static buffers."""
        return self.arena.num_bytes()

    def close(self) -> None:
        """Drop all graphs and buffers; more can be captured."""
        for key in self.keys.values():
            for entry in key:
                entry.graph.reset()
        self.keys.clear()
        self.arena.clear()

    def hide(self) -> Callable[[], None]:
        """Put everything aside; returns a function that drops what was captured in the meantime, and restores it."""
        hidden = self.keys, self.arena, self._anchor
        self.keys, self.arena, self._anchor = {}, BufferArena(), None  # guard: throwaway_graphs_kept

        def restore() -> None:
            self.close()
            self.keys, self.arena, self._anchor = hidden

        return restore

    def _address(self, leaves: Sequence[Any]) -> int:
        anchor = self._anchor
        if anchor is None or anchor < 0 or anchor >= len(leaves):
            return ANY_ADDRESS
        leaf = leaves[anchor]
        return leaf.data_ptr() if isinstance(leaf, torch.Tensor) else ANY_ADDRESS


# -- what is checked, launched and counted ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Replays of one or more graphs, and the eager calls between them, for one set of static inputs.

    A caller holds the pool for :meth:`check` and then :meth:`run`.
    """

    name: str  #: the region or the callable, for errors
    statics: StaticSet
    dynamic_positions: tuple[int, ...]  #: positions of the tensors that may be elsewhere in each call
    pattern: AliasPattern  #: how these tensors share memory
    reads: ContextReads = field(repr=False)
    inputs: InputPlan = field(repr=False)
    rows: tuple[tuple[Row, int], ...]  #: (the replays of a region at this key, inputs that it copies in each of them)
    pool_storages: frozenset[int]  #: addresses of the pool storages that the graphs write outputs to
    pool_outputs: tuple[torch.Tensor, ...]  #: these outputs, as tensors that do not keep that memory reserved
    launch: Callable[[Sequence[Any]], Any]  #: takes the arguments after the copies; replays and returns the outputs
    #: returns ``launch`` with the names of key and regions for a profiler, see Note [Names in profiles]
    ranged: Callable[[], Callable[[Sequence[Any]], Any]]

    def serves(self, args: list[Any]) -> bool:
        """Whether the graphs were captured for these static inputs and this alias pattern."""
        statics, dynamic = self.statics, self.dynamic_positions
        return (
            memory.data_ptrs_equal(args, statics.addresses, statics.positions)  # guard: static_addresses
            and (not dynamic or alias_pattern(args, dynamic) == self.pattern)  # guard: alias_pattern
            # A copy would hide that an input shares memory with a static one.
            # guard: staged_inside_static
            and not (statics.storages and any(storage_id(args[p]) in statics.storages for p in dynamic))
        )

    def check(self, args: Sequence[Any], context: ForwardContext | None, reads: ContextReads | None = None) -> None:
        """Refuse arguments and a context that the graphs cannot read as they were captured.

        ``reads`` replace all that the graphs read; without a context, they read none.
        """
        self.inputs.check(args)
        if context is not None:
            (self.reads if reads is None else reads).check(context, self.name)  # guard: context_reads

    def run(self, args: Sequence[Any], lease: PoolLease) -> Any:
        """Copy inputs, count, replay and copy back what the graphs wrote to inputs."""
        if self.inputs.staged:
            with without_grad():
                self.inputs.copy_in(args)
        lease.before_replay(self.pool_storages, self.pool_outputs)  # inputs may lie in outputs that this makes stale
        for row, num_copied in self.rows:
            row.n += 1
            row.items += num_copied
        return self.ranged()(args) if operators.is_profiled() else self.launch(args)


def launch_of(graph: Graph, inputs: InputPlan, outputs: OutputPlan) -> Callable[[Sequence[Any]], list[Any]]:
    """The function that replays one graph and returns its flat outputs; it takes the region's arguments."""
    replay = graph.replay
    if inputs.written or outputs.viewed_positions:

        def launch(leaves: Sequence[Any]) -> list[Any]:
            with without_grad():
                replay()
                inputs.copy_back(leaves)  # guard: copy_back
                return outputs.build(leaves)

        return launch
    fixed = outputs.build(())

    def bare(*_: Any) -> list[Any]:  # of any number of arguments, so that stitched code can call it, too
        replay()
        return fixed

    return bare


# -- the arguments ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class InputPlan:
    """How the arguments of a replay are checked and copied: refuses those that a graph cannot read as captured.

    Plans of regions become one of their callable's arguments (:meth:`at`, :meth:`joined`).
    """

    owner: str  #: the region, for errors
    key: object  #: the key's padded shape, for errors
    names: Mapping[int, str] = field(default_factory=dict)  #: a name for each argument
    #: (position, what the graph reads, with the shape and strides of the capture) of arguments that are copied before
    #: each replay
    staged: tuple[tuple[int, torch.Tensor], ...] = ()
    written: frozenset[int] = frozenset()  #: positions of those that are copied back, as the region writes to them
    constants: tuple[tuple[int, Any], ...] = ()  #: (position, value) of arguments that are no tensors
    #: (position, alias) of static inputs whose layout nobody else checks. The alias has the layout at capture. It keeps
    #: the memory alive if no module owns the input; otherwise it has no memory.
    layouts: tuple[tuple[int, torch.Tensor], ...] = ()
    #: (position, strides in elements) of staged inputs that an output is a view of
    viewed_strides: tuple[tuple[int, tuple[int, ...]], ...] = ()
    pool_inputs: tuple[tuple[int, int], ...] = ()  #: (position, address) of inputs written earlier in the same forward
    _targets: list[torch.Tensor] = field(init=False)  # the buffers with each element once
    _fits: tuple[tuple[Any, ...], ...] = field(init=False)
    _expanded: tuple[int, ...] = field(init=False)  # indices of staged inputs of which some elements are one in memory
    _strides: tuple[tuple[int, tuple[int, ...]], ...] = field(init=False)  # of those, and of viewed inputs
    _copies: Copies = field(init=False)
    _layouts: Layouts = field(init=False)

    def __post_init__(self) -> None:
        # Derived once, because every replay checks and copies; inputs usually have the layout of the buffers.
        targets = self._targets = [distinct_elements(buffer, name=self.names[p]) for p, buffer in self.staged]
        self._fits = tuple((p, buffer.shape, buffer.dtype, buffer.device) for p, buffer in self.staged)
        self._expanded = tuple(i for i, (_, buffer) in enumerate(self.staged) if targets[i].shape != buffer.shape)
        expanded = tuple((self.staged[i][0], self.staged[i][1].stride()) for i in self._expanded)
        self._strides = (*expanded, *self.viewed_strides)
        self._copies = grouped_copies(targets, targets)
        self._layouts = Layouts(static for _, static in self.layouts)

    def __bool__(self) -> bool:
        return bool(self.staged or self.constants or self.layouts or self.viewed_strides or self.pool_inputs)

    def at(self, places: Mapping[int, int]) -> InputPlan:
        """The plan of the arguments in ``places`` ({old position: new position}) alone, at their new positions."""

        def moved(pairs: Iterable[tuple[int, Any]]) -> tuple[tuple[int, Any], ...]:
            return tuple((places[position], what) for position, what in pairs if position in places)

        return InputPlan(
            self.owner,
            self.key,
            {place: self.names[position] for position, place in places.items()},
            moved(self.staged),
            frozenset(places[position] for position in self.written if position in places),
            moved(self.constants),
            moved(self.layouts),
            moved(self.viewed_strides),
            moved(self.pool_inputs),
        )

    @classmethod
    def joined(cls, plans: Sequence[InputPlan], owner: str) -> InputPlan:
        """One plan for the same arguments, without duplicate checks; no two staged inputs may share memory."""
        layouts = {(p, t.shape, t.stride(), t.dtype): (p, t) for plan in plans for p, t in plan.layouts}
        return cls(
            plans[0].owner if plans else owner,
            plans[0].key if plans else None,
            {p: name for plan in plans for p, name in plan.names.items()},
            tuple(pair for plan in plans for pair in plan.staged),
            frozenset[int]().union(*(plan.written for plan in plans)),
            tuple({(p, id(v)): (p, v) for plan in plans for p, v in plan.constants}.values()),
            tuple(layouts.values()),
            tuple(dict.fromkeys(pair for plan in plans for pair in plan.viewed_strides)),
            tuple(dict.fromkeys(pair for plan in plans for pair in plan.pool_inputs)),
        )

    def check(self, args: Sequence[Any]) -> None:
        """Compare ``args`` with the capture; for errors see :meth:`ReplayPlan.check`."""
        for position, shape, dtype, device in self._fits:  # first: a size that differs is also a number that differs
            leaf = args[position]
            if leaf.shape != shape or leaf.dtype != dtype or leaf.device != device:  # guard: staged_dtype, staged_shape
                raise self._does_not_fit(position, leaf, f"{tuple(shape)} {dtype} on {device}")
        for position, strides in self._strides:
            if args[position].stride() != strides:  # guard: input_strides
                raise ShapeError(
                    f"input {self.names[position]} of {self.owner} has other strides than at capture",
                    expected=f"{strides}: it is expanded, or an output is a view of it",
                    found=str(args[position].stride()),
                    remedy="pass it in the same layout; expand it the same way, or pass tensor.contiguous() from the "
                    "first call on",
                )
        for position, value in self.constants:
            found = args[position]
            if found is not value and _differs(found, value):  # guard: constants
                raise CaptureError(
                    f"argument {self.names[position]} of {self.owner} is baked into the graph of {self.key}",
                    expected=repr(value),
                    found=repr(found),
                    remedy="put it into the key: BatchDescriptor(..., extra=((name, value),))",
                )
        if self.layouts:
            tensors = [args[position] for position, _ in self.layouts]
            if not self._layouts.match(*tensors):
                self._check_layouts(tensors)
        if self.pool_inputs:
            self._check_pool_inputs(args)

    def copy_in(self, args: Sequence[Any]) -> None:
        """Copy the inputs into their buffers, with one foreach copy per group of matching tensors."""
        sources = [args[position] for position, _ in self.staged]
        for index in self._expanded:
            sources[index] = distinct_elements(sources[index], name=self.names[self.staged[index][0]])
        self._copies(sources)

    def copy_back(self, args: Sequence[Any]) -> None:
        """Copy the buffers that the region writes to back into the caller's tensors."""
        for (position, _), target in zip(self.staged, self._targets, strict=True):
            if position in self.written:
                distinct_elements(args[position], name=self.names[position]).copy_(target)

    def _check_layouts(self, tensors: Sequence[torch.Tensor]) -> None:
        changed = self._layouts.changed(tensors)  # guard: static_layout
        if changed is not None:
            index, expected, found = changed
            raise ShapeError(
                f"static input {self.names[self.layouts[index][0]]} of {self.owner} has another layout than at capture",
                expected=expected,
                found=found,
                remedy="pass the same view of it, or dispatch to the key of its size; assign a contiguous copy to "
                "a weight (w.data = new.contiguous())",
            )

    def _does_not_fit(self, position: int, leaf: torch.Tensor, expected: str) -> ShapeError:
        return ShapeError(
            f"input {self.names[position]} does not fit the buffer of this key",
            expected=expected,
            found=f"{tuple(leaf.shape)} {leaf.dtype} on {leaf.device}",
            remedy="pad the input to the descriptor's size, or dispatch to the key of its size; a key "
            "that was captured with inputs of another size is captured again after runtime.close()",
        )

    def _check_pool_inputs(self, args: Sequence[Any]) -> None:
        for position, address in self.pool_inputs:
            if args[position].data_ptr() != address:  # guard: pool_input_address
                raise StaticInputError(
                    f"input {self.names[position]} of {self.owner} has another address than at capture",
                    expected=f"pool memory at {address:#x}, written earlier in the forward",
                    found=f"memory at {args[position].data_ptr():#x}",
                    remedy="run the forward in the order it was captured in, or capture again after runtime.close()",
                )


# -- the context ------------------------------------------------------------------------------------------------------

ContextPath = tuple[tuple[str, Any], ...]
"""The way from a forward context to a value: ("attribute", name) or ("item", key) for each step."""


@dataclass(frozen=True, slots=True)
class ContextReads:
    """The values that one graph read from its context at capture, which each replay compares with its own context."""

    #: (path, value) of all, tensors last; the references keep the addresses from being reused while the entry lives
    values: tuple[tuple[ContextPath, Any], ...]
    addresses: list[int | None]  #: of the tensors at capture
    #: the ways to the values as a tree: for each node the index of its parent, 0 for the context, and the way from it
    _nodes: tuple[tuple[int, str, Any], ...] = field(repr=False)
    _at: tuple[int, ...] = field(repr=False)  # the index of the node of each value, from 1

    @classmethod
    def of(cls, values: Iterable[tuple[ContextPath, Any]]) -> ContextReads:
        """The reads of these values, each path once; graphs of one key were captured under one context."""
        found = sorted(dict(values).items(), key=lambda read: isinstance(read[1], torch.Tensor))
        at: dict[ContextPath, int] = {(): 0}
        for path, _ in found:
            for length in range(1, len(path) + 1):
                at.setdefault(path[:length], len(at))
        return cls(
            values=tuple(found),
            addresses=[value.data_ptr() for _, value in found if isinstance(value, torch.Tensor)],
            _nodes=tuple((at[path[:-1]], *path[-1]) for path in at if path),
            _at=tuple(at[path] for path, _ in found),
        )

    def beside(self, name: str) -> ContextReads:
        """The reads of all attributes of the context but one."""
        return self.of((path, value) for path, value in self.values if path[0] != ("attribute", name))

    def check(self, context: ForwardContext, name: str) -> None:
        """Compare with the context of a replay; for errors see :meth:`ReplayPlan.check`."""
        if not self._nodes:
            return
        found_at: list[Any] = [context]
        for parent, kind, part in self._nodes:
            try:
                found_at.append(getattr(found_at[parent], part) if kind == "attribute" else found_at[parent][part])
            except (AttributeError, LookupError, TypeError):
                found_at.append(None)
        now, num_plain = [found_at[index] for index in self._at], len(self.values) - len(self.addresses)
        for (path, value), found in zip(self.values[:num_plain], now, strict=False):
            if found is not value and _differs(found, value):
                raise CaptureError(
                    f"{_shown(path)} of the forward context is baked into the graph of {name}",
                    expected=repr(value),
                    found=repr(found),
                    remedy="put it into the key, BatchDescriptor(..., extra=((name, value),)), or pass it in a tensor",
                )
        now = now[num_plain:]
        if all(map(isinstance, now, itertools.repeat(torch.Tensor))) and memory.data_ptrs_equal(
            now, self.addresses, list(range(len(now)))
        ):
            return
        for (path, _), address, tensor in zip(self.values[num_plain:], self.addresses, now, strict=True):
            if not isinstance(tensor, torch.Tensor) or tensor.data_ptr() != address:  # guard: context_addresses
                raise StaticInputError(
                    f"{_shown(path)} of the forward context was read by the graph of {name} at capture",
                    expected=f"the tensor at {address or 0:#x}",
                    found=f"{tensor.data_ptr():#x}" if isinstance(tensor, torch.Tensor) else repr(tensor),
                    remedy="keep one tensor and refill it in place (`tensor.copy_(new)`)",
                )


NOTHING_READ = ContextReads.of(())


def _differs(found: Any, captured: Any) -> bool:
    """Whether a value that is no tensor is not the one that a graph has baked in; 1, 1.0 and True differ, too."""
    return type(found) is not type(captured) or found != captured  # guard: constant_types


def _shown(path: ContextPath) -> str:
    return "".join(f".{name}" if kind == "attribute" else f"[{name!r}]" for kind, name in path).lstrip(".")
