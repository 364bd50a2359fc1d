"""What lies in the padding, and results that depend on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphpass.errors import MismatchError
from graphpass.regions import PaddedValue, register_padding_rule
from tests.unit.cgpass.attended import Make
from tests.unit.cgpass.leaks import LEAKS, RIGHT, agree, around, is_padded, refusals
from tests.unit.compiled import Compiled, agrees
from tests.unit.models import module

RAGGED = (5, 7, 6, 5, 7, 6, 5)


def assert_padded(fast: Compiled) -> None:
    """Some call replayed a larger graph, and no problem is reported."""
    assert fast.problems == ()
    assert fast.is_padded


@pytest.mark.parametrize("in_two_inputs", [True, False])
@pytest.mark.parametrize("smallest", [1, 3])
def test_an_index_of_two_integers_stays_valid(compiled: Make, smallest: int, in_two_inputs: bool) -> None:
    """Looks up the width of boxes, of which all integers are smaller than the table only as long as corners match."""

    def widths(self: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.table(right - left if in_two_inputs else left[:, 1] - left[:, 0]) + 1

    def boxes(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        left = torch.randint(100, 1000, (size,))
        right = left + torch.randint(0, 4, (size,))
        return left if in_two_inputs else torch.stack([left, right], dim=1), right

    fast = compiled(module(widths, table=nn.Embedding(4, 3)).eval(), make=boxes)
    fast.serve([8, 7, 8, 7, smallest, smallest + 1, smallest, 6, 5, 6, 5])
    assert any(size.verdict == "proved" for record in fast.rt.report().figures.callables for size in record.sizes)
    assert fast.is_padded


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_floats_that_become_indices_stay_valid(compiled: Make, mode: str) -> None:
    """One column of a float matrix is a category."""
    fast = compiled(
        module(lambda self, x: self.table(x[:, 0].long()) + x[:, 1:], table=nn.Embedding(10, 3)).eval(),
        make=lambda size: (torch.cat([torch.randint(0, 10, (size, 1)).float(), torch.randn(size, 3)], 1),),
        mode=mode,
    )
    fast.serve(RAGGED)
    assert_padded(fast)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_inputs_that_share_memory_in_the_first_calls_alone(compiled: Make, mode: str) -> None:
    """A result that is a view of one of them is a view of that one in later calls, too."""
    fast = compiled(lambda x, y: (y + x, x[1:], y.t()), dynamic=True, mode=mode)
    for call in range(8):
        x = torch.randn(5, 4)
        y = x.detach() if call < 3 else torch.randn(5, 4)
        _, of_x, of_y = fast(x, y)
        for found, expected in ((of_x, x[1:]), (of_y, y.t())):
            agrees(found, expected)
            assert found.data_ptr() == expected.data_ptr()
    assert fast.rt.stats().replayed > 0


def test_an_expanded_output_is_padded(compiled: Make) -> None:
    layer = nn.Linear(3, 3).eval()
    fast = compiled(
        lambda x: (layer(x).mean(1, keepdim=True).expand(-1, 8), layer(x)[:, :1].expand(-1, 2)),
        make=lambda size: (torch.randn(size, 3),),
    )
    fast.serve(RAGGED)
    assert fast(torch.randn(5, 3))[0].stride(1) == 0
    assert_padded(fast)


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def attended(x: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return nn.functional.scaled_dot_product_attention(x, x, values, mask)


NOT_FINITE: dict[str, Callable[..., torch.Tensor]] = {
    "norm": lambda x, m: (unit(x * m) * m).sum(1),
    "zero by zero": lambda x, m: (x * m / m * m).sum(1),
    "unknown by zero": lambda x, m: (x / m * m).sum(1),
    "rsqrt": lambda x, m: (x * m * torch.rsqrt((x * m).square().sum(-1, keepdim=True)) * m).sum(1),
    "softmax": lambda x, m: (x.masked_fill(m == 0, float("-inf")).softmax(-1) * m).sum(1),
    "difference of infinities": lambda x, m: ((1 / m - 1 / m) * m * x).sum(1),
    "after a product": lambda x, m: (unit(x * m @ torch.eye(8)) * m).sum(1),
    "after a linear layer": lambda x, m: (unit(nn.functional.linear(x * m, torch.eye(8))) * m).sum(1),
    "after a normalisation": lambda x, m: (unit(nn.functional.layer_norm(x * m, (8,))) * m).sum(1),
    "deviation": lambda x, m: (x * m / (x * m).std(-1, keepdim=True) * m).sum(1),
    "contraction": lambda x, m: m.mT @ unit(x * m),
    "values of attention": lambda x, m: attended(x[:, None], unit(x * m)[:, None], m.mT[:, None] != 0),
    "median": lambda x, m: (x * m / (x * m).median(-1, keepdim=True).values * m).sum(1),
}
"""Programs of x [batch, length, 8] and a mask [batch, length, 1]; padding becomes NaN or infinite, then meets zero."""


@pytest.mark.parametrize(("compiler", "is_made"), [("eager", False), ("aot_eager", True)])
@pytest.mark.parametrize("program", NOT_FINITE.values(), ids=NOT_FINITE)
def test_nothing_absorbs_nan(
    compiled: Make, program: Callable[..., torch.Tensor], compiler: str, is_made: bool
) -> None:
    """Without a step of AOTAutograd the length is not padded; with it, zeros are put behind what became NaN."""
    names = {name: {0: "rows", 1: "length"} for name in "xm"}
    fast = compiled(
        program,
        make=lambda length: (torch.randn(3, length, 8), torch.ones(3, length, 1)),
        dynamic=True,
        compiler=compiler,
        padding={"m": 0},
        dynamic_dims=names,
    )
    fast.serve((5, 7, 5, 7, 9, 10) * 2)
    assert (fast.padded_sizes["rows"], fast.padded_sizes["length"]) == (True, is_made)
    assert fast.is_padded == is_made


# What a rule promises and its operator does not keep is found before a wrong result is handed out.


@torch.library.custom_op("graphpasstest_lies::lie", mutates_args=())
def lie(x: torch.Tensor, what: str) -> torch.Tensor:
    return LIES[what](x).clone()


@lie.register_fake
def _(x: torch.Tensor, what: str) -> torch.Tensor:
    return torch.empty_like(x)


register_padding_rule("graphpasstest_lies::lie", lambda call: PaddedValue(call.tensor("x").factors))

LIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda x: x - x.mean(0),
    "place of the smallest": lambda x: x + x.argmin(0),
    "reversed": lambda x: x.flip(0),
    "above the mean": lambda x: (x > x.abs().mean() - 50).to(x.dtype),
    "nan": lambda x: x / x.norm(dim=1).amin(),
    "infinity": lambda x: (x / x.norm(dim=1).amin()).nan_to_num(1.0, float("inf")),
    "number of rows": lambda x: x / len(x),
}


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("padding", [{}, {"x": 0.0}], ids=["repeated", "zeros"])
@pytest.mark.parametrize("what", [what for what in LIES if what != "above the mean"])
def test_a_rule_that_promises_too_much_is_refuted(
    compiled: Make, what: str, padding: dict[str, Any], compiler: str
) -> None:
    """Declared zeros are left alone, so that only a run without padding shows what they do."""
    fast = compiled(
        lambda x: lie(x, what),
        make=lambda size: (torch.rand(size, 3) * 10 + 100,),
        compiler=compiler,
        padding=padding,
    )
    fast.serve(RAGGED)
    (refusal,) = refusals(fast.rt)
    if padding or what == "number of rows":
        assert "differ from a run without padding" in refusal
    assert not fast.is_padded


def test_large_values_show_what_small_ones_hide(compiled: Make) -> None:
    """Small values leave each real entry, far above zero, on its side of the mean."""
    fast = compiled(lambda x: lie(x, "above the mean"), make=lambda size: (torch.rand(size, 3) * 10 + 100,))
    fast.serve(RAGGED)
    assert "depend on the padding" in fast.problem("no longer padded").what


def test_strictly_a_refuted_size_is_an_error(compiled: Make) -> None:
    fast = compiled(lambda x: lie(x, "mean"), dynamic=True, padding_check="strict")
    with pytest.raises(MismatchError, match="depend on the padding"):
        fast(torch.randn(5, 6))


@pytest.mark.parametrize("name", [*LEAKS, *RIGHT])
def test_what_mixes_rows_is_right_at_any_size(name: str) -> None:
    runtime = agree({**LEAKS, **RIGHT}[name], around(64), torch.float32, compiler="aot_eager")
    assert refusals(runtime) == []
    assert is_padded(runtime) or name in LEAKS
