"""What Python does around the graph of a compiled function: read off the bytecode that Dynamo wrote for it.

Dynamo applies a model's side effects (``self.step += 1``, a list that grows) after the graph has run. Whoever calls
the graph alone skips them; whoever runs the model twice has them twice. Building the result is no side effect, though
it looks like one: an object that this code has made, whose attributes it sets.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from graphpass import compat

__all__ = ["Effect", "python_effects"]

_MUTATING_METHODS = frozenset(
    {"append", "extend", "insert", "update", "clear", "pop", "add", "remove", "__setitem__", "__delitem__"}
)


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
    return [effect for code in codes for effect in _effects_of(code)]


def _effects_of(code: types.CodeType) -> list[Effect]:
    machine = _Machine()
    for instruction in dis.get_instructions(code):
        machine.run(instruction)
    return machine.effects


@dataclass(frozen=True, slots=True)
class _Value:
    """What is known of a value on the stack or in a variable.

    Attributes:
        kind: ``made`` (an object that this code has made), ``new`` (its class's ``__new__``), ``setter`` (a function
            that sets attributes), ``mro``, ``class`` (looked up in one), ``mutator`` (a method that changes its
            object), ``constant``, or empty.
        held: the constant, or the object that a mutator belongs to.
    """

    kind: str = ""
    held: Any = None


_UNKNOWN = _Value()
_MADE = _Value("made")
_IGNORED = frozenset({"PRECALL", "CACHE", "NOP", "EXTENDED_ARG", "RESUME", "COPY_FREE_VARS", "END_FOR", "KW_NAMES"})


class _Machine:
    """Runs straight-line code over what is known of its values; a loop's body once."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self._stack: list[_Value] = []
        self._variables: dict[str, _Value] = {}

    def run(self, instruction: dis.Instruction) -> None:
        """One instruction; those without a method here take and give values of which nothing is known."""
        name = instruction.opname
        if name in _IGNORED:
            return
        own: Callable[[dis.Instruction], None] | None = getattr(self, f"_{name.lower()}", None)
        if own is not None:
            own(instruction)
            return
        jump = False if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs else None
        net = dis.stack_effect(instruction.opcode, instruction.arg, jump=jump)
        if net <= 0:
            self._pop(1 - net)
            net = 1
        self._stack += [_UNKNOWN] * (net - 1) + [self._named(instruction)]

    def _pop(self, count: int = 1) -> list[_Value]:
        """The topmost values, deepest first."""
        return [self._stack.pop() if self._stack else _UNKNOWN for _ in range(count)][::-1]

    def _named(self, instruction: dis.Instruction) -> _Value:
        """A function that sets attributes is known by its name, wherever it is loaded from."""
        is_setter = instruction.opname.startswith("LOAD") and "setattr" in str(instruction.argval)
        return _Value("setter") if is_setter else _UNKNOWN

    def _found(self, what: str, value: _Value) -> None:
        self.effects.append(Effect(what, is_constant=value.kind == "constant"))

    def _load_fast(self, instruction: dis.Instruction) -> None:
        self._stack.append(self._variables.get(instruction.argval, _UNKNOWN))

    _load_fast_check = _load_fast

    def _store_fast(self, instruction: dis.Instruction) -> None:
        (self._variables[instruction.argval],) = self._pop()

    def _delete_fast(self, instruction: dis.Instruction) -> None:
        self._variables.pop(instruction.argval, None)

    def _load_const(self, instruction: dis.Instruction) -> None:
        named = self._named(instruction)
        self._stack.append(_Value("constant", instruction.argval) if named is _UNKNOWN else named)

    def _copy(self, instruction: dis.Instruction) -> None:
        depth = instruction.arg or 1
        self._stack.append(self._stack[-depth] if depth <= len(self._stack) else _UNKNOWN)

    def _swap(self, instruction: dis.Instruction) -> None:
        values = self._pop(instruction.arg or 2)
        self._stack += [values[-1], *values[1:-1], values[0]]

    def _pop_top(self, _: dis.Instruction) -> None:
        self._pop()

    _return_value = _pop_jump_if_false = _pop_jump_if_true = _jump_backward = _pop_top  # a loop's iterator goes with it

    def _load_attr(self, instruction: dis.Instruction) -> None:
        (owner,) = self._pop()
        name = instruction.argval
        kinds = {"__new__": "new", "__mro__": "mro"}
        if name in _MUTATING_METHODS:
            found = _Value("mutator", owner)
        else:
            found = _Value(kinds[name]) if name in kinds else self._named(instruction)
        net = dis.stack_effect(instruction.opcode, instruction.arg)
        self._stack += [found, owner][: net + 1]

    _load_method = _load_attr

    def _binary_subscr(self, _: dis.Instruction) -> None:
        container, _index = self._pop(2)
        self._stack.append(_Value("class") if container.kind == "mro" else _UNKNOWN)

    def _call(self, instruction: dis.Instruction) -> None:
        num_arguments = instruction.arg or 0
        taken = self._pop(num_arguments + 2)
        arguments = taken[2:]
        kinds = {value.kind: value for value in taken[:2]}
        if "setter" in kinds and len(arguments) == 3 and arguments[0].kind != "made":
            self._found(f"it sets the attribute {arguments[1].held!r}", arguments[2])
        mutator = kinds.get("mutator")
        if mutator is not None:
            # Of a class that was looked up, the method takes the object first.
            target = arguments[0] if mutator.held.kind == "class" and arguments else mutator.held
            if target.kind != "made":
                self._found("it changes Python state by a method", _UNKNOWN)
        self._stack.append(_MADE if "new" in kinds else _UNKNOWN)

    def _store_attr(self, instruction: dis.Instruction) -> None:
        value, owner = self._pop(2)
        if owner.kind != "made":
            self._found(f"it sets the attribute {instruction.argval!r}", value)

    def _store_subscr(self, _: dis.Instruction) -> None:
        _value, container, _key = self._pop(3)
        if container.kind != "made":
            self._found("it changes an item", _UNKNOWN)

    def _delete_attr(self, instruction: dis.Instruction) -> None:
        self._pop()
        self._found(f"it deletes the attribute {instruction.argval!r}", _UNKNOWN)

    def _delete_subscr(self, _: dis.Instruction) -> None:
        self._pop(2)
        self._found("it deletes an item", _UNKNOWN)

    def _store_global(self, instruction: dis.Instruction) -> None:
        (value,) = self._pop()
        self._found(f"it sets the variable {instruction.argval!r}", value)

    _store_deref = _store_global

    def _delete_global(self, instruction: dis.Instruction) -> None:
        self._found(f"it deletes the variable {instruction.argval!r}", _UNKNOWN)
