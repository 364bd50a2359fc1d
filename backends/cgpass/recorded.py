"""What the runtime records of a compiled graph, for reports."""

from __future__ import annotations

from collections.abc import Mapping

from cgpass.calls import AutoRules
from cgpass.graphsizes import GraphSizes
from graphpass.compat.dynamo import GraphBreak
from graphpass.errors import NoGraph
from graphpass.regions.padding import PaddingFinding, PaddingProof
from graphpass.regions.split import Partition
from graphpass.report.callables import PaddingCause, RegionReason, RegionRecord, SizeRecord

__all__ = ["after_a_break", "ends_record", "never_captured", "region_records", "size_records"]

_REWRITE = "rewrite that line so that torch.compile traces it; torch.compile(model, fullgraph=True) raises there"


def region_records(parts: Partition, artifacts: Mapping[str, object]) -> tuple[RegionRecord, ...]:
    """The regions of a graph.

    Args:
        parts: the partitioned graph.
        artifacts: region name -> its artifact, for captured regions; equal regions have the same object.
    """
    first_with: dict[int, str] = {}
    return tuple(
        RegionRecord(
            name=region.name,
            kind=region.kind,
            num_ops=len(region.graph_module.graph.nodes),
            reasons=tuple(RegionReason(str(reason), reason.where, reason.remedy) for reason in region.reasons),
            like=first_with.setdefault(id(artifacts.get(region.name, region)), region.name),
        )
        for region in parts.regions
    )


def size_records(graph: GraphSizes, rules: AutoRules, proof: PaddingProof) -> tuple[SizeRecord, ...]:
    """The sizes that distinguish the calls of a graph, in the order of its symbols, with their proofs."""
    remedies = {field: remedy for field, _, remedy in rules.unproved}
    return tuple(
        SizeRecord(
            field=field.name,
            symbol=str(symbol),
            traced=graph.hints[symbol],
            least=graph.guards.ranges.get(symbol, (None, None))[0],
            greatest=graph.guards.ranges.get(symbol, (None, None))[1],
            is_padded=field.is_padded,
            verdict=proof.verdicts[field.name].name.lower() if field.name in proof.verdicts else None,
            causes=tuple(_cause(finding) for finding in proof.findings if finding.field == field.name),
            remedy=remedies.get(field.name, ""),
        )
        for symbol, field in zip(graph.symbols, rules.keys.fields, strict=True)
    )


def ends_record(after: GraphBreak | None) -> RegionReason | None:
    """The record of the graph break after a graph; None if there is none."""
    if after is None:
        return None
    return RegionReason(after.why, after.where, after_a_break(after))


def after_a_break(graph_break: GraphBreak) -> str:
    """What to do about a graph break."""
    return f"{_REWRITE}; Dynamo's hint: {graph_break.hint}" if graph_break.hint else _REWRITE


def never_captured(off: NoGraph | None) -> RegionReason | None:
    """The record of the reason why a graph is never captured; None if it may be."""
    return None if off is None else RegionReason(off.why, remedy=off.remedy)


def _cause(finding: PaddingFinding) -> PaddingCause:
    return PaddingCause(finding.target, finding.op, finding.why, finding.where, finding.verdict.name.lower())
