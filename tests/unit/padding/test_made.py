"""Padding that is made, one operator a row: nothing but the real sizes tells real entries from what lies behind them.

Each program runs with repairs at its real sizes and at padded ones, with numbers, NaN and infinities in the padding,
and returns what it returns without padding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

from graphpass.compat import operators, symbolic
from graphpass.padding import (
    Asked,
    AtenGraph,
    Made,
    PaddedValue,
    Question,
    Sizes,
    Verdict,
    fused,
    indexing,
    input_values,
    interpret,
    made,
    making,
    padding_of,
    repairs,
)
from graphpass.padding.neutral import KEYS
from graphpass.padding.opcall import words
from graphpass.padding.table import BUILT_IN, FILLING, rule_for
from tests.fuzz.made import GARBAGE, MadeGraph, differs, filled
from tests.unit.padding.bruteforce import TOLERANCE, sizes_tried
from tests.unit.padding.programs import PROGRAMS
from tests.unit.padding.programs_fused import FUSED, layer
from tests.unit.padding.programs_made import CASES, IN_PARTS, OPERANDS, REWRITES, WRITES, Case
from tests.unit.padding.programs_moved import distances
from tests.unit.padding.table import Program
from tests.unit.padding.tracing import INPUTS, Traced, trace


def wrong(case: Case, traced: Traced, graph: MadeGraph, tried: int = 6) -> list[str]:
    """Where a graph with repairs returns something else than the program without padding."""
    found: list[str] = []
    if not graph.insertions:
        return found  # what is proved, test_programs shows
    for number, (real, sizes) in enumerate(itertools.islice(sizes_tried(traced, graph.fields), tried)):
        generator = torch.Generator().manual_seed(number)
        kinds = [INPUTS[name] for name in traced.names]
        inputs = [
            case.contents[name](kind.sizes(real), generator) if name in case.contents else kind.real(real, generator)
            for name, kind in zip(traced.names, kinds, strict=True)
        ]
        expected, _ = traced.run(inputs)
        for larger, garbage in itertools.product((real, sizes), GARBAGE):
            padded = [
                kind.padded(value, larger, 1.0, generator)
                if kind.declared is not None
                else filled(value, kind.sizes(larger), garbage, generator)
                for kind, value in zip(kinds, inputs, strict=True)
            ]
            for at, (one, other) in enumerate(zip(expected, graph.run(padded, real), strict=True)):
                is_other = getattr(one, "dtype", None) is not getattr(other, "dtype", None)
                if is_other or differs(one, other, TOLERANCE.get(getattr(one, "dtype", None), 0.0)):
                    found.append(f"output {at} of {dict(real)} padded to {dict(larger)}, {garbage}: {one} {other}")
    return found


@pytest.mark.parametrize("case", {case.name: case for case in CASES}.values(), ids=lambda case: case.name)
def test_what_is_made_is_right(case: Case) -> None:
    traced = trace(case.function)
    graph = MadeGraph(traced.graph, traced.symbols, traced.declared)
    assert (set(graph.proved), set(graph.fields)) == (set(case.proved), set(case.fields))
    assert bool(graph.insertions) == (set(case.proved) != set(case.fields))
    assert wrong(case, traced, graph) == []


def each_program() -> Iterator[Any]:
    for at, program in enumerate(PROGRAMS):
        yield pytest.param(program, id=program.name, marks=() if at % 4 == 0 else pytest.mark.fuzz)


@pytest.mark.parametrize("program", list(each_program()))
def test_a_made_program_of_the_tables_does_not_differ(program: Program) -> None:
    traced = trace(program.function)
    if traced.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        return  # it writes to an input, and is left as it is
    graph = MadeGraph(traced.graph, traced.symbols, traced.declared)
    assert wrong(Case(program.name, program.function), traced, graph, tried=3) == []


def test_each_row_of_the_tables_has_a_case() -> None:
    of_cuda = repairs._ON_CUDA  # tests/gpu
    filling = {name.rpartition("::")[2] for name, rule in BUILT_IN.items() if rule in FILLING}
    # The same as another; of an eager region; of a tensor that a context marks.
    elsewhere = words(
        "_convolution _low_memory_max_pool2d_with_offsets _scaled_dot_product_attention_math prepare_softmax_online",
        "scaled_dot_product_attention _scaled_dot_product_fused_attention_overrideable zero_padding",
    )
    assert filling - OPERANDS.keys() - elsewhere == of_cuda
    in_parts = {name.removeprefix("aten::").partition(".")[0] for name in fused.REPAIRED}
    rewrites = repairs._REWRITES.keys() | in_parts
    assert rewrites - REWRITES.keys() == of_cuda - {"scaled_dot_product_attention"}
    tables = (
        (OPERANDS, dict.fromkeys(filling)),
        (REWRITES, dict.fromkeys(rewrites)),
        (WRITES, dict.fromkeys(indexing.WRITES)),
    )
    assert {name for cases, rows in tables for name in cases.keys() - rows.keys()} == IN_PARTS
    assert not any(rule_for(f"aten::{name}") for name in (*IN_PARTS, *FUSED))
    assert FUSED.keys() >= {name.removeprefix("aten::") for name in fused.PARTS}


def made_of(function: Callable[..., Any], fields: Mapping[str, str] | None = None) -> tuple[Made | None, Traced]:
    traced = trace(function)
    graph, recorded = AtenGraph.as_decomposed(traced.graph, {})
    named = {symbol: (fields or {}).get(field, field) for symbol, field in traced.symbols.items()}
    asked = Asked(named, lambda sizes: input_values(graph.inputs, sizes, {}), is_whole=True)
    return made(graph, asked, recorded), traced


def summed(x: Tensor) -> Tensor:
    return x.flatten(0, 1).sum(0)


@pytest.mark.parametrize(
    "change",
    [{"inner": 1}, {"is_outermost": True, "inner": 1}, {"is_outermost": False}, {"dim": 1}],
    ids=["inside", "whole", "not outermost", "other dimension"],
)
def test_a_selection_counts_at_its_place_alone(change: dict[str, Any]) -> None:
    """As one by the number of all real entries would, which keeps padding and hides real entries."""
    found, traced = made_of(summed)
    assert found is not None
    assert set(padding_of(found.graph, traced.symbols).verdicts.values()) == {Verdict.PROVED}
    at = next(at for at, node in enumerate(found.graph.nodes) if node.op == "graphpass::neutral")
    node = found.graph.nodes[at]
    other = replace(node, arguments=tuple((name, change.get(name, one)) for name, one in node.arguments))
    nodes = (*found.graph.nodes[:at], other, *found.graph.nodes[at + 1 :])
    proof = padding_of(replace(found.graph, nodes=nodes), traced.symbols)
    assert proof.verdicts["b"] is Verdict.UNPROVED


def attends(q: Tensor, k: Tensor, c: Tensor) -> Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, c)[0]


@pytest.mark.parametrize(("change", "question"), [("b", Question.PADDING), ("s", Question.INDEPENDENCE)])
def test_a_number_that_is_not_of_the_keys_proves_nothing(
    change: str, question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does any number, where the real entries need not be the first."""
    monkeypatch.setattr(operators, "attention_to_lengths", lambda dtype, width: "flash")
    monkeypatch.setattr(repairs, "_ON_CUDA", ("_scaled_dot_product_flash_attention_for_cpu",))
    found, traced = made_of(attends)
    assert found is not None
    assert set(padding_of(found.graph, traced.symbols).verdicts.values()) == {Verdict.PROVED}
    (at,) = (at for at, node in enumerate(found.graph.nodes) if node.op == KEYS)
    size = next(symbol for symbol, field in traced.symbols.items() if field == change)
    node = found.graph.nodes[at]
    other = replace(node, arguments=tuple((name, size if name == "size" else one) for name, one in node.arguments))
    graph = replace(found.graph, nodes=(*found.graph.nodes[:at], other, *found.graph.nodes[at + 1 :]))
    sizes = Sizes({symbol: field for symbol, field in traced.symbols.items() if field == "s"}, question)
    (output,) = interpret(graph, input_values(graph.inputs, sizes), sizes).outputs
    assert isinstance(output, PaddedValue)
    assert output.findings


