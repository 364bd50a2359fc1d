"""The table of stock towers in docs/encoder.md: ``python -m tests.e2e.tower_table`` writes it."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpass.encoder.adapters import TowerAdapter, adapter_for
from graphpass.encoder.adapters.adapter import takes_grids
from graphpass.encoder.manager import EncoderCudaGraphManager
from graphpass.encoder.options import EncoderOptions
from graphpass.errors import EncoderConfigError
from tests.e2e.hugging_face import CPU, Place, difference
from tests.e2e.pagetable import PageTable
from tests.e2e.towers import FAMILIES, Grid, Tower, patches_of

TABLE = PageTable("encoder.md", "towers", ("modeling files", "items", "result", "calls that replay"))
NUM_REQUESTS, SHARE = 10, 0.9
LADDER = (16, 64, 128, 256, 600, 1200)
IMAGES_OF_BUDGETS = (1, 2, 4, 6, 8)
"""Of towers of one size."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one tower."""

    refusal: str = ""  #: why no adapter serves it
    difference: float = 0.0  #: the largest one from the tower in float32, of an item by itself; relative norm
    rounding: float = 0.0  #: the tower's own difference, of the same kind
    replayed: int = 0  #: requests of the second pass, of sizes that were never seen, that replay graphs alone
    graphs: int = 0  #: as many as are captured


def measured(family: Tower, place: Place = CPU) -> Outcome:
    """Two passes of requests of other sizes, each item against what the tower returns for it alone."""
    tower = family.build(place)
    limits = {"min_tokens": 8, "max_tokens": LADDER[-1], "max_frames": 16} if family.has_grids else {}
    try:
        adapter: Any = adapter_for(tower, max_items=8, output="both", **limits)
    except EncoderConfigError as error:
        return Outcome(refusal=str(error))
    least, largest = adapter.get_encoder_cudagraph_budget_range()
    ladder = LADDER if family.has_grids else [least * count for count in IMAGES_OF_BUDGETS]
    options = EncoderOptions(token_budgets=[b for b in ladder if b <= largest], costs=None, compile=False)
    manager = EncoderCudaGraphManager(adapter, options=options, device=place.device, dtype=place.dtype)
    manager.capture()
    seeded, seen, differs_by, rounding, replayed = random.Random(0), set[tuple[Grid, ...]](), 0.0, 0.0, 0
    exact = copy.deepcopy(tower).float()
    for number in range(2 * NUM_REQUESTS):
        grids: list[Grid] = []
        while not grids or tuple(grids) in seen:
            grids = family.sizes(seeded)
        seen.add(tuple(grids))
        pixels = patches_of(grids, adapter.row_shape, next(tower.parameters()), number)
        before = manager.get_cumulative_stats().misses
        found = manager.execute({"pixel_values": pixels, "grid_thw": torch.tensor(grids)})
        replayed += number >= NUM_REQUESTS and manager.get_cumulative_stats().misses == before
        sizes = [count * height * width for count, height, width in grids]
        for result, patches, grid in zip(found, pixels.split(sizes), grids, strict=True):
            own, expected = (_alone(adapter, one, patches, grid) for one in (tower, exact))
            parts = (result,) if isinstance(result, torch.Tensor) else result
            assert [(part.shape, part.dtype) for part in parts] == [(part.shape, part.dtype) for part in own]
            differs_by = max(differs_by, *map(_difference, parts, expected))
            rounding = max(rounding, *map(_difference, own, expected))
    graphs = len(manager.get_cumulative_stats().budgets)
    manager.clear()
    return Outcome("", differs_by, rounding, replayed, graphs)


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return difference(found.float(), expected.float())


def _alone(adapter: TowerAdapter, tower: Any, patches: torch.Tensor, grid: Grid) -> list[torch.Tensor]:
    """All that the tower returns for one item."""
    patches = patches.to(next(tower.parameters()).dtype)
    is_packed = takes_grids(tower)
    grids = {"grid_thw": torch.tensor([grid], device=patches.device)} if is_packed else {}
    with torch.no_grad():
        values = tower(adapter.as_taken(patches), **grids).values()
    parts = [part for value in values for part in ((value,) if isinstance(value, torch.Tensor) else value)]
    return parts if is_packed else [part[0] for part in parts]


def row_of(family: Tower, outcome: Outcome) -> str:
    """The row of one family, after its name."""
    items = "images, clips" if family.has_clips else "images" if family.has_grids else "images of one size"
    if outcome.refusal:
        found = outcome.refusal.partition("; found ")[2].partition("; remedy")[0]
        return f"{items} | refused: {found.replace('|', '/')} | |"
    return f"{items} | equal | {outcome.replayed} of {NUM_REQUESTS} |"


def main(names: Sequence[str]) -> None:
    """Measure ``names``, or all families of this transformers, and write their rows."""
    for family in FAMILIES:
        if family.is_there and (not names or str(family) in names):
            row = row_of(family, outcome := measured(family))
            rows = {**TABLE.rows(), str(family): row}
            TABLE.write({str(known): rows[str(known)] for known in FAMILIES if str(known) in rows})
            sys.stdout.write(f"{family}: {row} {outcome.difference:.1e}, {outcome.graphs} graphs\n")


if __name__ == "__main__":
    main(sys.argv[1:])
