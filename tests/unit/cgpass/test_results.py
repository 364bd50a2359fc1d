"""What a graphed call returns and leaves behind is what eager would: aliases, mutations, random numbers, state."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphpass.errors import CaptureError
from tests.observed import reported_regions
from tests.unit.cgpass.attended import COMPILERS, MODES, Make, attended
from tests.unit.compiled import agrees
from tests.unit.models import module


@MODES
def test_cloned_outputs_are_independent_of_later_replays(keyed: Make, mode: str) -> None:
    fast = keyed(attended)
    given = [torch.randn(4, 6) for _ in range(2)]
    agrees([fast.at(mode, 4, x, capture=x is given[0]) for x in given], [attended(x) for x in given])


@MODES
def test_viewed_outputs_are_stale_after_the_next_replay(keyed: Make, mode: str) -> None:
    fast = keyed(attended, dynamic=True, outputs="view")
    fast.capture(mode, sizes=(4, 2))
    x = torch.randn(4, 6)
    held = fast.at(mode, 4, x)
    agrees(held, attended(x))
    fast.at(mode, 2, torch.randn(2, 6))
    assert held.isnan().all(), "the other key's replay made it stale"


@MODES
@pytest.mark.parametrize("outputs", ["clone", "view"])
def test_an_output_fed_back_as_the_next_input(keyed: Make, mode: str, outputs: str) -> None:
    fast = keyed(attended, outputs=outputs)
    got, want = fast.at(mode, 4, torch.ones(4, 6), capture=True), attended(torch.ones(4, 6))
    for _ in range(3):
        got, want = fast.at(mode, 4, got), attended(want)
        agrees(got, want)


@MODES
def test_outputs_keep_their_aliases(keyed: Make, mode: str) -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = attended(x)
        return y, y[1:], y.t(), x[:, :2], x

    fast = keyed(model)
    fast.capture(mode)
    x = torch.randn(4, 6)
    y, tail, turned, part, same = fast.at(mode, 4, x)
    agrees((y, tail, turned, part), model(x)[:4])
    y.fill_(7)
    assert tail.eq(7).all()
    assert turned.eq(7).all()
    part.fill_(9)
    assert x[:, :2].eq(9).all(), "a view of the caller's own tensor"
    assert same is x


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor | None


@MODES
def test_structured_outputs_come_back_in_their_structure(keyed: Make, mode: str) -> None:
    def model(x: torch.Tensor, *, flag: bool) -> dict[str, Any]:
        y = attended(x)
        return {"list": [y, (y + 1, None)], "number": 3, "pair": Pair(y.sum(0), None), "size": x.shape[0], "flag": flag}

    fast = keyed(model)
    fast.at(mode, 4, torch.randn(4, 6), flag=True, capture=True)
    x = torch.randn(4, 6)
    got, want = fast.at(mode, 4, x, flag=True), model(x, flag=True)
    assert isinstance(got["pair"], Pair)
    assert got["pair"].right is None
    agrees(got.pop("pair").left, want.pop("pair").left)
    assert (got.pop("number"), got.pop("size"), got.pop("flag")) == (3, 4, True)
    assert got["list"][1][1] is None
    agrees((got["list"][0], got["list"][1][0]), (want["list"][0], want["list"][1][0]))


@MODES
def test_nested_and_keyword_inputs_are_staged(keyed: Make, mode: str) -> None:
    def model(pair: list[torch.Tensor], *, extra: dict[str, torch.Tensor]) -> torch.Tensor:
        return attended(pair[0]) + pair[1] * extra["weight"]

    fast = keyed(model)
    for capture in (True, False):
        pair, extra = [torch.randn(4, 6), torch.randn(4, 6)], {"weight": torch.randn(6)}
        agrees(fast.at(mode, 4, pair, extra=extra, capture=capture), model(pair, extra=extra))


@MODES
def test_a_mutated_input_is_the_callers(keyed: Make, mode: str) -> None:
    def model(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total.add_(attended(x))
        return total * 2

    fast = keyed(model)
    x, total, eager = torch.randn(4, 6), torch.zeros(4, 6), torch.zeros(4, 6)
    for capture in (True, False, False):
        agrees(fast.at(mode, 4, x, total, capture=capture), model(x, eager))
        agrees(total, eager)


def counting(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.steps.add_(1)
    return self.norm(torch.ops.cgpasstest.attend(x)) + self.steps


@MODES
@COMPILERS
def test_buffers_end_as_eager_leaves_them(keyed: Make, mode: str, compiler: str) -> None:
    model: Any = module(counting, steps=torch.zeros((), dtype=torch.long), norm=nn.BatchNorm1d(6)).train()
    eager = copy.deepcopy(model)
    fast = keyed(model, compiler=compiler)
    for step, capture in enumerate((True, False, False), start=1):
        x = torch.randn(4, 6)
        got = fast.at(mode, 4, x, capture=capture)
        with torch.no_grad():
            agrees(got, eager(x))
        agrees(dict(model.named_buffers()), dict(eager.named_buffers()))
        steps = (model.steps.item(), model.norm.num_batches_tracked.item())
        assert steps == (step, step), "also the capturing call counts once"


@MODES
@COMPILERS
def test_random_numbers_are_the_eager_stream(keyed: Make, mode: str, compiler: str) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return attended(F.dropout(x, 0.5, training=True)) + torch.rand(6)

    fast, x = keyed(model, compiler=compiler), torch.randn(4, 6)
    torch.manual_seed(3)
    got = [fast.at(mode, 4, x, capture=step == 0) for step in range(3)]
    after = torch.rand(3)
    torch.manual_seed(3)
    want = [model(x) for _ in range(3)]
    assert torch.equal(torch.rand(3), after), "the generator stands where eager leaves it"
    agrees(got, want)
    torch.manual_seed(3)
    agrees([fast.at(mode, 4, x) for _ in range(3)], want)


def test_a_float_attribute_recompiles_when_it_changes_and_is_no_host_read(keyed: Make) -> None:
    def normed(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (6,), eps=self.eps) * self.rate

    model: Any = module(normed, eps=1e-5, rate=0.25)
    fast = keyed(model, dynamic=True)
    for model.rate, model.eps in ((0.25, 1e-5), (0.75, 1e-5), (0.75, 0.5)):
        fast.check("FULL", capture=True)
    fast.check("FULL")
    regions = reported_regions(fast.rt)
    assert {kind for _, kind, _ in regions} == {"captured"}
    assert {name.partition(".")[0] for name, *_ in regions} == {"g0", "g1", "g2"}


@MODES
def test_a_python_number_is_guarded_or_refused_never_wrong(keyed: Make, mode: str) -> None:
    fast = keyed(lambda x, factor: attended(x) * factor, dynamic=True, make=lambda size: (torch.randn(size, 6), 3))
    fast.capture(mode)
    fast.check(mode)
    with pytest.raises(CaptureError, match=r"baked into the graph|has no graph"):
        fast.at(mode, 4, torch.randn(4, 6), 5)


@MODES
def test_inference_mode_captures_and_replays(keyed: Make, mode: str) -> None:
    model = nn.Linear(6, 6).eval()
    fast = keyed(lambda x: attended(model(x)))
    with torch.inference_mode():
        fast.capture(mode)
        fast.check(mode)
    fast.check(mode, capture=True)


def test_autograd_compiles_and_never_captures(keyed: Make, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).train()
    eager = copy.deepcopy(model)
    fast = keyed(model)
    for size in (4, 3, 1):
        x = torch.randn(size, 6)
        for run in (fast.fast, eager):
            run(x).square().sum().backward()
    agrees([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])
    said = [r for r in caplog.records if r.name == "graphpass" and "autograd" in r.message]
    assert [r.levelname for r in said] == ["WARNING"], "two callables, said once"
    assert "torch.inference_mode()" in said[0].message
    assert fast.rt.counts() == {}
    assert any(record.off is not None and "never captured" in record.off.why for record in fast.rt.callables())


def test_autograd_and_graphs_from_one_compile(keyed: Make) -> None:
    model = nn.Linear(6, 6)
    fast = keyed(model)
    fast.fast(torch.randn(4, 6)).sum().backward()
    assert model.weight.grad is not None
    fast.check("FULL", capture=True)
    assert fast.tally("FULL") == {("g1.full", 4): (1, 1)}


def test_a_written_parameter_that_is_assigned_stays_that_parameter(compiled: Make) -> None:
    def summed(self: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        self.total += x[rows][0]
        return x

    model: Any = module(summed, total=nn.Parameter(torch.zeros(6)))
    parameter, fast = model.total, compiled(model)
    for rows in ([0], [1, 0], [0, 1, 2], [1, 2, 0], [2, 2], [2, 1]):
        before, x = parameter.detach().clone(), torch.randn(3, 6)
        fast(x, torch.tensor(rows))
        assert model.total is parameter
        agrees(parameter.detach(), before + x[rows[0]])
    assert fast.rt.stats().replayed > 0
