"""Dynamo's work for the calls of one model, in the directory of ``warm_start``: saved after a capture, loaded before.

A call is loaded only where the model, the code that was traced and what it read are those of the save. See Note
[Saved starts].
"""

from __future__ import annotations

import importlib
import pickle
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from graphpass.capture.runtime import GraphRuntime
from graphpass.compat import memory, nnmodules, saving, trees
from graphpass.compat.subclasses import plain_tensors
from graphpass.ledger import Reason
from graphpass.options import Settings
from graphpass.report.records import LOADED, WARM_START
from graphpass.saved.files import CALL, NOT_SAVED, RESULT, SEE_SAVED, SavedFiles, UsedKeys, file_name
from graphpass.saved.fingerprint import (
    PLAIN,
    WITHOUT_METHODS,
    Parts,
    brief,
    class_digests,
    contents_of,
    contents_of_cell,
    difference,
    digest,
    environment,
    is_of_torch,
    is_own_module,
    items_of,
    modules,
    names_in,
    sources,
    text_of,
)
from graphpass.saved.graphs import OTHER_BITS, SavedGraphs, note

Form: TypeAlias = tuple[Any, ...]
"""What tells the calls of one compiled function from those of others: how its arguments are passed."""


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

    ``owners`` are the variables by which the compiled functions refer to the model.
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
        self._saved: dict[Form, list[_SavedCall]] = {}
        #: the keys that traffic used in an earlier process, of the form that was loaded last
        self.used: UsedKeys | None = None
        self._num_loaded: dict[Form, int] = {}  # {form: callables of the runtime, when its calls had been loaded}

    def load(self, function: Callable[..., Any], form: Form) -> None:
        """Let a function that is about to be compiled run the calls that were saved for its form."""
        if self._store is not None:
            with self._runtime.ledger.timed(WARM_START, LOADED):
                self._load(self._store, function, form)

    def _load(self, store: SavedFiles, function: Callable[..., Any], form: Form) -> None:
        try:
            name, parts = self._name(form), self._parts()
            self.used = UsedKeys(store, name, parts)
            contents = store.find(name, parts, CALL)
            calls: Any = contents if isinstance(contents, Reason) else pickle.loads(contents)
            why = calls if isinstance(calls, Reason) else None
            for saved in calls if why is None else ():
                why = self._install(function, saved) or why
        except Exception as error:  # a miss, whatever a file holds
            why = Reason(f"a saved call cannot be loaded: {type(error).__name__}: {error}", SEE_SAVED)
        if why is not None:
            note(self._runtime, "not loaded", why, is_problem=why is not NOT_SAVED)
            return
        self._num_loaded[form], self._saved[form] = len(self._runtime.callables()), list(calls)
        self._runtime.note("calls were loaded from warm_start: Dynamo traced nothing for them")

    def _install(self, function: Callable[..., Any], saved: _SavedCall) -> Reason | None:
        read = _read(saved.call, function, saved.guards, saved.names, saved.modules)
        found = difference(saved.parts, read)  # guard: saved_values
        if found is not None:
            return found
        guards, of_model = saving.rebuilt(function, saved.call)
        found = difference(guarded(saved.guards), guarded(of_model))  # guard: saved_guards
        if found is not None:
            return found
        graph = self._runtime.owned(SavedGraphs).load_file(saved.file, self._runtime, self._settings)
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
        form: Form,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Trace a call with a new function of this form, and save it; the call does not run."""
        if self._store is None or self._is_loaded(form):
            return
        graphs = self._runtime.owned(SavedGraphs)
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
                guards, names = tuple(saving.rebuilt(function, call)[1]), names_of(traced)
                parts = _read(call, function, guards, names, places)
                others = [other for other in self._saved.get(form, ()) if other.file != file]
                others.append(_SavedCall(call, file, guards, names, tuple(sorted(places)), parts))
                self._saved[form] = others
                written = self._store.write(self._name(form), self._parts(), CALL, pickle.dumps(others))
                why = written if isinstance(written, Reason) else None
        except (saving.CannotSaveError, pickle.PicklingError) as error:
            why = Reason(str(error), SEE_SAVED)
        finally:
            graphs.recording = None
        if why is not None:
            note(self._runtime, "Dynamo's work is not saved", replace(why, is_expected=False), is_problem=True)

    def gives_saved_bits(self, form: Form, args: Sequence[Any], run: Callable[..., Any]) -> bool:
        """Whether a captured call has the result that it had when it was saved; False removes what was loaded for it.

        Digests are compared where the call was loaded and nothing compiled, and arguments, parameters and buffers have
        equal contents; not if it changes them, or has other bits the second time. Beside its own arguments, which may
        be all zeros, it gets seeded ones.
        """
        if self._store is None or self.used is None:  # or what would have to be equal has no text
            return True
        tensors = (
            (*self._model.parameters(), *self._model.buffers()) if isinstance(self._model, torch.nn.Module) else ()
        )
        given = [one for tensor in tensors for _, one in plain_tensors(tensor)] + trees.flatten(args)[0]
        contents = contents_of(given)
        if contents is None:
            return True
        try:
            seeded = _seeded_call(args)  # guard: saved_seeded_bits
            result, again = (contents_of(trees.flatten((run(*args), run(*seeded)))[0]) for _ in range(2))
        except Exception:  # an example above the ladder, with on_fallback="error", or contents that the model refuses
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
            graphs = [call.file for call in self._saved.pop(form)]
            others = (file_name(name, parts, RESULT), file_name(name, self._parts(), CALL))
            self._store.remove(*graphs, *others)
            self._runtime.owned(SavedGraphs).refuse(graphs)
            note(self._runtime, "not loaded", OTHER_BITS, is_problem=True)
            return False
        return True

    def _is_loaded(self, form: Form) -> bool:
        """Whether the calls of a form were loaded, and nothing was compiled since."""
        return self._num_loaded.get(form) == len(self._runtime.callables())

    def _name(self, form: Form) -> str:
        kind: Any = self._model if hasattr(self._model, "__qualname__") else type(self._model)
        return digest(kind.__module__, kind.__qualname__, form)

    def _parts(self) -> Parts:
        tensors = list(self._model.parameters()) if isinstance(self._model, torch.nn.Module) else []
        devices = {tensor.device for tensor in tensors}
        return {**environment(devices), **self._settings.parts(), **modules(self._model)}

    @property
    def _runtime(self) -> GraphRuntime:
        assert self._settings.runtime is not None, "callers pass the runtime"
        return self._settings.runtime


def _seeded_call(args: Sequence[Any]) -> Any:
    """The same call with numbers that are always the same; arguments that share memory stay, so that guards hold."""
    tensors = trees.tensors(args)
    are_apart = len({memory.storage_id(tensor) for tensor in tensors}) == len(tensors)
    return trees.map_tensors(_seeded, args) if are_apart else args


def _seeded(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of this layout; integers, which may be indices, and what a guard tells from a plain tensor stay.

    Its numbers are from 0 to 1, which may be probabilities.
    """
    is_plain = type(tensor) is torch.Tensor and not tensor.requires_grad and not vars(tensor)
    if not (is_plain and tensor.is_floating_point() and tensor.layout is torch.strided and all(tensor.stride())):
        return tensor
    numbers = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(0))
    return torch.empty_like(tensor).copy_(numbers)


