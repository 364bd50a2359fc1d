"""Arguments and results of every form that torch.compile takes, nested tensors among them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphpass import BatchDescriptor
from graphpass.errors import CaptureError
from tests.observed import reported_regions
from tests.unit.cgpass.attended import ALL_REGIONS, COMPILERS, MODES, Attended, Make, expected_counts
from tests.unit.compiled import BOTH, agrees
from tests.unit.models import module


def row_slice(rows: int) -> torch.Tensor:
    start = int(torch.randint(1, 9, ()))
    return torch.randn(rows + 9, 6)[start : start + rows]


VIEWS: dict[str, Callable[[int], torch.Tensor]] = {
    "slice_of_columns": lambda rows: torch.randn(rows, 12)[:, ::2],
    "transposed": lambda rows: torch.randn(6, rows).t(),
    "row_slice": row_slice,
    # At an address that no vector load may assume aligned.
    "flat_slice": lambda rows: torch.randn(rows * 6 + 1)[1:].view(rows, 6),
    "expanded": lambda rows: torch.randn(6).expand(rows, 6),
}


@pytest.mark.parametrize(
    ("view", "dynamic"), [*((view, True) for view in VIEWS), ("transposed", False), ("row_slice", False)]
)
def test_inputs_that_are_views_at_two_sizes(keyed: Make, view: str, dynamic: bool) -> None:
    model = Attended().eval()
    fast = keyed(model, make=lambda size: (VIEWS[view](size),), dynamic=dynamic)
    fast.capture(sizes=(8, 4))
    assert fast.captured == 2 * ALL_REGIONS
    for mode, size in itertools.product(BOTH, (4, 8, 4, 8)):
        x = VIEWS[view](size)
        before = x.clone()
        agrees(fast.at(mode, size, x), model(x).detach())
        assert torch.equal(x, before)
    assert fast.captured == 2 * ALL_REGIONS, "wherever the view lies, its strides are the same"


def test_a_slice_of_one_buffer_that_moves_is_staged(keyed: Make) -> None:
    buffer, starts = torch.randn(20, 6), itertools.cycle((3, *range(1, 16)))

    def next_slice(size: int) -> tuple[torch.Tensor]:
        start = next(starts)
        return (buffer[start : start + size],)

    fast = keyed(Attended().eval(), make=next_slice)
    fast.capture()
    fast.check(sizes=[4] * 16)
    assert fast.uses("captured", "static_sets") == {(1, 1)}


@pytest.mark.parametrize("view", ["slice_of_columns", "transposed", "expanded"])
def test_another_layout_at_a_captured_key_is_right(keyed: Make, view: str) -> None:
    """Dynamo compiles anew for other strides; where it does not, the copy must not mind them."""
    layouts = itertools.cycle((VIEWS[view], lambda size: torch.randn(size, 6), VIEWS[view]))
    fast = keyed(Attended().eval(), lazy_capture=True)
    fast.capture(sizes=[6])
    fast.make = lambda size: (next(layouts)(size),)
    fast.check(sizes=[6] * 3)


@pytest.mark.parametrize(
    ("compiler", "weights"), [("eager", torch.contiguous_format), ("aot_eager", torch.channels_last)]
)
def test_channels_last(keyed: Make, compiler: str, weights: torch.memory_format) -> None:
    conv = nn.Conv2d(3, 4, 3, padding=1)
    model = module(lambda self, x: torch.ops.cgpasstest.scale(self.conv(x).relu()) + 1, conv=conv).eval()
    model.to(memory_format=weights)
    fast = keyed(
        model,
        make=lambda size: (torch.randn(size, 3, 8, 8).to(memory_format=torch.channels_last),),
        dynamic=True,
        compiler=compiler,
    )
    fast.capture(sizes=(5, 2))
    for mode, size in itertools.product(BOTH, (2, 5, 2)):
        (x,) = fast.make(size)
        got, want = fast.at(mode, size, x), model(x).detach()
        agrees(got, want)
        assert got.stride() == want.stride()
    counts = {(key.num_tokens, c.captured, c.replayed) for (_, _, key), c in fast.rt.counts().items()}
    assert counts == {(5, 1, 2), (2, 1, 3)}
    contiguous = torch.randn(2, 3, 8, 8)
    with pytest.raises(CaptureError, match="compiled the function again"):
        fast.at("FULL", 2, contiguous)
    for _ in range(2):
        agrees(fast.at("FULL", 2, contiguous, capture=True), model(contiguous).detach())


# -- random numbers


def draws(x: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    y = torch.ops.cgpasstest.attend(x + 1)
    return y + torch.rand(y.shape, generator=generator)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@MODES
def test_an_explicit_generator_advances_and_reseeding_reproduces(keyed: Make, mode: str) -> None:
    fast = keyed(draws)
    x, mine, eagers, default = torch.randn(4, 6), seeded(5), seeded(5), torch.get_rng_state()
    got = [fast.at(mode, 4, x, mine, capture=step == 0) for step in range(4)]
    want = [draws(x, eagers) for _ in range(4)]
    agrees(got, want)
    assert torch.equal(mine.get_state(), eagers.get_state())
    assert torch.equal(torch.get_rng_state(), default), "the default generator was not touched"
    mine.manual_seed(5)
    agrees([fast.at(mode, 4, x, mine) for _ in range(4)], want)


def test_another_generator_is_the_one_that_advances(keyed: Make) -> None:
    fast, x = keyed(draws), torch.randn(4, 6)
    first, second = seeded(1), seeded(2)
    fast.at("FULL", 4, x, first, capture=True)
    for generator, seed in ((second, 2), (second, 3), (first, 4)):
        agrees(fast.at("FULL", 4, x, generator.manual_seed(seed), capture=True), draws(x, seeded(seed)))


def test_a_generator_that_the_model_keeps(keyed: Make) -> None:
    model: Any = module(lambda self, x: x * 2 + torch.randn(6, generator=self.generator), generator=torch.Generator())
    fast, x = keyed(model), torch.randn(4, 6)
    model.generator.manual_seed(9)
    want = [model(x) for _ in range(3)]
    for captures in (1, 0):
        model.generator.manual_seed(9)
        agrees([fast.at("FULL", 4, x, capture=step < captures) for step in range(3)], want)


@COMPILERS
def test_the_default_generator_across_two_sizes(keyed: Make, compiler: str) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.ops.cgpasstest.attend(F.dropout(x, 0.5)), 0.5) + torch.randn_like(x)

    fast = keyed(model, make=lambda size: (torch.ones(size, 6),), dynamic=True, compiler=compiler)
    fast.capture(sizes=(8, 4))
    for seed, mode in ((3, "FULL"), (3, "PIECEWISE"), (4, "FULL")):
        torch.manual_seed(seed)
        got = [fast.at(mode, size, torch.ones(size, 6)) for size in (4, 8, 4)]
        after = torch.rand(2)
        torch.manual_seed(seed)
        agrees(got, [model(torch.ones(size, 6)) for size in (4, 8, 4)])
        assert torch.equal(torch.rand(2), after)
    assert fast.captured == 2 * ALL_REGIONS


# -- structured arguments and Python values


@dataclass
class Batch:
    left: torch.Tensor
    pair: tuple[torch.Tensor, list[torch.Tensor]]
    scale: float = 2.0


class Named(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def of_dataclass(batch: Batch, mask: torch.Tensor) -> torch.Tensor:
    y = torch.ops.cgpasstest.attend(batch.left * batch.scale) + batch.pair[0]
    return y * batch.pair[1][0] + mask


def of_named(named: Named, mask: torch.Tensor) -> torch.Tensor:
    return torch.ops.cgpasstest.attend(named.left + 1) * named.right + mask


def of_nested(nested: dict[str, Any], mask: torch.Tensor) -> torch.Tensor:
    (a, b), c = nested["pairs"][0], nested["deep"]["er"]
    return torch.ops.cgpasstest.attend(a + b) * c + mask


def drawn() -> torch.Tensor:
    return torch.randn(4, 6)


STRUCTURED: dict[str, tuple[Callable[..., torch.Tensor], Callable[[], Any]]] = {
    "dataclass": (of_dataclass, lambda: Batch(drawn(), (drawn(), [drawn()]))),
    "named tuple": (of_named, lambda: Named(drawn(), drawn())),
    "nested dict, list and tuple": (
        of_nested,
        lambda: {"pairs": [(drawn(), drawn())], "deep": {"er": torch.randn(6)}},
    ),
}


@pytest.mark.parametrize("name", STRUCTURED)
def test_structured_and_keyword_inputs(keyed: Make, name: str) -> None:
    function, make = STRUCTURED[name]

    def model(given: Any, *, named: dict[str, torch.Tensor]) -> torch.Tensor:
        return function(given, named["a"])

    fast = keyed(model, fullgraph=True)
    for number, mode in itertools.product(range(3), BOTH):
        given, named = make(), {"a": drawn()}
        agrees(fast.at(mode, 4, given, named=named, capture=number == 0), model(given, named=named))
    assert fast.rt.stats().callables == 1
    for mode in BOTH:
        assert fast.tally(mode) == expected_counts(mode, 4, (1, 3))


def test_keywords_in_any_order_are_one_graph(keyed: Make) -> None:
    def model(*, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.ops.cgpasstest.attend(x) - y

    fast = keyed(model)
    fast.at("FULL", 4, x=drawn(), y=drawn(), capture=True)
    x, y = drawn(), drawn()
    agrees(fast.at("FULL", 4, y=y, x=x), model(x=x, y=y))
    assert fast.uses() == {(1, 2)}


def with_values(x: torch.Tensor, bias: Any = None, times: int = 1, rate: float = 0.5, flip: bool = False) -> Any:
    y = torch.ops.cgpasstest.attend(x) * times + rate
    y = y.flip(0) if flip else y
    return y if bias is None else y + bias


VALUES = [{}, {"bias": torch.ones(6)}, {"times": 3}, {"rate": 0.25}, {"flip": True}]


@pytest.mark.parametrize("values", VALUES, ids=[",".join(v) or "none" for v in VALUES])
def test_none_int_float_and_bool_arguments(keyed: Make, values: dict[str, Any]) -> None:
    fast = keyed(with_values, dynamic=True)
    for number, mode in itertools.product(range(3), BOTH):
        x = drawn()
        agrees(fast.at(mode, 4, x, **values, capture=number == 0), with_values(x, **values))
    assert fast.uses() == {(1, 3)}


def test_values_that_take_turns_are_never_mixed_up(keyed: Make) -> None:
    """An int is baked, so it is in the key; everything else is Dynamo's to tell apart."""
    fast = keyed(with_values, dynamic=True)
    captured = []
    for capture in (True, False):
        for values, mode in itertools.product((*VALUES, *reversed(VALUES)), BOTH):
            x, key = drawn(), BatchDescriptor(4, extra=(("times", values.get("times", 1)),))
            agrees(fast.at(mode, key, x, **values, capture=capture), with_values(x, **values))
        captured.append(fast.captured)
    assert captured[0] == captured[1], "each set of values has its graph"


