"""Which tests a default run leaves to `tox run -e accept`, and the order of files: those that take longest come first.

Two processes take whole files: a long one at the end would leave a process without work.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

E2E = Path(__file__).parent / "e2e"
COSTS = Path(__file__).parent / "costs.txt"
LEAST_S = 4
"""Files that take less are not written down."""


def left_to_accept(items: Iterable[pytest.Item], arguments: Iterable[str]) -> set[pytest.Item]:
    """The end-to-end tests that are not the ones of their routes; none where some are asked for by their folder."""
    if any(E2E.name in argument for argument in arguments):
        return set()
    return {item for item in items if E2E in item.path.parents and item.get_closest_marker("route") is None}


def costliest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The items by the costs of their files as :func:`write_costs` has measured them, and as they came where equal."""
    costs = read_costs()
    return sorted(items, key=lambda item: -costs.get(item.nodeid.partition("::")[0], 0))


def shuffled(items: Iterable[pytest.Item], seed: int) -> list[pytest.Item]:
    """The items by files and, in each file, by tests in an order of this seed: what depends on an order fails."""
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.nodeid.partition("::")[0], []).append(item)
    chance = random.Random(seed)
    files = [chance.sample(of_file, len(of_file)) for of_file in by_file.values()]
    chance.shuffle(files)
    return [item for of_file in files for item in of_file]


def read_costs() -> dict[str, int]:
    """{file: seconds}."""
    lines = COSTS.read_text(encoding="utf-8").splitlines()
    return {file: int(seconds) for seconds, file in map(str.split, lines)}


def write_costs(reports: Iterable[pytest.TestReport]) -> None:
    """Write down what each file of a run took; files that did not run stay as they were."""
    took: Counter[str] = Counter()
    for report in reports:
        took[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]
    costs = {**read_costs(), **{file: round(seconds) for file, seconds in took.items()}}
    rows = sorted((-seconds, file) for file, seconds in costs.items() if seconds >= LEAST_S)
    COSTS.write_text("".join(f"{-seconds:4} {file}\n" for seconds, file in rows), encoding="utf-8")
