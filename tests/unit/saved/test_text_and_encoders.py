"""A CausalLM and an encoder that start again from what another one saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from graphpass.text import CausalLM
from tests.unit.encoder import toy
from tests.unit.saved.stack import SAVES_AOT_EAGER
from tests.unit.text import test_model as text


def refuse_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on nothing may be partitioned or compiled."""
    torch.compiler.reset()
    counters.clear()
    for name in ("partition", "RegionCompiler", "dispatched"):
        monkeypatch.setattr(f"cgpass.pipeline.{name}", None)


@SAVES_AOT_EAGER
def test_a_causal_lm_loads_what_another_one_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"compiler": None, "capture_sizes": [2], "warm_start": tmp_path / "starts", "progress": False}
    sizes: dict[str, Any] = {**text.SIZES, **given}
    first = CausalLM(text.llama(), **sizes)
    first.capture()
    expected = text.tokens(first)
    first.close()
    refuse_work(monkeypatch)
    second = CausalLM(text.llama(), **sizes)
    second.capture()
    assert text.tokens(second) == expected
    assert second.manager.runtime.compiled() == 0
    assert not counters["frames"]


@SAVES_AOT_EAGER
def test_an_encoder_loads_what_another_one_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"warm_start": tmp_path / "starts", "token_budgets": (8,)}
    first = toy.made(toy.Compiled(), **options)
    items = toy.images(toy.MIXED)
    expected = first.execute(items)
    assert first.runtime.compiled() > 0
    refuse_work(monkeypatch)
    second = toy.made(toy.Compiled(), **options)
    toy.assert_same(second.execute(items), expected)
    assert second.runtime.compiled() == 0, second.runtime.notes
