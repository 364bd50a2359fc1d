"""Whether entries along one size depend on each other at all, as needed for a batch that packs many requests."""

from __future__ import annotations

import sympy
from torch import fx

from graphpass.regions.padding.interpreter import Interpretation, input_values, interpret
from graphpass.regions.padding.program import AtenGraph
from graphpass.regions.padding.proof import padding_of
from graphpass.regions.padding.sizes import Sizes
from graphpass.regions.padding.values import PaddedValue, PaddingFinding

__all__ = ["independent_along"]


def independent_along(graph: AtenGraph | fx.GraphModule, symbol: sympy.Symbol) -> tuple[PaddingFinding, ...]:
    """The operators through which an entry along ``symbol`` depends on another index along it; empty if there are none.

    Stricter than :func:`padding_of`: any entries may be the real ones, not only the first, and nothing is known of the
    others, so causal order, masks, forward scans, windows and zero padding do not help. Registered rules are used here
    too; they see the difference by :attr:`OpCall.asks_independence`.
    """
    record = graph if isinstance(graph, AtenGraph) else AtenGraph.of(graph)
    fields = {symbol: str(symbol)}
    sizes = Sizes(fields, ordered=False)
    run = interpret(record, input_values(record, sizes, {}), sizes)
    findings = dict.fromkeys(_mixed(record, run, sizes, symbol))
    names = {(finding.op, finding.where) for finding in findings}
    # A size used as a number mixes no entries, but makes each depend on the number of entries.
    alone = padding_of(record, fields).findings
    return (*findings, *(finding for finding in alone if (finding.op, finding.where) not in names))


def _mixed(graph: AtenGraph, run: Interpretation, sizes: Sizes, symbol: sympy.Symbol) -> list[PaddingFinding]:
    findings = list(run.findings)
    results = [(f"output {at}", value) for at, value in enumerate(run.outputs) if run.dependent[at]]
    results += [(f"written input '{graph.input_names[at]}'", value) for at, value in run.written.items()]
    for target, value in results:
        if isinstance(value, PaddedValue):
            findings += [finding.reaching(target) for finding in value.findings]
            padded = [value.factors[dim][at] for dim, at in sizes.places(value)]
            if padded not in ([], [symbol]):
                why = f"its entries stand along {padded}, not along {symbol} alone"
                findings.append(PaddingFinding(str(symbol), "result", why, target=target))
    return sorted(set(findings), key=str)
