"""Which combinations of their parameters tests run with: each value of each ``parametrize`` once, or all of them.

A test of several ``parametrize`` marks runs with their product. By default, a run takes a few of these combinations, in
which each row of each mark occurs; `--all-combinations` takes them all, and so does a run with `-m` or a test's name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import pytest

Row = tuple[str, Hashable]


def rows_of(item: pytest.Item) -> frozenset[Row]:
    """One row of each ``parametrize`` mark, and one value of each parametrized fixture."""
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return frozenset()
    values = dict(item.callspec.params)
    rows: set[Row] = set()
    for mark in item.iter_markers("parametrize"):
        names = [name for name in names_of(mark) if name in values]
        rows.add((",".join(names), tuple(id(values.pop(name)) for name in names)))
    return frozenset(rows | {(name, id(value)) for name, value in values.items()})


def names_of(mark: pytest.Mark) -> list[str]:
    """The parameters that a ``parametrize`` mark sets."""
    names: str | Sequence[str] = mark.args[0] if mark.args else mark.kwargs["argnames"]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def each_row_once(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Enough of these items that each row of a test occurs in one of its items: those with most new rows.

    Items of other marks count apart: what runs on a GPU does not stand for what runs without one.
    """
    tests: dict[Hashable, list[pytest.Item]] = defaultdict(list)
    for item in items:
        marks = frozenset(mark.name for mark in item.iter_markers())
        tests[item.nodeid.partition("[")[0], marks].append(item)
    return {item for combinations in tests.values() for item in _covering(combinations)}


def _covering(combinations: list[pytest.Item]) -> list[pytest.Item]:
    rows = {item: rows_of(item) for item in combinations}
    wanted = frozenset().union(*rows.values())
    if not wanted:
        return combinations
    taken = []
    while wanted:
        best = max(combinations, key=lambda item: len(rows[item] & wanted))
        taken.append(best)
        wanted -= rows[best]
    return taken
