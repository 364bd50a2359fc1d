"""Compiled graphs in a directory: partition, artifacts and proofs, found again by the structure of the graph.

See Note [Saved starts].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from cgpass.appended import AppendedInputs
from cgpass.callable import CompiledGraph, GraphedCallable
from cgpass.keyrules import AutoRules
from graphpass.capture.runtime import GraphRuntime
from graphpass.compat import dynamo, nnmodules, saving, symbolic
from graphpass.compile import CompiledRegion, TunedRegion
from graphpass.compile.structure import Structure, structure_of
from graphpass.ledger import Reason
from graphpass.options import Settings
from graphpass.regions.symbols import graph_inputs
from graphpass.report.records import CallableRecord, CompileSeconds
from graphpass.saved import (
    GRAPH,
    NOT_SAVED,
    Parts,
    SavedFiles,
    UnstableError,
    UsedKeys,
    difference,
    digest,
    environment,
    file_name,
    implementations,
    text_of,
)
from graphpass.savedcalls import register_graphs

_SEE_SAVED = "see docs/guides/starting.md for what can be saved"


@dataclass(frozen=True, slots=True)
class GraphIdentity:
    """The name of a graph's file, and what must be equal where it is loaded."""

    structure: Structure
    facts: frozenset[Any]  #: that held of its symbols before it was partitioned
    name: str
    parts: Parts

    @classmethod
    def of(
        cls,
        graph_module: fx.GraphModule,
        ends_early: Reason | None,
        side_effects: Sequence[dynamo.SideEffect],
        settings: Settings,
    ) -> GraphIdentity | Reason:
        """The identity of a traced graph, in every process the same; or why it has none."""
        structure, inputs = structure_of(graph_module, settings.compiler), graph_inputs(graph_module.graph)
        names = [(given.source_name, given.label, given.is_static, sorted(given.marked_dims)) for given in inputs]
        effects = [(effect.text, effect.keeps_tensor) for effect in side_effects]
        ends = None if ends_early is None else ends_early.why
        if saving.calls_triton(graph_module):  # guard: saved_kernels
            return Reason("neither saved nor loaded: the model calls a Triton kernel of its own", _SEE_SAVED)
        devices = {given.value.device for given in inputs if isinstance(given.value, torch.Tensor)}
        try:
            parts = _parts(settings, devices, (node.target for node in graph_module.graph.nodes))
            name = digest(replace(structure.key, compiler=()), names, nnmodules.compiled_code(), ends, effects)
        except UnstableError as error:
            return Reason(f"neither saved nor loaded: {error}", _SEE_SAVED)
        return cls(structure, frozenset(symbolic.facts_of(structure.shape_env)), name, parts)


def _parts(settings: Settings, devices: Iterable[torch.device], ops: Iterable[Any]) -> Parts:
    return {
        **environment(devices),  # guard: saved_environment
        **{name: text_of(value) for name, value in settings.parts().items()},  # guard: saved_options
        "settings of the compiler": text_of(dynamo.compiler_settings()),  # guard: saved_settings
        **implementations(ops),  # guard: saved_implementations
    }


