"""What the runtime records of a compiled graph, for reports."""

from __future__ import annotations

from collections.abc import Mapping

from cgpass.calls import AutoRules
from cgpass.graphsizes import GraphSizes
from graphpass.capture.records import RegionReason, RegionRecord, SizeRecord
from graphpass.regions.padding import PaddingProof
from graphpass.regions.split import Partition

__all__ = ["padding_rows", "region_records", "size_records"]


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
            reasons=tuple(RegionReason(str(reason), reason.where) for reason in region.reasons),
            like=first_with.setdefault(id(artifacts.get(region.name, region)), region.name),
        )
        for region in parts.regions
    )


def size_records(graph: GraphSizes, rules: AutoRules) -> tuple[SizeRecord, ...]:
    """The sizes that distinguish the calls of a graph, in the order of its symbols."""
    return tuple(
        SizeRecord(
            field=field.name,
            symbol=str(symbol),
            traced=graph.hints[symbol],
            least=graph.guards.ranges.get(symbol, (None, None))[0],
            greatest=graph.guards.ranges.get(symbol, (None, None))[1],
            is_padded=field.is_padded,
        )
        for symbol, field in zip(graph.symbols, rules.keys.fields, strict=True)
    )


def padding_rows(proof: PaddingProof) -> tuple[tuple[str, str, str], ...]:
    """Rows (key field, verdict, reason) for the report; a row with an empty key field applies to all fields."""
    rows = [(field, verdict.name.lower(), "") for field, verdict in proof.verdicts.items()]
    rows += [(finding.field, finding.verdict.name.lower(), str(finding)) for finding in proof.findings]
    return (*rows, *(("", "assumes", text) for text in proof.assumptions))
