"""Random Python around the graph, over ``graphed`` and over plain ``torch.compile``, with eager as the oracle.

Whatever a caller can see is what eager leaves, or a typed error says why not. Default runs take the first programs;
``tox run -e fuzz`` takes all, ``python -m tests.fuzz python 5000 --first 100000`` any. A program that fails is made
small and printed as Python.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import graphpass as gp
from tests.fuzz.python_programs import PythonProgram, choose_python_program, model_class, scope_of_calls
from tests.fuzz.reduce import reduced
from tests.observed import Observed

LEAST_REPLAYED = 0.5
_MOST_FAILURES = 3
_SIZES, _DIMS = [2, 4, 8], {"x": 0}


@dataclass(slots=True)
class Tally:
    """What became of some programs.

    Attributes:
        programs: how many ran.
        calls: calls that were compared.
        replayed: programs that replayed a graph.
        replays: calls that replayed one.
        refused: typed errors, by their problem.
        wrong_without_us: programs that torch.compile with another backend gets wrong, too, or cannot run.
        failures: (program, what is wrong) of the others.
    """

    programs: int = 0
    calls: int = 0
    replayed: int = 0
    replays: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    wrong_without_us: int = 0
    failures: list[tuple[PythonProgram, str]] = field(default_factory=list)

    def __str__(self) -> str:
        share = 100 * self.replays / max(1, self.calls)
        lines = [
            f"{self.programs} programs, {self.replayed} replayed; {self.calls} calls, {share:.0f} % over a graph; "
            f"{self.wrong_without_us} programs that torch.compile alone gets wrong",
            *(f"{n:6} {reason}" for reason, n in self.refused.most_common()),
        ]
        return "\n    ".join(lines)


@dataclass(slots=True)
class Outcome:
    """How one program fared; see :class:`Tally`."""

    calls: int = 0
    replays: int = 0
    refusal: str | None = None
    mismatch: str | None = None


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison.

    Attributes:
        model: the program's module.
        called: what is called in its stead.
        held: returns the variables outside of it.
        compiled: makes of a method what a statement between two calls calls.
        replays: how many calls replayed a graph.
        last: the tensors of the last result.
    """

    model: nn.Module
    called: Callable[..., Any]
    held: Callable[[], dict[str, Any]]
    compiled: Callable[[Any], Any]
    replays: Callable[[], int] = lambda: 0
    last: list[torch.Tensor] = field(default_factory=list)

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


def search(route: str, seeds: Iterable[int]) -> Tally:
    """Run the programs of these seeds, until three have failed."""
    tally = Tally()
    for seed in seeds:
        program = choose_python_program(seed)
        outcome = check(program, ROUTES[route])
        tally.programs += 1
        tally.calls += outcome.calls
        tally.replays += outcome.replays
        tally.replayed += outcome.replays > 0
        if outcome.refusal is not None:
            tally.refused[outcome.refusal] += 1
        if outcome.mismatch is not None:
            if check(program, _over_stock).mismatch is not None:
                tally.wrong_without_us += 1
                continue
            tally.failures.append((program, f"seed {seed}: {outcome.mismatch}"))
            if len(tally.failures) == _MOST_FAILURES:
                break
    return tally


def explained(failures: Iterable[tuple[PythonProgram, str]], route: str) -> str:
    """Each failing program made small, with what is wrong."""
    texts = []
    for program, problem in failures:
        small = reduced(program, lambda smaller: check(smaller, ROUTES[route]))
        texts.append(f"{problem}\n{check(small, ROUTES[route]).mismatch}\n{small}")
    return "\n".join(texts)


def passes(route: str, seeds: range, capsys: pytest.CaptureFixture[str]) -> None:
    """Search, say what came of it, and fail on any difference, any untyped error, or too few replays."""
    tally = search(route, seeds)
    with capsys.disabled():
        sys.stdout.write(f"\n{route}, seeds {seeds.start} to {seeds.stop - 1}: {tally}\n")
    assert not tally.failures, explained(tally.failures, route)
    assert tally.replayed >= LEAST_REPLAYED * tally.programs, str(tally)


@pytest.fixture(autouse=True)
def odd_programs_may_warn() -> Iterator[None]:
    """Reading the grad of a leaf, and the like, is what programs are made to do; eager warns of it too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("first", [0, 40])
def test_some_programs(route: str, first: int, capsys: pytest.CaptureFixture[str]) -> None:
    passes(route, range(first, first + 6), capsys)


@pytest.mark.fuzz
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("first", range(1000, 6000, 100))
def test_many_programs(route: str, first: int, capsys: pytest.CaptureFixture[str]) -> None:
    passes(route, range(first, first + 100), capsys)
