"""graphed(): which size a call is padded to, what fills the padding, what is captured and replayed, in numbers."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import graphpass
from graphpass import CaptureError, GraphedModel, GraphRuntime, OptionError, ShapeError


class Rows(nn.Module):
    """Rows do not mix, so that any padding leaves the real ones as they are."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).tanh()


def made(model: Callable[..., Any], sizes: Any = (2, 4, 8), dims: Any = None, **options: Any) -> GraphedModel:
    return graphpass.graphed(model, sizes, {"x": 0} if dims is None else dims, **{"compiler": "eager", **options})


def full_counts(fast: GraphedModel) -> dict[int, tuple[int, int]]:
    """{padded tokens: (captured, replayed)} of the whole-model graphs."""
    return {
        key.num_tokens: (c.captured, c.replayed)
        for (region, _, key), c in fast.runtime.counts().items()
        if region.endswith(".full")
    }


def dispatches(fast: GraphedModel) -> dict[tuple[str, str, str], str]:
    """{(mode, key, reason): hits} of the report."""
    return {(mode, key, reason): hits for mode, key, reason, hits, *_ in fast.report()["Dispatches"].rows}


# -- sizes


@pytest.mark.parametrize(
    ("size", "padded"), [(1, 2), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8)], ids=lambda value: str(value)
)
def test_a_call_runs_at_the_next_size(size: int, padded: int) -> None:
    model = Rows().eval()
    fast = made(model)
    fast.capture(torch.randn(3, 6))
    assert full_counts(fast) == {2: (1, 1), 4: (1, 1), 8: (1, 1)}
    x = torch.randn(size, 6)
    got = fast(x)
    torch.testing.assert_close(got, model(x).detach())
    assert not got.requires_grad
    assert full_counts(fast) == {**dict.fromkeys((2, 4, 8), (1, 1)), padded: (1, 2)}
    (row,) = fast.report()["Dispatches"].rows
    mode, key, reason, hits, real, total, percent = row
    assert (mode, hits, real, total) == ("FULL", "1", str(size), str(padded))
    assert f"{padded} tokens" in key
    assert reason == ("exact" if size == padded else "padded")
    assert percent == f"{100 * (1 - size / padded):.1f} %"


def test_without_capture_a_key_is_captured_at_its_first_call() -> None:
    model = Rows().eval()
    fast = made(model)
    for size in (3, 4, 7, 3):
        x = torch.randn(size, 6)
        torch.testing.assert_close(fast(x), model(x).detach())
    assert full_counts(fast) == {4: (1, 3), 8: (1, 1)}


def test_the_examples_size_does_not_matter() -> None:
    model = Rows().eval()
    for example in (1, 3, 50):
        fast = made(model)
        fast.capture(torch.randn(example, 6))
        assert full_counts(fast) == {2: (1, 1), 4: (1, 1), 8: (1, 1)}
        x = torch.randn(3, 6)
        torch.testing.assert_close(fast(x), model(x).detach())


def test_capturing_twice_captures_once() -> None:
    fast = made(Rows())
    fast.capture(torch.randn(3, 6))
    fast.capture(torch.randn(3, 6))
    assert full_counts(fast) == {2: (1, 1), 4: (1, 1), 8: (1, 1)}


def test_an_empty_batch_runs_eagerly() -> None:
    model = Rows().eval()
    fast = made(model)
    fast.capture(torch.randn(3, 6))
    assert fast(torch.randn(0, 6)).shape == (0, 5)
    assert full_counts(fast) == {2: (1, 1), 4: (1, 1), 8: (1, 1)}
    assert [reason for _, _, reason in dispatches(fast)] == ["empty"]


