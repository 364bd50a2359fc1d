"""Whether entries along one size depend on each other at all: the question of a batch that packs many requests."""

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
    """What makes an entry along ``symbol`` depend on another index along it, real or padded; empty if nothing does.

    Unlike for :func:`padding_of`, the entries that matter may be any, not the first ones, and no value of the others
    is known: causal order, masks, forward scans, windows and zero padding excuse nothing. Registered rules answer this
    question, too; :attr:`OpCall.asks_independence` tells them.
    """
    record = graph if isinstance(graph, AtenGraph) else AtenGraph.of(graph)
    fields = {symbol: str(symbol)}
    sizes = Sizes(fields, ordered=False)
    run = interpret(record, input_values(record, sizes, {}), sizes)
    found = dict.fromkeys(_mixed(record, run, sizes, symbol))
    names = {(finding.op, finding.where) for finding in found}
    # A size used as a number mixes no entries, but makes each depend on how many there are.
    alone = padding_of(record, fields).findings
    return (*found, *(finding for finding in alone if (finding.op, finding.where) not in names))


def _mixed(graph: AtenGraph, run: Interpretation, sizes: Sizes, symbol: sympy.Symbol) -> list[PaddingFinding]:
    found = list(run.findings)
    results = [(f"output {at}", value) for at, value in enumerate(run.outputs) if run.dependent[at]]
    results += [(f"written input '{graph.input_names[at]}'", value) for at, value in run.written.items()]
    for target, value in results:
        if isinstance(value, PaddedValue):
            found += [finding.reaching(target) for finding in value.findings]
            padded = [value.factors[dim][at] for dim, at in sizes.places(value)]
            if padded not in ([], [symbol]):
                why = f"its entries stand along {padded}, not along {symbol} alone"
                found.append(PaddingFinding(str(symbol), "result", why, target=target))
    return sorted(set(found), key=str)
