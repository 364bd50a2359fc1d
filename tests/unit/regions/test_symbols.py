"""Symbols: which one a dimension carries, and which sizes the guards admit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import fx, nn

from graphpass import partition
from graphpass.errors import PartitionError
from graphpass.regions import Partition
from graphpass.regions.symbols import GuardedSymbols, symbol_of_dim


def traced(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[fx.GraphModule, Partition]:
    """The graph that Dynamo makes with dynamic shapes, and its partition."""
    made: list[tuple[fx.GraphModule, Partition]] = []

    def backend(gm: fx.GraphModule, examples: list[Any]) -> Any:
        made.append((gm, partition(gm)))
        return gm

    torch.compile(function, backend=backend, dynamic=True, fullgraph=True)(*args, **kwargs)
    return made[0]


def test_a_dimension_names_its_symbol() -> None:
    _, split = traced(lambda x, y, k: x @ y + k["z"], torch.rand(3, 4), torch.rand(4, 5), {"z": torch.rand(5)})
    inner = symbol_of_dim(split.inputs, "x", 1)
    assert isinstance(inner, sympy.Symbol)
    assert symbol_of_dim(split.inputs, "y", 0) == inner
    assert symbol_of_dim(split.inputs, "z", 0) == symbol_of_dim(split.inputs, "y", -1)
    assert symbol_of_dim(split.inputs, "x", 0) not in (inner, symbol_of_dim(split.inputs, "y", 1))


def test_keyword_arguments_have_names() -> None:
    def function(*args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return kwargs["x"] * args[0]

    _, split = traced(function, torch.rand(3), x=torch.rand(3))
    assert "x" in [given.source_name for given in split.inputs]


def test_an_entry_of_a_model_output_is_shown_as_users_write_it() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def function(encoder_outputs: Any, **kwargs: Any) -> torch.Tensor:
        return encoder_outputs[0] + kwargs["more"].last_hidden_state

    given = outputs.BaseModelOutput(last_hidden_state=torch.rand(3, 4))
    _, split = traced(function, given, more=outputs.BaseModelOutput(last_hidden_state=torch.rand(3, 4)))
    shown = [given.shown for given in split.inputs if isinstance(given.value, torch.Tensor)]
    assert shown == ["encoder_outputs.last_hidden_state", "kwargs['more'].last_hidden_state"]


def test_unknown_inputs_and_dimensions_are_refused() -> None:
    _, split = traced(lambda x: x + 1, torch.rand(3))
    with pytest.raises(PartitionError, match="one of x"):
        symbol_of_dim(split.inputs, "y", 0)
    with pytest.raises(PartitionError, match="no dimension 1"):
        symbol_of_dim(split.inputs, "x", 1)


def test_parameters_buffers_and_marked_inputs_are_static() -> None:
    model = nn.BatchNorm1d(4).eval()
    marked = torch.rand(3, 4)
    torch._dynamo.mark_static_address(marked)
    _, split = traced(lambda x, marked: model(x) + marked, torch.rand(3, 4), marked)
    static = [given for given in split.inputs if given.is_static]
    assert len(static) == 5
    assert [given.source_name for given in static if given.source_name] == ["marked"]
    assert [given.source_name for given in split.inputs if not given.is_static and given.source_name] == ["x"]


def test_guards_exclude_sizes_with_the_constraint_as_text() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        assert x.shape[0] % 8 == 0
        return x.view(-1, 8) + 1 if x.shape[0] < 100 else x

    gm, split = traced(function, torch.rand(16))
    symbol = symbol_of_dim(split.inputs, "x", 0)
    guards = GuardedSymbols.from_graph(gm)
    assert guards.ranges[symbol] == (2, 99)
    assert guards.excluded_by({symbol: 24}) is None
    assert guards.excluded_by({symbol: 1}) == f"{symbol} >= 2"
    assert guards.excluded_by({symbol: 12}) == f"Eq(Mod({symbol}, 8), 0)"
    assert guards.excluded_by({symbol: 104}) == f"{symbol} <= 99"


def test_size_one_is_outside_of_a_dynamic_graph() -> None:
    gm, split = traced(lambda x: x + 1, torch.rand(5))
    symbol = symbol_of_dim(split.inputs, "x", 0)
    guards = GuardedSymbols.from_graph(gm)
    assert guards.excluded_by({symbol: 1}) == f"{symbol} >= 2"
    assert [guards.excluded_by({symbol: size}) for size in (2, 5, 10**6)] == [None, None, None]


def test_a_guard_over_two_symbols_needs_both() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sum() + y.sum() if x.shape[0] == 2 * y.shape[0] + 1 else x.sum() - y.sum()

    gm, split = traced(function, torch.rand(7), torch.rand(5))
    x, y = (symbol_of_dim(split.inputs, name, 0) for name in "xy")
    guards = GuardedSymbols.from_graph(gm)
    assert guards.excluded_by({x: 11}) is None
    assert guards.excluded_by({x: 11, y: 6}) is None
    assert "Ne(" in str(guards.excluded_by({x: 11, y: 5}))


def test_a_static_graph_guards_nothing() -> None:
    split_from = fx.symbolic_trace(lambda x: x + 1)
    assert GuardedSymbols.from_graph(split_from) == GuardedSymbols({}, ())
    assert GuardedSymbols.from_graph(split_from).excluded_by({}) is None
    split = partition(split_from, example_inputs=(torch.rand(3),))
    assert symbol_of_dim(split.inputs, "x", 0) == 3
