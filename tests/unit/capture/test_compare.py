"""``compare``: eager runs beside every replay, which name what differs first; views that outlive their validity."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch

from graphpass import CUDAGraphWrapper
from graphpass.capture import CapturePolicy
from graphpass.capture.compare import first_difference
from graphpass.errors import MismatchError

X = torch.arange(8.0).reshape(4, 2)
ROW = torch.arange(8.0)


def test_a_difference_names_tensor_row_and_magnitude(rig: Any) -> None:
    scale = torch.ones(4, 1)
    rows = [scale]

    def region(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, x * rows[0]

    wrapper = rig.captured(rig.wrap(region, compare=True), X)
    rig.call(wrapper, X)
    rows[0] = torch.tensor([[1.0], [1.0], [3.0], [1.5]])
    with pytest.raises(MismatchError) as failure:
        rig.call(wrapper, X)
    for text in ("output 1 of region", "FULL 8 tokens", "row 2 (of 2 rows", "largest difference 10", "splitting_ops"):
        assert text in str(failure.value)


def test_what_a_region_writes_is_compared(rig: Any) -> None:
    step = [1.0]

    def region(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state[1] += step[0]
        return x + 1

    wrapper = rig.wrap(region, compare=True, mutated_inputs=[1], input_names=["x", "cache"])
    rig.capture(wrapper, X, torch.zeros(4, 2))
    step[0] = 1.5
    with pytest.raises(MismatchError, match=r"input 'cache' after the call of region differs.*row 1 .*difference 0.5"):
        rig.call(wrapper, X, torch.zeros(4, 2))


def test_the_first_region_inside_is_named(rig: Any) -> None:
    scales = {"first": 1.0, "second": 1.0, "third": 1.0}
    inner = {name: rig.wrap(lambda x, name=name: x * scales[name] + 1, "PIECEWISE", name=name) for name in scales}
    wrapper = rig.wrap(lambda x: inner["third"](inner["second"](inner["first"](x))), name="whole", compare=True)
    rig.capture(wrapper, X)
    assert torch.equal(rig.call(wrapper, X), X + 3)
    scales["second"] = 2.0
    with pytest.raises(MismatchError, match="output 0 of second differs in a replay at FULL"):
        rig.call(wrapper, X)


class Compiled:
    """A region whose compiler is told what to get wrong."""

    def __init__(self, off: torch.Tensor) -> None:
        self.off = off

    def uncompiled(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 3

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.uncompiled(x) + self.off


def compared(rig: Any, region: Any, name: str) -> CUDAGraphWrapper:
    return CUDAGraphWrapper(region, "FULL", runtime=rig.runtime, name=name, policy=CapturePolicy(compare=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_compiler_is_compared_with_the_region_as_traced(rig: Any, dtype: torch.dtype) -> None:
    x = torch.randn(4, 32, dtype=dtype)
    eps = torch.finfo(dtype).eps
    rounding = compared(rig, Compiled(torch.full((4, 32), eps, dtype=dtype)), "rounding")
    rig.capture(rounding, x)
    off = torch.zeros(4, 32, dtype=dtype)
    off[3] = 1.0
    wrong = compared(rig, Compiled(off), "wrong")
    with pytest.raises(MismatchError, match=r"output 0 of wrong differs in compiled code.*row 3 .*compiler='eager'"):
        rig.capture(wrong, x)


def test_random_numbers_of_a_compiler_are_its_own(rig: Any) -> None:
    class Draws(Compiled):
        def uncompiled(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand(4, 2)

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 - torch.rand(4, 2)

    wrapper = compared(rig, Draws(X), "draws")
    rig.capture(wrapper, X)
    torch.manual_seed(1)
    got = rig.call(wrapper, X)
    torch.manual_seed(1)
    assert torch.equal(got, X + 1 - torch.rand(4, 2))


@pytest.mark.parametrize(
    ("found", "expected", "text"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), None),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0]), "row 1 (of 1 rows that differ), largest .*nan"),
        (torch.tensor(3), torch.tensor(4), "largest difference 1, relative 0.25"),
        (torch.tensor([2**60 + 1]), torch.tensor([2**60]), "row 0"),
        (torch.tensor([True, False]), torch.tensor([True, True]), "row 1"),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]), None),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 3j]), "row 0 .* difference 1"),
        (torch.zeros(0, 3), torch.zeros(0, 3), None),
        (torch.ones(2, 3) * (1 + 1e-6), torch.ones(2, 3), None),
    ],
)
def test_differences(found: torch.Tensor, expected: torch.Tensor, text: str | None) -> None:
    difference = first_difference(found, expected)
    assert (difference is None) == (text is None)
    assert text is None or re.search(text.replace("(", r"\(").replace(")", r"\)"), str(difference))


def test_it_does_not_keep_parameters_alive(rig: Any) -> None:
    linear = torch.nn.Linear(8, 8)
    wrapper = rig.wrap(lambda x, w: x @ w, compare=True, static_inputs=[1])
    with torch.no_grad():
        rig.capture(wrapper, ROW, linear.weight)
    assert len(wrapper.captured()) == 1
    del linear
    assert wrapper.captured() == []


# -- views that outlive their validity


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "graphpass"]


def views(rig: Any) -> Any:
    return rig.captured(rig.wrap(lambda x: (x + 1, x.long() * 2), outputs="view", compare=True), ROW)


def test_a_view_alive_after_two_replays_is_reported(rig: Any, caplog: pytest.LogCaptureFixture) -> None:
    wrapper = views(rig)
    with caplog.at_level(logging.WARNING, "graphpass"):
        kept = rig.call(wrapper, ROW)[1][2:]  # a view of the view
        rig.call(wrapper, ROW + 1)
        assert not said(caplog)
        rig.call(wrapper, ROW + 2)
        rig.call(wrapper, ROW + 3)
    assert [text.split(": it")[0] for text in said(caplog)] == [
        "output 1 of region: a view is still held after a later replay overwrote it"
    ]
    (problem,) = rig.runtime.report().problems
    assert problem.places == ("output 1 of region",)
    assert not torch.equal(kept, (ROW * 2).long()[2:])
