"""What lies in the padding, and results that depend on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cgpass import paddingcheck
from graphpass.regions import PaddedValue, register_padding_rule
from tests.unit.cgpass.attended import Make
from tests.unit.cgpass.leaks import BOTH, LEAKS, RIGHT, agree, around, is_padded, refusals
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


def test_probabilities_stay_probabilities(compiled: Make) -> None:
    fast = compiled(
        lambda x: x + F.binary_cross_entropy(x, x, reduction="none"),
        make=lambda size: (torch.rand(size, 3),),
        dynamic_dims={"x": 0},
        padding_check="declared",
    )
    fast.serve(RAGGED)
    assert_padded(fast)


@pytest.mark.parametrize(
    "options", [{"padding": {"edges": 0}}, {"dynamic_dims": {"edges": 1}}], ids=["constant", "equal"]
)
def test_padding_whose_contents_say_nothing_is_compared_with_a_run_without_it(
    compiled: Make, options: dict[str, Any]
) -> None:
    """Padding of a declared constant has no other contents, and copies of equal edges are equal edges."""

    def scattered(nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Sums messages along edges: an edge in the padding is one more message."""
        source, target = edges
        return torch.zeros_like(nodes).index_add(0, target, nodes[source])

    def made(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        edges = torch.zeros(2, size, dtype=torch.int64)
        return torch.randn(10, 4), edges.random_(10) if "padding" in options else edges

    fast = compiled(scattered, make=made, **options)
    fast.serve((20, 15, 30, 13) * 3)
    problem = fast.problem("no longer padded")
    assert "differ from a run without padding" in problem.what
    assert problem.times == 1


@torch.library.custom_op("graphpasstest_contents::jitter", mutates_args=())
def jitter(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(1, device=x.device)


jitter.register_fake(torch.empty_like)
register_padding_rule("graphpasstest_contents::jitter", lambda call: PaddedValue(call.tensor("x").factors))


def test_an_operator_that_draws_numbers_is_not_taken_for_a_dependence(compiled: Make) -> None:
    fast = compiled(lambda x: jitter(x))
    for size in RAGGED:
        fast(torch.randn(size, 3))
    assert fast.problems == ()
    assert fast.rt.stats().replayed > 0


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


# A leak of 1/n, which is smaller than rounding, is found before a wrong result is handed out; right programs pad.


DECLARED: dict[str, Any] = {"dynamic_dims": {"x": 0}, "padding_check": "declared"}


def assert_refused(name: str, size: int, dtype: torch.dtype) -> None:
    runtime = agree(LEAKS[name], around(size), dtype)
    assert len(refusals(runtime)) == 1
    assert not is_padded(runtime)


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_refused(name: str) -> None:
    assert_refused(name, 1024, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [64, 1000, 100_000])
@pytest.mark.parametrize("name", BOTH)
def test_a_mean_is_refused_at_any_size_and_type(name: str, size: int, dtype: torch.dtype) -> None:
    assert_refused(name, size, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RIGHT)
def test_what_does_not_leak_is_padded(name: str, dtype: torch.dtype) -> None:
    runtime = agree(RIGHT[name], around(64), dtype)
    assert refusals(runtime) == []
    assert is_padded(runtime)


def test_an_entry_that_cancels_out_is_no_leak(compiled: Make) -> None:
    """A multiplication of 33 and of 64 rows rounds otherwise; of a mean of 0 only this rounding is left."""
    up, down = torch.randn(512, 768), torch.randn(768, 512)

    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        means = x.cumsum(0) / torch.arange(1, x.shape[0] + 1)[:, None]  # not proved
        return F.layer_norm(F.gelu(x @ up) @ down, (512,)).mean(1), means

    fast = compiled(model, **DECLARED, capture_sizes=[64])
    for size in (33, 37, 41, 33, 61):
        fast(torch.randn(size, 512))
    assert refusals(fast.rt) == []
    assert fast.is_padded


@torch.library.custom_op("graphpasstest_leaks::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is torch.float64:
        raise NotImplementedError("doubled has no float64")
    return x * 2


@torch.library.custom_op("graphpasstest_leaks::rough", mutates_args=())
def rough(x: torch.Tensor) -> torch.Tensor:
    """Rounds otherwise for each number of rows."""
    return x * (1 + 1e-6 * torch.randn(x.shape, generator=torch.Generator().manual_seed(len(x)), dtype=x.dtype))


@torch.library.custom_op("graphpasstest_leaks::add_one", mutates_args=("x",))
def add_one(x: torch.Tensor) -> None:
    x.add_(1)


doubled.register_fake(torch.empty_like)
rough.register_fake(torch.empty_like)


def adds(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    add_one(y)
    return y.cumsum(0)


OWN_TYPE = {
    "right": (lambda x: doubled(x).cumsum(0), False),
    "a mean": (lambda x: doubled(x).mean(0), True),
    "rounding": (lambda x: rough(x).cumsum(0), False),
    "rounding and a mean": (lambda x: rough(x).mean(0), True),
    "a reinterpretation": (lambda x: (x * 2).view(torch.int32).view(torch.float32).flip(0).flip(0), False),
    "a write": (adds, False),
}


@pytest.mark.parametrize("name", OWN_TYPE)
def test_an_operator_without_float64_is_compared_in_its_own_type(compiled: Make, name: str) -> None:
    function, leaks = OWN_TYPE[name]
    fast = compiled(function, **DECLARED, padding={"x": 0.0})
    for size in (1015, 1015, 1017, 1015):
        x = torch.randn(size, 8) + 2
        agrees(fast(x), function(x), rtol=1e-4, atol=1e-4)
    assert any("no float64 for" in problem.what for problem in fast.problems)
    assert bool(refusals(fast.rt)) == leaks
    assert fast.is_padded != leaks


@torch.library.custom_op("graphpasstest_leaks::normed", mutates_args=())
def normed(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm(dim=1).amin()


normed.register_fake(torch.empty_like)
register_padding_rule("graphpasstest_leaks::normed", lambda call: PaddedValue(call.tensor("x").factors))


@pytest.mark.parametrize("function", [normed, lambda x: normed(x).nan_to_num(1.0, float("inf"))], ids=["nan", "inf"])
def test_what_is_not_finite_is_compared_with_a_run_without_padding(
    compiled: Make, function: Callable[..., Any]
) -> None:
    """A rule promises what is not true; the padding of a declared constant has no other contents."""
    fast = compiled(lambda x: function(x), make=lambda size: (torch.randn(size, 3),), padding={"x": 0.0})
    fast.serve(RAGGED)
    (refusal,) = refusals(fast.rt)
    assert "not finite" in refusal


def test_what_is_not_finite_without_padding_either_is_padded(compiled: Make) -> None:
    fast = compiled(lambda x: (x / 0, x * 2))
    for size in RAGGED:
        x = torch.randn(size, 3).relu()
        agrees(fast(x), (x / 0, x * 2), equal_nan=True)
    assert refusals(fast.rt) == []
    assert fast.is_padded


def counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Writes to a counter, to a buffer and to its argument."""
    self.calls.add_(1)
    self.total.add_(x.flip(0).sum(0))
    x.mul_(2)
    return x + self.total


def test_a_run_in_float64_writes_to_copies(compiled: Make) -> None:
    model, reference = (
        module(counts, total=torch.zeros(8), calls=torch.zeros((), dtype=torch.int64)) for _ in range(2)
    )
    fast = compiled(model, **DECLARED, padding={"x": 0.0})
    for size in (13, 13, 9, 13, 9, 11):
        x = torch.randn(size, 8)
        given = x.clone()
        agrees(fast(given), reference(x))
        agrees(given, x)
        agrees(dict(model.named_buffers()), dict(reference.named_buffers()))
    assert refusals(fast.rt) == []
    assert fast.is_padded


@pytest.mark.parametrize("of_found", [3, 2])
def test_results_of_another_length_are_a_leak(of_found: int) -> None:
    """The padding's contents decide how many entries ``masked_select`` returns."""
    two, three, found = torch.zeros(2), torch.ones(3), torch.zeros(of_found)
    assert paddingcheck._is_leak(found, two, (three, found))
    assert not paddingcheck._is_rounding((three, three), two, 1.0)