class SavedGraphs:
    """What one runtime saves in a directory and loads from it."""

    def __init__(self) -> None:
        #: {file: (the callable that was saved there or loaded from it, what its compilation assumed of the sizes)}
        self._known: dict[str, tuple[GraphedCallable, tuple[sympy.Basic, ...]]] = {}
        #: While a call is traced in order to be saved: the files of the graphs that it reached, or why there is none.
        self.recording: list[str | Reason] | None = None
        #: (regions of a graph that is saved, writes its file again, or removes it) where regions are tuned later
        self._untuned: list[tuple[Sequence[CompiledRegion], Callable[[], object]]] = []

    def recorded(self, traced: GraphIdentity | Reason | None, *, has_floats: bool) -> Callable[..., Any]:
        """Add a graph that is traced in order to be saved; what Dynamo gets in its place raises."""
        assert self.recording is not None, "a graph of an ordinary compilation"
        self.recording.append(self._recorded(traced, has_floats))

        def raises(*_: Any) -> Any:
            raise saving.Recorded

        return raises

    def _recorded(self, traced: GraphIdentity | Reason | None, has_floats: bool) -> str | Reason:
        if not isinstance(traced, GraphIdentity):
            return traced or Reason("warm_start is not set")
        file = file_name(traced.name, traced.parts, GRAPH)
        if file not in self._known:
            return Reason("its graph is another one when it is traced again")
        made, added = self._known[file]
        if made.side_effects:  # guard: saved_side_effects
            return Reason(f"the model {made.side_effects[0].text}", "keep that state in a buffer, or return it")
        if has_floats:
            return Reason("it takes Python floats that vary", "pass them as tensors")
        symbolic.guard_on(traced.structure.shape_env, traced.structure.own(added))  # guard: saved_size_guards
        return file

    def load(
        self,
        name: str,
        identity: GraphIdentity,
        appended: AppendedInputs | None,
        side_effects: tuple[dynamo.SideEffect, ...],
        runtime: GraphRuntime,
        settings: Settings,
    ) -> GraphedCallable | None:
        """The callable of a graph that was just traced; None, with the reason in the report, if it is not saved."""
        assert settings.warm_start is not None
        store = SavedFiles(settings.warm_start)
        contents = store.find(identity.name, identity.parts, GRAPH)
        made = _loaded(contents)
        # What the compilation assumed of the sizes becomes a guard of this trace, too.
        if not isinstance(made, Reason) and not symbolic.guard_on(
            identity.structure.shape_env, identity.structure.own(made["added"])
        ):
            made = Reason("its sizes break a guard of the saved graph", is_expected=True)
        if isinstance(made, Reason):
            note_missed(runtime, name, made)
            return None
        graph = replace(made["graph"], name=name, appended=appended, side_effects=side_effects)
        used = UsedKeys(store, identity.name, identity.parts)
        return self._callable(file_name(identity.name, identity.parts, GRAPH), graph, made, used, runtime, settings)

    def load_file(self, file: str, runtime: GraphRuntime, settings: Settings) -> GraphedCallable | Reason:
        """The callable of a graph by the name of its file, or why it cannot be loaded."""
        assert settings.warm_start is not None
        if file in self._known:
            return self._known[file][0]
        store = SavedFiles(settings.warm_start)
        contents, saved = store.read(file), store.parts_of(file)
        now = _parts(settings, [torch.device("cuda")] if "GPU" in saved else [], saved)
        made = difference(saved, now) or _loaded(contents) if saved else contents
        if isinstance(made, (Reason, bytes)):
            return made if isinstance(made, Reason) else NOT_SAVED
        appended = None if made["sizes_read"] is None else AppendedInputs([], made["sizes_read"])
        graph = replace(made["graph"], name=runtime.next_callable_name(), appended=appended)
        named = settings.with_names(made["aliases"])
        return self._callable(file, graph, made, UsedKeys(store, file, saved), runtime, named)

    def _callable(
        self,
        file: str,
        graph: CompiledGraph,
        made: Mapping[str, Any],
        used: UsedKeys,
        runtime: GraphRuntime,
        settings: Settings,
    ) -> GraphedCallable:
        graph = replace(graph, sizes=replace(graph.sizes, settings=settings))
        record: CallableRecord = made["record"]
        admits = None if record.admits is None else graph.sizes.admits
        frame = dynamo.frame_id()
        record = replace(record, name=graph.name, frame=frame, admits=admits, is_loaded=True)
        runtime.register(replace(record, artifacts=0, seconds=CompileSeconds()))
        runtime.note("loaded from warm_start: nothing was partitioned or compiled", at=graph.name)
        rules: AutoRules | None = made["rules"]
        if rules is not None:
            inputs = graph.partition.inputs
            padded = {p: settings.padding.get(inputs[p].shown, "repeat") for p in rules.padded}
            rules = replace(rules, padded=padded)
        for region in {id(tuned): tuned for one in graph.compiled.values() if (tuned := one.tuned)}.values():
            region.load(graph.name, runtime.ledger)
        loaded = GraphedCallable(graph, runtime, settings, rules)
        loaded.remember_keys(used)
        self._known[file] = loaded, made["added"]
        return loaded

    def save(
        self,
        callable_: GraphedCallable,
        identity: GraphIdentity | Reason,
        made: tuple[CompiledGraph, AutoRules | None, CallableRecord],
        aliases: Mapping[str, str],
        runtime: GraphRuntime,
        settings: Settings,
    ) -> None:
        """Write a compiled graph to its file; the report says why it could not."""
        assert settings.warm_start is not None
        contents = identity if isinstance(identity, Reason) else _contents(identity, *made, aliases)
        if isinstance(contents, Reason):
            _note_unsaved(runtime, callable_.name, contents)
            return
        assert isinstance(identity, GraphIdentity), "it has contents"
        store, (record, added) = SavedFiles(settings.warm_start), contents

        def write() -> str | None:
            file = _written(store, identity, record)
            if isinstance(file, Reason):
                _note_unsaved(runtime, callable_.name, file)
                return None
            return file

        written = write()
        if written is not None:
            callable_.remember_keys(UsedKeys(store, identity.name, identity.parts))
            self._known[written] = callable_, added
            if settings.tune is not None:
                again = functools.partial(_written_or_removed, write, store, written)
                self._untuned.append((list(made[0].compiled.values()), again))

    def tuned(self, region: TunedRegion) -> None:
        """Write the graphs again in which a region has been tuned."""
        for regions, write in self._untuned:
            if any(one.tuned is region for one in regions):  # guard: saved_tuned
                write()


