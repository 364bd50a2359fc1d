"""Regions run in float64, the reference by which variants are judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from cgpass.infloat64 import region_in_float64


@torch.library.custom_op("graphpasstest_float64::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is torch.float64:
        raise NotImplementedError("doubled has no float64")
    return x * 2


@torch.library.custom_op("graphpasstest_float64::add_one", mutates_args=("x",))
def add_one(x: torch.Tensor) -> None:
    x.add_(1)


doubled.register_fake(torch.empty_like)


def adds(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    torch.ops.graphpasstest_float64.add_one.default(y)
    return y / 3


def run(function: Callable[..., Any], args: Sequence[torch.Tensor], written: Sequence[int] = ()) -> list[torch.Tensor]:
    module = torch.fx.symbolic_trace(function)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    FakeTensorProp(module, mode).propagate(*args)
    for node in module.graph.nodes:
        node.meta["example_value"] = node.meta.get("val")
    region: Any = SimpleNamespace(graph_module=module, mutated_inputs=frozenset(written))
    return region_in_float64(region, args)


PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "in float64": lambda x: (x / 3).to(torch.float32).sum(0),
    "no float64": lambda x: torch.ops.graphpasstest_float64.doubled.default(x) / 3,
    "a reinterpretation": lambda x: x.view(torch.int32).view(torch.float32) / 3,
    "a write": adds,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_as_right_as_float64(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(5, 4).to(dtype)
    if name == "a reinterpretation" and dtype is not torch.float32:
        pytest.skip("of four bytes")
    expected = {
        "in float64": (x.double() / 3).sum(0),
        "no float64": x.double() * 2 / 3,
        "a write": (x + 1).double() / 3,
    }
    (found,) = run(PROGRAMS[name], [x])
    torch.testing.assert_close(found, expected.get(name, x.double() / 3), rtol=1e-14, atol=0)


def test_it_writes_to_copies() -> None:
    x, kept = torch.randn(3), torch.zeros(3, dtype=torch.float64)
    returned, written = run(lambda x, kept: x + kept.add_(x), [x, kept], [1])
    assert not kept.any()
    torch.testing.assert_close(returned, x.double() * 2)
    torch.testing.assert_close(written, x.double())
