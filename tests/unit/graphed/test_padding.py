"""What padding may not do: reach a result, a buffer, an argument or the generator; each of these once went wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphpass as gp
from graphpass.errors import CaptureError
from tests.unit.graphed.oracle import agree, call, full_counts, graphed, replays

SIZES = (5, 3, 5, 3, 6, 7, 3, 5, 6, 7, 2, 2, 2)


class Experts(nn.Module):
    """Counts the tokens of each expert in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts = nn.Linear(4, 3), nn.Parameter(torch.randn(3, 4, 4))
        self.register_buffer("tokens", torch.zeros(3, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = self.router(x).argmax(-1)
        self.tokens += (chosen[:, None] == torch.arange(3)).sum(0)
        return torch.einsum("nd,nde->ne", x, self.experts[chosen]), chosen


class NormThenDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(x))


class Prepared(nn.Module):
    """The batch's own statistics in train mode, kept ones in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


def mean_of_large(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() > x.abs().mean(), x, torch.zeros_like(x))


MODELS: dict[str, Callable[[], Callable[..., Any]]] = {
    "an integer result": lambda: lambda x: x.argmax(0),
    "an integer of each row": lambda: lambda x: x.argmax(1),
    "a bool": lambda: lambda x: (x > 0).any(0),
    "all of a bool": lambda: lambda x: (x > -1).all(),
    "a threshold": lambda: mean_of_large,
    "mean over the batch": lambda: lambda x: x - x.mean(0),
    "softmax over the batch": lambda: lambda x: x.softmax(0),
    "attention over the batch": lambda: lambda x: F.scaled_dot_product_attention(x, x, x),
    "sort": lambda: lambda x: x.sort(0)[0],
    "cumulative sum": lambda: lambda x: x.cumsum(0),
    "reversed": lambda: lambda x: x.flip(0),
    "last row": lambda: lambda x: x[-1],
    "every other row": lambda: lambda x: x[::2],
    "flattened": lambda: lambda x: x.t().flatten(),
    "positions": lambda: lambda x: torch.arange(x.shape[0]) / x.shape[0],
    "doubled": lambda: lambda x: torch.cat([x, x]) * 2,
    "numbers of the size": lambda: lambda x: (x * 2, x.shape[0], 2 * x.shape[0] + 1),
    "random numbers": lambda: lambda x: x + torch.rand_like(x),
    "random numbers apart from the rows": lambda: lambda x: x + torch.rand(4),
    "expert counters": Experts,
    "batch norm beside dropout": lambda: NormThenDropout().train(),
    "batch norm in training": lambda: Prepared().train(),
    "batch norm in eval": lambda: Prepared().eval(),
}


@pytest.mark.parametrize("declared", [False, True], ids=["plain", "declared"])
@pytest.mark.parametrize("name", MODELS)
def test_padding_reaches_nothing(name: str, declared: bool) -> None:
    given: tuple[Any, ...] = ([2, 4, 8], {"x": 0}) if declared else ()
    agree(MODELS[name], [lambda n=n: call(torch.randn(n, 4)) for n in SIZES], *given)


ROWWISE = ("an integer of each row", "batch norm in eval")


@pytest.mark.parametrize("name", ROWWISE)
def test_what_does_not_mix_rows_is_padded(name: str) -> None:
    fast = agree(MODELS[name], [lambda n=n: call(torch.randn(n, 4)) for n in SIZES], [2, 4, 8], {"x": 0})
    assert set(full_counts(fast)) <= {2, 4, 8}
    assert replays(fast) >= 6


@pytest.mark.parametrize("name", ["mean over the batch", "a threshold", "an integer result", "expert counters"])
def test_a_declared_size_that_is_not_proved_runs_exact_and_says_so_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    fast = agree(MODELS[name], [lambda n=n: call(torch.randn(n, 4)) for n in (5, 3, 5, 3, 5)], [4, 8], {"x": 0})
    warned = [r.getMessage() for r in caplog.records if r.name == "graphpass" and r.levelname == "WARNING"]
    assert len([text for text in warned if "num_tokens" in text]) == 1
    assert set(full_counts(fast)) <= {3, 5}


LEAKS = ("mean over the batch", "a threshold", "an integer result", "sort", "reversed")


@pytest.mark.parametrize("name", [*LEAKS, "batch norm in training"])
def test_padding_that_was_declared_whatever_the_proof_is_refuted_by_the_run_time_check(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    calls = [lambda n=n: call(torch.randn(n, 4)) for n in (5, 5, 3, 3, 5, 3)]
    fast = agree(MODELS[name], calls, [4, 8], {"x": 0}, padding_check="declared")
    assert "depend on the padding" in caplog.text
    assert not {8} & set(full_counts(fast)) or replays(fast) > 0


@pytest.mark.parametrize("name", LEAKS)
def test_strictly_a_size_that_is_not_proved_is_an_error(name: str) -> None:
    fast = graphed(MODELS[name](), [4, 8], {"x": 0}, padding_check="strict")
    with pytest.raises(CaptureError, match="num_tokens cannot be padded") as raised:
        fast(torch.randn(5, 4))
    assert "test_padding.py" in raised.value.found, "with the user's line"


@torch.library.custom_op("graphpass_graphed_test::sees_a_context", mutates_args=())
def sees_a_context(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, float(gp.is_forward_context_available()))


sees_a_context.register_fake(torch.empty_like)


def test_ops_see_no_forward_context_that_nobody_has_set() -> None:
    fast = agree(lambda: lambda x: x + sees_a_context(x), [lambda n=n: call(torch.randn(n, 4)) for n in SIZES])
    assert replays(fast) > 0


class Masked(nn.Module):
    """Attention within rows of a padded sequence; a score of NaN times a weight of zero is NaN."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = gp.zero_padding(x, 2)
        bias = torch.zeros(mask.shape).masked_fill(~mask, -1e9)[:, None]
        return F.scaled_dot_product_attention(x, x, x, attn_mask=bias)


@pytest.mark.parametrize("contents", [float("nan"), 0.0, 1e30])
def test_zero_padding_keeps_anything_out_of_keys_and_values(contents: float) -> None:
    dims = {name: {0: "num_reqs", 1: "seq_len"} for name in ("x", "mask")}
    calls = [
        lambda shape=shape: call(torch.randn(*shape, 8), torch.ones(shape, dtype=torch.bool))
        for shape in ((3, 5), (3, 5), (1, 8), (2, 3), (4, 7), (3, 5), (2, 3))
    ]
    fast = agree(
        Masked, calls, {"num_reqs": [2, 4], "seq_len": [4, 8]}, dims, padding={"x": contents, "mask": False},
        padding_check="declared",
    )  # fmt: skip
    assert replays(fast) > 0


class MeanPooling(nn.Module):
    """Pools over a sequence, by its mask where it has one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(30, 4)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(ids)
        if mask is None:
            return x.mean(1)
        weights = mask[:, :, None].to(x.dtype)
        return (x * weights).sum(1) / weights.sum(1).clamp(min=1)


TOKENS = ({"num_reqs": [2, 4], "seq_len": [8, 512]}, {"ids": {0: "num_reqs", 1: "seq_len"}})


def tokens(rows: int, length: int, *, masked: bool) -> Any:
    ids = torch.randint(30, (rows, length))
    mask = torch.arange(length)[None] < torch.randint(1, length + 1, (rows, 1))
    return call(ids, mask.long()) if masked else call(ids)


SHAPES = ((3, 510), (3, 510), (3, 300), (3, 20), (2, 5), (4, 511), (2, 7), (3, 10), (2, 5))


@pytest.mark.parametrize("masked", [False, True], ids=["without a mask", "with a mask"])
@pytest.mark.parametrize("padding", [{}, {"ids": 0, "mask": 0}], ids=["repeated", "declared"])
def test_mean_pooling(masked: bool, padding: dict[str, int]) -> None:
    """A first call that pads 2 of 512 positions says little about later ones."""
    calls = [lambda shape=shape: tokens(*shape, masked=masked) for shape in SHAPES]
    given = padding if masked else {name: value for name, value in padding.items() if name == "ids"}
    fast = agree(MeanPooling, calls, *TOKENS, padding=given)
    if masked and padding:
        assert {key.num_tokens for _, _, key in fast.runtime.counts()} <= {2 * 8, 4 * 8, 2 * 512, 4 * 512}


def test_capture_with_zeros_blinds_nothing() -> None:
    model = MODELS["mean over the batch"]()
    fast = graphed(model, [2, 4, 8], {"x": 0})
    fast.capture(torch.zeros(5, 4))
    for n in SIZES:
        x = torch.randn(n, 4)
        torch.testing.assert_close(fast(x), model(x))


class Causal(nn.Module):
    """A decoder that returns the next token of each sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.qkv, self.head = nn.Embedding(30, 8), nn.Linear(8, 24), nn.Linear(8, 30)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.embedding(ids)).chunk(3, -1)
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x)[:, -1].argmax(-1)


