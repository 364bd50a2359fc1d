"""Timings of what a ladder captured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from graphpass.serving import traffic


@pytest.mark.parametrize(
    ("seconds", "enough_s", "expected"),
    [([9, 3, 1, 2], 100.0, 2), ([9, 3, 1, 2], 4.0, 2), ([9, 3, 1, 2], 3.0, 3), ([9, 1, 1, 2], 3.0, 1)],
)
def test_the_median_of_as_many_runs_as_take_long_enough(
    seconds: list[int], enough_s: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, left = [0.0], iter(seconds)

    def run() -> None:
        now[0] += next(left)

    monkeypatch.setattr(traffic.time, "perf_counter", lambda: now[0])
    assert traffic.timed_s(run, torch.device("cpu"), enough_s=enough_s) == expected


def test_a_run_is_timed_three_times_after_a_warm_up() -> None:
    runs: Iterator[int] = iter(range(100))
    traffic.timed_s(lambda: next(runs), torch.device("cpu"))
    assert next(runs) == 4