def test_a_float_argument_that_changes(keyed: Make) -> None:
    fast = keyed(with_values, dynamic=True)
    captured = []
    for rates, capture in (([0.5, 0.25, 0.75], True), ([0.5, 0.25, 0.75] * 2, False)):
        for rate, mode in itertools.product(rates, BOTH):
            x = drawn()
            agrees(fast.at(mode, 4, x, rate=rate, capture=capture), with_values(x, rate=rate))
        captured.append(fast.captured)
    assert captured[0] == captured[1]
    reasons = [why for _, _, why in reported_regions(fast.rt)]
    assert not [why for why in reasons if "host read" in why], "a Python float is no tensor to read"


def test_a_float_that_was_never_captured_is_served_by_the_same_graph(keyed: Make) -> None:
    fast = keyed(with_values, dynamic=True)
    fast.at("PIECEWISE", 4, drawn(), rate=0.5, capture=True)
    for rate in (0.25, 0.5, 0.75):
        x = drawn()
        agrees(fast.at("PIECEWISE", 4, x, rate=rate), with_values(x, rate=rate))


# Jagged tensors made inside the compiled function run eagerly, the rest of the graph replays.


OFFSETS = torch.tensor([0, 1, 3])


def jagged(x: torch.Tensor) -> Any:
    return torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged)


