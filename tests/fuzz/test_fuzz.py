"""Random programs over graphs, with eager as the oracle: whatever a caller can see is what eager leaves.

Default runs take a few programs, always the same; ``tox run -e fuzz`` searches.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.fuzz.oracle import check
from tests.fuzz.programs import Choices, choose_program
from tests.fuzz.search import Fuzzer, chunks, named

pytestmark = pytest.mark.usefixtures("odd_programs_may_warn")


def fuzzer_of(compiler: str, device: str = "cpu", **options: Any) -> Fuzzer:
    compared = partial(check, compiler=compiler, device=device, **options)
    return Fuzzer(
        name=f"{compiler} on {device}",
        make=lambda seed: choose_program(Choices(seed), draws=compiler == "eager"),
        check=compared,
        check_alone=partial(compared, stock=True),
        least_replayed=0.9,
    )


@pytest.mark.parametrize(
    ("compiler", "first", "count"),
    [("eager", 0, 16), ("aot_eager", 0, 4), pytest.param("inductor", 428, 1, marks=pytest.mark.soak)],
)
def test_a_few_programs(compiler: str, first: int, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    fuzzer_of(compiler).passes(range(first, first + count), capsys)


def searches(*rows: tuple[str, int, int, int]) -> Any:
    """(compiler, first seed, seeds, seeds of one test) each."""
    cases = [pytest.param(row[0], seeds, id=f"{row[0]}-{named(seeds)}") for row in rows for seeds in chunks(*row[1:])]
    return pytest.mark.parametrize(("compiler", "seeds"), cases)


@pytest.mark.fuzz
@searches(("eager", 1_000, 20_000, 1_000), ("aot_eager", 100_000, 2_000, 500), ("inductor", 200_000, 300, 100))
def test_many_programs(compiler: str, seeds: range, capsys: pytest.CaptureFixture[str]) -> None:
    fuzzer_of(compiler).passes(seeds, capsys)


@pytest.mark.cuda
@searches(("eager", 300_000, 380, 95), ("aot_eager", 310_000, 110, 110), ("inductor", 320_000, 10, 10))
def test_programs_on_a_gpu(compiler: str, seeds: range, cuda: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    fuzzer_of(compiler, str(cuda)).passes(seeds, capsys)


@pytest.mark.cuda
@pytest.mark.parametrize("seeds", chunks(330_000, 48, 12), ids=named)
def test_tuned_programs_on_a_gpu(seeds: range, cuda: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    fuzzer_of("inductor", str(cuda), tune="measure", tune_seconds=20.0, progress=False).passes(seeds, capsys)
