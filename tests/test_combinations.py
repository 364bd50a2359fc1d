"""A default run takes each row of each ``parametrize`` mark of a test; the rest of the product is for another run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.combinations import each_row_once

FILE = """
import pytest

@pytest.mark.parametrize("x", [1, 2, 3])
@pytest.mark.parametrize(("y", "z"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_product(x, y, z): ...

@pytest.mark.parametrize("x", [1, 2, 3])
def test_one_mark(x): ...

@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skip)])
@pytest.mark.parametrize("x", [1, 2, 3])
def test_marks_of_rows(x, device): ...

@pytest.fixture(params=[1, 2])
def made(request): return request.param

@pytest.mark.parametrize("x", [1, 2])
def test_fixture(made, x): ...

class TestOne:
    @pytest.mark.parametrize("x", [1, 2])
    @pytest.mark.parametrize("y", [1, 2])
    def test_in_a_class(self, x, y): ...

def test_without_parameters(): ...
"""


class Collected:
    def __init__(self) -> None:
        self.taken: list[pytest.Function] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        taken = each_row_once(items)
        self.taken = [item for item in items if item in taken and isinstance(item, pytest.Function)]


@pytest.fixture
def taken(tmp_path: Path) -> dict[str, list[tuple[object, ...]]]:
    """The combinations of each test, by its name."""
    (tmp_path / "test_file.py").write_text(FILE)
    collected = Collected()
    options = ["-q", "--collect-only", "--import-mode=importlib", "-p", "no:cacheprovider", "-c", "/dev/null"]
    assert pytest.main([*options, "--rootdir", str(tmp_path), str(tmp_path)], plugins=[collected]) == 0
    found: dict[str, list[tuple[object, ...]]] = {}
    for item in collected.taken:
        values = item.callspec.params if hasattr(item, "callspec") else {}
        found.setdefault(item.originalname, []).append(tuple(values[name] for name in sorted(values)))
    return found


def test_each_row_occurs_in_the_fewest_combinations(taken: dict[str, list[tuple[object, ...]]]) -> None:
    product = taken["test_product"]
    assert {x for x, _, _ in product} == {1, 2, 3}
    assert sorted((y, z) for _, y, z in product) == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert taken["test_one_mark"] == [(1,), (2,), (3,)]
    assert len(taken["test_fixture"]) == len(taken["test_in_a_class"]) == 2
    assert taken["test_without_parameters"] == [()]


def test_what_is_skipped_stands_for_nothing(taken: dict[str, list[tuple[object, ...]]]) -> None:
    rows = taken["test_marks_of_rows"]
    assert [x for device, x in rows if device == "cpu"] == [x for device, x in rows if device == "cuda"] == [1, 2, 3]
