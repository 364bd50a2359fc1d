"""What a trace read of the model and of Python modules, as text: what guards compare, and what no guard holds."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from graphpass.compat import nnmodules
from graphpass.compat.saving import ABSENT, ModelGuard
from graphpass.saved.fingerprint import (
    PLAIN,
    WITHOUT_METHODS,
    Parts,
    brief,
    class_digests,
    contents_of_cell,
    is_of_torch,
    is_own_module,
    items_of,
    names_in,
    text_of,
)

_OF_A_PART = {
    *("TYPE_MATCH", "HASATTR", "NOT_PRESENT_IN_GENERIC_DICT", "DICT_CONTAINS", "DICT_NOT_CONTAINS", "SET_CONTAINS"),
    *("SET_NOT_CONTAINS", "SEQUENCE_LENGTH", "TUPLE_ITERATOR_LEN", "DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK"),
    *("EMPTY_NN_MODULE_HOOKS_DICT", "TENSOR_MATCH", "NOT_NONE_MATCH", "WEAKREF_ALIVE", "DUPLICATE_INPUT"),
    "CLOSURE_MATCH",
}
"""Kinds of guards that compare a part of a value: its class, its length, its keys. All others stand for all of it."""


def names_of(traced: Iterable[types.CodeType]) -> tuple[str, ...]:
    """The names and the texts in code that may be names."""
    return tuple(sorted({name for code in traced for name in names_in(code)}))


def guarded(guards: Iterable[ModelGuard]) -> Parts:
    """What each guard on the model and on global variables checks.

    Raises:
        UnstableError: an argument has no text.
    """
    found: dict[str, list[str]] = {}
    for guard in guards:
        given = "".join(f" {text_of(value)}" for value in guard.arguments)
        is_in_value = not {*guard.kinds} <= _OF_A_PART  # then its text is in the value, in a stable form
        found.setdefault(f"the guard {guard.kinds[0]}{given} of {guard.expression}", []).extend(
            guard.kinds if is_in_value else guard.code
        )
    return {name: " and ".join(sorted(set(code))) for name, code in found.items()}


def assumed(
    guards: Sequence[ModelGuard], values: Mapping[str, Any], names: Collection[str] = (), modules: Iterable[str] = ()
) -> Parts:
    """What a trace assumes of the model, of global variables and of Python modules.

    Args:
        guards: the guards of the trace.
        values: {expression: value} of what they read.
        names: of the traced code, by which it may ask whether something is there.
        modules: the Python modules from which functions were traced.

    Raises:
        UnstableError: a guard stands for all of a value that has no text.
    """
    digest_of = class_digests()
    whole = {guard.expression for guard in guards if not {*guard.kinds} <= _OF_A_PART}
    variables = _variables(names, [importlib.import_module(name) for name in modules], values.values())
    parts = {f"the value of {at}": _read(value, digest_of, at in whole) for at, value in values.items()}
    parts |= {f"the variable {at}": brief(value) for at, value in variables.items()}  # guard: saved_variables
    held = dict[str, Any]()
    for at, value in values.items():
        attributes = _attributes(value)
        present = {name: attributes[name] for name in names if name in attributes}
        parts |= {f"names in {at}": " ".join(present)} if present else {}  # guard: saved_names
        held |= {f"{at}.{name}": item for name, item in (*present.items(), *_items(value))}  # guard: saved_ways
    return parts | _identities({**values, **variables, **held})  # guard: saved_identities


def _read(value: Any, digest_of: Callable[[type], str], is_whole: bool) -> str:
    """A value that a trace read; of an object and of a class, the code of the class too."""
    if value is ABSENT:
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

    Dynamo guards neither which names a module has nor which of its variables are one object.
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
    """Which of the values are one object."""
    first: dict[int, str] = {}
    parts = {}
    for at, value in values.items():
        if not isinstance(value, PLAIN) and value is not ABSENT and first.setdefault(id(value), at) != at:
            parts[f"that {at} is {first[id(value)]}"] = "so"
    return parts
