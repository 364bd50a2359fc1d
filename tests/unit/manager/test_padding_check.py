"""What padding does to real rows: compared with the model itself at each key, and bit for bit in poison mode."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphpass as gp
from graphpass.errors import MismatchError
from tests.unit.manager.models import Attends


def graphed(model: Callable[..., Any], sizes: Any = (4, 8), dims: Any = None, **options: Any) -> gp.GraphedModel:
    return gp.graphed(model, sizes, dims or {"x": 0}, **{"compiler": "eager", **options})


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


LEAKS: dict[str, Any] = {
    "mean over the batch": lambda: lambda x: x - x.mean(0),
    "softmax over the batch": lambda: lambda x: x.softmax(0),
    "sum over the batch": lambda: lambda x: (x, x.exp().sum(0)),
    "attention over the batch": lambda: lambda x: F.scaled_dot_product_attention(x, x, x),
    "batch norm in training": lambda: Normalized().train(),
    "a number made of a size": lambda: lambda x: x / x.shape[0],
}
BOTH = pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])


@BOTH
@pytest.mark.parametrize("lazily", [False, True], ids=["capture", "lazily"])
@pytest.mark.parametrize("leak", LEAKS)
def test_padding_that_real_rows_see_is_refused(leak: str, lazily: bool, mode: str) -> None:
    torch.manual_seed(0)
    fast = graphed(LEAKS[leak](), mode=mode)
    with pytest.raises(MismatchError, match=r"(?s)output \d is another one at .* than without padding.*check_padding"):
        fast(torch.randn(5, 6)) if lazily else fast.capture(torch.randn(3, 6))


@pytest.mark.parametrize("leak", LEAKS)
def test_without_padding_nothing_is_wrong(leak: str) -> None:
    torch.manual_seed(0)
    model = LEAKS[leak]()
    x = torch.randn(8, 6)
    got = graphed(model)(x)
    torch.testing.assert_close(got, LEAKS[leak]()(x))


def test_it_can_be_turned_off() -> None:
    fast = graphed(LEAKS["mean over the batch"](), check_padding=False)
    x = torch.ones(5, 6)
    assert torch.equal(fast(x), x - x.sum(0) / 8)


def test_each_key_is_checked_once() -> None:
    calls: list[int] = []

    class Rows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_compiling():
                calls.append(len(x))
            return x * 2

    fast = graphed(Rows())
    fast.capture(torch.ones(3, 6))
    assert sorted(calls) == [1, 5]  # the smallest sizes that are padded to 4 and to 8
    for size in (1, 3, 5, 8):
        assert torch.equal(fast(torch.ones(size, 6)), torch.full((size, 6), 2.0))
    assert len(calls) == 2
    assert {c.replayed for c in fast.runtime.counts().values()} == {3}


@BOTH
def test_state_is_left_as_one_call_leaves_it(mode: str) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(1))

        def forward(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
            self.steps.add_(1)
            total.add_(x.sum())
            return x + self.steps

    model = Counts()
    fast, total = graphed(model, mode=mode, padding={"x": 0}), torch.zeros(1)
    for step in range(1, 4):
        assert torch.equal(fast(torch.ones(5, 6), total), torch.ones(5, 6) + step)
        assert (int(model.steps), int(total)) == (step, 30 * step)
    assert "is not checked" not in str(fast.report())


def test_random_numbers_are_drawn_once_and_tell_nothing() -> None:
    fast = graphed(lambda x: x + torch.rand(6))
    for _ in range(2):
        torch.manual_seed(2)
        got = fast(torch.zeros(5, 6))
        torch.manual_seed(2)
        assert torch.equal(got, torch.rand(6).expand(5, 6))
    assert "is not checked: the model draws random numbers" in str(fast.report())


def test_models_that_cannot_be_called_twice_are_left_alone() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.step += 1
            return x - x.mean(0)

    model = Steps()
    fast = graphed(model)
    fast(torch.ones(5, 6))
    assert model.step == 1
    assert "whether padding changes real rows is not checked: it sets the attribute 'step'" in str(fast.report())


def test_views_handed_out_are_those_of_the_call() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            return x + self.steps

    fast = graphed(Running(), outputs="view")
    assert torch.equal(fast(torch.ones(5, 6)), torch.full((5, 6), 2.0))
    assert torch.equal(fast(torch.ones(5, 6)), torch.full((5, 6), 3.0))


def test_views_of_an_unpadded_call_are_no_copies() -> None:
    fast = graphed(lambda x: x + 1, outputs="view")
    first, second = fast(torch.zeros(4, 6)), fast(torch.ones(4, 6))
    assert first.data_ptr() == second.data_ptr()


# -- poison


def attending(zeroes: bool, **options: Any) -> gp.GraphedModel:
    dims = {name: {0: "num_reqs", 1: "seq_len"} for name in ("x", "mask")}
    return graphed(Attends(zeroes), {"num_reqs": [2, 4], "seq_len": [4, 8]}, dims, padding={"mask": False}, **options)


@BOTH
def test_poison_finds_nan_behind_a_mask(mode: str) -> None:
    batch = torch.randn(3, 5, 16), torch.ones(3, 5, dtype=torch.bool)
    want = F.scaled_dot_product_attention(batch[0], batch[0], batch[0])
    torch.testing.assert_close(attending(False, mode=mode)(*batch), want)  # zeros behind a mask are harmless
    with pytest.raises(
        MismatchError, match=r"(?s)real rows of output 0 depend on the padding of 'x'.*holds NaN.*zero_p"
    ):
        attending(False, mode=mode, poison=True)(*batch)
    fast = attending(True, mode=mode, poison=True)
    for reqs, tokens in ((3, 5), (1, 8), (2, 3), (4, 7)):
        x = torch.randn(reqs, tokens, 16)
        got = fast(x, torch.ones(reqs, tokens, dtype=torch.bool))
        torch.testing.assert_close(got, F.scaled_dot_product_attention(x, x, x))


def test_poison_finds_integers_that_matter() -> None:
    fast = graphed(lambda x: x - x.max(), poison=True)
    assert torch.equal(fast(torch.arange(1, 9)), torch.arange(-7, 1))
    with pytest.raises(MismatchError, match=r"padding of 'x'.*values of other rows"):
        graphed(lambda x: x + x.sum(), poison=True, check_padding=False)(torch.arange(1, 6))


def test_declared_padding_is_not_poisoned() -> None:
    fast = graphed(lambda x: x - x.amax(0), poison=True, padding={"x": float("-inf")}, check_padding=False)
    x = torch.randn(5, 6)
    assert torch.equal(fast(x), x - x.amax(0))


def test_poison_runs_in_every_call() -> None:
    fast = graphed(lambda x: x * 2, poison=True)
    fast.capture(torch.ones(3, 6))
    before = fast.runtime.stats().replayed
    fast(torch.ones(5, 6))
    fast(torch.ones(8, 6))  # no padding, no poison
    assert fast.runtime.stats().replayed - before == 2 + 3


# -- is_padding


def test_the_context_says_which_rows_are_padding() -> None:
    seen = graphed(Marks(), {"num_reqs": [2, 4], "seq_len": [4]}, {"x": {0: "num_reqs", 1: "seq_len"}}, cut={0: {}})
    expected = torch.ones(4, 4, dtype=torch.bool)
    for reqs, tokens in ((3, 2), (4, 4), (3, 3)):
        expected.fill_(True)[:reqs, :tokens] = False
        assert torch.equal(seen(torch.zeros(reqs, tokens)), expected)


@torch.library.custom_op("graphpass_padding_test::rows", mutates_args=())
def rows_that_are_padding(x: torch.Tensor) -> torch.Tensor:
    is_padding = gp.get_forward_context().is_padding if gp.is_forward_context_available() else None
    return torch.zeros_like(x, dtype=torch.bool) if is_padding is None else is_padding.view(x.shape).clone()


@rows_that_are_padding.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.bool)


class Marks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rows_that_are_padding(x)


@pytest.mark.parametrize("num_dims", [1, 2])
def test_zero_padding_is_a_copy_where_nothing_is_padding(num_dims: int) -> None:
    x = torch.randn(3, 4)
    y = gp.zero_padding(x, num_dims)
    assert torch.equal(x, y)
    assert y.data_ptr() != x.data_ptr()
    rows = torch.zeros(x.shape[:num_dims], dtype=torch.bool)
    rows[1] = True
    with gp.set_forward_context(is_padding=rows.flatten()):
        zeroed = gp.zero_padding(x, num_dims)
    assert torch.equal(zeroed, torch.stack([x[0], torch.zeros(4), x[2]]))


# -- models that are called twice


@dataclass
class Result:
    rows: torch.Tensor
    none: torch.Tensor | None = None


torch.export.register_dataclass(Result)


class Global:
    flag = True


SETTINGS = Global()


def sets_a_constant(x: torch.Tensor) -> torch.Tensor:
    SETTINGS.flag = False
    return x - x.mean(0)


def replaces_what_it_reads(x: torch.Tensor) -> torch.Tensor:
    SETTINGS.flag = not SETTINGS.flag
    return x - x.mean(0)


MADE: dict[str, Callable[[torch.Tensor], Any]] = {
    "a dataclass": lambda x: Result(x - x.mean(0)),
    "an ordered dict": lambda x: OrderedDict(rows=x - x.mean(0), more=x),
    "a dict": lambda x: {"rows": x - x.mean(0)},
    "a list that grows": lambda x: [*[x], x - x.mean(0)],
    "a constant that is set": sets_a_constant,
}


@pytest.mark.parametrize("model", MADE.values(), ids=MADE)
def test_making_a_result_is_no_side_effect(model: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(MismatchError):
        graphed(model)(torch.randn(5, 6))


@pytest.mark.parametrize("name", ["a dataclass", "an ordered dict", "a dict"])
def test_a_model_that_makes_its_result_is_called_past_dynamo(name: str) -> None:
    model = MADE[name]
    fast = graphed(model)
    x = torch.randn(8, 6)
    torch.testing.assert_close(vars(fast(x)) if name == "a dataclass" else fast(x), _plain(model(x)))
    assert "through Dynamo" not in str(fast.report())


def _plain(result: Any) -> Any:
    return vars(result) if isinstance(result, Result) else result


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.named = {"count": 0}

    def forward(self, x: torch.Tensor, how: str) -> Any:
        result = Result(x - x.mean(0))
        if how == "append":
            self.seen.append(1)
        elif how == "setitem":
            self.named["count"] = 5
        elif how == "attribute":
            self.last = result
        return result


@pytest.mark.parametrize("how", ["append", "setitem", "attribute"])
def test_what_the_model_keeps_is_one(how: str) -> None:
    model = Keeps()
    fast = graphed(model)
    fast(torch.randn(5, 6), how)
    assert "is not checked: it " in str(fast.report())
    assert len(model.seen) == (how == "append")


def test_a_switch_is_thrown_once() -> None:
    SETTINGS.flag = True
    fast = graphed(replaces_what_it_reads)
    fast(torch.randn(5, 6))
    assert SETTINGS.flag is False
    assert "is not checked: it sets the attribute 'flag'" in str(fast.report())


def test_poison_says_aloud_what_it_cannot_check(caplog: pytest.LogCaptureFixture) -> None:
    graphed(replaces_what_it_reads, poison=True)(torch.randn(5, 6))
    assert "is not checked" in caplog.text


def test_zero_padding_keeps_the_layout() -> None:
    x = torch.randn(3, 4, 5).transpose(1, 2)
    with gp.set_forward_context(is_padding=torch.tensor([False, True, False])):
        zeroed = gp.zero_padding(x)
    assert zeroed.stride() == torch.empty_like(x).stride()
    assert torch.equal(zeroed, x * torch.tensor([1.0, 0.0, 1.0])[:, None, None])