# -- what a trace read ------------------------------------------------------------------------------------------------


def _read(
    call: saving.TracedCall,
    function: Callable[..., Any],
    guards: Sequence[saving.ModelGuard],
    names: Sequence[str],
    modules: Iterable[str],
) -> Parts:
    """What the guards of a call read of the model that a function calls, and what its trace read without a guard."""
    values = saving.values_of((guard.expression for guard in guards), call, function)
    return {**sources(modules), **assumed(guards, values, names, sorted(modules))}


_OF_A_PART = {
    *("TYPE_MATCH", "HASATTR", "NOT_PRESENT_IN_GENERIC_DICT", "DICT_CONTAINS", "DICT_NOT_CONTAINS", "SET_CONTAINS"),
    *("SET_NOT_CONTAINS", "SEQUENCE_LENGTH", "TUPLE_ITERATOR_LEN", "DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK"),
    *("EMPTY_NN_MODULE_HOOKS_DICT", "TENSOR_MATCH", "NOT_NONE_MATCH", "WEAKREF_ALIVE", "DUPLICATE_INPUT"),
    "CLOSURE_MATCH",
}
"""Kinds of guards that compare a part of a value: its class, its length, its keys. All others stand for all of it."""

# guard: saved_unguarded
_UNGUARDED = (types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType, property)
"""Classes of what Dynamo reads without a guard on it, such as ``torch.Tensor.sin`` and ``torch.Tensor.T``."""


def names_of(traced: Iterable[types.CodeType]) -> tuple[str, ...]:
    """The names and the texts in code that may be names."""
    return tuple(sorted({name for code in traced for name in names_in(code)}))


def guarded(guards: Iterable[saving.ModelGuard]) -> Parts:
    """What each guard on the model and on global variables checks."""
    found: dict[str, list[str]] = {}
    for guard in guards:
        given = "".join(f" {text_of(value)}" for value in guard.arguments)
        is_in_value = not {*guard.kinds} <= _OF_A_PART  # then its text is in the value, in a stable form
        found.setdefault(f"the guard {guard.kinds[0]}{given} of {guard.expression}", []).extend(
            guard.kinds if is_in_value else guard.code
        )
    return {name: " and ".join(sorted(set(code))) for name, code in found.items()}