@pytest.mark.parametrize("on_fallback", ["warn", "silent"])
def test_above_the_largest_size_it_runs_compiled(on_fallback: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Rows().eval()
    fast = made(model, on_fallback=on_fallback)
    fast.capture(torch.randn(3, 6))
    for size in (9, 10, 9):
        x = torch.randn(size, 6)
        torch.testing.assert_close(fast(x), model(x).detach())
    warned = [r.message for r in caplog.records if r.name == "graphpass" and r.levelno >= logging.WARNING]
    assert len(warned) == (1 if on_fallback == "warn" else 0)
    assert all("9 tokens" in message for message in warned)
    assert full_counts(fast) == {2: (1, 1), 4: (1, 1), 8: (1, 1)}
    assert sum(map(int, dispatches(fast).values())) == 3
    assert sum("no graph for" in what for _, what in fast.report()["Notes"].rows) == 2


def test_a_fallback_can_be_an_error() -> None:
    fast = made(Rows(), on_fallback="error")
    fast.capture(torch.randn(3, 6))
    with pytest.raises(CaptureError, match="on_fallback is 'error'") as raised:
        fast(torch.randn(9, 6))
    assert "9 tokens" in raised.value.found
    assert "larger capture size" in raised.value.remedy


def test_two_dimensions_pad_each_in_its_ladder() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    fast = made(model, {"num_reqs": [2, 4], "seq_len": [3, 5]}, {"x": {0: "num_reqs", 1: "seq_len"}})
    fast.capture(torch.randn(2, 3))
    assert full_counts(fast) == dict.fromkeys((6, 10, 12, 20), (1, 1))
    for shape, padded in (((1, 1), 6), ((2, 4), 10), ((3, 2), 12), ((4, 5), 20)):
        x = torch.randn(shape)
        before = full_counts(fast)
        torch.testing.assert_close(fast(x), model(x))
        assert full_counts(fast) == {**before, padded: (1, before[padded][1] + 1)}
    assert full_counts(fast)[20] == (1, 2)


def test_negative_dimensions_count_from_the_end() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x.cos()

    fast = made(model, (4, 8), {"x": -1})
    x = torch.randn(2, 3)
    torch.testing.assert_close(fast(x), model(x))
    torch.testing.assert_close(fast(x), model(x))
    assert full_counts(fast) == {4: (1, 2)}


# -- padding


def seen_by_the_model(rule: Any, x: torch.Tensor, size: int = 4, dims: Any = None) -> torch.Tensor:
    """What the model read at a padded key, through an output that says it is not padded."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return x + 0

    padding = {} if rule is None else {"x": rule}
    fast = made(model, size if isinstance(size, Mapping) else [size], dims, padding=padding, cut={0: {}})
    fast(torch.full_like(x, 99))
    return fast(x)


def doubled_outside(real: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    padded = real.new_full(shape, -2)
    padded[: len(real)] = real
    return padded


@pytest.mark.parametrize(
    ("rule", "padding"),
    [(None, [0, 0]), (0, [0, 0]), (7.0, [7, 7]), ("repeat", [2, 2]), (doubled_outside, [-2, -2])],
    ids=["default", "zero", "value", "repeat", "function"],
)
def test_padding_is_filled_as_declared_at_every_call(rule: Any, padding: Sequence[float]) -> None:
    got = seen_by_the_model(rule, torch.tensor([1.0, 2.0]))
    assert got.tolist() == [1, 2, *padding]


@pytest.mark.parametrize("rule", [5, "repeat"])
def test_padding_in_two_dimensions(rule: Any) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x + 0

    fast = made(model, {"a": [2], "b": [3]}, {"x": {0: "a", 1: "b"}}, padding={"x": rule}, cut={0: {}})
    got = fast(torch.tensor([[1.0, 2.0]]))
    fill = [5, 5, 5] if rule == 5 else [1, 2, 2]
    assert got.tolist() == [[1, 2, fill[2]], fill]


def test_integer_and_boolean_inputs_are_padded_in_their_dtype() -> None:
    def model(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return torch.where(keep, x, -x)

    fast = made(model, [4], {"x": 0, "keep": 0}, padding={"x": 3, "keep": True}, cut={0: {}})
    got = fast(torch.tensor([1, 2]), torch.tensor([True, False]))
    assert got.tolist() == [1, -2, 3, 3]


@pytest.mark.parametrize("fill", [1e30, float("nan")])
def test_real_rows_do_not_depend_on_the_padding(fill: float) -> None:
    model = Rows().eval()
    x = torch.randn(3, 6)
    assert torch.equal(made(model, (4,), padding={"x": fill})(x), made(model, (4,))(x))


def test_a_padding_function_must_keep_the_shape() -> None:
    fast = made(Rows(), padding={"x": lambda real, shape: real})
    with pytest.raises(ShapeError, match="padding function") as raised:
        fast(torch.randn(3, 6))
    assert (raised.value.expected, raised.value.found) == ("(4, 6)", "(3, 6)")


class Masked(nn.Module):
    """Positions mix, under a mask that shares both symbols and that nobody declared."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        weights = input_ids.float().masked_fill(attention_mask == 0, -torch.inf).softmax(1)
        return (weights * input_ids).sum(1) + bias


def test_inputs_that_share_the_symbols_are_found() -> None:
    fast = made(Masked(), {"num_reqs": [2, 4], "seq_len": [4, 8]}, {"input_ids": {0: "num_reqs", 1: "seq_len"}})
    for shape in ((3, 5), (1, 2), (4, 8), (2, 3)):
        ids, mask, bias = torch.randint(1, 9, shape), torch.ones(shape, dtype=torch.long), torch.randn(1)
        torch.testing.assert_close(
            fast(ids, attention_mask=mask, bias=bias), Masked()(ids, attention_mask=mask, bias=bias)
        )


def test_an_input_of_equal_size_without_the_symbol_is_not_padded() -> None:
    def model(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return x @ table.sum(0).diag()

    fast = made(model, [4, 8])
    x, table = torch.randn(3, 3), torch.randn(3, 3)
    torch.testing.assert_close(fast(x, table), model(x, table))
    x = torch.randn(7, 3)
    torch.testing.assert_close(fast(x, table), model(x, table))


# -- life


def test_replays_do_not_run_the_models_python() -> None:
    calls = []

    class Loud(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return graphed_op(x * 2)

    @torch.library.custom_op("managertest::loud", mutates_args=())
    def graphed_op(x: torch.Tensor) -> torch.Tensor:
        calls.append("op")
        return x + 1

    graphed_op.register_fake(torch.empty_like)
    fast = made(Loud())
    fast.capture(torch.randn(4, 6))
    calls.clear()
    x = torch.randn(3, 6)
    torch.testing.assert_close(fast(x), x * 2 + 1)
    assert calls == []


def test_close_and_capture_again() -> None:
    model = Rows().eval()
    fast = made(model)
    fast.capture(torch.randn(3, 6))
    fast.close()
    assert fast.runtime.buffer_bytes() == 0
    x = torch.randn(3, 6)
    torch.testing.assert_close(fast(x), model(x).detach())
    assert full_counts(fast)[4] == (2, 2)
    fast.capture(x)
    assert {captured for captured, _ in full_counts(fast).values()} == {2}
    torch.testing.assert_close(fast(x), model(x).detach())


def test_a_runtime_can_be_given() -> None:
    runtime = GraphRuntime()
    fast = made(Rows(), runtime=runtime)
    assert fast.runtime is runtime
    fast(torch.randn(3, 6))
    assert runtime.stats().captured == 1


def test_it_is_copied_and_pickled_as_its_model() -> None:
    model = Rows().eval()
    fast = made(model)
    x = torch.randn(3, 6)
    want = fast(x)
    for copied in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert type(copied) is Rows
        assert copied is not model
        torch.testing.assert_close(copied(x).detach(), want)
    assert list(fast.state_dict()) == ["inner.weight", "inner.bias"]
    assert fast.inner is model.inner
    with pytest.raises(AttributeError, match="missing"):
        _ = fast.missing


def test_the_report_has_its_tables() -> None:
    fast = made(Rows())
    fast(torch.randn(3, 6))
    fast(torch.randn(9, 6))
    report = fast.report()
    assert [table.title for table in report.tables] == ["Dispatches", "Regions", "Keys", "Notes", "Memory and sizes"]
    assert report["Regions"].rows[0][:2] == ("g0.r0", "captured")
    assert report["Keys"].rows[0][1:5] == ("FULL", "4 tokens num_reqs=4", "1", "1")
    assert int(report["Memory and sizes"].rows[0][1]) >= 0
    text = str(report)
    for title in ("Dispatches", "Regions", "Keys", "Notes", "Memory and sizes"):
        assert title in text


# -- what is refused


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dims": {"y": 0}}, "dynamic_dims names an argument"),
        ({"padding": {"y": 0}}, "padding names an argument"),
        ({"padding": {"x": "mirror"}}, "no padding rule"),
        ({"dims": {"x": {0: "rows"}}}, "different key fields"),
        ({"sizes": {"num_tokens": [2], "seq": [3]}}, "different key fields"),
        ({"sizes": []}, "capture_sizes"),
        ({"sizes": [0]}, "capture_sizes"),
        ({"mode": "SOMETIMES"}, "SOMETIMES"),
        ({"paddings": {}}, "unknown option 'paddings'"),
    ],
    ids=lambda value: str(value),
)
def test_bad_arguments_are_refused_when_it_is_made(options: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        made(Rows(), **options)


def test_inputs_that_do_not_fit_are_refused() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    fast = made(model, dims={"x": 0, "y": 0})
    x = torch.randn(3, 6)
    fast(x, x)
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str, type[Exception]]] = [
        ((x,), {}, "missing a required argument", TypeError),
        ((x, x, x), {}, "too many positional arguments", TypeError),
        ((x, x), {"z": 1}, "unexpected keyword argument", TypeError),
        ((x, torch.randn(2, 6)), {}, "disagree on num_tokens", ShapeError),
        ((x, None), {}, "has no dimension 0", ShapeError),
        ((x, torch.randn(())), {}, "has no dimension 0", ShapeError),
        ((x, x.double()), {}, "'y' does not fit its buffer", ShapeError),
        ((x, torch.randn(3, 1)), {}, "'y' does not fit its buffer", ShapeError),
        ((x, torch.randn(3, 6, device="meta")), {}, "'y' does not fit its buffer", ShapeError),
    ]
    for args, kwargs, match, kind in cases:
        with pytest.raises(kind, match=match):
            fast(*args, **kwargs)
    torch.testing.assert_close(fast(x, x), x + x)