def written(x: torch.Tensor, offsets: torch.Tensor) -> Any:
    y = x.tanh()
    torch.nested.nested_tensor_from_jagged(y, offsets).mul_(2)
    return y.exp()


JAGGED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "values": lambda x, offsets: (jagged(x.tanh()) * 2).values().sum(0),
    "padded": lambda x, _: F.linear(jagged(x), x.new_ones(5, 4)).to_padded_tensor(0.0).exp(),
    "from_offsets": lambda x, offsets: torch.nested.nested_tensor_from_jagged(x.tanh(), offsets).values() * 3,
    "written": written,
    "result": lambda x, offsets: torch.nested.nested_tensor_from_jagged(x.tanh(), offsets),
    "result_beside_another": lambda x, offsets: (jagged(x.tanh()) * 2, x.exp() + 1),
}


def parts_of(value: Any) -> list[torch.Tensor]:
    parts = value if isinstance(value, tuple) else (value,)
    return [tensor.values() if tensor.layout is torch.jagged else tensor for tensor in parts]


@pytest.mark.parametrize(
    "options",
    [{"compiler": "eager"}, {"compiler": "aot_eager"}, {"compiler": "aot_eager", "mode": "PIECEWISE"}],
    ids=["eager", "aot_eager", "PIECEWISE"],
)
@pytest.mark.parametrize("name", JAGGED)
def test_a_jagged_tensor_inside(compiled: Make, name: str, options: dict[str, Any]) -> None:
    fast = compiled(JAGGED[name], **options)
    given = [torch.randn(3, 4) for _ in range(5)]
    found = [parts_of(fast(x, OFFSETS)) for x in given]
    agrees(found, [parts_of(JAGGED[name](x, OFFSETS)) for x in given])  # a result is not overwritten by a later one
    assert "nested tensor" in str(fast.rt.report())
