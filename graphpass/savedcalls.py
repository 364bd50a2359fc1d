"""Dynamo's work for the calls of one model, in the directory of ``warm_start``: saved after a capture, loaded before.

A call is loaded only where the model, the code that was traced and what it read are those of the save. See Note
[Saved starts].
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from graphpass.capture.runtime import GraphRuntime
from graphpass.compat import dynamo, memory, saving, trees
from graphpass.errors import GraphpassError
from graphpass.ledger import Reason
from graphpass.options import Settings
from graphpass.report.records import LOADED, WARM_START
from graphpass.saved import (
    CALL,
    NOT_SAVED,
    RESULT,
    Parts,
    SavedFiles,
    UnstableError,
    UsedKeys,
    assumed,
    contents_of,
    difference,
    digest,
    environment,
    file_name,
    guarded,
    modules,
    names_of,
    sources,
    text_of,
)

_GRAPHS: dict[str, type] = {}
"""{backend: the class of what it saves and loads of graphs, one for each runtime}."""


def register_graphs(backend: str, kind: type) -> None:
    """Name the class of what a backend saves and loads of graphs; see ``SavedGraphs`` of cgpass."""
    _GRAPHS[backend] = kind


_SEE_SAVED = "see docs/guides/starting.md for what can be saved"


@dataclass(frozen=True, slots=True)
class _SavedCall:
    call: saving.TracedCall
    file: str  #: of its graph
    guards: tuple[saving.ModelGuard, ...]  #: on the model and on global variables
    names: tuple[str, ...]  #: in the code that was traced
    modules: tuple[str, ...]  #: the Python modules from which functions were traced
    parts: Parts  #: what the guards read, and digests of the modules


class SavedCalls:
    """Saves and loads the traced calls of one model; without ``warm_start`` it does nothing.

    Args:
        model: the module or function.
        owners: the variables by which the compiled functions refer to the model.
        backend: the name of the backend.
        options: the backend's options, with the runtime.
        dynamic: as for torch.compile.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        owners: Sequence[str],
        backend: str,
        options: Mapping[str, Any],
        dynamic: bool | None,
    ) -> None:
        self._model, self._owners, self._backend, self._dynamic = model, owners, backend, dynamic
        self._options, self._settings = options, Settings.of(options)
        self._store = None if self._settings.warm_start is None else SavedFiles(self._settings.warm_start)
        self._saved: dict[Any, list[_SavedCall]] = {}
        #: the keys that traffic used in an earlier process, of the form that was loaded last
        self.used: UsedKeys | None = None
        self._num_loaded: dict[Any, int] = {}  # {form: callables of the runtime, when its calls had been loaded}

    def load(self, function: Callable[..., Any], form: Sequence[Any]) -> None:
        """Let a function that is about to be compiled run the calls that were saved for its form."""
        if self._store is not None:
            with self._runtime.ledger.timed(WARM_START, LOADED):
                self._load(self._store, function, form)

    def _load(self, store: SavedFiles, function: Callable[..., Any], form: Sequence[Any]) -> None:
        try:
            name, parts = self._name(form), self._parts()
            self.used = UsedKeys(store, name, parts)
            contents = store.find(name, parts, CALL)
            calls: Any = contents if isinstance(contents, Reason) else pickle.loads(contents)
            why = calls if isinstance(calls, Reason) else None
            for saved in calls if why is None else ():
                why = self._install(function, saved) or why
        except Exception as error:  # a miss, whatever a file holds
            why = Reason(f"a saved call cannot be loaded: {type(error).__name__}: {error}", _SEE_SAVED)
        if why is not None:
            self._note("not loaded", why)
            return
        self._num_loaded[tuple(form)], self._saved[tuple(form)] = len(self._runtime.callables()), list(calls)
        self._runtime.note("calls were loaded from warm_start: Dynamo traced nothing for them")

    def _install(self, function: Callable[..., Any], saved: _SavedCall) -> Reason | None:
        read = _read(saved.call, function, saved.guards, saved.names, saved.modules)
        found = difference(saved.parts, {**sources(saved.modules), **read})  # guard: saved_values
        if found is not None:
            return found
        guards = saving.rebuilt(function, saved.call)
        found = difference(guarded(saved.guards), guarded(guards.of_model))  # guard: saved_guards
        if found is not None:
            return found
        graph = self._graphs().load_file(saved.file, self._runtime, self._settings)
        if isinstance(graph, Reason):
            return graph
        setting = saving.setting_that_differs(saved.call)
        if setting is not None:
            return Reason(f"torch's setting {setting} differs from that of the save", is_expected=True)
        saving.install_call(function, saved.call, guards, graph)
        self._runtime.loaded_for(function.__code__, graph.name)
        return None

    def save(
        self,
        function: Callable[..., Any],
        form: Sequence[Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Trace a call with a new function of this form, and save it; the call does not run."""
        if self._store is None or self._is_loaded(form):
            return
        graphs = self._graphs()
        graphs.recording = []
        why: Reason | None = None
        try:
            call, traced, places = saving.record_call(
                function, args, kwargs, self._backend, self._options, self._dynamic, self._owners
            )
            (file,) = graphs.recording
            if isinstance(file, Reason):
                why = file
            else:
                guards, names = tuple(saving.rebuilt(function, call).of_model), names_of(traced)
                parts = {**sources(places), **_read(call, function, guards, names, places)}
                others = [other for other in self._saved.get(tuple(form), ()) if other.file != file]
                others.append(_SavedCall(call, file, guards, names, tuple(sorted(places)), parts))
                self._saved[tuple(form)] = others
                written = self._store.write(self._name(form), self._parts(), CALL, pickle.dumps(others))
                why = written if isinstance(written, Reason) else None
        except (saving.CannotSaveError, UnstableError, pickle.PicklingError) as error:
            why = Reason(str(error), _SEE_SAVED)
        finally:
            graphs.recording = None
        if why is not None:
            self._note("Dynamo's work is not saved", replace(why, is_expected=False))

    def gives_saved_bits(self, form: Sequence[Any], args: Sequence[Any], run: Callable[..., Any]) -> bool:
        """Whether a captured call has the result that it had when it was saved; False removes what was loaded for it.

        Digests are compared, in a process that has loaded the call and compiled nothing for it, where arguments,
        parameters and buffers have equal contents. A call that changes them, or has other bits the second time, is not.
        The call is compared with its own arguments and with seeded ones: an example may be all zeros.
        """
        if self._store is None:
            return True
        tensors = (
            (*self._model.parameters(), *self._model.buffers()) if isinstance(self._model, torch.nn.Module) else ()
        )
        given = [*tensors, *trees.flatten(args)[0]]
        contents = contents_of(given)
        if contents is None:
            return True
        try:
            seeded = _seeded_call(args)  # guard: saved_seeded_bits
            result, again = (contents_of(trees.flatten((run(*args), run(*seeded)))[0]) for _ in range(2))
        except GraphpassError:  # an example above the ladder, with on_fallback="error"
            return True
        if result is None or result != again or contents_of(given) != contents:
            return True
        parts = {**self._parts(), "contents of the call": contents, "threads": str(torch.get_num_threads())}
        name = self._name(form)
        if not self._is_loaded(form):
            self._store.write(name, parts, RESULT, result.encode())
            return True
        saved = self._store.read(file_name(name, parts, RESULT))
        if not isinstance(saved, Reason) and saved != result.encode():  # guard: saved_bits
            graphs = [call.file for call in self._saved.pop(tuple(form))]
            others = (file_name(name, parts, RESULT), file_name(name, self._parts(), CALL))
            self._store.remove(*graphs, *others)
            self._note("not loaded", Reason("the first replay has other bits than it had when it was saved"))
            return False
        return True

    def _is_loaded(self, form: Sequence[Any]) -> bool:
        """Whether the calls of a form were loaded, and nothing was compiled since."""
        return self._num_loaded.get(tuple(form)) == len(self._runtime.callables())

    def _name(self, form: Sequence[Any]) -> str:
        kind: Any = self._model if hasattr(self._model, "__qualname__") else type(self._model)
        return digest(kind.__module__, kind.__qualname__, tuple(form))

    def _parts(self) -> Parts:
        tensors = list(self._model.parameters()) if isinstance(self._model, torch.nn.Module) else []
        options = {name: text_of(value) for name, value in self._settings.parts().items()}
        return {**environment({tensor.device for tensor in tensors}), **options, **modules(self._model)}

    def _graphs(self) -> Any:
        """What the backend has saved and loaded for the runtime."""
        is_there = dynamo.registered_backend(self._backend) is not None  # it registers its part when it is imported
        assert is_there, "the options were validated by the backend"
        return self._runtime.owned(_GRAPHS[self._backend])

    @property
    def _runtime(self) -> GraphRuntime:
        assert self._settings.runtime is not None, "callers pass the runtime"
        return self._settings.runtime

    def _note(self, what: str, why: Reason) -> None:
        self._runtime.ledger.note(replace(why, why=f"{what}: {why.why}"), is_problem=why is not NOT_SAVED)


def _read(
    call: saving.TracedCall,
    function: Callable[..., Any],
    guards: Sequence[saving.ModelGuard],
    names: Sequence[str],
    modules: Iterable[str],
) -> Parts:
    """What the guards of a call read of the model that a function calls, and what its trace read without a guard."""
    at = saving.Expressions(call, function)
    values = {guard.expression: at.value(guard.expression) for guard in guards}
    return assumed(guards, values, names, sorted(modules))


def _seeded_call(args: Sequence[Any]) -> Any:
    """The same call with numbers that are always the same; arguments that share memory stay, so that guards hold."""
    tensors = trees.tensors(args)
    are_apart = len({memory.storage_id(tensor) for tensor in tensors}) == len(tensors)
    return trees.map_tensors(_seeded, args) if are_apart else args


def _seeded(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of this layout; integers, which may be indices, and what a guard tells from a plain tensor stay."""
    is_plain = type(tensor) is torch.Tensor and not tensor.requires_grad and not vars(tensor)
    if not (is_plain and tensor.is_floating_point() and tensor.layout is torch.strided and all(tensor.stride())):
        return tensor
    numbers = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
    return torch.empty_like(tensor).copy_(numbers)
