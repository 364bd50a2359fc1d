"""Captures one region for one call: the caller's arguments in, a finished entry out."""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import logging
import math
import time
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import torch

from graphpass.capture.cuda import CudaMeasurement, measurement_on
from graphpass.capture.outputs import OutputPlan
from graphpass.capture.pool import GraphDevice
from graphpass.capture.regioncalls import RegionCalls
from graphpass.capture.replay import (
    NOTHING_READ,
    ContextPath,
    ContextReads,
    EntryTable,
    Graph,
    GraphEntry,
    InputPlan,
    ReplayPlan,
    StaticSet,
    launch_of,
)
from graphpass.capture.runtime import GraphRuntime
from graphpass.capture.scope import CapturePolicy
from graphpass.capture.settings import restoring, without_cached_casts, without_collections
from graphpass.capture.staging import (
    AliasPattern,
    alias_pattern,
    storage_id,
    storage_ids,
)
from graphpass.compat import dynamo, memory, nnmodules, operators, trees
from graphpass.context import ForwardContext, entered
from graphpass.errors import CaptureError, DeviceError, GraphpassError
from graphpass.keys import CUDAGraphMode
from graphpass.ledger import Row

_log = logging.getLogger("graphpass")

_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)
_METHODS = (types.FunctionType, classmethod, staticmethod, property, functools.cached_property)
# Fields that identify the graph and its dispatcher; `num_tokens` is the key's padded count during capture.
_OF_THE_KEY = frozenset({"runtime_mode", "batch_descriptor", "num_tokens", "owner", "observer"})
_OUT_OF_MEMORY = "capture fewer or smaller sizes (capture_sizes, max_graphs; a manager: capture(max_bytes=...))"
_SPLIT = "run it eagerly to see whether the region itself fails; list an op that cannot be captured in splitting_ops"
_FULL_HOLDS_IT = (
    "set mode='PIECEWISE', which leaves it out of the graphs: a FULL graph holds the operations of splitting_ops, too"
)

# -- the call ---------------------------------------------------------------------------------------------------------