def test_other_arguments_than_captured_are_refused() -> None:
    def model(x: torch.Tensor, factor: float = 1.0, extra: torch.Tensor | None = None) -> torch.Tensor:
        return x * factor if extra is None else x * factor + extra

    fast = made(model)
    x = torch.randn(3, 6)
    torch.testing.assert_close(fast(x, factor=2.0), x * 2)
    for kwargs in ({"factor": 3.0}, {}, {"factor": 2.0, "extra": torch.randn(6)}):
        with pytest.raises(ShapeError, match="other arguments than the captured one"):
            fast(x, **kwargs)
    torch.testing.assert_close(fast(x=x, factor=2.0), x * 2)


def test_positional_and_keyword_arguments_are_one_call() -> None:
    def model(x: torch.Tensor, y: torch.Tensor, *, scale: int = 1) -> torch.Tensor:
        return (x - y) * scale

    fast = made(model, dims={"x": 0, "y": 0})
    x, y = torch.randn(3, 6), torch.randn(3, 6)
    for args, kwargs in (((x, y), {}), ((x,), {"y": y}), ((), {"y": y, "x": x})):
        torch.testing.assert_close(fast(*args, scale=2, **kwargs), (x - y) * 2)
    assert full_counts(fast) == {4: (1, 3)}


def test_arguments_without_names_are_refused() -> None:
    fast = made(lambda *parts, x: x + parts[0])
    with pytest.raises(OptionError, match="cannot be passed by name"):
        fast(torch.randn(3), x=torch.randn(3))


@pytest.mark.parametrize(
    "nested", [[torch.ones(3, 6)], {"a": torch.ones(3, 6)}, ((1, torch.ones(3, 6)),)], ids=["list", "dict", "tuple"]
)
def test_nested_tensor_arguments_are_refused(nested: Any) -> None:
    fast = made(lambda x, parts: x * 2)
    with pytest.raises(OptionError, match="'parts'") as raised:
        fast(torch.randn(3, 6), nested)
    assert "argument of its own" in raised.value.remedy
