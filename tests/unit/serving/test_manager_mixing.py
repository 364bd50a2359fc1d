"""Tokens and requests of a batch meet in declared attention alone: everything else that mixes them is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphpass import Batch, InputSpec
from graphpass.errors import CaptureError
from tests.unit.models import module
from tests.unit.serving.managed import (
    LARGEST,
    WIDTH,
    Attends,
    Doubled,
    SlotBuilder,
    X,
    assert_right,
    captured,
    made,
    refused,
    rows,
    run,
)

Rows = Callable[[torch.Tensor], Any]


def stock_attention(x: torch.Tensor) -> torch.Tensor:
    q = x.view(1, 1, -1, WIDTH)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).view(-1, WIDTH)


def _numbered(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[0], dtype=x.dtype).unsqueeze(1).expand(-1, WIDTH)


MIXING: Mapping[str, tuple[Rows, str]] = {
    "mean over the batch": (lambda x: x - x.mean(0), "mean"),
    "sum returned alone": (lambda x: x.sum(0), "sum"),
    "causal sum": (lambda x: x.cumsum(0), "cumsum"),
    "stock attention": (stock_attention, "scaled_dot_product"),
    "products of all pairs": (lambda x: x @ x.t(), "result"),
    "last token for all": (lambda x: x + x[-1:], "slice"),
    "divided by their number": (lambda x: x / x.shape[0], "div"),
    "times one over their number": (lambda x: x * (torch.ones(WIDTH) / x.shape[0]), "div"),
    "times their index": (lambda x: x * torch.arange(x.shape[0]).unsqueeze(1), "arange"),
    "index returned": (lambda x: (x * 2, torch.arange(x.shape[0])), "arange"),
    "index written to rows": (lambda x: x.index_put((torch.arange(x.shape[0]),), _numbered(x)), "arange"),
    "table up to their number": (lambda x: x + torch.arange(16.0).unsqueeze(1)[: x.shape[0]], "slice"),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_tokens_is_refused_by_op_and_line(name: str) -> None:
    model, op = MIXING[name]
    error = refused("mixes the tokens of a batch", model)
    assert op in error.found
    assert name == "products of all pairs" or "test_manager_mixing.py:" in error.problem
    assert "register_padding_rule" in error.remedy
    assert "attn_implementation" in error.remedy


class Numbered(nn.Module):
    """Numbers its tokens itself where no numbers are passed, as encoders do with positions and token types."""

    def forward(self, x: torch.Tensor, numbers: torch.Tensor | None = None) -> torch.Tensor:
        if numbers is None:
            numbers = torch.arange(x.shape[0])
        return x * numbers.unsqueeze(1)


def test_what_the_model_makes_itself_is_passed() -> None:
    error = refused("mixes the tokens", Numbered())
    assert "pass numbers as an input (an InputSpec)" in error.remedy
    manager = captured(Numbered(), specs=(X, InputSpec("numbers", (LARGEST,), torch.int64)))
    inputs = {"x": rows(5), "numbers": torch.arange(5)}
    torch.testing.assert_close(manager.run(Batch(5, inputs=inputs)), Numbered()(**inputs))


KEEPING: Mapping[str, Rows] = {
    "entry by entry": lambda x: (x * 2 + 1).relu(),
    "softmax over features": lambda x: x.softmax(-1),
    "heads apart": lambda x: (x.view(-1, 2, 3).transpose(0, 1) * 2).transpose(0, 1).flatten(1),
    "attention within a token": lambda x: F.scaled_dot_product_attention(*[x.view(-1, 1, 2, 3)] * 3).flatten(1),
    "in place": lambda x: x.clone().add_(1).mul_(x),
    "tokens last": lambda x: (x.t() * 2).t(),
    "picked in their own row": lambda x: x[torch.arange(x.shape[0]), x.argmax(-1)],
    "written in their own row": lambda x: x.index_put((torch.arange(x.shape[0]), x.argmax(-1)), torch.tensor(7.0)),
    "a row for each": lambda x: x * torch.cat([torch.ones(1, 3).cumsum(1).expand(x.shape[0], -1)] * 2, -1),
}


@pytest.mark.parametrize("name", KEEPING)
def test_what_keeps_tokens_apart_is_captured(name: str) -> None:
    model = KEEPING[name]
    manager = captured(model)
    for num_tokens in (3, 8, 1, 9):
        torch.testing.assert_close(run(manager, rows(num_tokens)), model(rows(num_tokens)))


# -- attention, and other ops of one's own


class DeclaresNothing(SlotBuilder):
    splitting_ops = ()


def test_ops_that_the_attention_declares_may_mix() -> None:
    model = Attends().eval()
    error = refused("add_to_slots", model, attention=DeclaresNothing())
    assert "no padding rule" in error.found
    manager = captured(model, attention=SlotBuilder())
    assert manager.runtime.stats().captured == 3


# -- several graphs


def breaks(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x - x.mean(0) if self.mixes_first else x * 2
    torch._dynamo.graph_break()
    return x + 1 if self.mixes_first else x - x.sum(0)


@pytest.mark.parametrize("mixes_first", [True, False])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_each_graph_is_checked(mode: str, mixes_first: bool) -> None:
    refused("mean" if mixes_first else "sum", module(breaks, mixes_first=mixes_first), mode)


@torch.compiler.disable
def mean_taken_away(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0)


class BetweenGraphs(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (mean_taken_away(x * 2) + 1).relu()


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_tensor_that_python_computes_between_graphs_is_refused(mode: str) -> None:
    refused("Python computes between the graphs", BetweenGraphs(), mode)


def test_a_graph_that_only_some_sizes_have_is_checked() -> None:
    manager = made(lambda x: x - x.mean(0) if x.shape[0] < 4 else x * 2)
    with pytest.raises(CaptureError, match="mean"):
        manager.capture()
    assert [key.captured.descriptor.num_tokens for key in manager.stats().keys] == [8, 4]


def test_keys_of_one_token_are_no_exception() -> None:
    """A size of 1 has no symbol, but a batch without a graph may have several tokens."""
    refused("mixes the tokens", lambda x: x - x.mean(0), sizes=(1,))
    manager = captured(Doubled(), sizes=(1,))
    assert_right(manager, (1, 3, 8))
    assert run(manager, rows(0)).shape == (0, WIDTH)
    manager.close()
    one = InputSpec("x", (1, WIDTH), torch.float32)
    refused("mixes the tokens", lambda x: x - x.mean(0), sizes=(1,), specs=(one,), max_num_reqs=1)
    manager = captured(Doubled(), sizes=(1,), specs=(one,), max_num_reqs=1)
    assert run(manager, rows(0)).shape == (0, WIDTH)
    manager.close()


def test_a_model_that_fixes_the_number_of_tokens_is_refused() -> None:
    def loops(x: torch.Tensor) -> torch.Tensor:
        for row in range(x.shape[0]):
            x = x + row
        return x

    manager = made(loops)
    with pytest.raises(CaptureError, match="fixes num_tokens") as raised:
        manager.capture()
    assert "g0, compiled for one num_tokens" in raised.value.found


# -- graphs that Dynamo compiles after the capture


class Changes(nn.Module):
    """Its code depends on an attribute, in its only graph or in the second of two."""

    def __init__(self, has_break: bool) -> None:
        super().__init__()
        self.has_break, self.form = has_break, "doubled"
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.has_break:
            x = x + 1
            self.note()
        self.steps.add_(1)
        if self.form == "taken away":
            return x - x.mean(0)
        return x * 2 if self.form == "doubled" else x * 3

    @torch.compiler.disable
    def note(self) -> None:
        pass


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "NONE"])
@pytest.mark.parametrize("has_break", [False, True])
def test_a_graph_that_is_compiled_in_a_step_is_checked_before_it_runs(has_break: bool, mode: str) -> None:
    """Nine tokens have no graph; with a graph break every step goes through Dynamo."""
    model = Changes(has_break)
    manager = captured(model, mode)
    sizes = (9, 3) if has_break or mode == "NONE" else (9,)
    for form, factor in (("doubled", 2), ("taken away", None), ("tripled", 3), ("doubled", 2)):
        model.form = form
        for num_tokens in sizes:
            x, steps = rows(num_tokens), model.steps.item()
            if factor is None:
                for _ in range(2):
                    with pytest.raises(CaptureError, match="mixes the tokens of a batch") as raised:
                        run(manager, x)
                    assert "mean" in raised.value.found
                assert model.steps == steps
            else:
                torch.testing.assert_close(run(manager, x), (x + has_break) * factor)
                assert model.steps == steps + 1


# -- requests


LAST_ROWS = InputSpec("last_rows", (LARGEST,), torch.int64, token_dim=None, request_dim=0)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("requests", lambda x, last_rows: x[last_rows] - x[last_rows].mean(0)),
        ("requests", lambda x, last_rows: x[last_rows].softmax(0)),
        ("tokens", lambda x, last_rows: x + x[last_rows].mean(0)),
        ("tokens", lambda x, last_rows: x + x[last_rows[0]]),
        ("tokens", lambda x, last_rows: (x[last_rows], x.sum(0))),
    ],
)
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_what_mixes_requests_is_refused(mode: str, name: str, model: Callable[..., Any]) -> None:
    refused(r"mixes the (requests|tokens) of a batch", model, mode, specs=[X, LAST_ROWS])


# -- state, random numbers, parameters


def test_state_that_tokens_are_summed_into_is_refused_and_a_counter_of_steps_is_not() -> None:
    def keeps(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x.sum(0) if self.sums else 1)
        return x * 2

    refused("sum", module(keeps, sums=True, total=torch.zeros(WIDTH)))
    manager = captured(module(keeps, sums=False, total=torch.zeros(WIDTH)))
    run(manager, rows(3))
    assert manager.model.total.tolist() == [1] * WIDTH
