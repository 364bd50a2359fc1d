"""Each remedy that a warning names, followed to the letter: afterwards calls replay, and results are those of eager."""

from __future__ import annotations

import ast
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported

import graphpass as gp
from graphpass import GraphRuntime
from graphpass.errors import CaptureError, OptionError
from tests.observed import calls_with_graph

HOST = "graphpasstest_remedies::host"


@torch.library.custom_op(HOST, mutates_args=())
def host(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.sum())


host.register_fake(torch.empty_like)


def compiled(model: Any, *, dynamic: bool | None = None, **options: Any) -> Any:
    return torch.compile(model, backend="cgpass", dynamic=dynamic, options={"compiler": "eager", **options})


def agree(fast: Any, model: Any, calls: Sequence[tuple[torch.Tensor, ...]], *, passes: int = 3) -> int:
    """Run all calls beside eager; the number of calls of the last pass that replayed."""
    before = 0
    with torch.no_grad():
        for number in range(passes):
            if number == passes - 1:
                before = calls_with_graph(gp.runtime_of(fast))
            for args in calls:
                torch.testing.assert_close(fast(*args), model(*args))
    return calls_with_graph(gp.runtime_of(fast)) - before


def rows(*sizes: int) -> list[tuple[torch.Tensor, ...]]:
    return [(torch.randn(size, 6),) for size in sizes]


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "graphpass" and r.levelno >= logging.WARNING]


def problem(fast: Any, text: str) -> Any:
    (found,) = [problem for problem in gp.runtime_of(fast).report().problems if text in problem.what]
    return found


class Picks(nn.Module):
    """Rows of a table that an index from data picks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[ids]


def test_the_dimension_that_is_named_is_declared_alone() -> None:
    """Dynamo gives the sizes of both inputs a symbol each; one declaration is for both."""
    model = Picks().eval()
    calls = [(torch.randn(n, 6), torch.randint(0, n, (n,))) for n in (5, 6, 7)]
    fast = compiled(model)
    agree(fast, model, calls)
    declaration = "dynamic_dims={'ids': 0}"
    assert declaration in problem(fast, "is not padded").remedy
    torch.compiler.reset()
    fast = compiled(model, dynamic_dims={"ids": 0})
    assert agree(fast, model, calls) == 3
    assert gp.runtime_of(fast).report().problems == ()


class Centred(nn.Module):
    def __init__(self, *, masked: bool) -> None:
        super().__init__()
        self.masked = masked

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.masked:
            return x - (x * mask[:, None]).sum(0) / mask.sum()
        return x - x.mean(0)


def test_a_mean_is_computed_from_sums_under_a_mask() -> None:
    calls = [(torch.randn(n, 6), torch.ones(n)) for n in (5, 6, 7)]
    fast = compiled(Centred(masked=False), padding={"mask": 0})
    agree(fast, Centred(masked=False), calls)
    assert "padding={'mask': 0}" in problem(fast, "is not padded").remedy
    torch.compiler.reset()
    model = Centred(masked=True)
    fast = compiled(model, padding={"mask": 0})
    assert agree(fast, model, calls) == 3
    assert len(gp.runtime_of(fast).report().figures.keys) == 2, "5 and 6 rows share a key"
    assert gp.runtime_of(fast).report().problems == ()


def pooled_by_lengths(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    mask = torch.arange(x.shape[1]) < lengths[:, None]
    return pooled_by_mask(x, mask.to(x.dtype))


def pooled_by_mask(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (x * mask[..., None]).sum(1) / mask.sum(1)[:, None]


def test_a_mask_that_the_model_computes_becomes_an_argument() -> None:
    fast = compiled(pooled_by_lengths, dynamic_dims={"x": {1: "seq"}})
    lengths = [(torch.randn(2, n, 6), torch.tensor([n, n - 2])) for n in (5, 6, 7)]
    agree(fast, pooled_by_lengths, lengths)
    remedy = problem(fast, "is not padded").remedy
    assert "a mask that the model computes, from lengths for example, cannot be declared: pass it" in remedy
    torch.compiler.reset()
    fast = compiled(pooled_by_mask, dynamic_dims={"x": {1: "seq"}}, padding={"mask": 0})
    masks = [(x, (torch.arange(x.shape[1]) < count[:, None]).to(x.dtype)) for x, count in lengths]
    assert agree(fast, pooled_by_mask, masks) == 3
    assert len(gp.runtime_of(fast).report().figures.keys) == 2, "5 and 6 columns share a key"
    assert gp.runtime_of(fast).report().problems == ()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).relu()


class Recurrent(nn.Module):
    """An LSTM beside other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.rnn, self.after = Normed(), nn.LSTM(6, 6, batch_first=True), Normed()


