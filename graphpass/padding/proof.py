"""The verdict for each padded size of an aten graph, and the largest set of sizes that may be padded together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import sympy
from torch import fx

from graphpass.ledger import PaddingFinding, Verdict
from graphpass.padding.interpreter import Interpretation, input_values, interpret
from graphpass.padding.program import AtenGraph
from graphpass.padding.sizes import Sizes
from graphpass.padding.values import PaddedValue, Size

InputsOf: TypeAlias = Callable[[Sizes], Sequence["PaddedValue | Size | None"]]
ResultFactors = tuple[tuple[sympy.Expr, ...], ...]


@dataclass(frozen=True, slots=True)
class PaddingProof:
    """Which sizes of a graph may be padded, and why others may not. See Note [Padding verdicts]."""

    verdicts: Mapping[str, Verdict]  #: key field -> verdict; all PROVED fields may be padded together
    #: For each flat output the factors of each dimension, outermost first; None if it is no tensor.
    output_factors: tuple[ResultFactors | None, ...]
    findings: tuple[PaddingFinding, ...]  #: the reasons why fields are not PROVED
    assumptions: tuple[str, ...]  #: the conditions on which the verdicts depend
    needs_real_contents: bool  #: an operator may fail for numbers in the padding that no real entry has


def padding_of(
    graph: AtenGraph | fx.GraphModule,
    symbols: Mapping[sympy.Symbol, str] | Collection[sympy.Symbol],
    declared: Mapping[int, float | int | bool | None] | None = None,
    *,
    written: Mapping[int, str] | None = None,
) -> PaddingProof:
    """Prove which sizes of an aten graph may be padded.

    Args:
        graph: the graph, or a graph module whose nodes have ``meta["val"]``.
        symbols: candidate symbol -> key field; or a collection of symbols, each its own key field.
        declared: input position -> the constant in its padding; None for other finite contents. Inputs that are not in
            it repeat real entries.
        written: input position -> name for findings, for inputs that the graph writes to.
    """
    record = graph if isinstance(graph, AtenGraph) else AtenGraph.of(graph)
    fields = dict(symbols) if isinstance(symbols, Mapping) else {symbol: str(symbol) for symbol in symbols}
    names = {**dict(enumerate(record.input_names)), **(written or {})}

    def attempt(candidates: Mapping[sympy.Symbol, str]) -> tuple[Interpretation, tuple[PaddingFinding, ...]]:
        sizes = Sizes(candidates)
        values = input_values(record.inputs, sizes, declared)
        run = interpret(record, values, sizes)
        targets = {position: f"written input '{names[position]}'" for position in run.written}
        return run, findings_of_results(run, sizes, values, targets)

    return decided(fields, attempt)


def findings_of_results(
    run: Interpretation,
    sizes: Sizes,
    inputs: Sequence[PaddedValue | Size | None],
    targets: Mapping[int, str],
    *,
    are_cut: bool = True,
) -> tuple[PaddingFinding, ...]:
    """Findings for everything that leaves a graph: outputs, written inputs, numbers for the host, random numbers.

    An output that is a size causes no finding: the caller evaluates its expression at the real sizes. ``targets`` names
    the written ones among ``inputs``, which are the values before the run; ``are_cut`` if outputs are cut by prefix.
    """
    findings = list(run.findings)
    for position, output in enumerate(run.outputs):
        if isinstance(output, PaddedValue):
            target = f"output {position}"
            findings += [finding.reaching(target) for finding in output.findings]
            if are_cut:
                findings += _padding_inside(output, sizes, target)  # guard: proof_padding_inside_a_result
    for position, value in run.written.items():
        target = targets[position]
        findings += [finding.reaching(target) for finding in value.findings]  # guard: proof_written_inputs
        before = inputs[position]
        assert isinstance(before, PaddedValue), "what a graph writes to is a tensor"
        for ours, theirs in zip(before.factors, value.factors, strict=True):
            if sizes.unified(ours, theirs) != ours:
                findings += _cut_wrongly(sizes, theirs or ours, f"entries {list(theirs)} go to {list(ours)}", target)
    order = {target: at for at, target in enumerate(targets.values())}
    return tuple(sorted(set(findings), key=lambda finding: (order.get(finding.target, -1), str(finding))))


def _padding_inside(output: PaddedValue, sizes: Sizes, target: str) -> list[PaddingFinding]:
    """Findings for padded factors that are not outermost: outputs are cut by prefix, which leaves such padding in."""
    findings: list[PaddingFinding] = []
    for dim, of_dim in enumerate(output.factors):
        if not sizes.is_prefix(of_dim):
            inside = tuple(size for size in of_dim[1:] if sizes.padded(size))
            findings += _cut_wrongly(sizes, inside, f"padding stands inside dimension {dim} of {list(of_dim)}", target)
    return findings


def _cut_wrongly(sizes: Sizes, at_fault: Sequence[Size], why: str, target: str) -> list[PaddingFinding]:
    fields = {field: None for size in at_fault for field in sizes.fields_of(size)}
    return [PaddingFinding(why, field=field, op="result", target=target) for field in fields]


Attempt = Callable[[Mapping[sympy.Symbol, str]], tuple[Interpretation, tuple[PaddingFinding, ...]]]


def decided(fields: Mapping[sympy.Symbol, str], attempt: Attempt) -> PaddingProof:
    """The proof for the largest set of key fields that may be padded together; earlier fields take precedence.

    ``attempt`` runs the pass with some of the candidates in ``fields``; it returns the run and its findings.
    """
    order = tuple(dict.fromkeys(fields.values()))
    refused: dict[PaddingFinding, None] = {}

    def padded(wanted: Collection[str]) -> dict[sympy.Symbol, str]:
        return {symbol: field for symbol, field in fields.items() if field in wanted}

    accepted = list(order)
    run, findings = attempt(padded(accepted))
    needs_real_contents = run.needs_real_contents  # also of fields that the user has padded without a proof
    if findings:
        accepted = []
        for field in order:
            tried, findings_of_attempt = attempt(padded([*accepted, field]))  # guard: proof_fields_alone
            refused.update(dict.fromkeys(findings_of_attempt))
            if not findings_of_attempt:
                accepted.append(field)
                run = tried
        if not accepted:
            run, _ = attempt({})
    verdicts = {field: Verdict.PROVED if field in accepted else Verdict.UNPROVED for field in order}
    factors = tuple(
        tuple(tuple(map(sympy.sympify, of_dim)) for of_dim in output.factors)
        if isinstance(output, PaddedValue)
        else None
        for output in run.outputs
    )
    assumptions = tuple(sorted(run.assumptions))
    return PaddingProof(MappingProxyType(verdicts), factors, tuple(refused), assumptions, needs_real_contents)