def test_the_last_position_of_a_padded_sequence() -> None:
    calls = [
        lambda shape=shape: tokens(*shape, masked=False) for shape in ((3, 5), (3, 5), (2, 7), (3, 6), (2, 5), (3, 7))
    ]
    agree(Causal, calls * 2, {"num_reqs": [2, 4], "seq_len": [8]}, TOKENS[1])


class Attends(nn.Module):
    """Attention over a padded sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.qkv = nn.Embedding(30, 8), nn.Linear(8, 24)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.qkv(self.embedding(ids)).chunk(3, -1)
        bias = None if mask is None else torch.zeros(mask.shape).masked_fill(mask == 0, -1e9)[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


@pytest.mark.parametrize("masked", [False, True], ids=["without a mask", "with a mask"])
def test_attention_over_a_padded_sequence(masked: bool) -> None:
    calls = [
        lambda shape=shape: tokens(*shape, masked=masked) for shape in ((3, 5), (3, 5), (2, 7), (4, 6), (2, 5), (3, 5))
    ]
    padding = {"ids": 0, "mask": 0} if masked else {"ids": 0}
    fast = agree(Attends, calls * 2, {"num_reqs": [2, 4], "seq_len": [8]}, TOKENS[1], padding=padding)
    if masked:
        assert {key.num_tokens for _, _, key in fast.runtime.counts()} <= {2 * 8, 4 * 8}


@pytest.mark.parametrize("width", [4, 8, 3], ids=["a capture size", "another capture size", "the real size"])
def test_a_width_that_equals_a_size_is_not_cut(width: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(width, width)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = self.inner(x)
            return y, y.t(), self.inner.weight * 2

    agree(Model, [lambda n=n: call(torch.randn(n, width)) for n in (3, 4, 7, 8, 3, 7, 3)], [4, 8], {"x": 0})


def test_a_table_of_the_batchs_size_by_chance_is_not_padded() -> None:
    calls = [lambda n=n: call(torch.randn(n, 3), torch.randn(3, 3)) for n in (3, 2, 3, 4, 3, 2, 4)]
    agree(lambda: lambda x, table: x @ table + table.sum(), calls, [2, 4, 8], {"x": 0})


def gathered(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mask is read by index, as Hugging Face models do: no guard ties its sizes to those of ``ids``."""
    rows, cols = torch.arange(ids.shape[0])[:, None], torch.arange(ids.shape[1])
    return torch.where(mask[rows, cols] > 0, ids, -1)


