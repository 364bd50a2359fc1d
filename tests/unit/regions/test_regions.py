"""Regions: their inputs and outputs, symbolic sizes, and what they write to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from graphpass import partition
from graphpass.errors import PartitionError
from graphpass.regions import Partition

Split = Callable[..., Partition]
SOFTMAX = ["aten::softmax"]


def crossing_values(split: Partition) -> list[Any]:
    """Metadata of everything that enters a region."""
    return [
        node.meta["example_value"]
        for region in split.regions
        for node in region.graph_module.graph.nodes
        if node.op == "placeholder"
    ]


SIZE_USES = [
    lambda y, z: y.view(z.size()),
    lambda y, z: y.reshape(z.shape),
    lambda y, z: y.flatten().view(*z.shape),
    lambda y, z: torch.full(size=z.size(), fill_value=1.0),
    lambda y, z: torch.broadcast_to(y[:1], z.size()),
    lambda y, z: y.as_strided(z.size(), (z.shape[1], 1)),
    lambda y, z: y.new_zeros((z.size(), 2)[0]) + torch.zeros(z.size()),
    lambda y, z: y.expand(z.shape[:1] + z.shape[1:]),
    lambda y, z: y + z.size().numel(),
    lambda y, z: y.view(z.shape[1], z.size(0)),
    lambda y, z: y.unflatten(0, (z.shape[0] // 2, 2)),
]


@pytest.mark.parametrize("use", SIZE_USES)
def test_sizes_cross_as_one_number_per_dimension(dynamo_split: Split, use: Callable[..., Any]) -> None:
    def function(x: torch.Tensor) -> Any:
        z = torch.cat([x, x])
        size_before = z
        y = F.softmax(z, -1)
        return use(y, size_before)

    split = dynamo_split(function, torch.rand(4, 6), ops=SOFTMAX, dynamic=True)
    assert not any(isinstance(value, torch.Size) for value in crossing_values(split))


@pytest.mark.parametrize("use", SIZE_USES[:2] + SIZE_USES[3:7])
def test_a_traced_graph_keeps_its_sizes_open(use: Callable[..., Any]) -> None:
    """Examples fix no size: the same partition serves another shape."""

    class Sized(fx.Tracer):
        def iter(self, obj: Any) -> Any:
            return iter([obj[0], obj[1]])

    gm = fx.GraphModule(nn.Module(), Sized().trace(lambda x: use(F.softmax(x, -1), x)))
    split = partition(gm, SOFTMAX, example_inputs=(torch.rand(4, 6),))
    assert not any(isinstance(value, torch.Size) for value in crossing_values(split))
    x = torch.rand(2, 3)
    torch.testing.assert_close(split.stitched(x), gm(x))


def test_a_size_that_is_returned_is_a_size_again() -> None:
    traced = fx.symbolic_trace(lambda x: {"size": F.softmax(x, -1).size(), "again": (x.shape, 3)})
    split = partition(traced, SOFTMAX, example_inputs=(torch.rand(4, 6),))
    got = split.stitched(torch.rand(2, 3))
    assert got == {"size": torch.Size([2, 3]), "again": (torch.Size([2, 3]), 3)}
    assert isinstance(got["size"], torch.Size)


def through_a_view(x: torch.Tensor, out: torch.Tensor) -> Any:
    view = x.t()[1:]
    view.mul_(2)
    return view + 1


def an_item(x: torch.Tensor, out: torch.Tensor) -> Any:
    x[0] = 1
    return x + 1


def behind_a_mask(x: torch.Tensor, out: torch.Tensor) -> Any:
    x[x > 0] = 0
    return x + 1


def to_a_copy(x: torch.Tensor, out: torch.Tensor) -> Any:
    y = x.clone()
    y.add_(out)
    return y


WRITES: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "in place": (lambda x, out: x.add_(1), ["x"]),
    "through a view": (through_a_view, ["x"]),
    "an item": (an_item, ["x"]),
    "behind a mask": (behind_a_mask, ["x"]),
    "an out argument": (lambda x, out: torch.mul(x, 2, out=out) + 1, ["out"]),
    "by an inplace flag": (lambda x, out: F.relu(x, inplace=True), ["x"]),
    "running statistics": (lambda x, out: F.batch_norm(x, out[0], out[1], training=True), ["out"]),
    "nothing": (lambda x, out: F.batch_norm(x, out[0], out[1].abs()) + x.contiguous() + x.view(-1)[0], []),
    "a copy": (to_a_copy, []),
}


@pytest.mark.parametrize(("function", "written"), WRITES.values(), ids=WRITES)
def test_what_is_written_is_known(dynamo_split: Split, function: Callable[..., Any], written: list[str]) -> None:
    split = dynamo_split(function, torch.randn(3, 3), torch.rand(3, 3))
    (region,) = split.regions
    names = {given.name: given.source_name for given in split.inputs}
    assert [split.inputs[i].source_name for i in split.mutated_inputs] == written
    assert [names[region.inputs[i]] for i in region.mutated_inputs] == written


def test_a_graph_without_shapes_is_refused() -> None:
    gm = fx.symbolic_trace(nn.Linear(3, 3))
    with pytest.raises(PartitionError, match="example_inputs"):
        partition(gm)
    with pytest.raises(PartitionError, match="1 example inputs for 2 placeholders"):
        partition(fx.symbolic_trace(lambda a, b: a + b), example_inputs=(torch.ones(1),))


def test_examples_that_do_not_fit_name_the_node() -> None:
    gm = fx.symbolic_trace(lambda a, b: (a @ b) + 1)
    with pytest.raises(PartitionError, match="'matmul' cannot be run") as error:
        partition(gm, example_inputs=(torch.ones(2, 3), torch.ones(2, 3)))
    assert error.value.__cause__ is not None
