"""A failing program made small: what can be left out, or be made ordinary, without the failure going away."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from tests.fuzz.programs import Call, Program
from tests.fuzz.python_programs import PythonProgram

if TYPE_CHECKING:
    from tests.fuzz.search import Outcome

AnyProgram = TypeVar("AnyProgram", Program, PythonProgram)


_LEAST = (("lines", 0), ("between", 0), ("calls", 1), ("returned", 1), ("splitting_ops", 0))
_ORDINARY_CALL: tuple[tuple[str, Any], ...] = (("layout", "fresh"), ("instance", 0), ("rows", 3))
_ORDINARY: tuple[tuple[str, Any], ...] = (
    ("route", "direct"),
    ("dynamic", False),
    ("outputs", "clone"),
    ("padding", "zero"),
    ("declared", False),
    ("compiler", "eager"),
    ("returned", "x"),
)
_ORDINARY_ARGUMENTS = ("rows(3)", "rows(3)", "None", "True", "1", "'first'", "torch.tensor(-1)")


def reduced(program: AnyProgram, run: Callable[[AnyProgram], Outcome]) -> AnyProgram:
    """The smallest program found that still differs from eager in the way ``program`` does."""
    kind = kind_of(run(program))

    def fails(smaller: AnyProgram) -> bool:
        try:
            return kind_of(run(smaller)) == kind
        except Exception:  # a line is missing that another one needs
            return False

    found: AnyProgram | None = program
    while found is not None:
        program, found = found, next((smaller for smaller in _smaller(found) if fails(smaller)), None)
    return program


def kind_of(outcome: Outcome) -> str | None:
    """What sort of difference it is: wrong values, other aliases, an error; None for none."""
    if outcome.mismatch is None:
        return None
    text = re.sub(r"^call \d+( \(.*?\))?: ", "", outcome.mismatch)
    for sign in ("share memory", "was kept", "instead of [", "generator"):
        if sign in text:
            return sign
    return text.split(":", 1)[0]


def _smaller(program: AnyProgram) -> Iterator[AnyProgram]:
    """Programs with one thing less; the ones that lose most come first."""
    fields = {field.name: getattr(program, field.name) for field in dataclasses.fields(program)}
    for field, least in _LEAST:
        values = fields.get(field, ())
        for length in (len(values) // 2, 1) if isinstance(values, tuple) else ():
            for start in reversed(range(len(values) - length + 1) if length else ()):
                if len(values) - length >= least:
                    yield dataclasses.replace(program, **{field: values[:start] + values[start + length :]})
    for field, value in _ORDINARY:
        if isinstance(fields.get(field), type(value)) and fields[field] != value:
            yield dataclasses.replace(program, **{field: value})
    for position, call in enumerate(program.calls):
        for ordinary in _ordinary(call):
            calls: Any = (*program.calls[:position], ordinary, *program.calls[position + 1 :])
            yield dataclasses.replace(program, calls=calls)


def _ordinary(call: Call | tuple[str, ...]) -> Iterator[Call | tuple[str, ...]]:
    if isinstance(call, tuple):
        ordinary = enumerate(_ORDINARY_ARGUMENTS)
        yield from ((*call[:at], value, *call[at + 1 :]) for at, value in ordinary if call[at] != value)
        return
    for field, value in _ORDINARY_CALL:
        if getattr(call, field) != value:
            yield dataclasses.replace(call, **{field: value})
    for mode in {"PIECEWISE": ("NONE", "FULL"), "FULL": ("NONE",)}.get(call.mode, ()):
        yield dataclasses.replace(call, mode=mode)
