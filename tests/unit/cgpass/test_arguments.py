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

import cgpass
import graphpass as gp
from graphpass import BatchDescriptor, GraphRuntime
from graphpass.errors import CaptureError
from tests.observed import reported_regions
from tests.unit.cgpass.attended import (
    BOTH,
    COMPILERS,
    MODES,
    Attended,
    Run,
    agrees,
    compiled_with,
    expected_counts,
    regions_of,
)


def slice_of_columns(rows: int) -> torch.Tensor:
    return torch.randn(rows, 12)[:, ::2]


def transposed(rows: int) -> torch.Tensor:
    return torch.randn(6, rows).t()


def row_slice(rows: int) -> torch.Tensor:
    buffer = torch.randn(rows + 9, 6)
    start = int(torch.randint(1, 9, ()))
    return buffer[start : start + rows]


def flat_slice(rows: int) -> torch.Tensor:
    """At an address that no vector load may assume aligned."""
    return torch.randn(rows * 6 + 1)[1:].view(rows, 6)


def expanded(rows: int) -> torch.Tensor:
    return torch.randn(6).expand(rows, 6)


VIEWS = [slice_of_columns, transposed, row_slice, flat_slice, expanded]


@pytest.mark.parametrize(
    ("make", "dynamic"), [*((make, True) for make in VIEWS), (transposed, False), (row_slice, False)]
)
def test_inputs_that_are_views_at_two_sizes(
    rt: GraphRuntime, at_key: Run, make: Callable[[int], torch.Tensor], dynamic: bool
) -> None:
    model = Attended().eval()
    compiled = compiled_with(rt, model, dynamic=dynamic)
    with rt.capturing():
        for mode in BOTH:
            for size in (8, 4):
                at_key(compiled, mode, size, make(size))
    captured = rt.stats().captured
    assert captured == 2 * sum(map(regions_of, BOTH))
    for mode in BOTH:
        for size in (4, 8, 4, 8):
            x = make(size)
            before = x.clone()
            agrees(at_key(compiled, mode, size, x), model(x).detach())
            assert torch.equal(x, before)
    assert rt.stats().captured == captured, "wherever the view lies, its strides are the same"


def test_a_slice_of_one_buffer_that_moves_is_staged(rt: GraphRuntime, at_key: Run) -> None:
    buffer = torch.randn(20, 6)
    model = Attended().eval()
    compiled = compiled_with(rt, model)
    with rt.capturing():
        for mode in BOTH:
            at_key(compiled, mode, 4, buffer[3:7])
    for start, mode in itertools.product(range(1, 16), BOTH):
        x = buffer[start : start + 4]
        agrees(at_key(compiled, mode, 4, x), model(x).detach())
    assert {(c.captured, c.static_sets) for c in rt.counts().values()} == {(1, 1)}


@pytest.mark.parametrize("make", [slice_of_columns, transposed, expanded])
def test_another_layout_at_a_captured_key_is_right(
    rt: GraphRuntime, at_key: Run, make: Callable[[int], torch.Tensor]
) -> None:
    """Dynamo compiles anew for other strides; where it does not, the copy must not mind them."""
    model = Attended().eval()
    compiled = compiled_with(rt, model, lazy_capture=True)
    with rt.capturing():
        for mode in BOTH:
            at_key(compiled, mode, 6, torch.randn(6, 6))
    for mode in BOTH:
        for x in (make(6), torch.randn(6, 6), make(6)):
            agrees(at_key(compiled, mode, 6, x), model(x).detach())


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.cgpasstest.scale(self.conv(x).relu()) + 1


