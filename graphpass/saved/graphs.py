"""Compiled graphs in a directory: partition, artifacts and proofs, found again by the structure of the graph.

See Note [Saved starts].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from graphpass.capture.runtime import GraphRuntime
from graphpass.compat import configuration, nnmodules, saving, symbolic
from graphpass.compat.sideeffects import SideEffect
from graphpass.compile import CompiledRegion, TunedRegion
from graphpass.compile.structure import Structure, structure_of
from graphpass.ledger import Reason
from graphpass.options import Settings
from graphpass.regions.symbols import graph_inputs
from graphpass.saved.files import GRAPH, NOT_SAVED, SEE_SAVED, SavedFiles, UsedKeys, file_name
from graphpass.saved.fingerprint import Parts, difference, digest, environment, implementations, text_of

OTHER_BITS = Reason("the first replay has other bits than it had when it was saved")


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
        side_effects: Sequence[SideEffect],
        settings: Settings,
    ) -> GraphIdentity | Reason:
        """The identity of a traced graph, in every process the same; or why it has none."""
        structure, inputs = structure_of(graph_module, settings.compiler), graph_inputs(graph_module.graph)
        names = [(given.source_name, given.label, given.is_static, sorted(given.marked_dims)) for given in inputs]
        effects = [(effect.text, effect.keeps_tensor) for effect in side_effects]
        ends = None if ends_early is None else ends_early.why
        if saving.calls_triton(graph_module):  # guard: saved_kernels
            return Reason("neither saved nor loaded: the model calls a Triton kernel of its own", SEE_SAVED)
        devices = {given.value.device for given in inputs if isinstance(given.value, torch.Tensor)}
        try:
            parts = _parts(settings, devices, (node.target for node in graph_module.graph.nodes))
            name = digest(structure.key[1:], names, nnmodules.compiled_code(), ends, effects)
        except saving.CannotSaveError as error:
            return Reason(f"neither saved nor loaded: {error}", SEE_SAVED)
        return cls(structure, frozenset(symbolic.facts_of(structure.shape_env)), name, parts)

    @property
    def file(self) -> str:
        """The name of the graph's file."""
        return file_name(self.name, self.parts, GRAPH)

    def added(self) -> tuple[sympy.Basic, ...] | Reason:
        """What the compilation has assumed of the sizes since, in symbols of any process; or why it cannot be saved."""
        symbols = set(self.structure.symbols)
        found = [guard for guard in symbolic.facts_of(self.structure.shape_env) if guard not in self.facts]
        cannot = saving.guards_of_compilers()
        if any(not guard.free_symbols <= symbols for guard in found):
            cannot = "a guard on a size that no input has"
        return self.structure.canonical(found) if cannot is None else Reason(cannot, SEE_SAVED)

    def takes(self, added: Sequence[sympy.Basic]) -> bool:
        """Make what a compilation assumed of the sizes guards of this trace; False if its sizes break one."""
        return symbolic.guard_on(self.structure.shape_env, self.structure.own(added))


def _parts(settings: Settings, devices: Iterable[torch.device], ops: Iterable[Any]) -> Parts:
    return {
        **environment(devices),  # guard: saved_environment
        **settings.parts(),  # guard: saved_options
        "settings of the compiler": text_of(configuration.settings_now()),  # guard: saved_settings
        **implementations(ops),  # guard: saved_implementations
    }


