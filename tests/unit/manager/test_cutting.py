"""Outputs are cut where their symbols say so, never by equal sizes; what the model writes is the caller's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

import graphpass
from graphpass import GraphedModel, ShapeError

MODES = pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])


def made(model: Callable[..., Any], sizes: Any = (4, 8), dims: Any = None, **options: Any) -> GraphedModel:
    return graphpass.graphed(model, sizes, {"x": 0} if dims is None else dims, **{"compiler": "eager", **options})


def agrees(fast: GraphedModel, model: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
    """The graphed model's results are the model's, shapes included, at each input shape."""
    for shape in shapes:
        x = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize("width", [4, 8, 3], ids=["a capture size", "another capture size", "the real size"])
def test_a_width_that_equals_a_size_is_not_cut(width: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(width, width)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = self.inner(x)
            return y, y.amax(0), y.t() @ y, y.t()

    model = Model().eval()
    fast = made(model, cut={1: {}, 2: {}})
    with torch.no_grad():
        for rows in (3, 4, 7, 8, 3):
            x = torch.randn(rows, width)
            (y, top, gram, turned), (want, *_, want_turned) = fast(x), model(x)
            torch.testing.assert_close((y, turned), (want, want_turned))
            assert (top.shape, gram.shape) == ((width,), (width, width))


def test_outputs_without_the_symbol_are_left_whole() -> None:
    weight = torch.randn(8)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", weight)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * self.weight, self.weight * 2

    agrees(made(Model()), Model(), (3, 8), (7, 8), (8, 8))


def test_two_symbols_in_any_order() -> None:
    def model(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"turned": x.transpose(0, 1) * 2, "rows": x.cos()[:, 0], "columns": x[0].sin()}

    fast = made(model, {"a": [4, 8], "b": [4, 8]}, {"x": {0: "a", 1: "b"}})
    agrees(fast, model, (3, 7), (7, 3), (4, 8), (8, 4), (2, 2))


def doubled(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x]) * 2


def test_a_derived_size_needs_a_cut() -> None:
    with pytest.raises(ShapeError, match="nothing says how to cut output 0") as raised:
        made(doubled)(torch.randn(3, 6))
    assert "2*" in raised.value.found
    assert "cut={0:" in raised.value.remedy


@pytest.mark.parametrize("cut", [{0: {}}, {0: {1: "num_tokens"}}])
def test_a_cut_overrides_what_symbols_say(cut: dict[Any, Any]) -> None:
    got = made(doubled, cut=cut)(torch.ones(3, 6))
    assert got.shape == ((8, 3) if cut[0] else (8, 6))
    assert got[3].eq(0).all(), "padding is left to the user"


def test_a_cut_by_name_in_a_dict() -> None:
    def model(x: torch.Tensor) -> dict[str, Any]:
        return {"plain": (x, x + 1), "both": doubled(x)}

    got = made(model, cut={"both": {}})(torch.ones(3, 6))
    assert (got["plain"][1].shape, got["both"].shape) == ((3, 6), (8, 6))


def test_a_model_output_keeps_its_class() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> BaseModelOutputWithPooling:
            y = self.inner(x)
            return BaseModelOutputWithPooling(last_hidden_state=y, pooler_output=y[:, 0])

    model = Model().eval()
    fast = made(model)
    fast.capture(torch.randn(4, 6))
    x = torch.randn(3, 6)
    got, want = fast(x), model(x)
    assert type(got) is BaseModelOutputWithPooling
    torch.testing.assert_close(got.last_hidden_state, want.last_hidden_state.detach())
    torch.testing.assert_close(got.pooler_output, want.pooler_output.detach())
    assert got.hidden_states is None


@dataclass
class Result:
    hidden: torch.Tensor
    extra: torch.Tensor | None


@MODES
def test_nested_results_with_none_and_numbers(mode: str) -> None:
    def model(x: torch.Tensor) -> Any:
        y = x.cos()
        return [(y, None), {"sum": y.sum(-1), "none": None}], 7

    fast = made(model, mode=mode)
    for rows in (3, 7, 3):
        x = torch.randn(rows, 6)
        got, want = fast(x), model(x)
        assert got[0][0][1] is None
        assert got[0][1]["none"] is None
        assert got[1] == 7
        torch.testing.assert_close((got[0][0][0], got[0][1]["sum"]), (want[0][0][0], want[0][1]["sum"]))


def test_a_class_that_pytrees_do_not_know_is_refused() -> None:
    def model(x: torch.Tensor) -> Result:
        return Result(x.cos(), None)

    with pytest.raises(ShapeError, match="output 0 is a Result") as raised:
        made(model)(torch.randn(3, 6))
    assert "register_dataclass" in raised.value.remedy
    assert made(model, cut={0: {}})(torch.randn(3, 6)).hidden.shape == (4, 6)


@MODES
def test_results_do_not_change_with_later_calls(mode: str) -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x.cos(), x, x[:, :2]

    fast = made(model, mode=mode)
    xs = [torch.randn(3, 6) for _ in range(3)]
    kept = [fast(x) for x in xs]
    for x, (y, same, part) in zip(xs, kept, strict=True):
        torch.testing.assert_close((y, part), (x.cos(), x[:, :2]))
        assert same is x


@MODES
def test_a_mutated_input_is_copied_back(mode: str) -> None:
    def model(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total.add_(x)
        return total * 2

    fast = made(model, dims={"x": 0, "total": 0}, mode=mode)
    total, eager = torch.zeros(3, 6), torch.zeros(3, 6)
    for _ in range(3):
        x = torch.randn(3, 6)
        torch.testing.assert_close(fast(x, total), model(x, eager))
        torch.testing.assert_close(total, eager)


def test_capture_writes_to_no_input() -> None:
    def model(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return total.add_(x).clone()

    fast = made(model, dims={"x": 0, "total": 0})
    total = torch.zeros(4, 6)
    fast.capture(torch.randn(4, 6), total)
    assert total.eq(0).all()


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        return x + self.steps


@MODES
def test_buffers_count_calls(mode: str) -> None:
    model = Counted()
    fast = made(model, mode=mode)
    for step in range(1, 5):
        x = torch.randn(3 if step % 2 else 7, 6)
        torch.testing.assert_close(fast(x), x + step)
    assert model.steps.item() == 4


def test_python_side_effects_keep_working() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.seen: list[int] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x * 2

    model = Model()
    fast = made(model)
    with torch._dynamo.config.patch(recompile_limit=64):
        for call in range(1, 4):
            x = torch.randn(3, 6)
            torch.testing.assert_close(fast(x), x * 2)
            assert model.calls == call
    assert any("sets the attribute" in what for _, what in fast.report()["Notes"].rows)


def test_a_graph_break_runs_through_dynamo_and_is_right() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
            self.seen = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            torch._dynamo.graph_break()
            return self.second(y).relu()

    model = Model().eval()
    fast = made(model)
    fast.capture(torch.randn(4, 6))
    agrees(fast, model, (3, 6), (7, 6), (8, 6), (3, 6))
    captured = {region: c.captured for (region, _, _), c in fast.runtime.counts().items()}
    assert len(captured) == 2, "a FULL for each graph"
    reasons = [row[-1] for row in fast.report()["Regions"].rows]
    assert any("graph_break" in reason and "test_cutting.py" in reason for reason in reasons)
    assert any("through Dynamo's guards" in what for _, what in fast.report()["Notes"].rows)


def reads_the_host(x: torch.Tensor) -> torch.Tensor:
    return x.cos() * x.abs().nonzero().sum() + 1


def test_a_model_that_cannot_be_whole_falls_back_to_regions(caplog: pytest.LogCaptureFixture) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fast = made(reads_the_host, mode="FULL")
        for rows in (3, 7, 3):
            x = torch.randn(rows, 6)
            torch.testing.assert_close(fast(x), reads_the_host(x))
    said = [r.message for r in caplog.records if r.name == "graphpass" and "FULL is not possible" in r.message]
    assert said
    assert "nonzero" in said[0]
    modes = {str(mode) for _, mode, _ in fast.runtime.counts()}
    assert modes == {"PIECEWISE"}
    assert any("FULL is not possible" in what and "nonzero" in what for _, what in fast.report()["Notes"].rows)


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask[:, None, None, :])
        return x + self.out(y.transpose(1, 2).flatten(2))


def test_piecewise_around_attention() -> None:
    bert = Bert().eval()
    fast = graphpass.graphed(
        bert,
        {"num_reqs": [2, 4], "seq_len": [8, 16]},
        {"input_ids": {0: "num_reqs", 1: "seq_len"}},
        splitting_ops=["torch.nn.functional.scaled_dot_product_attention"],
        mode="PIECEWISE",
        compiler="eager",
    )
    for shape in ((3, 9), (4, 16), (2, 5)):
        ids, mask = torch.randint(20, shape), torch.ones(shape, dtype=torch.bool)
        mask[0, -2:] = False
        torch.testing.assert_close(fast(ids, mask), bert(ids, mask).detach())
    rows = fast.report()["Regions"].rows
    assert [kind for _, kind, *_ in rows] == ["captured", "eager", "captured"]
    assert "scaled_dot_product_attention" in rows[1][-1]
    assert {str(mode) for _, mode, _ in fast.runtime.counts()} == {"PIECEWISE"}