@pytest.mark.parametrize(
    ("compiler", "weights"), [("eager", torch.contiguous_format), ("aot_eager", torch.channels_last)]
)
def test_channels_last(rt: GraphRuntime, at_key: Run, compiler: str, weights: torch.memory_format) -> None:
    model = Image().eval().to(memory_format=weights)
    compiled = compiled_with(rt, model, compiler=compiler)
    with rt.capturing():
        for mode in BOTH:
            for size in (5, 2):
                at_key(compiled, mode, size, torch.randn(size, 3, 8, 8).to(memory_format=torch.channels_last))
    for mode in BOTH:
        for size in (2, 5, 2):
            x = torch.randn(size, 3, 8, 8).to(memory_format=torch.channels_last)
            got, want = at_key(compiled, mode, size, x), model(x).detach()
            agrees(got, want)
            assert got.stride() == want.stride()
    assert {(key.num_tokens, c.captured, c.replayed) for (_, _, key), c in rt.counts().items()} == {
        (5, 1, 2),
        (2, 1, 3),
    }
    contiguous = torch.randn(2, 3, 8, 8)
    with pytest.raises(CaptureError, match="compiled the function again"):
        at_key(compiled, "FULL", 2, contiguous)
    for _ in range(2):
        agrees(at_key(compiled, "FULL", 2, contiguous, capture=rt), model(contiguous).detach())


# -- random numbers