Roles: TypeAlias = Collection[int | str]
"""Arguments that have a role, each a position or a keyword's name."""


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call as flat leaves, and the flat positions of each role that a wrapper declares."""

    leaves: Sequence[Any]  #: all values in the arguments, in order
    spec: Any  #: the structure that turns leaves back into ``(args, kwargs)``; later calls compare with this object
    names: tuple[str, ...]  #: a readable name for each leaf
    static: frozenset[int]  #: tensors whose address a graph may bake in
    mutated: frozenset[int]  #: tensors that the region writes to
    module_owned: frozenset[int]  #: static tensors that a module owns; graphs do not keep their memory
    layout: frozenset[int]  #: numbers that describe the memory layout of tensors

    @classmethod
    def of(
        cls,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        spec: Any,
        static: Roles,
        mutated: Roles,
        module_owned: Roles,
        layout: Roles,
        names: Sequence[str],
    ) -> Call:
        """The call with ``args`` and ``kwargs``, whose structure is ``spec``; ``names`` are those of ``args``."""
        leaves: list[Any] = []
        leaf_names: list[str] = []
        positions: dict[int | str, range] = {}
        arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        stems = [*names[: len(args)], *map(str, range(len(names), len(args))), *kwargs]
        for (argument, value), stem in zip(arguments, stems, strict=True):
            own = trees.flatten(value)[0]
            leaf_names += [stem] if len(own) == 1 else [f"{stem}[{index}]" for index in range(len(own))]
            positions[argument] = range(len(leaves), len(leaves) + len(own))
            leaves += own
        tensors = {p for p, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}

        def of_role(arguments: Roles) -> frozenset[int]:
            return frozenset(p for argument in arguments for p in positions.get(argument, ()))

        parameters = {p for p in tensors if isinstance(leaves[p], torch.nn.Parameter)}
        marked = {p for p in tensors if memory.has_static_address(leaves[p])}
        owned = (of_role(module_owned) & tensors) | parameters
        return cls(
            leaves=leaves,
            spec=spec,
            names=tuple(leaf_names),
            static=(of_role(static) & tensors) | owned | marked,
            mutated=of_role(mutated) & tensors,
            module_owned=owned,
            layout=of_role(layout),
        )

    def sharing(self, positions: Collection[int]) -> frozenset[int]:
        """Positions of all tensors that share a storage with one of those at ``positions``, these included."""
        storages = storage_ids(self.leaves[position] for position in positions)
        tensors = ((position, leaf) for position, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor))
        return frozenset(positions).union(position for position, leaf in tensors if storage_id(leaf) in storages)

    def owner_ids(self) -> tuple[int, ...]:
        """Ids of the module-owned tensors; they tell module instances apart, also after a weight got new memory."""
        return tuple(id(self.leaves[position]) for position in sorted(self.module_owned))


# -- the capture ------------------------------------------------------------------------------------------------------


class Recorder:
    """Captures one region, for one call at a time; ``compare`` of the policy keeps copies of inner regions' outputs."""

    def __init__(
        self, table: EntryTable, runnable: Callable[..., Any], runtime: GraphRuntime, policy: CapturePolicy
    ) -> None:
        self.region, self.mode, self.name = table.region, table.mode, str(table.region)
        self.table, self.runnable, self.runtime, self.policy = table, runnable, runtime, policy

    def record(self, context: ForwardContext, call: Call, baked: frozenset[int]) -> tuple[GraphEntry, Sequence[Any]]:
        """Copy inputs into buffers, warm up and record; mutated tensors and generators are restored after each run.

        The graph may bake in the addresses of the arguments at the flat positions ``baked``. Returns the entry and the
        flat outputs, which own their pool memory; the entry does not.
        """
        self._row(context, "warmed")  # the counts list the key, whatever comes of it
        device = self.runtime.lease.device_for(call.leaves)
        memory.refuse_inside_capture(device.device, self.name)  # guard: no_capture_inside_another
        inside = RegionCalls(device.call, observed=[] if self.policy.compare else None)
        arena, ranks = self.table.arena, self._ranks
        saved = arena.saved()
        key = f"{self.name} {context.batch_descriptor}"
        try:
            with contextlib.nullcontext() if ranks is None else ranks.capturing(key):
                return self._recorded(device, inside, context, call, baked)
        except BaseException as error:
            try:
                self._explain(error, inside, context)  # guard: failed_capture_is_typed
                raise
            finally:
                arena.restore(saved)  # guard: failed_capture_bytes

    def _recorded(
        self, device: GraphDevice, inside: RegionCalls, context: ForwardContext, call: Call, baked: frozenset[int]
    ) -> tuple[GraphEntry, Sequence[Any]]:
        start_s = time.perf_counter()
        leaves = call.leaves
        static, inputs, pattern = self._inputs(device.device, context, call, baked)
        # Only of FULL graphs: the outputs of a region go to the next region.
        observer = context.observer if self.mode is CUDAGraphMode.FULL else None
        observer = observer if observer is not None and observer.runtime is self.runtime else None
        keep_results = None if observer is None else observer.keep_results
        body = _Body(self.name, self.runnable, call.spec, inside, _graph_inputs(call, inputs), keep_results)
        log = ReadLog()
        generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
        mutated = [body.inputs[position] for position in sorted(call.mutated)]
        with without_collections(), _surroundings(self.mode, inside, log, context), contextlib.ExitStack() as undo:
            inputs.copy_in(leaves)
            versions = _versions(body.inputs)
            with restoring(mutated, generators, device.device):
                self._wait_for_ranks()
                with _tuning(inside, measurement_on(device)) as spent_s:
                    run_seconds = device.warm_up(body)
                self._wait_for_ranks()
                self._row(context, "warmed").n += 1
                self._refuse_undeclared_mutation(call, versions, _versions(body.inputs))
                existed = storage_ids(body.returned)  # guard: memory_reached_by_itself
            if sum(spent_s):  # that run does not tell how long one takes
                with restoring(mutated, generators, device.device):
                    run_seconds = device.warm_up(body)
            if observer is not None:
                observer.prepare()
            with restoring(mutated, generators, device.device):
                log.is_open = True
                graph, recorded, seconds, grown = self._measured(device, body, generators, context)
                # A traceback would keep it, and a communicator waits at its end for graphs with its collectives.
                undo.callback(graph.reset)  # guard: failed_recording_reset
                log.is_open = False
            returned = recorded[: len(body.returned)]
            # Warm-up and recording use different pools: a storage that both returned existed before them.
            outputs = OutputPlan.of(returned, body.inputs, device.without_ownership, existed & storage_ids(returned))
            device.refuse_frozen(outputs.pool_outputs)  # guard: tape_frozen_results
            self._wait_for_ranks()
            observed = tuple(replace(o, tensor=device.without_ownership(o.tensor)) for o in inside.observed or ())
            undo.pop_all()
        self.runtime.lease.make_stale(outputs.pool_outputs)  # guard: recorded_result_is_stale
        row = self._row(context, "captured")
        row.n, row.seconds = row.n + 1, row.seconds + time.perf_counter() - start_s - sum(spent_s)
        row.least_s = min(row.least_s, body.launch_s)
        self._trace(context, call, inputs, outputs)
        viewed = (position for position, _ in inputs.staged if position in outputs.viewed_positions)
        inputs = replace(inputs, viewed_strides=tuple((position, leaves[position].stride()) for position in viewed))
        statics = StaticSet.of(leaves, static, call.spec, call.owner_ids())
        plan = self._plan(context, graph, statics, inputs, pattern, outputs, log)
        build_result, written = trees.builder_of(body.returned_spec), tuple(sorted(call.mutated))
        entry = GraphEntry(
            self.region, build_result, graph, plan, outputs, observed, written, run_seconds, seconds, *grown
        )
        return entry, returned

    @property
    def _ranks(self) -> Any:
        return self.runtime.lockstep.get(self.region.callable)

    def _wait_for_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.passed()

    def _measured(
        self,
        device: GraphDevice,
        body: _Body,
        generators: Sequence[torch.Generator],
        context: ForwardContext,
    ) -> tuple[Graph, Sequence[Any], Callable[[], float | None], tuple[int, int]]:
        """Record; where the callable itself decides under which key a call runs, also the graph's time and bytes."""
        if context.owner is None:
            return *device.record(body, generators), lambda: None, (0, 0)
        device.open()  # what a pool takes once is not this graph's
        before = device.reading()
        graph, recorded = device.record(body, generators)
        seconds = device.timed(graph.replay) if self._ranks is None else lambda: None
        pool_bytes, driver_bytes = (now - then for now, then in zip(device.reading(), before, strict=True))
        row = self._row(context, "captured")
        row.pool_bytes, row.driver_bytes = row.pool_bytes + pool_bytes, row.driver_bytes + driver_bytes
        return graph, recorded, seconds, (pool_bytes, driver_bytes)

    def _inputs(
        self, device: torch.device, context: ForwardContext, call: Call, baked: frozenset[int]
    ) -> tuple[list[int], InputPlan, AliasPattern]:
        """(Positions baked in place, the plan of the other arguments, how those with a buffer share memory)."""
        leaves, names = call.leaves, call.names
        baked_storages = storage_ids(leaves[p] for p in baked)
        pool_storages = self.runtime.lease.forward_storages
        static, pool, staged, constants = set(baked), [], [], []
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                # Layout numbers may change from call to call: the graph reads buffers in the layout of the capture.
                if position not in call.layout:
                    constants.append((position, leaf))
                continue
            if leaf.device != device:
                raise DeviceError(
                    f"argument {names[position]} of {self.name} lies on another device",
                    expected=f"every tensor on {device}",
                    found=f"{tuple(leaf.shape)} on {leaf.device}",
                    remedy="move it there first, or keep it out of the captured region",
                )
            if position in static:
                continue
            if storage_id(leaf) in baked_storages:  # guard: inside_static_at_capture
                # It aliases a static input: a copy would not see writes to that input.
                static.add(position)
            elif storage_id(leaf) in pool_storages:  # guard: fresh_eager_results
                pool.append((position, leaf.data_ptr()))
            else:
                staged.append(position)
        pattern = alias_pattern(leaves, staged)
        buffers = self.table.arena.like(leaves, staged, pattern)
        plan = InputPlan(
            self.name,
            context.batch_descriptor,
            dict(enumerate(names)),
            tuple(zip(staged, buffers, strict=True)),
            call.mutated.intersection(staged),
            constants=tuple(constants),
            layouts=tuple(_layouts(call, sorted(static))),
            pool_inputs=tuple(pool),
        )
        return sorted(static), plan, pattern

    def _plan(
        self,
        context: ForwardContext,
        graph: Graph,
        statics: StaticSet,
        inputs: InputPlan,
        pattern: AliasPattern,
        outputs: OutputPlan,
        log: ReadLog,
    ) -> ReplayPlan:
        launch = launch_of(graph, inputs, outputs)
        label = f"{self.name} {self.mode} {context.batch_descriptor}"
        return ReplayPlan(
            name=self.name,
            statics=statics,
            dynamic_positions=tuple(position for position, _ in inputs.staged),
            pattern=pattern,
            reads=log.reads(),
            inputs=inputs,
            rows=((self._row(context, "replayed"), len(inputs.staged)),),
            pool_storages=outputs.pool_storages,
            pool_outputs=outputs.pool_outputs,
            launch=launch,
            ranged=functools.partial(operators.ranged, label, launch),
        )

    def _row(self, context: ForwardContext, event: str) -> Row:
        return self.runtime.ledger.rows(self.region, event)[self.mode, context.batch_descriptor]

    def _trace(self, context: ForwardContext, call: Call, inputs: InputPlan, outputs: OutputPlan) -> None:
        _log.debug("%s %s %s recorded", self.name, self.mode, context.batch_descriptor)
        dynamo.trace(
            f"graphpass_graph_{self.name}",
            lambda: {
                "region": self.name,
                "mode": str(self.mode),
                "key": str(context.batch_descriptor),
                "inputs": len(call.leaves),
                "copied_inputs": [call.names[position] for position, _ in inputs.staged],
                "written_inputs": [call.names[position] for position in sorted(call.mutated)],
                "outputs": len(outputs.pool_outputs),
                "pool_bytes": self.runtime.pool_bytes(),
            },
        )

    def _refuse_undeclared_mutation(
        self, call: Call, before: Sequence[int | None], after: Sequence[int | None]
    ) -> None:
        leaves, mutated = call.leaves, call.mutated
        declared = {storage_id(leaves[p]) for p in mutated}
        for position, (old, new) in enumerate(zip(before, after, strict=True)):
            if old != new and storage_id(leaves[position]) not in declared:  # guard: undeclared_mutation
                raise CaptureError(
                    f"{self.name} writes to its input {call.names[position]!r}",
                    expected="every input that the region writes to, listed in mutated_inputs",
                    found=f"mutated_inputs={[call.names[p] for p in sorted(mutated)]}",
                    remedy=f"add {call.names[position]!r} to mutated_inputs",
                )

    # -- why it failed ------------------------------------------------------------------------------------------------

    def _explain(self, error: BaseException, inside: RegionCalls, context: ForwardContext) -> None:
        """Raise a CaptureError from ``error`` with region, op and key; return for what is re-raised as it is."""
        refused = error if isinstance(error, CaptureError) and inside.failed is not None else None
        if not isinstance(error, Exception) or (isinstance(error, GraphpassError) and refused is None):
            return
        region, runnable = inside.failed or (self.name, self.runnable)
        place = nnmodules.place_of_failure(error, getattr(runnable, "uncompiled", None))
        where = [f"in {region}"] if region != self.name else []
        problem = [f"capture of {self.name} failed at {self.mode} {context.batch_descriptor}", *where]
        num_bytes = f"(pool {self.runtime.pool_bytes()} bytes, buffers {self.runtime.buffer_bytes()} bytes)"
        found = f"{refused.problem}: {refused.found}" if refused else f"{type(error).__name__}: {error}"
        raise CaptureError(
            ", ".join([*problem, place] if place else problem),  # guard: failure_names_the_op
            expected=refused.expected if refused else "a region that can be captured",
            found=f"{found} {num_bytes}",
            remedy=self._remedy(
                error, refused, is_eager_inside=region != self.name and not hasattr(runnable, "uncompiled")
            ),
            where=" ".join([*where, f"at {place.removeprefix('at ')}"] if place else where or [f"in {self.name}"]),
        ) from error

    def _remedy(self, error: Exception, refused: CaptureError | None, *, is_eager_inside: bool) -> str:
        """Listing the op in splitting_ops does not help if it splits already or the graph is FULL."""
        if isinstance(error, torch.OutOfMemoryError):
            return _OUT_OF_MEMORY
        if self.mode is CUDAGraphMode.FULL and is_eager_inside:
            return _FULL_HOLDS_IT
        remedy = _SPLIT if refused is None else refused.remedy
        is_of_a_callable = self.mode is CUDAGraphMode.FULL and self.region.region
        return f"{remedy}, and set mode='PIECEWISE'" if is_of_a_callable else remedy


