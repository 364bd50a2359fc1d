"""The interpreter of the padding pass: values through a graph, what leaves it, registered rules, independence."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from graphpass import partition
from graphpass.compile import traced_regions
from graphpass.errors import OptionError
from graphpass.padding import (
    AtenGraph,
    OpCall,
    PaddedValue,
    PaddingFinding,
    PaddingProof,
    PaddingReason,
    Sizes,
    Verdict,
    interpret,
    padding_of,
    register_padding_rule,
)
from graphpass.padding.values import ALL_FINITE
from graphpass.regions.partitionproof import mixing_of

aten = torch.ops.aten
BATCH, SEQ, FEATURES = 3, 5, 8


class Traced:
    """A function of x [batch, seq, features] and of more tensors, as a record."""

    def __init__(self, function: Callable[..., Any], *more: Tensor) -> None:
        x = torch.randn(BATCH, SEQ, FEATURES)
        module = make_fx(lambda *inputs: _flat(function(*inputs)), tracing_mode="symbolic")(x, *more)
        self.module = module
        self.graph = AtenGraph.of(module)
        sizes: Any = self.graph.inputs[0]
        self.batch, self.seq, self.features = sizes.sizes
        self.fields = {self.batch: "batch", self.seq: "seq"}

    def prove(self, declared: dict[int, float | int | bool] | None = None) -> PaddingProof:
        return padding_of(self.graph, self.fields, declared)

    def verdicts(self, declared: dict[int, float | int | bool] | None = None) -> str:
        proof = self.prove(declared)
        assert all(finding.field in self.fields.values() for finding in proof.findings)
        return " ".join(f"{field}:{verdict.name}" for field, verdict in proof.verdicts.items())

    def mixing(self) -> tuple[PaddingFinding, ...]:
        """The operators through which an entry along ``seq`` depends on other entries along it."""
        parts = partition(self.module, ())
        return mixing_of(parts, traced_regions(parts.regions, AtenGraph.of), {self.seq: "seq"})


def _flat(result: Any) -> Any:
    return result if isinstance(result, tuple) else (result,)


BOTH = "batch:PROVED seq:PROVED"
BATCH_ONLY = "batch:PROVED seq:UNPROVED"
MASK = torch.ones(BATCH, SEQ, dtype=torch.int64)


def test_a_verdict_names_what_it_assumes_where_it_does() -> None:
    traced = Traced(lambda x, mask: x.sum(-1).masked_fill(mask == 0, -torch.inf).softmax(-1) @ x[0, :, 0], MASK)
    assert traced.prove({1: 0}).assumptions == (ALL_FINITE,)
    assert Traced(lambda x: x * 2).prove().assumptions == ()


def test_output_factors_are_outermost_first() -> None:
    traced = Traced(lambda x: (x.transpose(0, 1), x.flatten(0, 1), x.shape[1]))
    proof = padding_of(traced.graph, {traced.batch: "batch"})
    b, s, d = traced.batch, traced.seq, traced.features
    assert proof.output_factors[:2] == (((s,), (b,), (d,)), ((b, s), (d,)))
    assert proof.output_factors[2] is None


def test_padding_inside_a_dimension_cannot_be_cut_so_fields_are_accepted_in_order() -> None:
    traced = Traced(lambda x: x.flatten(0, 1))
    assert traced.verdicts() == BATCH_ONLY
    assert "padding stands inside dimension 0" in traced.prove().findings[0].why
    proof = padding_of(traced.graph, {traced.seq: "seq", traced.batch: "batch"})
    assert proof.verdicts == {"seq": Verdict.UNPROVED, "batch": Verdict.PROVED}


def test_a_graph_may_start_from_what_another_left() -> None:
    traced = Traced(lambda x: x.sum(1))
    b, s, d = traced.batch, traced.seq, traced.features
    inputs: list[Any] = list(traced.graph.inputs)
    inputs[0] = PaddedValue(((b,), (s,), (d,))).with_pads({(1, 0): 0.0})
    run = interpret(traced.graph, inputs, Sizes(traced.fields))
    (output,) = run.outputs
    assert isinstance(output, PaddedValue)
    assert output.factors == ((b,), (d,))
    assert not output.findings
    inputs[0] = PaddedValue(((b,), (b,), (d,)))
    (output,) = interpret(traced.graph, inputs, Sizes(traced.fields)).outputs
    assert isinstance(output, PaddedValue)
    assert any("other sizes than its graph" in finding.why for finding in output.findings)


def test_a_record_is_pickled_with_its_proof() -> None:
    traced = Traced(lambda x: F.gelu(x).softmax(-1) + x.mean(1, keepdim=True))
    again = pickle.loads(pickle.dumps(traced.graph))
    assert again == traced.graph
    assert padding_of(again, traced.fields).findings == traced.prove().findings


@pytest.fixture
def operator() -> str:
    """A fresh operator that doubles a tensor, by name."""
    name = f"padding_test::double_{next(_NUMBERS)}"
    torch.library.custom_op(name, lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor").register_fake(
        torch.empty_like
    )
    return name


_NUMBERS = itertools.count()


def _call(name: str, x: Tensor) -> Tensor:
    return getattr(torch.ops.padding_test, name.partition("::")[2])(x)


def test_a_registered_rule_answers_for_its_operator(operator: str) -> None:
    seen: list[OpCall] = []

    def rule(call: OpCall) -> PaddedValue:
        seen.append(call)
        return call.tensor("x")

    traced = Traced(lambda x: _call(operator, x))
    assert traced.verdicts() == "batch:UNPROVED seq:UNPROVED"
    register_padding_rule(operator, rule)
    assert traced.verdicts() == BOTH
    assert seen[0].op == operator.replace("::", ".")
    assert not any(call.asks_independence for call in seen)
    assert traced.mixing() == ()
    assert any(call.asks_independence for call in seen)
    with pytest.raises(OptionError, match="already"):
        register_padding_rule(operator, rule)


def test_an_argument_stands_for_each_result_of_its_sizes() -> None:
    name = f"padding_test::double_{next(_NUMBERS)}"
    op = torch.library.custom_op(
        name, lambda x: (x + 1, x * 2), mutates_args=(), schema="(Tensor x) -> (Tensor, Tensor)"
    )
    op.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
    register_padding_rule(name, lambda call: call.tensor("x"))
    assert Traced(lambda x: _call(name, x)).verdicts() == BOTH
    # Zeros in the argument's padding are no zeros in the result's.
    assert Traced(lambda x: _call(name, x)[0].sum(1)).verdicts({0: 0}) == BATCH_ONLY


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (lambda call: PaddingReason("it sorts"), "it sorts"),
        (lambda call: 1 // 0, "ZeroDivisionError"),
        (lambda call: PaddedValue(((2,),)), "its padding rule says"),
        (lambda call: (call.fresh(), call.fresh()), "2 value(s) for 1 results"),
        (lambda call: None, "its padding rule says None"),
    ],
    ids=["reason", "exception", "other sizes", "too many", "nothing"],
)
def test_a_rule_that_gives_no_value_proves_nothing(operator: str, rule: Any, why: str) -> None:
    register_padding_rule(operator, rule)
    proof = Traced(lambda x: _call(operator, x)).prove()
    assert set(proof.verdicts.values()) == {Verdict.UNPROVED}
    assert all(why in finding.why for finding in proof.findings)


@pytest.mark.parametrize(
    ("op", "rule", "message"),
    [
        ("aten::softmx", lambda call: call.fresh(), "_?softmax"),
        ("aten::_softmax", lambda call: call.fresh(), "already"),
        (aten.add.Tensor, None, "cannot be called"),
        (aten.relu_, 3, "cannot be called"),
        (3, lambda call: call.fresh(), "cannot be identified"),
        ("no_namespace", lambda call: call.fresh(), "no operator"),
    ],
)
def test_a_wrong_registration_is_refused(op: Any, rule: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        register_padding_rule(op, rule)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.layer_norm(x, (FEATURES,)).relu() @ torch.ones(FEATURES, 2),
        lambda x: x[:, :, None].expand(-1, -1, 4, -1).transpose(1, 2).softmax(-1),
        lambda x: x * torch.arange(x.shape[1])[:, None],
        lambda x: x[torch.arange(x.shape[0])],
        lambda x: x.masked_fill(x > 0, 0.0).cumsum(-1),
    ],
    ids=["layers", "heads", "positions", "every row", "features"],
)
def test_rows_that_are_independent(function: Callable[[Tensor], Tensor]) -> None:
    traced = Traced(function)
    assert traced.mixing() == ()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.cumsum(1),
        lambda x: x[:, 1:],
        lambda x: x + x[:, :1],
        lambda x: F.pad(x, (0, 0, 1, 0)),
        lambda x: torch.cat([x[:, :1], x], 1),
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        lambda x: torch.ones(x.shape[1], x.shape[1]).tril().expand(x.shape[0], -1, -1) @ x,
        lambda x: x @ x.transpose(1, 2),
        lambda x: F.conv1d(x.transpose(1, 2), torch.ones(FEATURES, FEATURES, 1)),
        lambda x: x[:, torch.zeros(x.shape[1], dtype=torch.int64)],
        lambda x: x / x.shape[1],
        lambda x: x.flip(1),
    ],
    ids=["scan", "shift", "first", "pad", "prepend", "causal", "triangle", "pairs", "window", "index", "size", "flip"],
)
def test_rows_that_are_not_independent(function: Callable[[Tensor], Tensor]) -> None:
    traced = Traced(function)
    assert traced.mixing() != ()


def test_symbols_without_names_are_their_own_fields() -> None:
    traced = Traced(lambda x: x * 2)
    assert dict(padding_of(traced.graph, [traced.seq]).verdicts) == {str(traced.seq): Verdict.PROVED}
    assert isinstance(traced.seq, sympy.Symbol)