def _written(store: SavedFiles, identity: GraphIdentity, record: Any) -> str | Reason:
    """The name of the file of a graph, or why it could not be written."""
    try:
        return store.write(identity.name, identity.parts, GRAPH, saving.dumps(record))
    except saving.CannotSaveError as error:
        return Reason(str(error), _SEE_SAVED)


def _written_or_removed(write: Callable[[], str | None], store: SavedFiles, file: str) -> None:
    if write() is None:
        store.remove(file)  # it lacks what was tuned since


def _note_unsaved(runtime: GraphRuntime, name: str, why: Reason) -> None:
    runtime.ledger.note(replace(why, why=f"not saved: {why.why}"), at=name, is_problem=True)


def _contents(
    identity: GraphIdentity,
    graph: CompiledGraph,
    rules: AutoRules | None,
    record: CallableRecord,
    aliases: Mapping[str, str],
) -> tuple[Any, tuple[sympy.Basic, ...]] | Reason:
    """The record in a graph's file and what its compilation assumed of the sizes, or why it cannot be saved."""
    shape_env, symbols = identity.structure.shape_env, set(identity.structure.symbols)
    added = [guard for guard in symbolic.facts_of(shape_env) if guard not in identity.facts]
    cannot = saving.guards_of_compilers()
    if any(not guard.free_symbols <= symbols for guard in added):
        cannot = "a guard on a size that no input has"
    if cannot is not None:
        return Reason(cannot, _SEE_SAVED)
    assumed = identity.structure.canonical(added)
    made = {
        "graph": replace(
            graph,
            partition=replace(graph.partition, stitched=_unbound, _outputs=None),
            sizes=replace(graph.sizes, settings=None),  # type: ignore[arg-type]
            compiled=dict(graph.compiled),
            traces=dict(graph.traces),
            appended=None,
            side_effects=(),
        ),
        "rules": None if rules is None else replace(rules, padded=dict.fromkeys(rules.padded)),  # type: ignore[arg-type]
        "record": replace(record, admits=None if record.admits is None else _unbound, frame=None),
        "added": assumed,
        "sizes_read": None if graph.appended is None else graph.appended.sizes,
        "aliases": dict(aliases),
    }
    return made, assumed


def _unbound(*_: Any) -> Any:
    raise AssertionError("a saved graph is bound to its runtime when it is loaded")


def _loaded(contents: bytes | Reason) -> Any:
    """The record in a file, or why there is none."""
    if isinstance(contents, Reason):
        return contents
    try:
        return saving.loads(contents)
    except Exception as error:
        return Reason(f"a saved graph cannot be loaded: {type(error).__name__}: {error}", _SEE_SAVED)


def note_missed(runtime: GraphRuntime, name: str, why: Reason) -> None:
    """Add to the report why something is not loaded; only a damaged or foreign file is a problem."""
    runtime.ledger.note(replace(why, why=f"not loaded: {why.why}"), at=name, is_problem=not why.is_expected)


register_graphs("cgpass", SavedGraphs)