class SavedGraphs:
    """What one runtime saves in a directory and loads from it.

    A file holds what the compilation assumed of the sizes, and a record of the backend, which makes the callable of a
    process by ``bound(used_keys, runtime, settings)``, with ``traced=(name, ...)`` of a new trace.
    """

    def __init__(self) -> None:
        #: {file: (the callable that was saved there or loaded from it, what its compilation assumed of the sizes)}
        self._known: dict[str, tuple[Any, Sequence[sympy.Basic]]] = {}
        self._refused: set[str] = set()  # files that may still be there, if they cannot be removed
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
        if traced.file not in self._known:
            return Reason("its graph is another one when it is traced again")
        made, added = self._known[traced.file]
        if made.side_effects:  # guard: saved_side_effects
            return Reason(f"the model {made.side_effects[0].text}", "keep that state in a buffer, or return it")
        if has_floats:
            return Reason("it takes Python floats that vary", "pass them as tensors")
        traced.takes(added)  # guard: saved_size_guards
        return traced.file

    def load(self, identity: GraphIdentity, traced: Sequence[Any], runtime: GraphRuntime, settings: Settings) -> Any:
        """The callable of a graph that was just traced; None, with the reason in the report, if it is not saved."""
        store = _store(settings)
        found = self._loaded(identity.file, store.find(identity.name, identity.parts, GRAPH))
        if not isinstance(found, Reason) and not identity.takes(found[1]):
            found = Reason("its sizes break a guard of the saved graph", is_expected=True)
        if isinstance(found, Reason):  # only a damaged or foreign file is a problem
            note(runtime, "not loaded", found, at=traced[0], is_problem=not found.is_expected)
            return None
        used = UsedKeys(store, identity.name, identity.parts)
        self._known[identity.file] = found[0].bound(used, runtime, settings, traced), found[1]
        return self._known[identity.file][0]

    def load_file(self, file: str, runtime: GraphRuntime, settings: Settings) -> Any:
        """The callable of a graph by the name of its file, or why it cannot be loaded."""
        if file not in self._known:
            store = _store(settings)
            contents, saved = store.read(file), store.parts_of(file)
            now = _parts(settings, [torch.device("cuda")] if "GPU" in saved else [], saved)
            found = difference(saved, now) or self._loaded(file, contents) if saved else contents
            if isinstance(found, (Reason, bytes)):
                return found if isinstance(found, Reason) else NOT_SAVED
            self._known[file] = found[0].bound(UsedKeys(store, file, saved), runtime, settings), found[1]
        return self._known[file][0]

    def _loaded(self, file: str, contents: bytes | Reason) -> Any:
        if file in self._refused:  # guard: saved_refused
            return OTHER_BITS
        try:
            return contents if isinstance(contents, Reason) else saving.loads(contents)
        except Exception as error:
            return Reason(f"a saved graph cannot be loaded: {type(error).__name__}: {error}", SEE_SAVED)

    def save(
        self,
        made: Any,
        identity: GraphIdentity | Reason,
        record: Any,
        regions: Sequence[CompiledRegion],
        runtime: GraphRuntime,
        settings: Settings,
    ) -> None:
        """Write the record of a compiled graph, again when a region was tuned; the report says why it could not."""
        added = identity if isinstance(identity, Reason) else identity.added()
        if isinstance(identity, Reason) or isinstance(added, Reason):
            assert isinstance(added, Reason), "the identity's own"
            note(runtime, "not saved", added, at=made.name, is_problem=True)
            return
        store = _store(settings)

        def write() -> bool:
            try:
                file = store.write(identity.name, identity.parts, GRAPH, saving.dumps((record, added)))
            except saving.CannotSaveError as error:
                file = Reason(str(error), SEE_SAVED)
            if isinstance(file, Reason):
                note(runtime, "not saved", file, at=made.name, is_problem=True)
            return isinstance(file, str)

        def again() -> None:
            if not write():
                store.remove(identity.file)  # it lacks what was tuned since

        if write():
            made.remember_keys(UsedKeys(store, identity.name, identity.parts))
            self._known[identity.file] = made, added
            self._refused.discard(identity.file)
            if settings.tune is not None:
                self._untuned.append((regions, again))

    def refuse(self, files: Iterable[str]) -> None:
        """Load these files no more, until they are written anew."""
        for file in files:
            self._known.pop(file, None)
            self._refused.add(file)

    def tuned(self, region: TunedRegion) -> None:
        """Write the graphs again in which a region has been tuned."""
        for regions, write in self._untuned:
            if any(one.tuned is region for one in regions):  # guard: saved_tuned
                write()


def _store(settings: Settings) -> SavedFiles:
    assert settings.warm_start is not None, "callers ask only with a directory"
    return SavedFiles(settings.warm_start)


def note(runtime: GraphRuntime, what: str, why: Reason, *, is_problem: bool, at: str = "") -> None:
    """Add to the report what is not saved or loaded."""
    runtime.ledger.note(replace(why, why=f"{what}: {why.why}"), at=at, is_problem=is_problem)
