"""The values of a saved graph's nodes are made when they are read."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import fx

from graphpass.compat import memory, saving, symbolic
from graphpass.regions.execute import value_of


def loaded() -> dict[str, fx.Node]:
    """The nodes of a graph, by name, that was saved and loaded."""

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        late = x[1:]
        return late, late.double().t(), x

    graph = fx.symbolic_trace(forward)
    fake_mode = symbolic.new_fake_mode()
    symbolic.set_values(graph, [fake_mode.from_tensor(torch.zeros(5, 3))], fake_mode)
    nodes = saving.loads(saving.dumps({"graph": graph}))["graph"].graph.nodes
    return {node.name: node for node in nodes}


@pytest.mark.parametrize("order", [("x", "getitem", "t"), ("t", "getitem", "x")])
def test_values_are_made_when_they_are_read(order: tuple[str, ...]) -> None:
    nodes = loaded()
    assert all(isinstance(nodes[name].meta["example_value"], symbolic.LateValue) for name in order)
    values = {name: value_of(nodes[name]) for name in order}
    assert isinstance(nodes["double"].meta["example_value"], symbolic.LateValue)
    assert {name: (tuple(value.shape), value.stride(), value.dtype) for name, value in values.items()} == {
        "x": ((5, 3), (3, 1), torch.float32),
        "getitem": ((4, 3), (3, 1), torch.float32),
        "t": ((3, 4), (1, 3), torch.float64),
    }
    storage = {name: memory.storage_id(value) for name, value in values.items()}
    assert storage["getitem"] == storage["x"] != storage["t"] == memory.storage_id(value_of(nodes["double"]))
    assert value_of(nodes["t"]) is values["t"]


@pytest.mark.parametrize("within", [torch.inference_mode, symbolic.new_fake_mode])
def test_values_that_are_read_in_another_mode_are_of_the_saved_one(
    within: type[contextlib.AbstractContextManager[object]],
) -> None:
    nodes = loaded()
    before = value_of(nodes["x"])
    with within():
        value = value_of(nodes["t"])
    assert not value.is_inference()
    assert value.fake_mode is before.fake_mode
