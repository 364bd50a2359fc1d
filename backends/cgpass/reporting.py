"""What is said of a graph when it has been compiled: warnings, log lines, and artifacts for tlparse."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from cgpass.rules import AutoRules
from graphpass.capture.runtime import GraphRuntime
from graphpass.compat import dynamo
from graphpass.ledger import Reason
from graphpass.modes import CUDAGraphMode
from graphpass.options import Settings
from graphpass.regions.padding import PaddingProof
from graphpass.regions.split import Partition

__all__ = ["report_graph"]

_log = logging.getLogger("graphpass")


def report_graph(
    name: str,
    parts: Partition,
    ends_early: Reason | None,
    auto: tuple[AutoRules, PaddingProof] | None,
    runtime: GraphRuntime,
    settings: Settings,
) -> None:
    """Report one compiled graph: what of it gets no graph, and what is not padded, each with its remedy.

    Args:
        name: the callable.
        parts: its regions.
        ends_early: the graph break after it; None if the function ends there.
        auto: rules of its dispatcher and the proof behind them; None if a forward context dispatches.
        runtime: whose report it is.
        settings: the backend's options.
    """
    is_silent = settings.on_fallback == "silent"
    _log_regions(name, parts)
    dynamo.trace_text(f"graphpass_partition_{name}", parts.dump)
    if ends_early is not None:
        runtime.warn(
            "ends at a graph break, and the code from there to the next graph runs in Python: "
            f"graph break: {ends_early}",
            ends_early.remedy,
            at=name,
            is_silent=is_silent,
            is_recorded=True,
        )
    if CUDAGraphMode.PIECEWISE in settings.runtime_modes():
        for text, remedy, region in _eager_regions(parts):
            runtime.warn(text, remedy, at=f"{name}.{region}", is_silent=is_silent, is_recorded=True)
    if auto is None:
        return
    rules, proof = auto
    for _, problem, remedy in rules.unproved:
        runtime.warn(problem, remedy, at=name, is_silent=is_silent, is_recorded=True)
    dynamo.trace_json(f"graphpass_padding_{name}", lambda: _padding(proof))
    dynamo.trace_json(f"graphpass_keys_{name}", lambda: _keys(rules))


def _log_regions(name: str, parts: Partition) -> None:
    num_captured = sum(region.kind == "captured" for region in parts.regions)
    num_eager = len(parts.regions) - num_captured
    _log.debug("%s compiled: %d regions for graphs, %d eager regions", name, num_captured, num_eager)
    for region in parts.regions:
        for reason in region.reasons:
            _log.debug("%s.%s is eager: %s%s", name, region.name, reason, f" at {reason.where}" if reason.where else "")


def _eager_regions(parts: Partition) -> Iterator[tuple[str, str, str]]:
    """(text, remedy, region) of each region that is eager although the user did not ask for it."""
    for region in parts.regions:
        for reason in region.reasons:
            if not reason.captures_whole and reason.remedy:
                where = f" at {reason.where}" if reason.where else ""
                yield f"runs eagerly between graphs: {reason}{where}", reason.remedy, region.name


def _padding(proof: PaddingProof) -> dict[str, object]:
    return {
        "verdicts": {field: verdict.name for field, verdict in proof.verdicts.items()},
        "findings": [
            {
                "field": f.field,
                "op": f.op,
                "why": f.why,
                "where": f.where,
                "target": f.target,
                "verdict": f.verdict.name,
            }
            for f in proof.findings
        ],
        "assumptions": list(proof.assumptions),
    }


def _keys(rules: AutoRules) -> dict[str, object]:
    return {
        "mode": str(rules.mode),
        "never_captured": None if rules.off is None else {"why": rules.off.why, "remedy": rules.off.remedy},
        "fields": [
            {
                "field": field.name,
                "is_padded": field.is_padded,
                "sizes": None if field.ladder is None else list(field.ladder),
            }
            for field in rules.keys.fields
        ],
        "max_graphs": rules.keys.max_graphs,
    }