def assumed(
    guards: Sequence[saving.ModelGuard],
    values: Mapping[str, Any],
    names: Collection[str] = (),
    modules: Iterable[str] = (),
) -> Parts:
    """What a trace assumes of the model, of global variables and of Python modules.

    ``values`` is {expression: value} of what its guards read; by ``names`` of its code it may ask whether something is
    there.
    """
    digest_of = class_digests()
    whole = {guard.expression for guard in guards if not {*guard.kinds} <= _OF_A_PART}
    variables = _variables(names, [importlib.import_module(name) for name in modules], values.values())
    parts = {f"the value of {at}": _text_read(value, digest_of, at in whole) for at, value in values.items()}
    parts |= {f"the variable {at}": brief(value) for at, value in variables.items()}  # guard: saved_variables
    held = dict[str, Any]()
    for at, value in values.items():
        attributes = _attributes(value)
        present = {name: attributes[name] for name in names if name in attributes}
        parts |= {f"names in {at}": " ".join(present)} if present else {}  # guard: saved_names
        held |= {f"{at}.{name}": item for name, item in (*present.items(), *_items(value))}  # guard: saved_ways
    parts |= {f"the method {at}": brief(item) for at, item in held.items() if isinstance(item, _UNGUARDED)}
    known = {"torch.default_generator": torch.default_generator}  # guard: saved_default_generator
    return parts | _identities({**known, **values, **variables, **held})  # guard: saved_identities


def _text_read(value: Any, digest_of: Callable[[type], str], is_whole: bool) -> str:
    """A value that a trace read; of an object and of a class, the code of the class too."""
    if value is saving.ABSENT:
        return "absent"
    is_tree = isinstance(value, (torch.nn.Module, torch.Tensor))  # compared otherwise, with all that it holds
    text = text_of(value) if is_whole and not is_tree else brief(value)  # guard: saved_whole_values
    if isinstance(value, (set, frozenset)):  # a trace may iterate it, in the order of this process
        return f"{text}, iterated as {items_of(value)}"
    if isinstance(value, type):
        return f"{text} {digest_of(value)}"
    # guard: saved_methods
    return text if isinstance(value, WITHOUT_METHODS) else f"{text} {digest_of(type(value))}"


def _variables(names: Collection[str], modules: Iterable[Any], values: Iterable[Any]) -> dict[str, Any]:
    """{module.name: value} of what the names may mean in Python modules that a trace reads; torch's are of its version.

    Dynamo guards neither a module's names nor which variables are one object.
    """
    found: dict[str, Any] = {}
    todo, seen = [value for value in (*modules, *values) if is_own_module(value)], set[str]()
    while todo:
        module = todo.pop()
        if module.__name__ in seen:
            continue
        seen.add(module.__name__)
        held = {f"{module.__name__}.{name}": vars(module)[name] for name in names if name in vars(module)}
        todo += [value for value in held.values() if is_own_module(value)]
        found |= held
    return found


def _attributes(value: Any) -> Mapping[str, Any]:
    """The attributes of an object itself; Dynamo does not guard which are absent where it catches the error."""
    is_module = isinstance(value, torch.nn.Module)
    if isinstance(value, (*PLAIN, type, types.ModuleType, types.FunctionType)) or is_of_torch(type(value)) > is_module:
        return {}
    held = dict(getattr(value, "__dict__", {}))
    slots = [name for base in type(value).__mro__ for name in _slots(base)]
    held |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
    if is_module:
        parameters, buffers = nnmodules.tensor_dicts(value)
        held = {**held, **parameters, **buffers, **nnmodules.child_dict(value)}
    return held


def _items(value: Any) -> list[tuple[str, Any]]:
    """What a container, a class or a function holds; Dynamo guards only one of the ways to an object."""
    if isinstance(value, types.FunctionType):
        cells = [item for cell in value.__closure__ or () for item in contents_of_cell(cell)]
        value = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *cells]
    if isinstance(value, type):
        value = {} if is_of_torch(value) else dict(vars(value))
    if isinstance(value, dict):
        return [(str(number), item) for number, item in enumerate(value.values())]
    return [(str(number), item) for number, item in enumerate(value)] if isinstance(value, (list, tuple)) else []


def _slots(base: type) -> Iterable[str]:
    slots = vars(base).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots if isinstance(slots, (tuple, list, dict)) else ()


def _identities(values: Mapping[str, Any]) -> Parts:
    first: dict[int, str] = {}
    parts = {}
    for at, value in values.items():
        if not isinstance(value, PLAIN) and value is not saving.ABSENT and first.setdefault(id(value), at) != at:
            parts[f"that {at} is {first[id(value)]}"] = "so"
    return parts
