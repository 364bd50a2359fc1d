"""Random Python around the graph, over ``graphed`` and over plain ``torch.compile``, with eager as the oracle.

Whatever a caller can see is what eager leaves, or a typed error says why not. Default runs take the first programs;
``tox run -e fuzz`` takes all. A program that fails is printed as Python.
"""

from __future__ import annotations

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


def _over_graphed(model: nn.Module, program: PythonProgram) -> tuple[Any, Callable[[], int]]:
    fast = gp.graphed(model, *((_SIZES, _DIMS) if program.declared else ()), compiler="eager", on_fallback="silent")
    return fast, lambda: fast.runtime.stats().replayed


def _over_compile(model: nn.Module, program: PythonProgram) -> tuple[Any, Callable[[], int]]:
    declared = {"capture_sizes": _SIZES, "dynamic_dims": _DIMS} if program.declared else {}
    options = {"compiler": "eager", "on_fallback": "silent", **declared}
    fast = torch.compile(model, backend="cgpass", dynamic=True if program.declared else None, options=options)
    return fast, lambda: gp.runtime_of(fast).stats().replayed if torch._dynamo.utils.counters["frames"]["ok"] else 0


def _over_stock(model: nn.Module, program: PythonProgram) -> tuple[Any, Callable[[], int]]:
    fast = torch.compile(model, backend="eager", dynamic=True if program.declared else None)
    return fast, lambda: 0


ROUTES = {"graphed": _over_graphed, "torch.compile": _over_compile}


def _arguments(program: PythonProgram, number: int, last: list[torch.Tensor]) -> list[Any]:
    scope = scope_of_calls(number, last)
    given = []
    for name, text in zip(("x", "y", "parts", "flag", "k", "name"), program.calls[number], strict=True):
        scope[name] = eval(text, scope)
        given.append(scope[name])
    return given


def check(program: PythonProgram, route: Callable[..., tuple[Any, Callable[[], int]]]) -> Outcome:
    """Compare a program over graphs with eager, call by call, and at the end all results that were kept."""
    torch.compiler.reset()
    sides = []
    for is_ours in (False, True):
        made, outside = model_class(program)
        model = made().eval()
        called, replays = route(model, program) if is_ours else (model, lambda: 0)
        sides.append((model, called, outside, [], replays))
    outcome, last = Outcome(), ([], [])
    replays = sides[1][-1]
    kept: list[tuple[Any, Any, Observed]] = []
    with torch.no_grad():
        for number in range(len(program.calls)):
            before = 0 if outcome.calls == 0 else _count(replays)
            seen, results = [], []
            for side, (model, called, outside, _, _) in enumerate(sides):
                try:
                    for at, statement in program.between:
                        if at == number:
                            exec(statement, {**scope_of_calls(99, ()), "model": model})
                    given = _arguments(program, number, last[side])
                    torch.manual_seed(number)
                    result = called(*given)
                except Exception as error:
                    if side == 0:
                        return outcome  # eager cannot run it
                    if isinstance(error, gp.GraphpassError):
                        outcome.refusal = f"{type(error).__name__}: {error.problem}"
                    else:
                        outcome.mismatch = f"call {number}: {type(error).__name__}: {error}"
                    return outcome
                results.append(result)
                last[side][:] = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
                seen.append(Observed.of(result=result, given=given, model=model, outside=outside))
            difference = seen[0].difference(seen[1])
            if difference is not None:
                outcome.mismatch = f"call {number} {program.calls[number]}: {difference}"
                return outcome
            kept.append((*results, seen[0]))
            outcome.calls += 1
            outcome.replays += _count(replays) > before
        for number, (wanted, found, _) in enumerate(kept):
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


def passes(route: str, seeds: range, capsys: pytest.CaptureFixture[str]) -> None:
    """Search, say what came of it, and fail on any difference, any untyped error, or too few replays."""
    tally = search(route, seeds)
    with capsys.disabled():
        sys.stdout.write(f"\n{route}, seeds {seeds.start} to {seeds.stop - 1}: {tally}\n")
    assert not tally.failures, "\n".join(f"{problem}\n{program}" for program, problem in tally.failures)
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
