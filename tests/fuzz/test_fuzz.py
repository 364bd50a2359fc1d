"""Random programs over graphs, with eager as the oracle: whatever a caller can see is what eager leaves.

Default runs take a few programs, always the same; ``tox run -e fuzz`` searches. A program that fails is made small
and printed as Python, for tests/fuzz/test_found_by_fuzzing.py.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given

from tests.fuzz.oracle import check
from tests.fuzz.programs import Program, Seeded, choose_program, programs
from tests.fuzz.reduce import reduced

LEAST_REPLAYED = 0.9
_MOST_FAILURES = 3


@dataclass(slots=True)
class Tally:
    """How many programs ran, how many of them replayed a graph, and why the others were refused."""

    programs: int = 0
    replayed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    wrong_without_us: int = 0
    failures: list[Program] = field(default_factory=list)

    def __str__(self) -> str:
        wrong = f", {self.wrong_without_us} that the compiler alone gets wrong" if self.wrong_without_us else ""
        lines = [
            f"{self.programs} programs, {self.replayed} replayed{wrong}",
            *(f"{n:6} {r}" for r, n in self.refused.most_common()),
        ]
        return "\n    ".join(lines)


def search(compiler: str, seeds: Iterable[int], device: str = "cpu") -> Tally:
    """Run the programs of these seeds, until three have failed."""
    tally = Tally()
    for seed in seeds:
        program = choose_program(Seeded(seed), draws=compiler == "eager")
        outcome = check(program, compiler, device)
        tally.programs += 1
        tally.replayed += outcome.replayed
        if outcome.refusal is not None:
            tally.refused[outcome.refusal] += 1
        if outcome.mismatch is not None:
            if check(program, compiler, device, stock=True).mismatch is not None:
                tally.wrong_without_us += 1
                continue
            tally.failures.append(program)
            if len(tally.failures) == _MOST_FAILURES:
                break
    return tally


def explained(failures: Iterable[Program], compiler: str, device: str = "cpu") -> str:
    """Each failing program made small, with what is wrong, and whether the compiler alone is wrong as well."""
    texts = []
    for program in failures:
        small = reduced(program, lambda smaller: check(smaller, compiler, device))
        ours, stock = (check(small, compiler, device, stock=alone).mismatch for alone in (False, True))
        texts.append(f"{ours}\n{compiler} alone: {stock}\n{small!r}\n{small.source()}")
    return "\n".join(texts)


def passes(compiler: str, seeds: range, capsys: pytest.CaptureFixture[str], device: str = "cpu") -> None:
    """Search, say what came of it, and fail on any difference, or where too few programs replayed a graph."""
    tally = search(compiler, seeds, device)
    with capsys.disabled():
        sys.stdout.write(f"\n{compiler} on {device}, seeds {seeds.start} to {seeds.stop - 1}: {tally}\n")
    assert not tally.failures, explained(tally.failures, compiler, device)
    assert tally.replayed >= LEAST_REPLAYED * tally.programs, str(tally)


@pytest.fixture(autouse=True)
def odd_programs_may_warn() -> Iterator[None]:
    """Writing to expanded tensors, and the like, is what programs are made to do; eager warns of it too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@given(program=programs())
def test_what_hypothesis_writes_does_what_eager_does(program: Program) -> None:
    assert check(program).mismatch is None


@pytest.mark.parametrize(("compiler", "first", "count"), [("eager", 0, 20), ("aot_eager", 0, 6), ("inductor", 428, 1)])
def test_a_few_programs(compiler: str, first: int, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    passes(compiler, range(first, first + count), capsys)


def chunks(first: int, count: int, at_once: int) -> list[range]:
    """``count`` seeds from ``first`` on, a test each for so many at once: processes can share them."""
    return [range(start, start + at_once) for start in range(first, first + count, at_once)]


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("compiler", "seeds"),
    [
        *(("eager", seeds) for seeds in chunks(1_000, 20_000, 1_000)),
        *(("aot_eager", seeds) for seeds in chunks(100_000, 2_000, 500)),
        *(("inductor", seeds) for seeds in chunks(200_000, 300, 100)),
    ],
    ids=lambda value: f"{value.start}-{value.stop - 1}" if isinstance(value, range) else value,
)
def test_many_programs(compiler: str, seeds: range, capsys: pytest.CaptureFixture[str]) -> None:
    passes(compiler, seeds, capsys)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("compiler", "seeds"),
    [("eager", range(300_000, 300_380)), ("aot_eager", range(310_000, 310_110)), ("inductor", range(320_000, 320_010))],
    ids=lambda value: "" if isinstance(value, range) else value,
)
def test_programs_on_a_gpu(compiler: str, seeds: range, cuda: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    passes(compiler, seeds, capsys, str(cuda))
