"""Real variants of Inductor in real graphs: the choice is no slower, as right as before, and equal in each replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphpass as gp
from graphpass.compat import configuration
from graphpass.compile import tuning

pytestmark = [pytest.mark.cuda, pytest.mark.alone]


class Step(nn.Module):
    """Layers of a decoder at one token: a norm, small products, a gate."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(width, 6 * width, bias=False) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(3 * width, width, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            gate, values = up(norm(x)).chunk(2, -1)
            x = x + down(nn.functional.silu(gate) * values)
        return x


@pytest.fixture
def step() -> Step:
    torch.manual_seed(0)
    return Step().cuda().bfloat16().eval()


def graphed(model: nn.Module, *example: Any, **options: Any) -> Any:
    """``model``, tuned within ten minutes and captured."""
    given = {"tune": "measure", "tune_seconds": 600, **options}
    made: Any = gp.graphed(model, **given)
    made.capture(*example)
    return made


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def test_a_decode_step_is_tuned(step: Step) -> None:
    x = torch.randn(1, 512, device="cuda", dtype=torch.bfloat16)
    exact = Step().cuda().double()
    exact.load_state_dict(step.state_dict())
    untuned = gp.graphed(step)
    untuned.capture(x)
    tuned = graphed(step, x)
    with torch.no_grad():
        wide = exact(x.double())
    assert error(tuned(x), wide) <= 1.6 * error(untuned(x), wide)
    first = tuned(x).clone()
    assert all(torch.equal(tuned(x), first) for _ in range(1000))
    (found,) = tuned.report().figures.costs.tuned
    assert found.tuning_s > 0
    assert found.untuned_s >= found.tuned_s > 0
    assert f"{found.gain:.1%}" in str(tuned.report())
    for one in (tuned, untuned):
        one.close()


def test_a_loaded_start_has_the_variants_that_were_chosen(step: Step, tmp_path: Path) -> None:
    x = torch.randn(1, 512, device="cuda", dtype=torch.bfloat16)
    starts = []
    for _ in range(2):
        torch.compiler.reset()
        tuned = graphed(step, x, warm_start=tmp_path, tune_seconds=60)
        bits, compiled = tuned(x).clone(), tuned.runtime.compiled()
        starts.append((bits, compiled, tuned.report().figures.costs.tuned))
        tuned.close()
    (bits, _, (chosen,)), (again, compiled, (loaded,)) = starts
    assert compiled == 0
    assert torch.equal(again, bits)
    assert loaded.settings == chosen.settings
    assert chosen.tuning_s > loaded.tuning_s == 0


def test_this_torch_has_the_settings() -> None:
    assert configuration.settings_that_are_off(tuning.SETTINGS) == list(tuning.SETTINGS)
