"""What a graphed call returns and leaves behind is what eager would: aliases, mutations, random numbers, state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphpass import GraphRuntime
from graphpass.errors import CaptureError
from tests.observed import reported_regions
from tests.unit.cgpass.attended import MODES, Run, compiled_with


def attended(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.cgpasstest.attend(x + 1) * 2


@MODES
def test_cloned_outputs_are_independent_of_later_replays(rt: GraphRuntime, at_key: Run, mode: str) -> None:
    compiled = compiled_with(rt, attended)
    first_in, second_in = torch.randn(4, 6), torch.randn(4, 6)
    first = at_key(compiled, mode, 4, first_in, capture=rt)
    second = at_key(compiled, mode, 4, second_in)
    torch.testing.assert_close(first, attended(first_in))
    torch.testing.assert_close(second, attended(second_in))


@MODES
def test_viewed_outputs_are_stale_after_the_next_replay(rt: GraphRuntime, at_key: Run, mode: str) -> None:
    compiled = compiled_with(rt, attended, outputs="view")
    with rt.capturing():
        for size in (4, 2):
            at_key(compiled, mode, size, torch.randn(size, 6))
    x = torch.randn(4, 6)
    held = at_key(compiled, mode, 4, x)
    torch.testing.assert_close(held, attended(x))
    at_key(compiled, mode, 2, torch.randn(2, 6))
    assert held.isnan().all(), "the other key's replay made it stale"


@MODES
@pytest.mark.parametrize("outputs", ["clone", "view"])
def test_an_output_fed_back_as_the_next_input(rt: GraphRuntime, at_key: Run, mode: str, outputs: str) -> None:
    compiled = compiled_with(rt, attended, outputs=outputs)
    got = at_key(compiled, mode, 4, torch.ones(4, 6), capture=rt)
    want = attended(torch.ones(4, 6))
    for _ in range(3):
        got, want = at_key(compiled, mode, 4, got), attended(want)
        torch.testing.assert_close(got, want)


@MODES
def test_outputs_keep_their_aliases(rt: GraphRuntime, at_key: Run, mode: str) -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = attended(x)
        return y, y[1:], y.t(), x[:, :2], x

    compiled = compiled_with(rt, model)
    at_key(compiled, mode, 4, torch.randn(4, 6), capture=rt)
    x = torch.randn(4, 6)
    y, tail, turned, part, same = at_key(compiled, mode, 4, x)
    torch.testing.assert_close((y, tail, turned, part), model(x)[:4])
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
def test_structured_outputs_come_back_in_their_structure(rt: GraphRuntime, at_key: Run, mode: str) -> None:
    def model(x: torch.Tensor, *, flag: bool) -> dict[str, Any]:
        y = attended(x)
        return {"list": [y, (y + 1, None)], "number": 3, "pair": Pair(y.sum(0), None), "size": x.shape[0], "flag": flag}

    compiled = compiled_with(rt, model)
    at_key(compiled, mode, 4, torch.randn(4, 6), flag=True, capture=rt)
    x = torch.randn(4, 6)
    got, want = at_key(compiled, mode, 4, x, flag=True), model(x, flag=True)
    assert isinstance(got["pair"], Pair)
    assert got["pair"].right is None
    torch.testing.assert_close(got.pop("pair").left, want.pop("pair").left)
    assert (got.pop("number"), got.pop("size"), got.pop("flag")) == (3, 4, True)
    assert got["list"][1][1] is None
    torch.testing.assert_close((got["list"][0], got["list"][1][0]), (want["list"][0], want["list"][1][0]))


@MODES
def test_nested_and_keyword_inputs_are_staged(rt: GraphRuntime, at_key: Run, mode: str) -> None:
    def model(pair: list[torch.Tensor], *, extra: dict[str, torch.Tensor]) -> torch.Tensor:
        return attended(pair[0]) + pair[1] * extra["weight"]

    compiled = compiled_with(rt, model)
    example = [torch.randn(4, 6), torch.randn(4, 6)]
    at_key(compiled, mode, 4, example, extra={"weight": torch.randn(6)}, capture=rt)
    inputs, extra = [torch.randn(4, 6), torch.randn(4, 6)], {"weight": torch.randn(6)}
    torch.testing.assert_close(at_key(compiled, mode, 4, inputs, extra=extra), model(inputs, extra=extra))


@MODES
@pytest.mark.parametrize(
    "make",
    [lambda: torch.randn(4, 12)[:, ::2], lambda: torch.randn(6, 4).t(), lambda: torch.randn(9, 6)[2:6]],
    ids=["strided slice", "transposed", "offset slice"],
)
def test_inputs_that_are_views_are_read_as_they_lie(
    rt: GraphRuntime, at_key: Run, mode: str, make: Callable[[], torch.Tensor]
) -> None:
    compiled = compiled_with(rt, attended)
    at_key(compiled, mode, 4, make(), capture=rt)
    for _ in range(2):
        x = make()
        torch.testing.assert_close(at_key(compiled, mode, 4, x), attended(x))
    assert rt.stats().captured == (1 if mode == "FULL" else 2)


@MODES
def test_a_mutated_input_is_the_callers(rt: GraphRuntime, at_key: Run, mode: str) -> None:
    def model(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total.add_(attended(x))
        return total * 2

    compiled = compiled_with(rt, model)
    x, total, eager = torch.randn(4, 6), torch.zeros(4, 6), torch.zeros(4, 6)
    for capture in (rt, None, None):
        got = at_key(compiled, mode, 4, x, total, capture=capture)
        torch.testing.assert_close(got, model(x, eager))
        torch.testing.assert_close(total, eager)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        return self.norm(torch.ops.cgpasstest.attend(x)) + self.steps


@MODES
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_buffers_end_as_eager_leaves_them(rt: GraphRuntime, at_key: Run, mode: str, compiler: str) -> None:
    model = Counting().train()
    eager = copy.deepcopy(model)
    compiled = compiled_with(rt, model, compiler=compiler)
    for step, capture in enumerate((rt, None, None), start=1):
        x = torch.randn(4, 6)
        got = at_key(compiled, mode, 4, x, capture=capture)
        with torch.no_grad():
            torch.testing.assert_close(got, eager(x))
        torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))
        assert model.steps.item() == model.norm.num_batches_tracked.item() == step, (
            "also the capturing call counts once"
        )


@MODES
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_random_numbers_are_the_eager_stream(rt: GraphRuntime, at_key: Run, mode: str, compiler: str) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return attended(F.dropout(x, 0.5, training=True)) + torch.rand(6)

    compiled = compiled_with(rt, model, compiler=compiler)
    x = torch.randn(4, 6)
    torch.manual_seed(3)
    got = [at_key(compiled, mode, 4, x, capture=rt), at_key(compiled, mode, 4, x), at_key(compiled, mode, 4, x)]
    after = torch.rand(3)
    torch.manual_seed(3)
    want = [model(x) for _ in range(3)]
    assert torch.equal(torch.rand(3), after), "the generator stands where eager leaves it"
    torch.testing.assert_close(got, want)
    torch.manual_seed(3)
    torch.testing.assert_close([at_key(compiled, mode, 4, x) for _ in range(3)], want)


def test_a_float_attribute_recompiles_when_it_changes_and_is_no_host_read(rt: GraphRuntime, at_key: Run) -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.eps = 1e-5
            self.rate = 0.25

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.layer_norm(x, (6,), eps=self.eps) * self.rate

    model = Norm()
    compiled = compiled_with(rt, model)
    x = torch.randn(4, 6)
    torch.testing.assert_close(at_key(compiled, "FULL", 4, x, capture=rt), model(x))
    model.rate = 0.75
    torch.testing.assert_close(at_key(compiled, "FULL", 4, x, capture=rt), model(x))
    model.eps = 0.5
    torch.testing.assert_close(at_key(compiled, "FULL", 4, x, capture=rt), model(x))
    torch.testing.assert_close(at_key(compiled, "FULL", 4, x + 1), model(x + 1))
    rows = reported_regions(rt)
    assert {kind for _, kind, _ in rows} == {"captured"}
    assert {name.partition(".")[0] for name, *_ in rows} == {"g0", "g1", "g2"}


@MODES
def test_a_python_number_is_guarded_or_refused_never_wrong(rt: GraphRuntime, at_key: Run, mode: str) -> None:
    def model(x: torch.Tensor, factor: int) -> torch.Tensor:
        return attended(x) * factor

    compiled = compiled_with(rt, model)
    x = torch.randn(4, 6)
    at_key(compiled, mode, 4, x, 3, capture=rt)
    torch.testing.assert_close(at_key(compiled, mode, 4, x, 3), model(x, 3))
    with pytest.raises(CaptureError, match=r"baked into the graph|has no graph"):
        at_key(compiled, mode, 4, x, 5)


@MODES
def test_inference_mode_captures_and_replays(rt: GraphRuntime, at_key: Run, mode: str) -> None:
    model = nn.Linear(6, 6).eval()
    compiled = compiled_with(rt, lambda x: attended(model(x)))
    with torch.inference_mode():
        at_key(compiled, mode, 4, torch.randn(4, 6), capture=rt)
        x = torch.randn(4, 6)
        torch.testing.assert_close(at_key(compiled, mode, 4, x), attended(model(x)))
    outside = torch.randn(4, 6)
    with rt.capturing():
        got = at_key(compiled, mode, 4, outside)
    torch.testing.assert_close(got, attended(model(outside)).detach())


def test_autograd_compiles_and_never_captures(
    rt: GraphRuntime, caplog: pytest.LogCaptureFixture, python_calls: list[str]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).train()
    eager = copy.deepcopy(model)
    compiled = compiled_with(rt, model)
    for size in (4, 3, 1):
        x = torch.randn(size, 6)
        compiled(x).square().sum().backward()
        eager(x).square().sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])
    said = [r for r in caplog.records if r.name == "graphpass" and "autograd" in r.message]
    assert [r.levelname for r in said] == ["WARNING"], "two callables, said once"
    assert "torch.inference_mode()" in said[0].message
    assert rt.counts() == {}
    assert any(record.off is not None and "never captured" in record.off.why for record in rt.callables())


def test_autograd_and_graphs_from_one_compile(rt: GraphRuntime, at_key: Run, tally: Run) -> None:
    model = nn.Linear(6, 6)
    compiled = compiled_with(rt, model)
    compiled(torch.randn(4, 6)).sum().backward()
    assert model.weight.grad is not None
    x = torch.randn(4, 6)
    with torch.no_grad():
        torch.testing.assert_close(at_key(compiled, "FULL", 4, x, capture=rt), model(x))
    assert tally(rt, "FULL") == {("g1.full", 4): (1, 1)}


def test_a_written_parameter_that_is_assigned_stays_that_parameter(rt: GraphRuntime) -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total = nn.Parameter(torch.zeros(6))

        def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            self.total += x[rows][0]
            return x

    module = Summed()
    parameter = module.total
    options = {"compiler": "eager", "runtime": rt, "dispatch": "auto"}
    compiled = torch.compile(module, backend="cgpass", options=options)
    with torch.no_grad():
        for rows in ([0], [1, 0], [0, 1, 2], [1, 2, 0], [2, 2], [2, 1]):
            before = parameter.clone()
            x = torch.randn(3, 6)
            compiled(x, torch.tensor(rows))
            assert module.total is parameter
            torch.testing.assert_close(parameter, before + x[rows[0]])
    assert sum(count.replayed for count in rt.counts().values()) > 0
