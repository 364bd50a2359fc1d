"""What the runtime records of a compiled graph, for reports."""

from __future__ import annotations

from collections.abc import Mapping

from cgpass.rules import AutoRules
from graphpass.ledger import Reason
from graphpass.regions.padding import PaddingFinding, PaddingProof
from graphpass.regions.split import Partition
from graphpass.report.records import PaddingCause, RegionRecord, SizeRecord


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
            reasons=tuple(Reason(str(reason), reason.remedy, reason.where) for reason in region.reasons),
            like=first_with.setdefault(id(artifacts.get(region.name, region)), region.name),
        )
        for region in parts.regions
    )


def size_records(rules: AutoRules, proof: PaddingProof) -> tuple[SizeRecord, ...]:
    """The sizes that distinguish the calls of a graph, in the order of its symbols, with their proofs."""
    remedies = {field: remedy for field, _, remedy in rules.unproved}
    return tuple(
        SizeRecord(
            field=field.name,
            symbol=str(size.symbol),
            traced=rules.sizes.hints[size.symbol],
            least=rules.sizes.guards.ranges.get(size.symbol, (None, None))[0],
            greatest=rules.sizes.guards.ranges.get(size.symbol, (None, None))[1],
            is_padded=field.is_padded,
            verdict=proof.verdicts[field.name].name.lower() if field.name in proof.verdicts else None,
            causes=tuple(_cause(finding) for finding in proof.findings if finding.field == field.name),
            remedy=remedies.get(field.name, ""),
        )
        for size, field in zip(rules.sizes.sizes, rules.keys.fields, strict=True)
    )


def _cause(finding: PaddingFinding) -> PaddingCause:
    return PaddingCause(finding.target, finding.op, finding.why, finding.where, finding.verdict.name.lower())
