"""``graphpass explain``: how a model is cut into regions, why, and where it can be padded."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from graphpass.capture.lookup import runtime_of
from graphpass.capture.records import CallableRecord, RegionRecord
from graphpass.cli.failures import users_code
from graphpass.cli.program import Program
from graphpass.cli.result import Cell, Heading, Part, Result, Strip, Text
from graphpass.errors import OptionError
from graphpass.report import Table

__all__ = ["explain", "quiet_compiler"]

_GRAPH_BREAK = re.compile(r"(?P<why>graph break: .+) at (?P<where>[^/ ]+:\d+.*)")
_FINDING = re.compile(r"(?P<target>.+?) (?:may depend|depends?) on padding of '.*?' through (?P<op>.+)")


def explain(program: Program, options: Mapping[str, Any]) -> Result:
    """Partition a model for its example inputs; runs it once, without graphs and without a compiler.

    Args:
        program: the model.
        options: options of the backend; ``compiler`` and ``dispatch`` are ignored.

    Raises:
        GraphpassError: the model fails, or an option is invalid.
    """
    used = {**options, "compiler": "eager", "dispatch": "auto"}
    torch.compiler.reset()  # code that is compiled already would not be traced again
    compiled = torch.compile(program.model, backend="cgpass", options=used, dynamic=True)
    expected = "a model that runs under torch.compile with its example inputs"
    with (
        users_code(program.name, expected=expected, remedy="run the model eagerly with these inputs first"),
        quiet_compiler(),
        torch.no_grad(),
    ):
        compiled(*program.args, **program.kwargs)
    try:
        runtime = runtime_of(compiled)
    except OptionError:  # Dynamo compiled nothing
        return Result("explain", program.name, _figures(program, (), {}), (Text("torch.compile found no graph."),))
    notes = {row[1]: int(row[0]) for row in runtime.report()["Notes"].rows}
    figures = _figures(program, runtime.callables(), notes)
    return Result("explain", program.name, figures, tuple(_parts(figures)))


@contextlib.contextmanager
def quiet_compiler() -> Iterator[None]:
    """Keep warnings of torch.compile and graphpass off stderr in the body: the command shows their subject itself."""
    loggers = [logging.getLogger(name) for name in ("torch._dynamo", "torch.fx", "torch._inductor", "graphpass")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _figures(program: Program, records: Sequence[CallableRecord], notes: Mapping[str, int]) -> dict[str, Any]:
    regions = [region for record in records for region in record.regions]
    return {
        "model": program.name,
        "device": str(program.device),
        "torch": torch.__version__,
        "captured_regions": sum(region.kind == "captured" for region in regions),
        "eager_regions": sum(region.kind == "eager" for region in regions),
        "unique_regions": sum(record.artifacts for record in records),
        "graphs": [_graph(record) for record in records],
        "notes": [{"what": text, "times": times} for text, times in notes.items()],
    }


def _graph(record: CallableRecord) -> dict[str, Any]:
    findings = [(field, why) for field, _, why in record.padding if field and why]
    verdicts = {field: verdict for field, verdict, why in record.padding if field and not why}
    return {
        "name": record.name,
        "mode": None if record.mode is None else str(record.mode),
        "never_captured": record.off,
        "ends": record.reason,
        "regions": [_region(record, region) for region in record.regions],
        "sizes": [
            {
                "field": size.field,
                "symbol": size.symbol,
                "traced": size.traced,
                "least": size.least,
                "greatest": size.greatest,
                "padded": size.is_padded,
                "verdict": verdicts.get(size.field),
                "not_proved": [why for field, why in findings if field == size.field],
            }
            for size in record.sizes
        ],
        "assumptions": [why for field, _, why in record.padding if not field],
    }


def _region(record: CallableRecord, region: RegionRecord) -> dict[str, Any]:
    return {
        "name": f"{record.name}.{region.name}",
        "kind": region.kind,
        "nodes": region.num_ops,
        "same_as": None if region.like == region.name else f"{record.name}.{region.like}",
        "reasons": [{"why": reason.why, "where": reason.where} for reason in region.reasons],
    }


def _parts(figures: Mapping[str, Any]) -> Iterator[Part]:
    graphs = figures["graphs"]
    yield Text(
        f"{len(graphs)} graph(s): {figures['captured_regions']} captured regions, {figures['unique_regions']} of them "
        f"compiled, and {figures['eager_regions']} eager regions. Traced on {figures['device']}, torch "
        f"{figures['torch']}."
    )
    yield Heading("Why it is cut")
    yield _cuts(graphs)
    if all(not region["reasons"] for graph in graphs for region in graph["regions"]) and not _endings(graphs):
        yield Text("Nothing is cut: each graph is one captured region.")
    if figures["device"] == "cpu":
        yield Text("On the CPU a tensor on the CPU cuts nothing. Run this on a GPU to see such tensors.")
    yield Heading("Regions")
    rows: list[tuple[str, ...]] = []
    for graph in graphs:
        groups = _groups(graph)
        yield Strip(f"{graph['name']} in order", tuple(_cells(graph, groups)))
        rows += [_row(first, names) for first, names in groups]
    yield Table("Regions", ("region", "kind", "nodes", "equal regions"), tuple(rows))
    yield from _padding_parts(graphs)
    yield Table("Notes", ("times", "what"), tuple((str(note["times"]), str(note["what"])) for note in figures["notes"]))


def _endings(graphs: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    return [(graph["name"], why) for graph in graphs for why in (graph["ends"], graph["never_captured"]) if why]


def _cuts(graphs: Sequence[Mapping[str, Any]]) -> Table:
    """One row for each different reason, with the regions that have it."""
    regions_of: dict[tuple[str, str], list[str]] = {}
    for graph in graphs:
        for region in graph["regions"]:
            for reason in region["reasons"]:
                regions_of.setdefault((reason["why"], reason["where"]), []).append(region["name"])
        for name, why in _endings([graph]):
            match = _GRAPH_BREAK.fullmatch(why)
            cut = (match["why"], match["where"].replace(": `", ": ").removesuffix("`")) if match else (why, "")
            regions_of.setdefault(cut, []).append(f"{name}.end")
    rows = tuple((why, where, _listed(names)) for (why, where), names in regions_of.items())
    return Table("Cuts", ("reason", "line", "regions"), rows)


def _groups(graph: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], list[str]]]:
    """The first region of each kind of region, and the names of all: equal artifacts, or eager for equal reasons."""
    groups: dict[tuple[Any, ...], tuple[Mapping[str, Any], list[str]]] = {}
    for region in graph["regions"]:
        reasons = tuple((reason["why"], reason["where"]) for reason in region["reasons"])
        key = ("eager", reasons) if region["kind"] == "eager" else ("captured", region["same_as"] or region["name"])
        groups.setdefault(key, (region, []))[1].append(region["name"])
    return list(groups.values())


def _row(first: Mapping[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    return (first["name"], first["kind"], str(first["nodes"]), _listed(names[1:]))


def _cells(graph: Mapping[str, Any], groups: Sequence[tuple[Mapping[str, Any], list[str]]]) -> Iterator[Cell]:
    row_of = {name: first["name"] for first, names in groups for name in names}
    for region in graph["regions"]:
        why = "; ".join(f"{reason['why']} at {reason['where']}" for reason in region["reasons"])
        about = f"{region['kind']}, {region['nodes']} nodes" + (f": {why}" if why else "")
        yield Cell(region["name"], region["kind"], about, row_of[region["name"]])
    if graph["ends"]:
        yield Cell(f"{graph['name']}.end", "end", graph["ends"], row_of.get(f"{graph['name']}.r0", ""))


def _listed(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def _padding_parts(graphs: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
    yield Heading("Padding")
    sizes = [(graph["name"], size) for graph in graphs for size in graph["sizes"]]
    if not sizes:
        yield Text("No size is symbolic: every shape is captured as it is.")
    yield Table(
        "Sizes",
        ("graph", "size", "symbol", "traced", "admitted", "padding", "padded"),
        tuple(
            (
                name,
                size["field"],
                size["symbol"],
                str(size["traced"]),
                f"{_bound(size['least'])} to {_bound(size['greatest'])}",
                size["verdict"] or "no candidate",
                "yes" if size["padded"] else "no, captured exactly",
            )
            for name, size in sizes
        ),
    )
    yield _not_proved(sizes)
    assumptions = tuple((graph["name"], text) for graph in graphs for text in graph["assumptions"])
    yield Table("The proof assumes", ("graph", "what"), assumptions)


def _not_proved(sizes: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    """One row for each op that shows padding, with all results that it reaches."""
    reached: dict[tuple[str, str, str], list[str]] = {}
    for name, size in sizes:
        for why in size["not_proved"]:
            match = _FINDING.fullmatch(why)
            row = (name, size["field"], match["op"] if match else why)
            reached.setdefault(row, []).extend([match["target"]] if match else [])
    rows = tuple((*row, ", ".join(dict.fromkeys(targets))) for row, targets in reached.items())
    return Table("Where padding is not proved", ("graph", "size", "through", "reaches"), rows)


def _bound(value: int | None) -> str:
    return "any" if value is None else str(value)