# -- what is warmed up and recorded ------------------------------------------------------------------------------------


def _layouts(call: Call, static: Iterable[int]) -> Iterator[tuple[int, torch.Tensor]]:
    """An alias of each static input; for tensors of modules, only if Dynamo does not guard their layouts."""
    lent = call.sharing(call.module_owned)
    for position in static:
        leaf = call.leaves[position]
        if position not in lent:
            yield position, leaf.detach()
        elif position not in call.module_owned or not dynamo.guards_module_layouts():  # guard: module_layouts
            yield position, torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def _graph_inputs(call: Call, inputs: InputPlan) -> list[Any]:
    """The arguments to record with, buffers for staged ones. A tape keeps them: they must not keep modules' memory."""
    lent, leaves = call.sharing(call.module_owned), enumerate(call.leaves)
    found = [memory.without_ownership(leaf) if position in lent else leaf for position, leaf in leaves]
    for position, buffer in inputs.staged:
        found[position] = buffer
    return found


class _Body:
    def __init__(
        self,
        name: str,
        runnable: Callable[..., Any],
        spec: Any,
        inside: RegionCalls,
        inputs: list[Any],
        keep_results: Callable[[list[Any]], list[Any]] | None,
    ) -> None:
        self._name, self._runnable, self._spec, self._inside = name, runnable, spec, inside
        self._keep_results = keep_results
        self.inputs = inputs
        self.returned: list[Any] = []
        self.returned_spec: Any = None
        self.launch_s = math.inf  # host seconds of the fastest run

    def __call__(self) -> list[Any]:
        observed = self._inside.observed
        if observed is not None:
            observed.clear()
        args, kwargs = trees.unflatten(self.inputs, self._spec)
        start_s = time.perf_counter()
        result = self._inside.call(self._name, self._runnable, args, kwargs)
        self.launch_s = min(self.launch_s, time.perf_counter() - start_s)
        self.returned, self.returned_spec = trees.flatten(result)
        if self._keep_results is not None:
            self.returned = self._keep_results(self.returned)
        return [*self.returned, *(seen.tensor for seen in observed or ())]


