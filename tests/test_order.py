"""A default run has an end-to-end test of each route; files that take longest come first."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import order

ROUTES = {"one argument", "graphed", "CausalLM", "attach", "PEFT", "ranks"}


@dataclass(frozen=True)
class Item:
    """As far as the order asks."""

    nodeid: str
    path: Path
    mark: Any

    def get_closest_marker(self, name: str) -> Any:
        return self.mark


def items(*names: str) -> list[Any]:
    marked = {"e2e/a.py": pytest.mark.route("one argument").mark}
    return [Item(f"{name}::test_one", order.E2E.parent / name, marked.get(name)) for name in names]


def test_each_route_has_an_end_to_end_test() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in order.E2E.glob("*.py"))
    assert sorted(re.findall(r'mark\.route\("(.+?)"\)', sources)) == sorted(ROUTES)


@pytest.mark.parametrize(
    ("arguments", "left_out"), [(["tests"], {"b"}), (["tests/e2e"], set()), (["tests/e2e/b.py"], set())]
)
def test_an_end_to_end_test_runs_where_it_is_its_routes_or_named(arguments: list[str], left_out: set[str]) -> None:
    found = {item.path.stem for item in order.left_to_accept(items("e2e/a.py", "e2e/b.py", "unit/c.py"), arguments)}
    assert found == left_out


def test_the_longest_files_come_first_and_others_as_they_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "COSTS", tmp_path / "costs.txt")
    (tmp_path / "costs.txt").write_text("   9 b.py\n  12 gone.py\n")
    reports = [SimpleNamespace(nodeid=f"{file}::test_{n}", duration=s) for n, (file, s) in enumerate(
        [("d.py", 4.1), ("a.py", 1.0), ("d.py", 20.2), ("c.py", 3.0)])]  # fmt: skip
    order.write_costs(reports)  # type: ignore[arg-type]
    assert order.read_costs() == {"d.py": 24, "gone.py": 12, "b.py": 9}
    found = [item.nodeid for item in order.costliest_first(items("a.py", "b.py", "c.py", "d.py"))]
    assert found == ["d.py::test_one", "b.py::test_one", "a.py::test_one", "c.py::test_one"]


def test_a_seed_shuffles_files_and_the_tests_of_each() -> None:
    names = [f"{file}::test_{n}" for file in "abc" for n in range(9)]
    taken = [Item(name, Path(name), None) for name in names]
    orders = [[item.nodeid for item in order.shuffled(taken, seed)] for seed in (0, 0, 1)]  # type: ignore[arg-type]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == names != sorted(orders[0], key=lambda name: name[0])
    assert len({name[0] for name in orders[0][:9]}) == 1, "a file stays in one piece"