def test_a_layer_whose_length_is_not_padded_stays_one_operator() -> None:
    traced = trace(lambda x, w: layer(x, w).sum(0))
    for field in ("b", "s"):
        of_field = {symbol: one for symbol, one in traced.symbols.items() if one == field}
        graph = MadeGraph(traced.graph, of_field, {})
        assert graph.insertions
        targets = [node.target for node in graph.module.graph.nodes]
        assert (torch.ops.aten._transformer_encoder_layer_fwd.default in targets) == (field == "b")


@pytest.mark.parametrize("is_expanded", [False, True])
def test_a_bias_of_the_efficient_kernel_is_aligned(is_expanded: bool) -> None:
    """As ATen makes it: rows of a multiple of 8 entries, whatever the sizes of a call."""

    def attends(q: Tensor, k: Tensor, c: Tensor, free: Tensor) -> Tensor:
        bias = torch.where(free[:, None, None] & free[:, None, :, None], 0.0, -math.inf).to(q.dtype)
        bias = bias.expand(-1, 2, -1, -1) if is_expanded else torch.cat([bias, bias], 1)
        return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, c, bias, False)[0]

    traced = trace(attends)
    graph = MadeGraph(traced.graph, traced.symbols, traced.declared)
    assert set(graph.fields) == {"b", "s"}
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention.default
    (node,) = graph.module.graph.find_nodes(op="call_function", target=kernel)
    bias = node.args[3].meta["val"]
    expressions = [symbolic.expression_of(size) for size in (*bias.shape, *bias.stride())]
    for length in range(2, 20):
        sizes = {symbol: 3 if field == "b" else length for symbol, field in traced.symbols.items()}
        numbers = [int(sympy.sympify(size).xreplace(sizes)) for size in expressions]
        assert numbers[:4] == [3, 2, length, length]
        assert [stride % 8 for stride in numbers[4:]] == [0, 0, 0, 1]