@contextlib.contextmanager
def _surroundings(mode: CUDAGraphMode, inside: RegionCalls, log: ReadLog, context: ForwardContext) -> Iterator[None]:
    """Enter the context and the torch settings of warm-up and recording.

    The region sees the key's padded token count, and in PIECEWISE mode no attention metadata.
    """
    descriptor = context.batch_descriptor
    assert descriptor is not None
    # A graph must not bake in the real token count of one step, nor the metadata that eager attention reads.
    seen = replace(
        context,
        attn_metadata=None if mode is CUDAGraphMode.PIECEWISE else context.attn_metadata,
        num_tokens=None if context.num_tokens is None else descriptor.num_tokens,  # guard: count_of_the_key
        capture=inside,
    )
    with entered(log.proxy_of(seen, of=context)), torch.no_grad(), without_cached_casts():
        yield


@contextlib.contextmanager
def _tuning(inside: RegionCalls, measurement: CudaMeasurement | None) -> Iterator[list[float]]:
    """Tune the regions that can be before their calls in the body; yields the seconds of each. None tunes none."""
    spent_s: list[float] = []

    def tune(region: str, runnable: Any, args: Sequence[Any]) -> None:
        if (tune_region := getattr(runnable, "tune_in_warm_up", None)) is not None:
            spent_s.append(tune_region(args, measurement))

    inside.before = None if measurement is None else tune
    yield spent_s
    inside.before = None


