"""Programs of many seeds over graphs, beside eager: what came of them, and what is wrong.

A program that fails is printed as Python, for tests/fuzz/test_found_by_fuzzing.py.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

MOST_FAILURES = 3


@dataclass(slots=True)
class Outcome:
    """How one program fared."""

    calls: int = 0  #: calls that were compared
    replays: int = 0  #: replays, or calls that replayed
    refusal: str | None = None  #: the typed error that ended it
    mismatch: str | None = None  #: what differs from eager


@dataclass(slots=True)
class Tally:
    """What became of some programs."""

    programs: int = 0
    calls: int = 0
    replays: int = 0
    replayed: int = 0  #: programs that replayed a graph
    refused: Counter[str] = field(default_factory=Counter)
    wrong_without_us: int = 0  #: programs that torch.compile with another backend gets wrong, too, or cannot run
    failures: list[tuple[Any, str]] = field(default_factory=list)  #: (program, what is wrong) of the others

    def __str__(self) -> str:
        lines = [
            f"{self.programs} programs, {self.replayed} replayed; {self.calls} calls, {self.replays} replays; "
            f"{self.wrong_without_us} programs that torch.compile alone gets wrong",
            *(f"{n:6} {reason}" for reason, n in self.refused.most_common()),
        ]
        return "\n    ".join(lines)


@dataclass(frozen=True, slots=True)
class Fuzzer:
    """One kind of program."""

    name: str
    make: Callable[[int], Any]  #: the program of a seed
    check: Callable[[Any], Outcome]  #: compares it over graphs with eager
    check_alone: Callable[[Any], Outcome]  #: compares torch.compile without graphpass with eager: is a difference ours?
    least_replayed: float  #: share of the programs

    def search(self, seeds: Iterable[int]) -> Tally:
        """Run the programs of these seeds, until three have failed."""
        tally = Tally()
        for seed in seeds:
            program = self.make(seed)
            outcome = self.check(program)
            tally.programs += 1
            tally.calls += outcome.calls
            tally.replays += outcome.replays
            tally.replayed += outcome.replays > 0
            if outcome.refusal is not None:
                tally.refused[outcome.refusal] += 1
            if outcome.mismatch is not None:
                if self.check_alone(program).mismatch is not None:
                    tally.wrong_without_us += 1
                    continue
                tally.failures.append((program, f"seed {seed}: {outcome.mismatch}"))
                if len(tally.failures) == MOST_FAILURES:
                    break
        return tally

    def explained(self, tally: Tally) -> str:
        """Each failing program, with what is wrong, and what is with the compiler alone."""
        texts = []
        for program, problem in tally.failures:
            texts.append(f"{problem}\ntorch.compile alone: {self.check_alone(program).mismatch}\n{program}")
        return "\n".join(texts)

    def passes(self, seeds: range, capsys: pytest.CaptureFixture[str]) -> None:
        """Search, say what came of it, and fail on any difference, any untyped error, or too few replays."""
        tally = self.search(seeds)
        with capsys.disabled():
            sys.stdout.write(f"\n{self.name}, {named(seeds)}: {tally}\n")
        assert not tally.failures, self.explained(tally)
        assert tally.replayed >= self.least_replayed * tally.programs, str(tally)


def named(seeds: range) -> str:
    """For the ids of tests."""
    return f"{seeds.start}-{seeds.stop - 1}"


def chunks(first: int, count: int, at_once: int) -> list[range]:
    """``count`` seeds from ``first`` on, a test each for so many at once: processes can share them."""
    return [range(start, start + at_once) for start in range(first, first + count, at_once)]
