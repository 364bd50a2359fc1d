"""Saved starts of tuned models: the variants that were chosen are loaded, and nothing is tuned again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import graphpass as gp
from graphpass.capture import recorder
from graphpass.compat import saving
from graphpass.compile import tuning
from tests.unit.compile.tuned import DESCENT, Bench, Captured, captured, notes, tuned
from tests.unit.models import linear, module


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A clock for variants that the real compiler makes."""
    bench = Bench(replay_s={(DESCENT,): 0.5})
    monkeypatch.setattr(recorder, "measurement_on", lambda device: bench)
    monkeypatch.setattr(tuning, "_NUM_REPLAYS", 3)
    monkeypatch.setattr(tuning, "SETTINGS", (DESCENT,))
    monkeypatch.setattr(Captured, "variant", property(lambda run: (run.name,), lambda run, _: None), raising=False)
    return bench


def layer() -> Any:
    """It calls a method of what an operator returns."""
    return module(lambda self, x: self.linear(x).relu().chunk(2, -1)[0] * 2, linear=linear(4))


def started(model: Any, folder: Path) -> tuple[Any, gp.GraphRuntime]:
    torch.compiler.reset()
    rt = gp.GraphRuntime()
    return captured(model, rt, warm_start=folder, capture_sizes=[4, 16], progress=False), rt


def test_variants_that_were_chosen_are_loaded(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = layer()
    x = torch.randn(16, 4)
    saved, rt = started(model, tmp_path)
    assert [(found.sizes, found.settings) for found in tuned(rt)] == [("9 and more", DESCENT), ("2 to 8", DESCENT)]
    bits = saved(x)
    monkeypatch.setattr(bench, "capture", None)
    loaded, other = started(model, tmp_path)
    assert other.compiled() == 0
    assert torch.equal(loaded(x), bits)
    torch.testing.assert_close(loaded(x[:3]), model(x[:3]))
    found = tuned(other)
    assert [(of.sizes, of.settings, of.tuned_s) for of in found] == [(of.sizes, of.settings, 0.5) for of in tuned(rt)]
    assert [of.tuning_s for of in found] == [0, 0]
    assert "not loaded" not in notes(other)
    assert "chose no variant" not in notes(other)
    for one in (rt, other):
        one.close()


@pytest.mark.soak
def test_a_choice_that_cannot_be_saved_removes_the_file(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = saving.dumps

    def dumps(record: Any) -> bytes:
        if any(region.tuned._chosen for region in record[0].graph.compiled.values()):
            raise saving.CannotSaveError("this variant")
        return written(record)

    monkeypatch.setattr(saving, "dumps", dumps)
    _, rt = started(layer(), tmp_path)
    assert "not saved: this variant" in notes(rt)
    assert not list(tmp_path.glob("*.graph"))
    rt.close()