def _versions(leaves: Sequence[Any]) -> list[int | None]:
    return [memory.version_of(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]


# -- reads of the forward context --------------------------------------------------------------------------------------


class ReadLog:
    """Logs the values that a region reads from the forward context while ``is_open`` is True.

    An op inside a graph reads the context once, at capture: a number or an address becomes part of the graph. So the
    region sees a proxy of the context.
    """

    def __init__(self) -> None:
        self._found: dict[ContextPath, Any] = {}
        self.is_open = False

    def proxy_of(self, context: ForwardContext, *, of: ForwardContext) -> ForwardContext:
        """A proxy of ``context`` that logs reads, except of fields in which it differs from ``of``."""
        own = {f.name for f in fields(context) if getattr(context, f.name) is not getattr(of, f.name)}
        return self._proxy(context, (), unlogged=_OF_THE_KEY | own)  # type: ignore[no-any-return]

    def reads(self) -> ContextReads:
        """The values read so far."""
        return ContextReads.of(self._found.items()) if self._found else NOTHING_READ

    def read(self, value: Any, path: ContextPath) -> Any:
        """Log ``value`` and return it; for a container or an object, return a proxy that logs reads of its parts."""
        if isinstance(value, (torch.Tensor, *_SCALARS)):
            if self.is_open:
                self._found[path] = value
            return value
        if type(value) is dict:
            return _LoggedDict(value, path, self)
        if isinstance(value, (list, tuple)):
            parts = [self.read(part, (*path, ("item", n))) for n, part in enumerate(value)]
            if type(value) is tuple:
                return tuple(parts)
            return type(value)(*parts) if hasattr(value, "_fields") else value  # a list may be written to
        if isinstance(value, (*_METHODS, types.MethodType, types.BuiltinFunctionType, type)):
            return value
        return self._proxy(value, path)

    def _proxy(self, value: Any, path: ContextPath, unlogged: frozenset[str] = frozenset()) -> Any:
        """An instance of a subclass of the value's class that forwards attribute reads and writes to the value."""
        kind: Any = type(value)

        def get(proxy: Any, name: str) -> Any:
            if name == "__dict__":
                return {part: get(proxy, part) for part in vars(value)}
            static = inspect.getattr_static(kind, name, None)
            if isinstance(static, _METHODS) or (name.startswith("__") and name.endswith("__")):
                return kind.__getattribute__(proxy, name)
            found = getattr(value, name)
            return found if name in unlogged else self.read(found, (*path, ("attribute", name)))

        namespace = {
            "__slots__": (),
            "__getattribute__": get,
            "__setattr__": lambda _, name, new: setattr(value, name, new),
        }
        try:
            return object.__new__(type(kind)(kind.__name__, (kind,), namespace))
        except TypeError:  # a class that is final or written in C: reads of its parts are not logged
            return value


class _LoggedDict(dict[Any, Any]):
    def __init__(self, original: dict[Any, Any], path: ContextPath, log: ReadLog) -> None:
        super().__init__(original)
        self._path = path
        self._log = log

    def __getitem__(self, key: Any) -> Any:
        return self._log.read(super().__getitem__(key), (*self._path, ("item", key)))

    def __iter__(self) -> Iterator[Any]:  # also keeps dict(self) and {**self} from reading past __getitem__
        return super().__iter__()

    def get(self, key: Any, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def values(self) -> Any:
        return [self[key] for key in self]

    def items(self) -> Any:
        return [(key, self[key]) for key in self]
