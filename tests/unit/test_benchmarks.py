"""Benchmarks that no other test runs: they import, and name what there is."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests import bench
from tests.bench import partition_time

MODULES = sorted(path.stem for path in Path(bench.__file__).parent.glob("*.py") if not path.stem.startswith("_"))


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_imports(name: str) -> None:
    importlib.import_module(f"tests.bench.{name}")


def test_the_steps_of_a_partition_are_timed() -> None:
    timing = partition_time.measure(1)
    assert set(timing.phase_s) == set(partition_time.PHASES.values())
