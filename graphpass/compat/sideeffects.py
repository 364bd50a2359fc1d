"""The side effects of the code that Dynamo compiles: changes of Python state after the graph."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from graphpass.compat.dynamo import name_of_source, translator
from graphpass.compat.nnmodules import LIBRARIES
from graphpass.compat.operators import written_node


@dataclass(frozen=True, slots=True)
class SideEffect:
    """One change of Python state, which Dynamo's code makes after the graph."""

    text: str  #: the change, as the predicate of a sentence: "sets the attribute 'steps' of Decoder (model.py:12)"
    #: Id of the changed object; 0 for a global variable or a variable of an enclosing function; None where there is
    #: nothing to restore, or the change is unknown.
    owner: int | None
    keeps_tensor: bool  #: the change stores an argument or a result of the graph beyond the call


def side_effects_of_compilation() -> tuple[SideEffect, ...]:
    """The side effects of the code that Dynamo is compiling; call it while the backend runs.

    It leaves out changes of objects that the code creates (its result), and attributes that already have the constant
    that the code assigns.
    """
    try:
        output = translator().output  # type: ignore[union-attr]
        effects = output.side_effects
        objects = {id(item): item for item in effects.keepalive}
        owners = {variable: objects.get(key) for key, variable in effects.id_to_variable.items()}
        # guard: side_effects_of_own_objects
        changed = [v for v in owners if effects.is_modified(v) and not _is_made_here(v)]
        found = [effect for v in changed for effect in _changes_of(effects, v, owners[v])]
    except AttributeError:  # another torch release, whose record has another structure
        return (SideEffect("may change Python state: Dynamo's record was not found", None, keeps_tensor=False),)
    if output.random_calls:
        found.append(SideEffect("draws Python's random numbers", None, keeps_tensor=False))
    return tuple(found)


def _is_made_here(variable: Any) -> bool:
    return type(variable.mutation_type).__name__.endswith("New")


def _changes_of(effects: Any, variable: Any, item: Any) -> Iterator[SideEffect]:
    from torch._dynamo import variables

    stacks = effects.mutation_user_stacks.get(variable) or [()]
    user = [frame for frame in stacks[-1] if not frame.filename.startswith(LIBRARIES)]
    line = f" ({os.path.basename(user[-1].filename)}:{user[-1].lineno})" if user else ""
    attributes = effects.store_attr_mutations.get(variable, {})
    for name, value in attributes.items():
        keeps = _keeps_tensor(effects, variable, value)
        if isinstance(variable, variables.NewGlobalVariable) or isinstance(item, types.ModuleType):
            yield SideEffect(f"sets the global variable {name!r}{line}", 0, keeps)
        elif isinstance(variable, variables.CellVariable):
            yield SideEffect(f"sets a variable of an enclosing function{line}", 0, keeps)
        elif isinstance(value, variables.DeletedVariable):
            yield SideEffect(f"deletes the attribute {name!r} of {type(item).__name__}{line}", id(item), keeps)
        elif not _holds_already(item, name, value):
            yield SideEffect(f"sets the attribute {name!r} of {type(item).__name__}{line}", id(item), keeps)
    if not attributes:
        yield SideEffect(f"changes a {type(item).__name__}{line}", id(item), _keeps_tensor(effects, variable, variable))


def _holds_already(item: Any, name: str, value: Any) -> bool:
    if not value.is_python_constant() or name not in getattr(item, "__dict__", {}):
        return False
    new, old = value.as_python_constant(), vars(item)[name]
    return new is old or (type(new) is type(old) and type(new) in (bool, int, float, str) and new == old)


def _keeps_tensor(effects: Any, owner: Any, value: Any) -> bool:
    """Whether ``value`` contains a tensor from outside the owner's root object: an argument or a result."""
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.base import VariableTracker

    found: list[Any] = []
    seen: set[int] = set()
    waiting = [value]
    while waiting:

        def look(variable: Any) -> None:
            if id(variable) not in seen:
                seen.add(id(variable))
                waiting.extend(effects.store_attr_mutations.get(variable, {}).values() if variable is not owner else ())
                if isinstance(variable, TensorVariable):
                    found.append(variable)

        VariableTracker.visit(look, waiting.pop())
    root = _source_name(owner).partition("]")[0]  # L['model'
    return any(not root or _own_name(tensor).partition("]")[0] != root for tensor in found)


def _own_name(tensor: Any) -> str:
    """The source of a tensor, or of the one that an operator such as ``+=`` has written to and returned."""
    argument = written_node(tensor.as_proxy().node).meta.get("grapharg")
    return _source_name(tensor) or (_source_name(argument) if argument is not None else "")


def _source_name(variable: Any) -> str:
    """The source of a value in Dynamo's notation (``L['self'].layers[0]``); empty for values that the code computes."""
    try:
        return name_of_source(variable.source) or ""
    except NotImplementedError:
        return ""
