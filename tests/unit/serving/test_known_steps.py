"""Steps of known sizes: what the first has looked up serves the later ones, and what others may change is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import graphpass as gp
from graphpass import Batch, InputSpec
from graphpass.capture.modelstate import ModelState
from graphpass.capture.replay import ReplayPlan
from graphpass.errors import ShapeError, StaticInputError
from graphpass.regions import register_padding_rule
from tests.unit.serving.managed import WIDTH, Attends, Requests, Rows, SlotBuilder, captured, rows


def batch(size: int) -> Batch:
    return Batch(size, inputs={"x": torch.randn(size, WIDTH)})


def agree(model: Any, steps: Any, of: Batch) -> None:
    assert of.inputs is not None
    with torch.no_grad():
        torch.testing.assert_close(steps.run(of), model(**of.inputs))


def test_the_inputs_of_a_later_step_fit_or_are_refused() -> None:
    model = Rows()
    manager = captured(model)
    for _ in range(3):
        agree(model, manager, batch(3))
    for wrong in (torch.randn(1, WIDTH), torch.randn(3, WIDTH, dtype=torch.float64), torch.randn(3, 1)):
        with pytest.raises(ShapeError, match="does not fit its buffer"):
            manager.run(Batch(3, inputs={"x": wrong}))
    for other in (torch.randn(WIDTH, 3).t(), torch.randn(3, 2 * WIDTH)[:, ::2], torch.randn(3, WIDTH)):
        agree(model, manager, Batch(3, inputs={"x": other}))
    shifted = manager.buffers["x"]
    shifted[:5] = torch.randn(5, WIDTH)
    rows = shifted[1:4].clone()  # in the manager's own memory, one row after its place
    with torch.no_grad():
        torch.testing.assert_close(manager.run(Batch(3, inputs={"x": shifted[1:4]})), model(rows))


def test_results_of_one_size_are_objects_of_their_own() -> None:
    manager = captured(Rows())
    first = manager.run(batch(3))
    first.unsqueeze_(0)
    assert manager.run(batch(3)).shape == (3, 5)


@torch.library.custom_op("knownsteps::hidden", mutates_args=())
def hidden(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(gp.get_forward_context().is_padding[:, None], 0.0)


hidden.register_fake(torch.empty_like)
register_padding_rule("knownsteps::hidden", lambda call: call.fresh())


def test_a_graph_that_reads_the_context_is_replayed_in_one() -> None:
    """The address that it has read is compared in each step."""
    model = lambda x: torch.ops.knownsteps.hidden(x)  # noqa: E731
    manager, x = captured(model, sizes=(4,)), torch.randn(3, WIDTH)
    torch.testing.assert_close(manager.run(Batch(3, inputs={"x": x})), x)
    (key,) = manager._captured._by_key.values()
    assert not key.is_bare


# -- a loop in which nobody else has control


def exchanged(model: nn.Module) -> None:
    model.inner.weight = nn.Parameter(torch.randn_like(model.inner.weight))


def test_unattended_steps_compare_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, compare = list[int](), ModelState.matches_modules
    monkeypatch.setattr(ModelState, "matches_modules", lambda *given: compared.append(1) or compare(*given))
    model = Rows()
    manager = captured(model)
    steps = manager.unattended()
    compared.clear()
    for _ in range(5):
        agree(model, steps, batch(3))
    assert len(compared) == 1
    agree(model, manager, batch(3))
    assert len(compared) == 2, "run() compares in every call"


def test_after_somebody_else_had_control_a_step_compares_again() -> None:
    model = Rows()
    manager = captured(model)
    steps = manager.unattended()
    for _ in range(3):
        agree(model, steps, batch(3))
        exchanged(model)
        steps.attended()


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_code_of_the_user_in_a_step_counts_as_control(mode: str) -> None:
    """A padding function runs in each step; in PIECEWISE eager regions do."""
    model, calls = Rows(), list[int]()

    def padding(real: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        calls.append(1)
        return nn.functional.pad(real, (0, 0, 0, shape[0] - len(real)))

    given = {"specs": [InputSpec("x", (10, WIDTH), torch.float32, padding=padding)]} if mode == "FULL" else {}
    manager = captured(model, mode, splitting_ops=["aten::tanh"], **given)
    steps = manager.unattended()
    for _ in range(3):
        agree(model, steps, batch(3))
        exchanged(model)
    assert bool(calls) == (mode == "FULL")


def test_other_metadata_is_compared_in_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    model, builder = Attends(), SlotBuilder()
    manager = captured(model, sizes=(4,), attention=builder)
    steps, requests = manager.unattended(), Requests(model)
    compared, check = list[int](), ReplayPlan.check

    def spied(plan: ReplayPlan, args: Any, context: Any, reads: Any = None) -> None:
        compared.extend([1] * (reads is None))
        check(plan, args, context, reads)

    monkeypatch.setattr(ReplayPlan, "check", spied)
    for _ in range(4):
        x = rows(2)
        torch.testing.assert_close(steps.run(Batch(2, inputs={"x": x}, attention=[1, 3])), requests.step(x, [1, 3]))
    assert len(compared) == 1
    builder.sums, builder._by_key = builder.sums.clone(), {}
    with pytest.raises(StaticInputError, match="forward context"):
        steps.run(Batch(2, inputs={"x": rows(2)}, attention=[1, 3]))
