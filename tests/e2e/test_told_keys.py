"""The benchmark of attention that is told the number of keys: it runs, and finds forms that hide no padding."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.bench.told_keys import heard, main, masked, plain


def test_a_form_that_attends_to_padding_is_found() -> None:
    inputs = [torch.randn(2, 3, 16, 8) for _ in range(3)]
    assert heard(masked, inputs, 14) == (True, True)
    assert heard(plain, inputs, 14) == (False, False)
    assert heard(plain, inputs, 16) == (True, True), "there is no padding"


def test_a_form_that_multiplies_by_what_lies_behind_is_found() -> None:
    def added(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
        return scores.masked_fill(torch.arange(k.shape[2]) >= keys, -torch.inf).softmax(-1) @ v

    assert heard(added, [torch.randn(2, 3, 16, 8) for _ in range(3)], 14) == (True, False)


def test_the_benchmark_runs(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    main(["--smoke", "--rounds", "2", "--json", str(path)])
    figures = json.loads(path.read_text(encoding="utf-8"))
    found = figures["kernels"]["2 x 16 float32"]
    assert found["hides"] == {"plain": [False, False], "mask": [True, True]}
    assert set(found["lacks"]) == {"flash, told", "efficient, told"}, "kernels of a GPU"
    assert set(figures["layers"]["2 x 16"]) == {"made", "plain"}
    assert "made" in figures["layers"]["insertions"]