@pytest.mark.parametrize("first", [(3, 5), (1, 1), (2, 8), (1, 5), (5, 5), (8, 1)])
def test_a_mask_that_is_gathered_from(first: tuple[int, int]) -> None:
    shapes = (first, (3, 5), (1, 1), (4, 7), (2, 2), (8, 8), (3, 5), (4, 7), first)
    calls = [lambda shape=shape: tokens(*shape, masked=True) for shape in shapes]
    agree(lambda: gathered, calls, {"num_reqs": [2, 4, 8], "seq_len": [4, 8]}, TOKENS[1])


@pytest.mark.parametrize("rule", [0, 7.0, "repeat", lambda real, shape: F.pad(real, (0, 0, 0, shape[0] - len(real)))])
def test_padding_by_any_rule(rule: Any) -> None:
    fast = agree(
        lambda: lambda x: x.tanh(), [lambda n=n: call(torch.randn(n, 4)) for n in SIZES], [4, 8], {"x": 0},
        padding={"x": rule},
    )  # fmt: skip
    assert set(full_counts(fast)) == {4, 8}


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_modes(mode: str) -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.cos()
        return y, F.softmax(y, 1) + 1

    options = {"mode": mode, "splitting_ops": ["torch.nn.functional.softmax"]}
    fast = agree(lambda: model, [lambda n=n: call(torch.randn(n, 4)) for n in SIZES], [4, 8], {"x": 0}, **options)
    assert replays(fast) >= 6
    assert {str(found) for _, found, _ in fast.runtime.counts()} == {mode.partition("_")[0]}


def above_the_mean(x: torch.Tensor) -> torch.Tensor:
    """Ten real rows far above zero: small values in the padding leave every entry on its side of the mean."""
    return x > x.abs().mean() - 50


def test_large_values_in_the_padding_show_what_small_ones_hide(caplog: pytest.LogCaptureFixture) -> None:
    calls = [lambda: call(torch.rand(13, 4) * 10 + 100)] * 4
    agree(lambda: above_the_mean, calls, [16], {"x": 0}, padding_check="declared")
    assert "depend on the padding" in caplog.text


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        total.mul_(2).add_(1)
        x.mul_(3)
        return x + self.steps + total


@pytest.mark.parametrize("check", ["prove", "declared"])
def test_the_run_time_check_leaves_no_trace(check: str) -> None:
    calls = [lambda n=n: call(torch.randn(n, 4), torch.ones(1)) for n in (5, 5, 3, 5, 3, 3)]
    fast = agree(Counted, calls, [4, 8], {"x": 0}, padding_check=check)
    assert set(full_counts(fast)) == {4, 8}
    assert replays(fast) > 0


def looked_up(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return table[torch.arange(x.shape[0]) % table.shape[0]] * x


def test_what_was_equal_in_the_first_call_may_differ() -> None:
    shapes = ((3, 3), (5, 5), (3, 3), (5, 5), (3, 5), (5, 3), (3, 5), (5, 3), (3, 5), (5, 3), (5, 5))
    calls = [lambda n=n, m=m: call(torch.randn(n, 2), torch.randn(m, 2)) for n, m in shapes]
    agree(lambda: looked_up, calls)
    agree(lambda: lambda x, table: (x * 2, table * 3), calls)
    agree(lambda: lambda x, table: (x * 2, table * 3), calls, [4, 8], {"x": 0})
