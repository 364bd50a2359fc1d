"""What Python does around the graph of a compiled function: read off the bytecode that Dynamo wrote for it.

Dynamo applies a model's side effects (``self.step += 1``, a list that grows) after the graph has run. Whoever calls
the graph alone skips them; whoever runs the model twice has them twice. Building the result is no side effect, though
it looks like one: an object that this code has made, whose attributes it sets.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphpass import compat

__all__ = ["Effect", "python_effects"]

_STORES = frozenset(
    {"STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR", "DELETE_ATTR", "DELETE_SUBSCR", "DELETE_GLOBAL", "STORE_DEREF"}
)
_MUTATING_METHODS = frozenset(
    {"append", "extend", "insert", "update", "clear", "pop", "add", "remove", "__setitem__", "__delitem__"}
)
# They move values about and say nothing of where these came from.
_BETWEEN = frozenset({"COPY", "PRECALL", "PUSH_NULL", "CACHE", "NOP", "EXTENDED_ARG"})


@dataclass(frozen=True, slots=True)
class Effect:
    """One side effect.

    Attributes:
        text: what it does, as a sentence's predicate.
        is_constant: it writes a constant, the same one whenever this code runs.
    """

    text: str
    is_constant: bool


def python_effects(function: Callable[..., Any]) -> list[Effect]:
    """The side effects of calling what Dynamo compiled for ``function``, in all its versions."""
    codes = compat.compiled_code_of(function)
    if not codes:
        return [Effect("Dynamo's code for it was not found", is_constant=False)]
    return [effect for code in codes for effect in _Scan(tuple(_instructions(code))).effects()]


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    return (instruction for instruction in dis.get_instructions(code) if instruction.opname not in _BETWEEN)


@dataclass(slots=True)
class _Scan:
    """One pass over straight-line code, with what its local variables hold.

    Attributes:
        made: variables with an object that this code has made by ``__new__``.
        setters: variables with a function that sets attributes.
        classes: variables with a class that was looked up in an ``__mro__``, whose methods take the object first.
    """

    code: tuple[dis.Instruction, ...]
    made: set[str] = field(default_factory=set)
    setters: set[str] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)

    def effects(self) -> Iterator[Effect]:
        """Those that reach beyond what the code has made."""
        for position, instruction in enumerate(self.code):
            name = str(instruction.argval)
            if instruction.opname == "STORE_FAST":
                self._keep(position, name)
            elif instruction.opname in _STORES:
                yield Effect(f"it changes Python state ({instruction.opname} {name})", is_constant=False)
            elif self._is_setter(instruction):
                yield from self._attribute(position)
            elif instruction.opname in ("LOAD_METHOD", "LOAD_ATTR") and name in _MUTATING_METHODS:
                yield from self._method(position)

    def _keep(self, position: int, variable: str) -> None:
        """Note what a variable is given, or forget what it held."""
        for held in (self.made, self.setters, self.classes):
            held.discard(variable)
        source = self.code[position - 1]
        if self._is_local(source, self.made) or self._is_new_object(position - 1):
            self.made.add(variable)
        elif self._is_setter(source):
            self.setters.add(variable)
        elif source.opname.startswith("BINARY_SUBSCR") and self._loads(position - 3, "__mro__"):
            self.classes.add(variable)

    def _attribute(self, position: int) -> Iterator[Effect]:
        """A call ``setattr(target, name, value)``, of whose function a load stands here."""
        rest = self.code[position + 1 :]
        if rest and rest[0].opname == "STORE_FAST":  # kept for later besides
            rest = rest[1:]
        if not rest or self._is_local(rest[0], self.made):
            return
        name = next((at for at, i in enumerate(rest) if i.opname == "LOAD_CONST" and isinstance(i.argval, str)), None)
        if name is None:
            yield Effect("it sets an attribute", is_constant=False)
            return
        value = rest[name + 1 : name + 3]
        # A value that is more than its constant goes on with what is made of it.
        is_constant = bool(value) and value[0].opname == "LOAD_CONST" and not _goes_on(value[1:])
        yield Effect(f"it sets the attribute {rest[name].argval!r}", is_constant=is_constant)

    def _method(self, position: int) -> Iterator[Effect]:
        """A call of a method that changes its object: the one before it, or its first argument if a class is."""
        before, after = self.code[position - 1], self.code[position + 1 : position + 2]
        target = after[0] if after and self._is_local(before, self.classes) else before
        if not self._is_local(target, self.made):
            name = self.code[position].argval
            yield Effect(f"it changes Python state ({self.code[position].opname} {name})", is_constant=False)

    def _is_setter(self, instruction: dis.Instruction) -> bool:
        if instruction.opname == "LOAD_FAST":
            return instruction.argval in self.setters
        return instruction.opname.startswith("LOAD") and "setattr" in str(instruction.argval)

    def _is_local(self, instruction: dis.Instruction, variables: set[str]) -> bool:
        return instruction.opname.startswith("LOAD_FAST") and instruction.argval in variables

    def _is_new_object(self, position: int) -> bool:
        """Whether the call that ends here is one of ``__new__``, with arguments that are no calls."""
        if not self.code[position].opname.startswith("CALL"):
            return False
        for instruction in reversed(self.code[:position]):
            if instruction.opname.startswith("CALL") or instruction.opname.startswith("STORE"):
                return False
            if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and instruction.argval == "__new__":
                return True
        return False

    def _loads(self, position: int, name: str) -> bool:
        return position >= 0 and self.code[position].argval == name


def _goes_on(following: Sequence[dis.Instruction]) -> bool:
    return bool(following) and following[0].opname.startswith(
        ("BINARY", "UNARY", "LOAD_ATTR", "LOAD_METHOD", "COMPARE")
    )