class InOneLine(Recurrent):
    """Dynamo leaves out this forward without a graph break, and compiles the layers around the LSTM."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.rnn(self.before(x))[0])


class InLines(Recurrent):
    """Dynamo breaks the graph at the LSTM, and does not say why."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        x = self.rnn(x)[0]
        return self.after(x)


@pytest.mark.parametrize("kind", [InOneLine, InLines])
def test_dynamo_is_told_to_trace_an_lstm(kind: type[Recurrent]) -> None:
    model = kind().eval()
    calls = [(torch.randn(3, 5, 6),)]
    fast = compiled(model)
    agree(fast, model, calls)
    remedies = [problem.remedy for problem in gp.runtime_of(fast).report().problems if "rnn" in problem.remedy]
    assert len(remedies) == 1
    assert "set torch._dynamo.config.allow_rnn = True" in remedies[0]
    torch.compiler.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        fast = compiled(model)
        assert agree(fast, model, calls) == 1
    assert gp.runtime_of(fast).report().problems == ()


def test_a_model_of_an_lstm_alone_names_the_setting() -> None:
    model = nn.LSTM(6, 6).eval()
    fast = compiled(model)
    with torch.no_grad():
        fast(torch.randn(3, 5, 6))
        with pytest.raises(OptionError, match="allow_rnn = True"):
            gp.runtime_of(fast)


class Positions(nn.Module):
    """Learned positions that are counted from a mask, as in XLM-RoBERTa."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 6), nn.Embedding(33, 6)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (self.words(ids) + self.places(mask.cumsum(1) + 1)) * mask[..., None]


@pytest.mark.parametrize(("options", "dims"), [({"padding": {"mask": 0}}, {}), ({}, {"dynamic_dims": {"ids": 1}})])
def test_positions_that_are_counted_are_padded_with_a_check(options: dict[str, Any], dims: dict[str, Any]) -> None:
    model = Positions().eval()
    calls = [(torch.randint(50, (2, n)), torch.ones(2, n, dtype=torch.int64)) for n in (5, 6, 7)]
    fast = compiled(model, dynamic=True, **options)
    agree(fast, model, calls)
    remedy = problem(fast, "ids[1] is not padded").remedy
    assert "padding_check='declared'" in remedy
    assert ("dynamic_dims={'ids': 1}" in remedy) == bool(dims)
    torch.compiler.reset()
    fast = compiled(model, dynamic=True, padding_check="declared", **options, **dims)
    assert agree(fast, model, calls) == 3
    assert gp.runtime_of(fast).report().problems == ()
    assert len(gp.runtime_of(fast).report().figures.keys) == 2, "5 and 6 tokens share a key"


LAYER = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
NAMES = {"src": {0: "batch", 1: "seq"}, "src_key_padding_mask": {0: "batch", 1: "seq"}}


@pytest.mark.parametrize("model", [LAYER, nn.TransformerEncoder(LAYER, 2, enable_nested_tensor=False)])
@pytest.mark.parametrize("masked", [True, False])
def test_encoder_layers_of_torch_are_padded(model: nn.Module, masked: bool) -> None:
    with torch.inference_mode():
        try:
            torch.compile(model.eval(), backend="eager", dynamic=True, fullgraph=True)(torch.randn(3, 5, 16))
        except Unsupported:
            pytest.skip("Dynamo of this torch does not trace the fused encoder layer")
    declared = {"dynamic_dims": NAMES, "padding": {"src_key_padding_mask": True}} if masked else {}
    model = model.eval()
    fast = compiled(model, dynamic=True, **{"compiler": "aot_eager", **declared})
    sizes = [(3, 5), (5, 6), (7, 7), (9, 6), (11, 5)]
    with torch.inference_mode():
        for batch, length in sizes * 2:
            x, hidden = torch.randn(batch, length, 16), torch.arange(length) >= torch.randint(2, length + 1, (batch, 1))
            given = {"src_key_padding_mask": hidden} if masked else {}
            torch.testing.assert_close(fast(src=x, **given), model(x, **given))
    record = gp.runtime_of(fast).report().figures.callables[0]
    padded = [size.field for size in record.sizes if size.is_padded]
    assert padded == (["batch", "seq"] if masked else ["src[0]"])


class Skips(nn.Module):
    """A skip connection over a layer that halves and one that doubles: one length, written in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.Conv1d(4, 8, 3, 2, padding=1)
        self.doubles = nn.ConvTranspose1d(8, 4, 4, 2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.doubles(self.halves(x)), x], 1)


