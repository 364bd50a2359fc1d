"""Random Python around the graph, over ``graphed`` and over plain ``torch.compile``, with eager as the oracle.

Whatever a caller can see is what eager leaves, or a typed error says why not. Default runs take the first programs;
``tox run -e fuzz`` takes all, ``python -m tests.fuzz python 5000 --first 100000`` any.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import graphpass as gp
from tests.fuzz.python_programs import (
    PythonProgram,
    choose_python_program,
    choose_wrapping_program,
    model_class,
    scope_of_calls,
)
from tests.fuzz.search import Fuzzer, Outcome
from tests.observed import Observed

pytestmark = pytest.mark.usefixtures("odd_programs_may_warn")

_SIZES, _DIMS = [2, 4, 8], {"x": 0}


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison."""

    model: nn.Module  #: the program's module
    called: Callable[..., Any]  #: what is called in its stead
    held: Callable[[], dict[str, Any]]  #: returns the variables outside of it
    compiled: Callable[[Any], Any]  #: makes of a method what a statement between two calls calls
    replays: Callable[[], int] = lambda: 0  #: how many calls replayed a graph
    last: list[torch.Tensor] = field(default_factory=list)  #: the tensors of the last result

    def observed(self, **more: Any) -> Observed:
        optimizers = [list(optimizer.state.values()) for optimizer in (self.model._sgd, self.model._adam)]
        return Observed.of(**more, model=self.model, held=self.held(), optimizers=optimizers)


Route = Callable[[PythonProgram], Side]


def _eagerly(program: PythonProgram) -> Side:
    made, held = model_class(program)
    model = made().eval()
    return Side(model, model, held, lambda method: method)


def _over_graphed(program: PythonProgram) -> Side:
    side, options = _eagerly(program), {"compiler": program.compiler, "on_fallback": "silent"}
    fast = gp.graphed(side.model, *((_SIZES, _DIMS) if program.declared else ()), **options)
    return dataclasses.replace(
        side,
        called=fast,
        compiled=_by(backend="cgpass", options=options),
        replays=lambda: fast.runtime.stats().replayed,
    )


def _over_compile(program: PythonProgram) -> Side:
    side, options = _eagerly(program), {"compiler": program.compiler, "on_fallback": "silent"}
    declared = {"capture_sizes": _SIZES, "dynamic_dims": _DIMS} if program.declared else {}
    fast = _by(backend="cgpass", dynamic=program.declared or None, options={**options, **declared})(side.model)

    def replays() -> int:
        return gp.runtime_of(fast).stats().replayed if torch._dynamo.utils.counters["frames"]["ok"] else 0

    return dataclasses.replace(side, called=fast, compiled=_by(backend="cgpass", options=options), replays=replays)


def _over_stock(program: PythonProgram) -> Side:
    side, compiled = _eagerly(program), _by(backend=program.compiler, dynamic=program.declared or None)
    return dataclasses.replace(side, called=compiled(side.model), compiled=_by(backend=program.compiler))


def _by(**how: Any) -> Callable[[Any], Any]:
    """``torch.compile`` that makes one callable of one."""
    return functools.cache(lambda called: torch.compile(called, **how))


ROUTES = {"graphed": _over_graphed, "torch.compile": _over_compile}


def _arguments(program: PythonProgram, number: int, last: list[torch.Tensor]) -> list[Any]:
    scope = scope_of_calls(number, last)
    given = []
    for name, text in zip(("x", "y", "parts", "flag", "k", "name", "i"), program.calls[number], strict=True):
        scope[name] = eval(text, scope)
        given.append(scope[name])
    return given


def _called(program: PythonProgram, number: int, side: Side) -> tuple[Any, Observed]:
    """The result of one call and of what comes before it, and all that can be seen then."""
    scope = {**scope_of_calls(99, ()), "model": side.model, "held": side.held, "compiled": side.compiled}
    for at, statement in program.between:
        if at == number:
            exec(statement, scope)
    given = _arguments(program, number, side.last)
    torch.manual_seed(number)
    result = side.called(*given)
    side.last[:] = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return result, side.observed(result=result, given=given)


def check(program: PythonProgram, route: Route) -> Outcome:
    """Compare a program over graphs with eager, call by call, and at the end all results that were kept."""
    torch.compiler.reset()
    with torch.no_grad():
        return _compare(program, _eagerly(program), route(program))


def _compare(program: PythonProgram, eager: Side, ours: Side) -> Outcome:
    outcome = Outcome()
    kept: list[tuple[Any, Any]] = []
    for number in range(len(program.calls)):
        before = 0 if outcome.calls == 0 else _count(ours.replays)
        try:
            wanted, expected = _called(program, number, eager)
        except Exception:  # eager cannot run it
            return outcome
        try:
            found, seen = _called(program, number, ours)
        except gp.GraphpassError as error:
            outcome.refusal = f"{type(error).__name__}: {error.problem}"
            return outcome
        except Exception as error:
            outcome.mismatch = f"call {number}: {type(error).__name__}: {error}"
            return outcome
        difference = expected.difference(seen)
        if difference is not None:
            outcome.mismatch = f"call {number} {program.calls[number]}: {difference}"
            return outcome
        kept.append((wanted, found))
        outcome.calls += 1
        outcome.replays += _count(ours.replays) > before
    for number, (wanted, found) in enumerate(kept):
        difference = Observed.of(result=wanted).difference(Observed.of(result=found))
        if difference is not None:
            outcome.mismatch = f"the result of call {number}, at the end: {difference}"
            return outcome
    return outcome


def _count(replays: Callable[[], int]) -> int:
    try:
        return replays()
    except gp.errors.OptionError:  # nothing has been compiled yet
        return 0


def fuzzer_of(route: str, make: Callable[[int], PythonProgram] = choose_python_program) -> Fuzzer:
    return Fuzzer(
        name=route,
        make=make,
        check=functools.partial(check, route=ROUTES[route]),
        check_alone=functools.partial(check, route=_over_stock),
        least_replayed=0.5,
    )


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("first", [0, 40])
def test_some_programs(route: str, first: int, capsys: pytest.CaptureFixture[str]) -> None:
    fuzzer_of(route).passes(range(first, first + 6), capsys)


def test_some_programs_over_a_weight_that_wraps_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    fuzzer_of("torch.compile", choose_wrapping_program).passes(range(4), capsys)


@pytest.mark.fuzz
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("first", range(1000, 2000, 100))
def test_many_programs_over_a_weight_that_wraps_tensors(
    route: str, first: int, capsys: pytest.CaptureFixture[str]
) -> None:
    fuzzer_of(route, choose_wrapping_program).passes(range(first, first + 100), capsys)


@pytest.mark.fuzz
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("first", range(1000, 6000, 100))
def test_many_programs(route: str, first: int, capsys: pytest.CaptureFixture[str]) -> None:
    fuzzer_of(route).passes(range(first, first + 100), capsys)
