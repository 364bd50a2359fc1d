"""A manager's buffers: which dimension grows with what, what lies behind the real entries, what is refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import graphpass as gp
from graphpass import Batch, CudaGraphManager, InputSpec
from graphpass.errors import OptionError, ShapeError
from graphpass.serving.buffers import InputBuffers, RealInputs
from tests.unit.serving.managed import captured, sum_of_rows

WIDTH, LARGEST = 4, 10
CPU = torch.device("cpu")
X = InputSpec("x", (LARGEST, WIDTH), torch.float32)


def filled(buffers: InputBuffers, inputs: Mapping[str, torch.Tensor] | None, real: int, padded: int) -> dict[str, Any]:
    """Fill with a batch of ``real`` tokens; what the model is given at ``padded``."""
    given = buffers.at({**buffers.largest, "num_tokens": padded})
    RealInputs(buffers, {**buffers.largest, "num_tokens": real}, given).fill(inputs)
    return dict(given.arguments)


def mask(buffers: InputBuffers) -> torch.Tensor:
    return buffers.at(buffers.largest).is_padding


def manager_of(
    model: Callable[..., Any], specs: Sequence[InputSpec], mode: str = "FULL", sizes: Any = (4, 8), **given: Any
) -> CudaGraphManager:
    return captured(model, mode, sizes, specs, **given)


# -- the buffers alone


@pytest.mark.parametrize("padding", [0, 7.5, -1, math.inf, True], ids=str)
def test_padding_by_a_value_is_there_from_the_start_and_after_larger_batches(padding: Any) -> None:
    buffers = InputBuffers([InputSpec("x", (LARGEST, WIDTH), torch.float32, padding=padding)], CPU)
    expected = torch.full((LARGEST, WIDTH), float(padding))
    assert torch.equal(buffers.tensors["x"], expected)
    poison = torch.full((LARGEST, WIDTH), math.nan)
    for real, is_in_place in itertools.product((9, 3, 5, 1, 10, 0, 2, 2), (False, True)):
        buffers.tensors["x"][:real] = math.nan if is_in_place else 0
        given = filled(buffers, None if is_in_place else {"x": poison[:real]}, real, LARGEST)
        assert given["x"][:real].isnan().all()
        assert torch.equal(given["x"][real:], expected[real:])


def test_a_function_that_returns_another_shape_is_refused_and_the_next_batch_is_right() -> None:
    wrong = [True]

    def rule(real: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return real if wrong[0] else torch.cat([real, torch.ones(shape[0] - real.shape[0], *shape[1:])])

    buffers = InputBuffers([InputSpec("x", (LARGEST, WIDTH), torch.float32, padding=rule)], CPU)
    with pytest.raises(ShapeError, match="padding function of input 'x'"):
        filled(buffers, {"x": torch.randn(3, WIDTH)}, 3, 4)
    wrong[0] = False
    x = torch.randn(2, WIDTH)
    assert torch.equal(filled(buffers, {"x": x}, 2, 4)["x"], torch.cat([x, torch.ones(2, WIDTH)]))


@pytest.mark.parametrize("rule", [0, "repeat"])
def test_two_dimensions_are_padded_together(rule: Any) -> None:
    """One row a request, one column a token."""
    spec = InputSpec("mask", (3, LARGEST), torch.float32, token_dim=1, request_dim=0, padding=rule)
    buffers = InputBuffers([spec], CPU)
    assert buffers.largest == {"num_tokens": LARGEST, "num_reqs": 3}
    full = {"num_tokens": LARGEST, "num_reqs": 3}
    given = buffers.at(full)
    for real in ({"num_tokens": 9, "num_reqs": 3}, {"num_tokens": 4, "num_reqs": 1}, {"num_tokens": 6, "num_reqs": 2}):
        x = torch.randn(real["num_reqs"], real["num_tokens"])
        RealInputs(buffers, real, given).fill({"mask": x})
        pad = (0, LARGEST - real["num_tokens"], 0, 3 - real["num_reqs"])
        if rule == 0:
            expected = nn.functional.pad(x, pad)
        else:
            expected = nn.functional.pad(x[None, None], pad, mode="replicate")[0, 0]
        assert torch.equal(given.arguments["mask"], expected)


@pytest.mark.parametrize(
    ("specs", "found"),
    [
        ([], "no input"),
        ([InputSpec("x", (4,), torch.long, token_dim=None)], "x"),
        ([InputSpec("x", (4,), torch.long), InputSpec("x", (4,), torch.long)], "x"),
        ([InputSpec("x", (4,), torch.long), InputSpec("y", (5,), torch.long)], "y"),
        (
            [
                InputSpec("x", (4, 2), torch.long, request_dim=1),
                InputSpec("y", (3,), torch.long, token_dim=None, request_dim=0),
            ],
            "y",
        ),
    ],
)
def test_inputs_that_describe_no_largest_batch_are_refused(specs: list[InputSpec], found: str) -> None:
    with pytest.raises(OptionError, match="one largest batch") as raised:
        InputBuffers(specs, CPU)
    assert found in raised.value.found


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"shape": (0, 4)}, "a size of input 'x'"),
        ({"shape": (4.0, 4)}, "a size of input 'x'"),
        ({"shape": (True, 4)}, "a size of input 'x'"),
        ({"token_dim": 2}, "the dimensions of input 'x'"),
        ({"token_dim": -3}, "the dimensions of input 'x'"),
        ({"request_dim": 5}, "the dimensions of input 'x'"),
        ({"token_dim": 1, "request_dim": -1}, "the dimensions of input 'x'"),
        ({"padding": "last"}, "no padding rule"),
        ({"padding": None}, "no padding rule"),
    ],
)
def test_an_input_that_cannot_be_is_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        InputSpec(**{"name": "x", "shape": (4, 4), "dtype": torch.float32, **given})


@pytest.mark.parametrize(
    ("padding", "dtype"), [(math.nan, torch.long), (0.5, torch.long), (300, torch.uint8), (2, torch.bool)]
)
def test_a_padding_value_that_the_dtype_cannot_hold_is_refused_by_name(padding: Any, dtype: torch.dtype) -> None:
    """Another value than was declared would be there."""
    with pytest.raises(OptionError, match="input 'x' cannot hold its padding") as raised:
        InputSpec("x", (4,), dtype, padding=padding)
    assert str(dtype) in raised.value.expected
    assert raised.value.found == repr(padding)


# -- through a manager: the token dimension anywhere


SHAPES: Mapping[str, tuple[tuple[int, ...], int]] = {
    "ids": ((LARGEST,), 0),
    "embeddings": ((LARGEST, WIDTH), 0),
    "a token dimension of 1": ((3, LARGEST), 1),
    "the last": ((2, 3, LARGEST), -1),
    "in the middle": ((2, LARGEST, 3), 1),
    "the last but one": ((2, LARGEST, 3), -2),
    "as wide as the batch": ((LARGEST, LARGEST), 0),
    "a width that is a key": ((LARGEST, 8), 0),
    "a width of 1": ((LARGEST, 1), 0),
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, "FULL") for name in SHAPES), ("embeddings", "PIECEWISE"), ("in the middle", "PIECEWISE")],
)
def test_the_token_dimension_may_be_anywhere(name: str, mode: str) -> None:
    shape, token_dim = SHAPES[name]
    manager = manager_of(lambda x: x * 2 + 1, [InputSpec("x", shape, torch.float32, token_dim=token_dim)], mode)
    for num_tokens in (3, 8, 1, 9, 10, 4):
        x = torch.randn(shape).narrow(token_dim, 0, num_tokens)
        torch.testing.assert_close(manager.run(Batch(num_tokens, inputs={"x": x})), x * 2 + 1)
        manager.buffers["x"].narrow(token_dim, 0, num_tokens).copy_(x + 1)
        torch.testing.assert_close(manager.run(Batch(num_tokens)), (x + 1) * 2 + 1)
    assert manager.stats().replays == 8


def test_requests_must_be_counted_where_an_input_has_one_entry_for_each() -> None:
    specs = [X, InputSpec("offsets", (5,), torch.float32, token_dim=None, request_dim=0)]
    manager = manager_of(lambda x, offsets: (x + 1, offsets * 2), specs, max_num_reqs=5)
    inputs = {"x": torch.randn(3, WIDTH), "offsets": torch.randn(2)}
    for num_reqs in (None, 6, -1):
        with pytest.raises(ShapeError, match="does not fit the buffers") as raised:
            manager.run(Batch(3, inputs=inputs, num_reqs=num_reqs))
        assert f"num_reqs={num_reqs}" in raised.value.found
    with pytest.raises(ShapeError, match="input 'offsets'"):
        manager.run(Batch(3, inputs=inputs, num_reqs=3))
    got = manager.run(Batch(3, inputs=inputs, num_reqs=2))
    torch.testing.assert_close(got, (inputs["x"] + 1, inputs["offsets"] * 2))


@pytest.mark.parametrize("largest", [1, 2, 3, 5])
def test_as_many_requests_as_tokens(largest: int) -> None:
    """Sizes that are equal by chance are one symbol for torch; results are still cut by the right one."""
    specs = [
        InputSpec("x", (largest, WIDTH), torch.float32),
        InputSpec("offsets", (largest,), torch.float32, token_dim=None, request_dim=0),
    ]
    manager = manager_of(lambda x, offsets: (x + 1, offsets * 2), specs, sizes=[largest], max_num_reqs=largest)
    for num_tokens in range(1, largest + 1):
        for num_reqs in range(1, num_tokens + 1):
            inputs = {"x": torch.randn(num_tokens, WIDTH), "offsets": torch.randn(num_reqs)}
            got = manager.run(Batch(num_tokens, inputs=inputs, num_reqs=num_reqs))
            torch.testing.assert_close(got, (inputs["x"] + 1, inputs["offsets"] * 2))
    assert not manager.stats().fallbacks


# -- through a manager: padding


class Masked(nn.Module):
    """A mean over real rows alone, whatever padding holds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - sum_of_rows(gp.zero_padding(x))


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "NONE"])
def test_the_context_says_which_rows_are_padding(mode: str) -> None:
    spec = InputSpec("x", (LARGEST, WIDTH), torch.float32, padding=math.nan)
    manager = manager_of(Masked(), [spec], mode)
    for num_tokens in (3, 8, 1, 9, 2, 10, 5, 4):
        x = torch.randn(num_tokens, WIDTH)
        torch.testing.assert_close(manager.run(Batch(num_tokens, inputs={"x": x})), x - x.sum(0))
