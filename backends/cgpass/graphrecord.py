"""What is said of a graph when it has been compiled: its record for reports, warnings, log lines and artifacts."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sympy
import torch

from cgpass.keyrules import AutoRules
from cgpass.namedsizes import Expression, symbols_in, value_at
from graphpass.capture.runtime import GraphRuntime
from graphpass.compat import dynamo
from graphpass.compile import RegionTrace
from graphpass.keys import CUDAGraphMode
from graphpass.ledger import PaddingFinding, Verdict
from graphpass.options import Settings
from graphpass.padding import PaddingProof
from graphpass.regions.split import Partition
from graphpass.report import Report
from graphpass.report.figures import graph_figures
from graphpass.report.records import CallableRecord, RegionRecord, SizeRecord

_log = logging.getLogger("graphpass")


def explain(
    model: Callable[..., Any], *inputs: Any, options: Mapping[str, Any] | None = None, dynamic: bool | None = True
) -> Report:
    """Partition ``model`` for ``inputs``; report its regions with their reasons, and which sizes may be padded.

    Runs the model once, without graphs.

    Args:
        model: a module or function.
        inputs: positional example inputs.
        options: as for the backend; ``runtime`` and ``dispatch`` are ignored, and nothing is compiled by Inductor.
        dynamic: as for ``torch.compile``. By default every size is symbolic unless the model specializes it. Padding is
            reported for symbolic sizes only.

    Raises:
        OptionError: an option is unknown or cannot be used.
    """
    compiler = "eager" if Settings.of(options).compiler == "eager" else "aot_eager"  # what pads without its kernels
    runtime = GraphRuntime()
    used = {**(options or {}), "compiler": compiler, "runtime": runtime, "dispatch": "auto"}
    compiled = torch.compile(model, backend="cgpass", options=used, dynamic=dynamic)
    with torch.no_grad():
        compiled(*inputs)
    return runtime.report()


def region_records(parts: Partition, artifacts: Mapping[str, object]) -> tuple[RegionRecord, ...]:
    """The regions of a graph."""
    first_with: dict[int, str] = {}
    return tuple(
        RegionRecord(
            name=region.name,
            kind=region.kind,
            num_ops=len(region.graph_module.graph.nodes),
            reasons=region.reasons,
            like=first_with.setdefault(id(artifacts.get(region.name, region)), region.name),
        )
        for region in parts.regions
    )


def _made(traces: Mapping[str, RegionTrace], rules: AutoRules) -> dict[str, list[PaddingFinding]]:
    names = {size.symbol: size.name for size in rules.sizes.sizes if size.is_padded}
    found: dict[str, list[PaddingFinding]] = {}

    def add(why: str, op: str, sizes: Iterable[Expression], where: str = "") -> None:
        for field in {names[one] for one in symbols_in(sizes) if one in names}:
            made = PaddingFinding(why, "", where, field=field, op=op, verdict=Verdict.PROVED)
            found.setdefault(field, []).append(made)

    for position, fill in rules.padded.items():
        layout = rules.sizes.layouts[position]
        if fill != "repeat":
            add(f"padding of {layout.name} filled with {fill}", "input", layout.shape)
    for trace in traces.values():
        own = dict(trace.symbols)
        for inserted in () if trace.problem else trace.result.insertions:
            num_bytes = inserted.itemsize * math.prod(
                value_at(_renamed(size, own), rules.sizes.hints) for size in inserted.sizes
            )
            add(f"{inserted.what}, {num_bytes} bytes", inserted.op, [_renamed(inserted.size, own)], inserted.where)
    return found


def _renamed(size: Expression, own: Mapping[Any, sympy.Symbol]) -> Expression:
    return size if isinstance(size, int) else size.xreplace(own)


def size_records(rules: AutoRules, proof: PaddingProof, traces: Mapping[str, RegionTrace]) -> tuple[SizeRecord, ...]:
    """The sizes that distinguish the calls of a graph, in the order of its symbols, with their proofs."""
    ranges, made = rules.sizes.guards.ranges, _made(traces, rules)
    verdicts = {field: "made" if field in made else str(verdict) for field, verdict in proof.verdicts.items()}
    return tuple(
        SizeRecord(
            field=size.name,
            symbol=str(size.symbol),
            traced=rules.sizes.hints[size.symbol],
            least=ranges.get(size.symbol, (None, None))[0],
            greatest=ranges.get(size.symbol, (None, None))[1],
            is_padded=size.is_padded,
            verdict=verdicts.get(size.name),
            causes=tuple(found for found in proof.findings if found.field == size.name),
            made=tuple(made.get(size.name, ())),
            remedy=rules.unproved[size.name].remedy if size.name in rules.unproved else "",
        )
        for size in rules.sizes.sizes
    )


def report_graph(
    record: CallableRecord,
    parts: Partition,
    rules: AutoRules | None,
    runtime: GraphRuntime,
    settings: Settings,
) -> None:
    """Say what of a compiled graph gets no graph, and what is not padded, each with its remedy."""

    def warn(text: str, remedy: str, at: str) -> None:
        runtime.warn(text, remedy, at=at, is_silent=settings.on_fallback == "silent", is_recorded=True)

    name, num_captured = record.name, sum(region.kind == "captured" for region in record.regions)
    num_eager = len(record.regions) - num_captured
    _log.debug("%s compiled: %d regions for graphs, %d eager regions", name, num_captured, num_eager)
    dynamo.trace(f"graphpass_partition_{name}", parts.dump, "string")
    if record.ends is not None:
        text = "ends at a graph break, and the code from there to the next graph runs in Python: graph break: "
        warn(f"{text}{record.ends}", record.ends.remedy, name)
    in_pieces = CUDAGraphMode.PIECEWISE in settings.runtime_modes()
    for region, reason in ((of, reason) for of in parts.regions for reason in of.reasons):
        _log.debug("%s.%s is eager: %s", name, region.name, reason)
        if in_pieces and not reason.captures_whole and reason.remedy:  # eager although the user did not ask for it
            warn(f"runs eagerly between graphs: {reason}", reason.remedy, f"{name}.{region.name}")
    dynamo.trace(f"graphpass_callable_{name}", lambda: graph_figures(record))
    for problem in () if rules is None else rules.unproved.values():
        warn(problem.why, problem.remedy, name)
