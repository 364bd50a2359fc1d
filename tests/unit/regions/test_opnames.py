"""Names of ops: every form of one op answers to its name, and to no other op's."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from graphpass import partition
from graphpass.errors import PartitionError
from graphpass.regions.eagerrules import matcher_of
from graphpass.regions.names import names_of
from tests.unit.models import module


def eager_ops(function: Callable[..., Any], ops: list[object]) -> list[str]:
    """Names of the nodes that the listed ops made eager."""
    gm = fx.symbolic_trace(module(lambda self, x, y: function(x, y)))
    split = partition(gm, ops, rules=(), example_inputs=(torch.ones(3, 3), torch.ones(3, 3)))
    eager = [region for region in split.regions if region.why and "splitting op" in region.why]
    return [node.name for region in eager for node in region.graph_module.graph.nodes if node.op.startswith("call")]


FORMS = [
    ("aten::add", lambda x, y: x + y),
    ("aten::add", lambda x, y: 1 + x),
    ("aten::add", lambda x, y: torch.add(x, y)),
    ("aten::add", lambda x, y: x.add(y)),
    ("aten::add", lambda x, y: x.add_(y)),
    ("aten::add", lambda x, y: torch.ops.aten.add.Tensor(x, y)),
    ("aten::add", lambda x, y: torch.ops.aten.add(x, y)),
    ("aten::add_", lambda x, y: x.add_(y)),
    ("aten::div", lambda x, y: x / y),
    ("aten::div", lambda x, y: torch.true_divide(x, y)),
    ("aten::true_divide", lambda x, y: x / y),
    ("aten::floor_divide", lambda x, y: x // y),
    ("aten::remainder", lambda x, y: x % y),
    ("aten::matmul", lambda x, y: x @ y),
    ("aten::matmul", lambda x, y: torch.matmul(x, y)),
    ("aten::matmul", lambda x, y: torch.linalg.matmul(x, y)),
    ("aten::bitwise_and", lambda x, y: (x > 0) & (y > 0)),
    ("aten::bitwise_not", lambda x, y: ~(x > 0)),
    ("aten::neg", lambda x, y: -x),
    ("aten::gt", lambda x, y: x > y),
    ("aten::gt", lambda x, y: torch.greater(x, y)),
    ("aten::softmax", lambda x, y: F.softmax(x, -1)),
    ("aten::softmax", lambda x, y: torch.softmax(x, -1)),
    ("aten::softmax", lambda x, y: x.softmax(-1)),
    ("aten::sigmoid", lambda x, y: torch.special.expit(x)),
    ("aten::linear", lambda x, y: F.linear(x, y)),
    ("aten::linalg_inv", lambda x, y: torch.inverse(x + torch.eye(3))),
    ("aten::cat", lambda x, y: torch.concat([x, y])),
    ("aten::transpose", lambda x, y: torch.swapaxes(x, 0, 1)),
    ("aten::clamp", lambda x, y: x.clip(0)),
    ("aten::select", lambda x, y: x[0]),
    ("aten::slice", lambda x, y: x[1:]),
    ("aten::index", lambda x, y: x[torch.tensor([0])]),
    ("aten::to", lambda x, y: x.double()),
    ("aten::scaled_dot_product_attention", lambda x, y: F.scaled_dot_product_attention(x, y, y)),
    ("torch.nn.functional.scaled_dot_product_attention", lambda x, y: F.scaled_dot_product_attention(x, y, y)),
    ("torch.Tensor.add", lambda x, y: torch.add(x, y)),
    ("operator.add", lambda x, y: x.add(y)),
    ("torch.ops.aten.add", lambda x, y: x.add(y)),
    (torch.add, lambda x, y: x + y),
    (torch.Tensor.add, lambda x, y: x + y),
    (operator.add, lambda x, y: torch.add(x, y)),
    (F.softmax, lambda x, y: x.softmax(-1)),
    (torch.ops.aten.add, lambda x, y: x + y),
    (torch.ops.aten.add.Tensor, lambda x, y: x + y),
    ("aten::add.Tensor", lambda x, y: x + y),
    ("aten::to.dtype", lambda x, y: x.to(torch.float64)),
    ("aten::sum.dim_IntList", lambda x, y: x.sum(0)),
    ("aten::linear", lambda x, y: torch.ops.aten.linear.default(x, y)),
]


@pytest.mark.parametrize(("op", "function"), FORMS)
def test_every_form_of_an_op_matches_its_name(op: object, function: Callable[..., Any]) -> None:
    assert len(eager_ops(function, [op])) == 1


@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "and", "or", "xor", "matmul", "pow", "lshift"])
def test_an_in_place_operator_answers_to_both_names(name: str) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(getattr(operator, f"i{name}"), (x, x))
    plain = graph.call_function(getattr(operator, {"and": "and_", "or": "or_"}.get(name, name)), (x, x))
    assert names_of(plain) < names_of(node)
    assert {f"{name}_" for name in names_of(plain)} <= names_of(node)


OTHERS = [
    ("aten::add", lambda x, y: x - y),
    ("aten::add_", lambda x, y: x + y),
    (torch.Tensor.add_, lambda x, y: x.add(y)),
    ("aten::add.Scalar", lambda x, y: x + y),
    (torch.ops.aten.add.Scalar, lambda x, y: torch.ops.aten.add.Tensor(x, y)),
    ("aten::to.other", lambda x, y: x.to(torch.float64)),
    ("aten::sum.dim_IntList", lambda x, y: x.sum()),
    ("aten::sum", lambda x, y: x.mean()),
    ("aten::index", lambda x, y: x[0]),
    ("aten::softmax", lambda x, y: F.log_softmax(x, -1)),
    (len, lambda x, y: x + y),
]


@pytest.mark.parametrize(("op", "function"), OTHERS)
def test_a_name_matches_no_other_op(op: object, function: Callable[..., Any]) -> None:
    assert eager_ops(function, [op]) == []


@pytest.mark.parametrize(
    ("op", "nearest"),
    [
        ("aten::softmx", "aten::softmax"),
        ("aten::add.Tensr", "aten::add.Tensor"),
        ("torch.nn.functional.scaled_dot_product_attn", "torch.nn.functional.scaled_dot_product_attention"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(op: str, nearest: str) -> None:
    with pytest.raises(PartitionError, match=nearest) as error:
        matcher_of(op)
    assert error.value.found == repr(op)


@pytest.mark.parametrize("op", ["nolib::noop", "no.such.module.function", "softmax", 3, "aten::"])
def test_what_names_no_op_is_refused(op: object) -> None:
    with pytest.raises(PartitionError):
        matcher_of(op)


@pytest.mark.parametrize(
    "name", ["flex_attention", "higher_order.flex_attention", "torch.ops.higher_order.flex_attention"]
)
def test_a_higher_order_op_has_its_own_name_and_that_of_graphs(name: str) -> None:
    graph = fx.Graph()
    nodes = [graph.call_function(getattr(torch.ops.higher_order, op), ()) for op in ("flex_attention", "cond")]
    assert list(map(matcher_of(name), nodes)) == [True, False]


def test_one_string_is_not_a_list_of_ops() -> None:
    gm = fx.symbolic_trace(module(lambda self, x, y: torch.add(x, y)))
    with pytest.raises(PartitionError, match=r"splitting_ops=\['aten::add'\]"):
        partition(gm, "aten::add", example_inputs=(torch.ones(3), torch.ones(3)))


@pytest.mark.parametrize("op", [nn.Linear, "torch.nn.Linear", "aten::linear", F.linear])
def test_a_module_call_matches_its_class_and_what_it_calls(op: object) -> None:
    model = module(lambda self, x: self.layer(x) * 2, layer=nn.Linear(3, 3))
    split = partition(fx.symbolic_trace(model), [op], example_inputs=(torch.ones(2, 3),))
    assert [region.kind for region in split.regions] == ["eager", "captured"]


def test_a_custom_op_matches_by_name_object_and_function(dynamo_split: Callable[..., Any]) -> None:
    @torch.library.custom_op("graphpass_opnames::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @twice.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    packet = torch.ops.graphpass_opnames.twice
    for op in ("graphpass_opnames::twice", packet, packet.default, twice, "graphpass_opnames::twice.default"):
        split = dynamo_split(lambda x: twice(x + 1) + 1, torch.ones(3), ops=[op])
        assert [region.kind for region in split.regions] == ["captured", "eager", "captured"]
        torch.compiler.reset()
