"""Random models through saved starts: one that reads another value never runs what was saved for the first.

Default runs take a few programs; ``tox run -e fuzz`` takes many.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import graphpass as gp
from tests.fuzz.saved_programs import SavedProgram, choose_saved_program, some_changes
from tests.fuzz.search import chunks, named

pytestmark = pytest.mark.usefixtures("odd_programs_may_warn")

CHANGES = 6  #: of one program
OPTIONS: dict[str, Any] = {"compiler": "eager", "progress": False}


def inputs(rows: int) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))


def graphed(model: nn.Module, folder: Path, *, is_changed: bool) -> torch.Tensor:
    fast = gp.graphed(model, [4], {"x": 0}, mode="FULL", on_fallback="silent", **OPTIONS, warm_start=folder)
    if not is_changed:
        fast.capture(inputs(4))
    result: torch.Tensor = fast(inputs(4))
    return result


def manager(model: nn.Module, folder: Path, *, is_changed: bool) -> torch.Tensor:
    dispatcher = gp.CudagraphDispatcher("FULL", [4], max_num_reqs=4)
    made = gp.CudaGraphManager(
        model, dispatcher, [gp.InputSpec("x", (4, 8), torch.float32)], **OPTIONS, warm_start=folder
    )
    made.capture()
    return made.run(gp.Batch(4, inputs={"x": inputs(4)})).clone()


FRONTS = (graphed, manager)


@dataclass
class Tally:
    """What became of some programs and of their changed models."""

    programs: int = 0
    became: Counter[str] = field(default_factory=Counter)  #: of the programs
    changed: Counter[str] = field(default_factory=Counter)  #: of the changed models
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.programs} programs, {dict(self.became)}; {self.changed.total()} changed, {dict(self.changed)}"


def started(program: SavedProgram, front: Any, folder: Path, change: Any = None) -> tuple[str, bool]:
    """(whether it was loaded or why not, whether its result is eager's) of one start."""
    torch.compiler.reset()
    counters.clear()
    result = front(program.model(change), folder, is_changed=change is not None)
    is_right = torch.equal(result, program.model(change)(inputs(4)))
    return "traced" if counters["frames"] else "loaded", is_right


def search(seeds: range) -> Tally:
    tally = Tally()
    for seed in seeds:
        program, front = choose_saved_program(seed), FRONTS[seed % 2]
        with tempfile.TemporaryDirectory() as place, torch.no_grad():
            tally.programs += 1
            tally.became[_checked(tally, program, front, Path(place) / "starts", seed)] += 1
    return tally


def _checked(tally: Tally, program: SavedProgram, front: Any, folder: Path, seed: int) -> str:
    """What became of a program."""
    try:
        program.model()(inputs(4))
    except Exception:
        return "eager cannot run it"
    try:
        _, is_right = started(program, front, folder)
    except gp.GraphpassError:
        return "refused"
    if not is_right:
        return "wrong without a saved start"
    if not list(folder.glob("*.call")):
        return "not saved"
    became, is_right = started(program, front, folder)
    if not is_right:
        tally.wrong.append(f"seed {seed}, unchanged: {program}")
    for change in some_changes(program, seed, CHANGES):
        try:
            expected = program.model(change)(inputs(4))
        except Exception:
            continue
        try:
            found, is_right = started(program, front, folder, change)
        except gp.GraphpassError:
            tally.changed["refused"] += 1
            continue
        is_same = torch.equal(expected, program.model()(inputs(4)))
        # What is loaded may read another value at each call, as a tensor that is made of a float.
        tally.changed[f"{found}, {'equal' if is_same else 'other'} result"] += 1
        if not is_right:
            tally.wrong.append(f"seed {seed}, {front.__name__}, {found}, {change}: {program}")
    return became


def passes(seeds: range, capsys: pytest.CaptureFixture[str]) -> None:
    tally = search(seeds)
    with capsys.disabled():
        sys.stdout.write(f"\nsaved starts, {named(seeds)}: {tally}\n")
    assert not tally.wrong, "\n".join(tally.wrong)
    assert tally.became["loaded"] > tally.programs / 3, str(tally)


def test_a_few_changed_models(capsys: pytest.CaptureFixture[str]) -> None:
    passes(range(4), capsys)


@pytest.mark.fuzz
@pytest.mark.parametrize("seeds", chunks(1_000, 800, 50), ids=named)
def test_many_changed_models(seeds: range, capsys: pytest.CaptureFixture[str]) -> None:
    passes(seeds, capsys)