def draws(x: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    y = torch.ops.cgpasstest.attend(x + 1)
    return y + torch.rand(y.shape, generator=generator)


@MODES
def test_an_explicit_generator_advances_and_reseeding_reproduces(rt: GraphRuntime, at_key: Run, mode: str) -> None:
    compiled = compiled_with(rt, draws, compiler="eager")
    x = torch.randn(4, 6)
    mine, eagers = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    default = torch.get_rng_state()
    got = [at_key(compiled, mode, 4, x, mine, capture=rt), *(at_key(compiled, mode, 4, x, mine) for _ in range(3))]
    want = [draws(x, eagers) for _ in range(4)]
    agrees(got, want)
    assert torch.equal(mine.get_state(), eagers.get_state())
    assert torch.equal(torch.get_rng_state(), default), "the default generator was not touched"
    mine.manual_seed(5)
    agrees([at_key(compiled, mode, 4, x, mine) for _ in range(4)], want)


def test_another_generator_is_the_one_that_advances(rt: GraphRuntime, at_key: Run) -> None:
    compiled = compiled_with(rt, draws, compiler="eager")
    x = torch.randn(4, 6)
    first, second = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    with rt.capturing():
        at_key(compiled, "FULL", 4, x, first)
        agrees(at_key(compiled, "FULL", 4, x, second), draws(x, torch.Generator().manual_seed(2)))
        agrees(at_key(compiled, "FULL", 4, x, second.manual_seed(3)), draws(x, torch.Generator().manual_seed(3)))
        agrees(at_key(compiled, "FULL", 4, x, first.manual_seed(4)), draws(x, torch.Generator().manual_seed(4)))


class Keeps(nn.Module):
    """Its own generator, as samplers keep one."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + torch.randn(6, generator=self.generator)


def test_a_generator_that_the_model_keeps(rt: GraphRuntime, at_key: Run) -> None:
    model = Keeps()
    compiled = compiled_with(rt, model, compiler="eager")
    x = torch.randn(4, 6)
    model.generator.manual_seed(9)
    want = [model(x) for _ in range(3)]
    model.generator.manual_seed(9)
    agrees([at_key(compiled, "FULL", 4, x, capture=c) for c in (rt, None, None)], want)
    model.generator.manual_seed(9)
    agrees([at_key(compiled, "FULL", 4, x) for _ in range(3)], want)


@COMPILERS
def test_the_default_generator_across_two_sizes(rt: GraphRuntime, at_key: Run, compiler: str) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.ops.cgpasstest.attend(F.dropout(x, 0.5)), 0.5) + torch.randn_like(x)

    compiled = compiled_with(rt, model, compiler=compiler)
    with rt.capturing():
        for mode in BOTH:
            for size in (8, 4):
                at_key(compiled, mode, size, torch.ones(size, 6))
    for seed, mode in ((3, "FULL"), (3, "PIECEWISE"), (4, "FULL")):
        torch.manual_seed(seed)
        got = [at_key(compiled, mode, size, torch.ones(size, 6)) for size in (4, 8, 4)]
        after = torch.rand(2)
        torch.manual_seed(seed)
        agrees(got, [model(torch.ones(size, 6)) for size in (4, 8, 4)])
        assert torch.equal(torch.rand(2), after)
    assert rt.stats().captured == 2 * sum(map(regions_of, BOTH))


# -- structured arguments and Python values


@dataclass
class Batch:
    left: torch.Tensor
    pair: tuple[torch.Tensor, list[torch.Tensor]]
    scale: float = 2.0


class Named(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def of_dataclass(batch: Batch, *, mask: dict[str, torch.Tensor]) -> torch.Tensor:
    y = torch.ops.cgpasstest.attend(batch.left * batch.scale) + batch.pair[0]
    return y * batch.pair[1][0] + mask["a"]


def of_named(named: Named, *, mask: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.ops.cgpasstest.attend(named.left + 1) * named.right + mask["a"]


def of_nested(nested: dict[str, Any], *, mask: dict[str, torch.Tensor]) -> torch.Tensor:
    (a, b), c = nested["pairs"][0], nested["deep"]["er"]
    return torch.ops.cgpasstest.attend(a + b) * c + mask["a"]


def make_dataclass() -> Batch:
    return Batch(torch.randn(4, 6), (torch.randn(4, 6), [torch.randn(4, 6)]))


def make_named() -> Named:
    return Named(torch.randn(4, 6), torch.randn(4, 6))


def make_nested() -> dict[str, Any]:
    return {"pairs": [(torch.randn(4, 6), torch.randn(4, 6))], "deep": {"er": torch.randn(6)}}


@pytest.mark.parametrize(
    ("model", "make"),
    [(of_dataclass, make_dataclass), (of_named, make_named), (of_nested, make_nested)],
    ids=["dataclass", "named tuple", "nested dict, list and tuple"],
)
def test_structured_and_keyword_inputs(
    rt: GraphRuntime, at_key: Run, tally: Run, model: Callable[..., Any], make: Callable[[], Any]
) -> None:
    compiled = compiled_with(rt, model, fullgraph=True)
    with rt.capturing():
        for mode in BOTH:
            at_key(compiled, mode, 4, make(), mask={"a": torch.randn(4, 6)})
    for mode in BOTH * 2:
        given, mask = make(), {"a": torch.randn(4, 6)}
        agrees(at_key(compiled, mode, 4, given, mask=mask), model(given, mask=mask))
    assert rt.stats().callables == 1
    for mode in BOTH:
        assert tally(rt, mode) == expected_counts(mode, 4, (1, 3))


def test_keywords_in_any_order_are_one_graph(rt: GraphRuntime, at_key: Run) -> None:
    def model(*, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.ops.cgpasstest.attend(x) - y

    compiled = compiled_with(rt, model)
    at_key(compiled, "FULL", 4, x=torch.randn(4, 6), y=torch.randn(4, 6), capture=rt)
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    agrees(at_key(compiled, "FULL", 4, y=y, x=x), model(x=x, y=y))
    assert {(c.captured, c.replayed) for c in rt.counts().values()} == {(1, 2)}


def with_values(x: torch.Tensor, bias: Any = None, times: int = 1, rate: float = 0.5, flip: bool = False) -> Any:
    y = torch.ops.cgpasstest.attend(x) * times + rate
    y = y.flip(0) if flip else y
    return y if bias is None else y + bias


VALUES = [{}, {"bias": torch.ones(6)}, {"times": 3}, {"rate": 0.25}, {"flip": True}]


@pytest.mark.parametrize("values", VALUES, ids=[",".join(v) or "none" for v in VALUES])
def test_none_int_float_and_bool_arguments(rt: GraphRuntime, at_key: Run, values: dict[str, Any]) -> None:
    compiled = compiled_with(rt, with_values)
    with rt.capturing():
        for mode in BOTH:
            at_key(compiled, mode, 4, torch.randn(4, 6), **values)
    for mode in BOTH * 2:
        x = torch.randn(4, 6)
        agrees(at_key(compiled, mode, 4, x, **values), with_values(x, **values))
    assert {(c.captured, c.replayed) for c in rt.counts().values()} == {(1, 3)}


def test_values_that_take_turns_are_never_mixed_up(rt: GraphRuntime, at_key: Run) -> None:
    """An int is baked, so it is in the key; everything else is Dynamo's to tell apart."""
    compiled = compiled_with(rt, with_values)

    def run(values: dict[str, Any], mode: str) -> None:
        x = torch.randn(4, 6)
        key = BatchDescriptor(4, extra=(("times", values.get("times", 1)),))
        agrees(at_key(compiled, mode, key, x, **values), with_values(x, **values))

    with rt.capturing():
        for values in (*VALUES, *reversed(VALUES)):
            for mode in BOTH:
                run(values, mode)
    captured = rt.stats().captured
    for values in (*VALUES, *reversed(VALUES)):
        for mode in BOTH:
            run(values, mode)
    assert rt.stats().captured == captured, "each set of values has its graph"


def test_a_float_argument_that_changes(rt: GraphRuntime, at_key: Run) -> None:
    compiled = compiled_with(rt, with_values)
    rates = [0.5, 0.25, 0.75]
    with rt.capturing():
        for rate, mode in itertools.product(rates, BOTH):
            at_key(compiled, mode, 4, torch.randn(4, 6), rate=rate)
    captured = rt.stats().captured
    for rate, mode in itertools.product((*rates, *rates), BOTH):
        x = torch.randn(4, 6)
        agrees(at_key(compiled, mode, 4, x, rate=rate), with_values(x, rate=rate))
    assert rt.stats().captured == captured
    assert not [why for _, _, why in reported_regions(rt) if "host read" in why], "a Python float is no tensor to read"


def test_a_float_that_was_never_captured_is_served_by_the_same_graph(rt: GraphRuntime, at_key: Run) -> None:
    compiled = compiled_with(rt, with_values)
    at_key(compiled, "PIECEWISE", 4, torch.randn(4, 6), rate=0.5, capture=rt)
    for rate in (0.25, 0.5, 0.75):
        x = torch.randn(4, 6)
        agrees(at_key(compiled, "PIECEWISE", 4, x, rate=rate), with_values(x, rate=rate))


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
    "padded": lambda x, _: torch.nn.functional.linear(jagged(x), x.new_ones(5, 4)).to_padded_tensor(0.0).exp(),
    "from_offsets": lambda x, offsets: torch.nested.nested_tensor_from_jagged(x.tanh(), offsets).values() * 3,
    "written": written,
    "result": lambda x, offsets: torch.nested.nested_tensor_from_jagged(x.tanh(), offsets),
    "result_beside_another": lambda x, offsets: (jagged(x.tanh()) * 2, x.exp() + 1),
}


def plain(value: Any) -> list[torch.Tensor]:
    parts = value if isinstance(value, tuple) else (value,)
    return [tensor.values() if tensor.layout is torch.jagged else tensor for tensor in parts]


@pytest.mark.parametrize(
    "options",
    [{"compiler": "eager"}, {"compiler": "aot_eager"}, {"compiler": "aot_eager", "mode": "PIECEWISE"}],
    ids=["eager", "aot_eager", "PIECEWISE"],
)
@pytest.mark.parametrize("name", JAGGED)
def test_a_jagged_tensor_inside(name: str, options: dict[str, Any]) -> None:
    torch.compiler.reset()
    function = JAGGED[name]
    compiled = torch.compile(function, backend="cgpass", options=cgpass.options(**options))
    expected, found = [], []
    with torch.no_grad():
        for step in range(5):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
            expected.append(plain(function(x, OFFSETS)))
            found.append(plain(compiled(x, OFFSETS)))
    torch.testing.assert_close(found, expected)  # after all calls: a result is not overwritten by a later one
    assert "nested tensor" in str(gp.runtime_of(compiled).report())
