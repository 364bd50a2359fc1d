"""The proof of a partitioned graph: as the proof of the whole, whatever is cut, and made once for each structure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from graphpass import partition
from graphpass.compat import symbolic
from graphpass.compile import RegionCompiler, traced_regions
from graphpass.padding import ignores_numbers
from graphpass.regions import (
    AtenGraph,
    OpCall,
    PaddedValue,
    PaddingProof,
    Partition,
    Verdict,
    partitionproof,
    register_padding_rule,
)
from graphpass.regions.partitionproof import prove_partition
from tests.unit.compile.passes import reading

PROVED, UNPROVED = Verdict.PROVED, Verdict.UNPROVED


@torch.library.custom_op("paddingtest::cut", mutates_args=())
def cut(x: Tensor) -> Tensor:
    """Ends a region; row-wise."""
    return x.clone()


@torch.library.custom_op("paddingtest::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    """Nobody registered a rule for it."""
    return x - x.mean(0)


for _op in (cut, opaque):
    _op.register_fake(torch.empty_like)

torch.library.define("paddingtest::store", "(Tensor x) -> ()")
torch.library.impl("paddingtest::store", "default", lambda x: None)
torch.library.register_fake("paddingtest::store", lambda x: None)
torch.library.define("paddingtest::fill", "(Tensor x, Tensor(a!) out) -> ()")

torch.library.register_fake("paddingtest::fill", lambda x, out: None)


@torch.library.impl("paddingtest::fill", "default")
def _fill(x: Tensor, out: Tensor) -> None:
    out.copy_(x * 2)


def _fill_numbered(x: Tensor, out: Tensor, number: int) -> None:
    out.copy_(x * 2)


for _name in ("fill_as", "fill_of_layer"):
    torch.library.define(f"paddingtest::{_name}", "(Tensor x, Tensor(a!) out, int number) -> ()")
    torch.library.register_fake(f"paddingtest::{_name}", lambda x, out, number: None)
    torch.library.impl(f"paddingtest::{_name}", "default", _fill_numbered)


def rows_as_they_are(call: OpCall) -> PaddedValue:
    return PaddedValue(call.tensor("x").factors)


def fills_row_by_row(call: OpCall) -> tuple[PaddedValue, ...]:
    call.unify(call.tensor("x").factors[0], call.tensor("out").factors[0])
    return (PaddedValue(call.tensor("out").factors),)


register_padding_rule("paddingtest::cut", rows_as_they_are)


def fills_by_number(call: OpCall) -> Any:
    return fills_row_by_row(call) if call.argument("number") == 0 else call.fresh()


register_padding_rule("paddingtest::fill", fills_row_by_row)
register_padding_rule("paddingtest::fill_as", fills_by_number)
register_padding_rule("paddingtest::fill_of_layer", fills_row_by_row, ignores_numbers=True)


@dataclass
class Prover:
    """A backend that proves what may be padded and then runs the regions as they are."""

    splitting_ops: tuple[str, ...] = ("paddingtest::cut",)
    compiler: str = "eager"
    declared: Mapping[str, int] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    parts: list[Partition] = field(default_factory=list)
    proofs: list[PaddingProof] = field(default_factory=list)
    num_traces: int = 0  # of eager regions

    def __call__(self, graph_module: fx.GraphModule, examples: Any) -> Callable[..., Any]:
        parts = partition(graph_module, self.splitting_ops)
        captured = [region for region in parts.regions if region.kind == "captured"]
        compiled = RegionCompiler().compile(captured, self.compiler, trace=reading(AtenGraph.of))
        eager = traced_regions([r for r in parts.regions if r.kind == "eager"], AtenGraph.of, ignores_numbers)
        self.num_traces = len({id(traced.result) for traced in eager.values()})
        declared = {
            p: self.declared[n.source_name] for p, n in enumerate(parts.inputs) if n.source_name in self.declared
        }
        self.parts.append(parts)
        self.proofs.append(prove_partition(parts, {**compiled.traces, **eager}, self._symbols(parts), declared))
        bound: Callable[..., Any] = parts.bind(
            {**{r.name: r.graph_module.forward for r in parts.regions}, **compiled.by_name}
        )
        return bound

    def _symbols(self, parts: Partition) -> dict[sympy.Symbol, str]:
        found: dict[sympy.Symbol, str] = {}
        for given in parts.inputs:
            for dim, size in enumerate(given.value.shape if isinstance(given.value, Tensor) else ()):
                symbol = symbolic.expression_of(size)
                if isinstance(symbol, sympy.Symbol) and not given.is_static:
                    name = f"{given.source_name}.{dim}"
                    found.setdefault(symbol, self.fields.get(name, name))
        return found

    def prove(self, model: Callable[..., Any], *inputs: Any, dims: tuple[int, ...] = (0, 1)) -> PaddingProof:
        """Compile by one call, with these dimensions of all inputs dynamic where the model lets them be."""
        torch.compiler.reset()
        for given in inputs:
            for dim in dims:
                if isinstance(given, Tensor) and dim < given.dim():
                    torch._dynamo.maybe_mark_dynamic(given, dim)
        with torch.no_grad():
            torch.compile(model, backend=self, fullgraph=True)(*inputs)
        return self.proofs[-1]


def verdicts(proof: PaddingProof) -> dict[str, Verdict]:
    return dict(proof.verdicts)


def text_of(proof: PaddingProof) -> str:
    return "\n".join(map(str, proof.findings))


X = torch.randn(3, 5, 4)


def per_row(x: Tensor) -> Tensor:
    return F.layer_norm(cut(F.gelu(x) * 2), (4,)).softmax(-1)


def mean_of_rows(x: Tensor) -> Tensor:
    return cut(x * 2).mean(1)


def minus_the_batch(x: Tensor) -> Tensor:
    return cut(x) - cut(x * 2).sum(0)


def attends(x: Tensor) -> Tensor:
    y = cut(x)
    return cut(F.scaled_dot_product_attention(y, y, y))


def attends_causally(x: Tensor) -> Tensor:
    y = cut(x)
    return cut(F.scaled_dot_product_attention(y, y, y, is_causal=True))


def flattened(x: Tensor) -> Tensor:
    return cut(x.reshape(-1, 4) * 2).view(x.shape) + 1


def left_flat(x: Tensor) -> Tensor:
    return cut(x.reshape(-1, 4) * 2)


def sized(x: Tensor) -> Tensor:
    return cut(x) / x.shape[0]


PROGRAMS = [
    (per_row, PROVED, PROVED),
    (mean_of_rows, PROVED, UNPROVED),
    (minus_the_batch, UNPROVED, PROVED),
    (attends, PROVED, UNPROVED),
    (attends_causally, PROVED, PROVED),
    (flattened, PROVED, PROVED),
    (left_flat, PROVED, UNPROVED),
    (sized, UNPROVED, PROVED),
]


@pytest.mark.parametrize(("model", "batch", "rows"), PROGRAMS, ids=lambda value: getattr(value, "__name__", None))
def test_a_cut_changes_no_verdict(model: Callable[..., Any], batch: Verdict, rows: Verdict) -> None:
    cuts: list[tuple[str, ...]] = [(), ("paddingtest::cut",), ("aten::gelu", "paddingtest::cut", "aten::mul")]
    proofs = [Prover(splitting_ops).prove(model, X) for splitting_ops in cuts]
    assert [verdicts(proof) for proof in proofs] == [{"x.0": batch, "x.1": rows}] * 3
    assert len({str(proof.output_factors) for proof in proofs}) == 1
    assert len({text_of(proof) for proof in proofs}) == 1


class Decoder(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + cut(F.gelu(layer(x)))
        return x


@pytest.mark.parametrize("num_layers", [6, pytest.param(240, marks=pytest.mark.soak)])
def test_equal_layers_are_interpreted_once(num_layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted: list[Any] = []

    def counting(graph: AtenGraph, *args: Any) -> Any:
        interpreted.append(graph)
        return interpret(graph, *args)

    interpret = partitionproof.interpret
    monkeypatch.setattr(partitionproof, "interpret", counting)
    prover = Prover()
    proof = prover.prove(Decoder(num_layers).eval(), X)
    assert len(prover.parts[0].regions) == 2 * num_layers + 1
    assert verdicts(proof) == {"x.0": PROVED, "x.1": PROVED}
    # The first region, the cut, the regions between cuts, the last.
    assert len(interpreted) == len(set(map(id, interpreted))) == 4


def test_declared_padding_reaches_later_regions() -> None:
    def masked(x: Tensor, mask: Tensor) -> Tensor:
        return cut(F.scaled_dot_product_attention(cut(x), x, x, attn_mask=mask[:, None, :].bool()))

    mask = torch.ones(3, 5, dtype=torch.int64)
    fields = {"mask.0": "x.0", "mask.1": "x.1"}
    splitting_ops = ("paddingtest::cut", "torch.nn.functional.scaled_dot_product_attention")
    proof = Prover(splitting_ops, declared={"mask": 0}, fields=fields).prove(masked, X, mask)
    assert verdicts(proof) == {"x.0": PROVED, "x.1": PROVED}
    proof = Prover(splitting_ops, declared={"mask": 1}, fields=fields).prove(masked, X, mask)
    assert verdicts(proof) == {"x.0": PROVED, "x.1": UNPROVED}


def test_an_op_that_writes_to_an_argument_has_its_rule() -> None:
    def model(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.ops.paddingtest.fill(x + 1, out)
        return out * 2

    for splitting_ops in ((), ("paddingtest::fill",)):
        assert verdicts(Prover(splitting_ops).prove(model, X)) == {"x.0": PROVED, "x.1": PROVED}


@pytest.mark.parametrize(("op", "verdict", "num_traces"), [("fill_as", UNPROVED, 2), ("fill_of_layer", PROVED, 1)])
def test_numbers_that_no_rule_reads_do_not_tell_regions_apart(op: str, verdict: Verdict, num_traces: int) -> None:
    def model(x: Tensor) -> Tensor:
        for number in (0, 1):
            out = torch.empty_like(x)
            getattr(torch.ops.paddingtest, op)(x + 1, out, number)
            x = out * 2
        return x

    prover = Prover((f"paddingtest::{op}",))
    assert prover.prove(model, X).verdicts["x.0"] is verdict
    assert prover.num_traces == num_traces


# -- state -------------------------------------------------------------------------------------------------------------


def test_a_value_that_shares_padded_memory_is_not_trusted_after_a_write() -> None:
    def model(x: Tensor) -> Any:
        y = x * 2
        rows = y[1:]
        z = cut(y)
        y.add_(z)
        return cut(z) + y, rows * 1

    proof = Prover().prove(model, torch.randn(3, 4), dims=(0,))
    assert verdicts(proof) == {"x.0": UNPROVED}
    (finding,) = proof.findings
    assert (finding.target, finding.why) == ("output 1", "it writes to memory that other values share")


# -- numbers and host reads --------------------------------------------------------------------------------------------


# -- regions without a graph -------------------------------------------------------------------------------------------


def test_what_enters_a_region_without_a_graph_may_not_be_padded() -> None:
    """Inputs that overlap are merged by AOTAutograd, so that its graph is not the region's."""

    def model(x: Tensor, a: Tensor, b: Tensor) -> Any:
        a.add_(1)
        return cut(x * 2), cut(a + b)

    memory = torch.zeros(12)
    proof = Prover().prove(model, torch.randn(3, 4), memory[:8], memory[2:10])
    assert proof.verdicts["a.0"] is UNPROVED
    assert "a.0" in {finding.field for finding in proof.findings}


def test_a_region_that_nobody_traced_is_a_reason() -> None:
    def model(x: Tensor) -> Tensor:
        return cut(x * 2) + 1

    prover = Prover()
    prover.prove(model, X)
    (parts,) = prover.parts
    proof = prove_partition(parts, {}, prover._symbols(parts))
    assert verdicts(proof) == {"x.0": UNPROVED, "x.1": UNPROVED}
    assert "it was not traced" in text_of(proof)
    assert verdicts(prove_partition(parts, {}, {})) == {}