def test_a_size_that_is_written_in_two_ways_is_one_size() -> None:
    model = Skips().eval()
    fast = compiled(model, dynamic=True)
    with torch.no_grad():
        for batch, length in [(3, 10), (5, 10), (6, 12), (7, 12), (5, 12), (9, 10)] * 2:
            x = torch.randn(batch, 4, length)
            torch.testing.assert_close(fast(x), model(x))
    report = gp.runtime_of(fast).report()
    assert {size.field: size.is_padded for size in report.figures.callables[0].sizes} == {"x[0]": True, "x[2]": False}
    assert not any("correct the padding rule" in found.remedy for found in report.problems)


@pytest.mark.parametrize(
    "model", [lambda x: x.flip(0), lambda x: x.sort(0)[0], lambda x: x * x.shape[0]], ids=["flip", "sort", "size"]
)
def test_where_no_padding_suits_none_is_suggested(model: Callable[..., Any]) -> None:
    fast = compiled(model)
    agree(fast, model, rows(5, 6, 7))
    assert "no padding suits" in problem(fast, "is not padded").remedy


def test_a_capture_scope_captures_under_auto_dispatch(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(6, 6).eval()
    fast = gp.graphed(model, compiler="eager")
    with torch.no_grad(), caplog.at_level(logging.WARNING, "graphpass"):
        fast(torch.randn(4, 6))
        with fast.runtime.capturing():
            fast(torch.randn(4, 6))
            assert fast.runtime.stats().captured == 1
        x = torch.randn(4, 6)
        torch.testing.assert_close(fast(x), model(x))
    assert fast.runtime.stats().captured == 1
    assert warned(caplog) == []


def test_a_capture_scope_survives_padding_that_the_check_refutes() -> None:
    def centred(x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)

    fast = compiled(centred, dynamic=True, dynamic_dims={"x": 0}, padding_check="declared")
    with torch.no_grad():
        fast(torch.randn(5, 6))
        with gp.runtime_of(fast).capturing():
            x = torch.randn(5, 6)
            torch.testing.assert_close(fast(x), centred(x))
    assert "no longer padded" in problem(fast, "depend on the padding").what
    assert agree(fast, centred, rows(5, 5)) == 2


def test_precapture_after_a_weight_was_replaced(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(6, 6).eval()
    fast = compiled(model)
    agree(fast, model, rows(5, 5))
    model.weight = nn.Parameter(torch.randn(6, 6))
    with torch.no_grad(), caplog.at_level(logging.WARNING, "graphpass"):
        gp.precapture(fast, torch.randn(5, 6))
        captured = gp.runtime_of(fast).stats().captured
        agree(fast, model, rows(5, 5))
    assert gp.runtime_of(fast).stats().captured == captured == 2
    assert warned(caplog) == []


def test_an_example_of_size_one_is_followed_by_a_larger_one() -> None:
    fast = gp.graphed(nn.Linear(6, 6).eval(), [1, 4, 8], {"input": 0}, compiler="eager")
    fast.capture(torch.randn(1, 6))
    (found,) = fast.report().problems
    assert "one size was captured ahead of the calls" in found.what
    torch.compiler.reset()
    fast = gp.graphed(nn.Linear(6, 6).eval(), [1, 4, 8], {"input": 0}, compiler="eager")
    fast.capture(torch.randn(3, 6))
    assert fast.runtime.stats().captured == 3
    assert fast.report().problems == ()


class Counts(nn.Module):
    """Replaces its buffer in every call, or writes into it."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(6))
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_place:
            self.count.add_(1)
        else:
            self.count = self.count + 1
        return x + self.count


def test_a_buffer_that_is_replaced_again_and_again_is_copied_in_the_end() -> None:
    fast, eager = compiled(Counts(in_place=False)), Counts(in_place=False)
    agree(fast, eager, rows(5, 5), passes=8)
    runtime = gp.runtime_of(fast)
    captured = runtime.stats().captured
    assert "count" in problem(fast, "is replaced again and again").places[0]
    agree(fast, eager, rows(5, 5), passes=8)
    assert runtime.stats().captured == captured, "no capture more"
    torch.compiler.reset()
    fast, eager = compiled(Counts(in_place=True)), Counts(in_place=True)
    assert agree(fast, eager, rows(5, 5), passes=8) == 2
    assert gp.runtime_of(fast).stats().captured == 1
    assert gp.runtime_of(fast).report().problems == ()


def test_an_op_is_listed_as_the_error_prints_it() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return host(x + 1)

    options = {"compiler": "aot_eager", "mode": "PIECEWISE"}
    fast = compiled(model, **options)
    agree(fast, model, rows(5, 5))
    printed = "graphpasstest_remedies.host.default"
    assert printed in problem(fast, "the capture failed").what
    torch.compiler.reset()
    fast = compiled(model, **options, splitting_ops=[printed])
    assert agree(fast, model, rows(5, 5)) == 2
    assert gp.runtime_of(fast).report().problems == ()


def spread(x: torch.Tensor, **given: Any) -> torch.Tensor:
    return torch.repeat_interleave(x, torch.tensor([1, 2, 3]), dim=0, **given)


def test_repeats_with_a_known_total_are_captured() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fast = compiled(lambda x: spread(x) * 2)
        agree(fast, lambda x: spread(x) * 2, rows(3, 3))
        assert "output_size" in problem(fast, "data-dependent shape").remedy
        torch.compiler.reset()
        fast = compiled(lambda x: spread(x, output_size=6) * 2)
        assert agree(fast, lambda x: spread(x) * 2, rows(3, 3)) == 2
    assert gp.runtime_of(fast).report().problems == ()


def test_one_reader_is_one_problem() -> None:
    """What Dynamo computes from the number of elements is a consequence."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fast = compiled(lambda x: x[x[:, 0] > 0].sum(0) * 2)
        agree(fast, lambda x: x[x[:, 0] > 0].sum(0) * 2, rows(5, 5))
    assert [problem.kind for problem in gp.runtime_of(fast).report().problems] == ["cut"]


def test_a_runtime_for_each_thread_dispatches() -> None:
    model = nn.Linear(6, 6).eval()
    fast = compiled(model, runtime=GraphRuntime(), dispatch="auto")
    assert agree(fast, model, rows(5, 5)) == 2


def test_full_that_is_impossible_is_an_error_where_fallbacks_are() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        fast = compiled(lambda x: x * x.sum().item(), mode="FULL", on_fallback="error")
        with pytest.raises(CaptureError, match="cannot be captured whole"):
            fast(torch.randn(4, 6))


def test_what_the_user_asked_for_is_no_problem() -> None:
    fast = compiled(nn.Linear(6, 6).eval(), mode="NONE")
    with torch.no_grad():
        for args in rows(5, 5, 5):
            fast(*args)
    assert gp.runtime_of(fast).report().problems == ()


def test_a_slip_in_a_name() -> None:
    model = nn.Linear(6, 6).eval()
    fast = compiled(lambda hidden, mask: model(hidden) * mask, padding={"maks": 0}, dynamic_dims={"hidden": 0})
    with torch.no_grad():
        fast(torch.randn(4, 6), torch.ones(4, 1))
    assert "padding names maks" in problem(fast, "inputs are hidden, mask").what
    with pytest.raises(OptionError, match="did you mean 'batch'"):
        gp.graphed(model, {"bach": [8]}, {"input": {0: "batch"}})


def test_a_number_that_varies_is_passed_as_a_tensor() -> None:
    calls = [(torch.randn(5, 6), number) for number in (3, 4, 3, 4)]
    fast = compiled(lambda x, number: x * number)
    with torch.no_grad():
        for args in calls:
            torch.testing.assert_close(fast(*args), args[0] * args[1])
    assert "pass the number as a tensor" in problem(fast, "calls with the same number and sizes").remedy
    torch.compiler.reset()
    fast = compiled(lambda x, number: x * number)
    with_tensors = [(x, torch.tensor(number)) for x, number in calls]
    assert agree(fast, lambda x, number: x * number, with_tensors) == 4


class Rowwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu()


def test_sizes_that_seldom_come_twice_are_declared_and_captured_ahead() -> None:
    """A grid of batch and length, as ragged traffic has it."""
    seeded = random.Random(0)
    model, sizes = Rowwise().eval(), [(seeded.randint(2, 60), seeded.randint(2, 60)) for _ in range(40)]
    calls = [(torch.randn(*size, 6),) for size in sizes]
    fast = gp.graphed(model, dynamic_dims={"x": {0: "batch", 1: "seq"}}, compiler="eager")
    agree(fast, model, calls, passes=1)
    found = problem(fast, "were the first of their sizes")
    assert 2 * found.times >= len(calls)
    ladder = ast.literal_eval(found.remedy.partition("capture_sizes=")[2].partition("}")[0] + "}")
    assert ladder.keys() == {"batch", "seq"}
    torch.compiler.reset()
    fast = gp.graphed(model, ladder, dynamic_dims={"x": {0: "batch", 1: "seq"}}, compiler="eager", progress=False)
    fast.capture(torch.randn(3, 5, 6))
    assert calls_with_graph(fast.runtime) == 0, "captures ahead serve no call"
    assert agree(fast, model, calls, passes=1) == len(calls)
    assert fast.report().problems == ()


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return x * self.step


def test_a_function_that_is_compiled_again_and_again_is_a_problem() -> None:
    fast, eager = compiled(Steps(), dynamic=False), Steps()
    agree(fast, eager, rows(5, 5, 5), passes=4)
    assert "buffer" in problem(fast, "has compiled a function 8 times").remedy