def test_weights_get_no_zeros_before_they_are_multiplied() -> None:
    """A row of them may be NaN as a whole, and so is its product then."""
    found, _ = made_of(lambda x, y: torch.bmm(torch.bmm(x, y.mT).softmax(-1).float().clone(), y.float()))
    assert found is not None
    assert [(one.op, one.what[:3]) for one in found.graph.insertions] == [("aten._softmax", "-in"), ("aten.bmm", "0 i")]


def test_distances_are_computed_as_between_few_entries() -> None:
    """Beyond 25 entries ATen multiplies matrices, whose rounding hides what is close."""
    graph = trace(lambda x, y: torch.cdist(x, x + 1e-9 * y))
    made_graph = MadeGraph(graph.graph, graph.symbols, {})
    x, y = (torch.randn(3, 40, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    (found,) = made_graph.run([x, y], {"b": 3, "s": 20})
    torch.testing.assert_close(found[:, :20, :20], torch.cdist(x[:, :20], x[:, :20] + 1e-9 * y[:, :20]))
    assert (found[:, :20, :20].diagonal(dim1=1, dim2=2) > 0).all()


def test_a_row_of_no_weights_is_zero_where_its_padding_is_nan() -> None:
    graph = trace(lambda x, y: torch.bmm(x[..., 0:1].mT.softmax(-1)[..., 2:], y[:, 2:]))
    made_graph = MadeGraph(graph.graph, graph.symbols, {})
    assert "s" in made_graph.fields
    inputs = [torch.full((3, 4, 8), math.nan, dtype=torch.float64), torch.ones(3, 4, 8, dtype=torch.float64)]
    (found,) = made_graph.run(inputs, {"b": 3, "s": 2})
    assert found.eq(0).all()


def test_sizes_of_one_field_are_not_told_apart() -> None:
    assert made_of(summed)[0] is not None
    assert made_of(summed, {"s": "b"})[0] is None


def test_a_rewrite_that_its_rule_refuses_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def flipped(operands: making.Operands) -> Any:
        operands.filled(("self",), operands.call.places(operands.call.tensor("self"), [1]), 0)
        return operands.making.added(operands.node)

    monkeypatch.setitem(repairs._REWRITES, "flip", flipped)
    traced = trace(lambda x: x.flip(1))
    graph, recorded = AtenGraph.as_decomposed(traced.graph, {})
    sizes = Sizes(traced.symbols)
    run = making.Making(graph, sizes, dict.fromkeys(recorded, "aten::flip"), repairs.repairs_of)
    run.run(input_values(graph.inputs, sizes, {}))
    assert run.insertions == []


def test_two_equal_ranges_are_two_tensors() -> None:
    """A caller may write to one of them."""
    graph = trace(lambda x: (distances(x.shape[1]), x * 2, distances(x.shape[1])))
    made_graph = MadeGraph(graph.graph, graph.symbols, {})
    first, _, last = made_graph.run([torch.ones(2, 4, 4)], {"b": 2, "s": 3})
    assert first.data_ptr() != last.data_ptr()
    assert first[:5].tolist() == last[:5].tolist() == [2, 1, 0, -1, -2]


def test_a_place_before_a_square_of_a_size() -> None:
    graph = trace(lambda x, u: torch.bmm(x, x.transpose(1, 2)).flatten(1) @ (u @ u.T).flatten()[:, None])
    made_graph = MadeGraph(graph.graph, graph.symbols, {})
    assert made_graph.fields == ["b", "s"]
