"""``graphpass explain``: how a model is cut into regions, why, and where it can be padded."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from graphpass.capture.runtime import runtime_of
from graphpass.cli.usermodel import Program, Result, users_code
from graphpass.errors import OptionError
from graphpass.regions.execute import are_fake
from graphpass.report import Problem
from graphpass.report.drawing import Heading, Part, Table, listed
from graphpass.report.figures import graph_figures
from graphpass.report.problems import cuts_of
from graphpass.report.records import CallableRecord
from graphpass.report.report import proof_tables, region_maps, regions_table


def explain(program: Program, options: Mapping[str, Any]) -> Result:
    """Partition a model for its example inputs; runs it once, without graphs and without Inductor."""
    used = {**options, "compiler": _without_kernels(program, options), "dispatch": "auto"}
    torch.compiler.reset()  # code that is compiled already would not be traced again
    compiled = torch.compile(program.model, backend="cgpass", options=used, dynamic=True)
    expected = "a model that runs under torch.compile with its example inputs"
    with (
        users_code(program.name, expected=expected, remedy="run the model eagerly with these inputs first"),
        quiet_compiler(),
        torch.no_grad(),
    ):
        try:
            compiled(*program.args, **program.kwargs)
        except Exception:
            program.model(*program.args, **program.kwargs)  # its own error is shorter than torch.compile's
            raise
    try:
        runtime = runtime_of(compiled)
    except OptionError:  # Dynamo compiled nothing
        return Result("explain", program.name, _figures(program, (), ()), ("torch.compile found no graph.",))
    figures = _figures(program, runtime.callables(), runtime.noted())
    return Result("explain", program.name, figures, tuple(_parts(figures, runtime.callables())))


def _without_kernels(program: Program, options: Mapping[str, Any]) -> str:
    """The compiler that pads as the options' does; AOTAutograd takes no model of fake tensors."""
    state = program.model.state_dict() if isinstance(program.model, torch.nn.Module) else {}
    values = [*program.args, *program.kwargs.values(), *state.values()]
    return "eager" if are_fake(values) or options.get("compiler") == "eager" else "aot_eager"


@contextlib.contextmanager
def quiet_compiler() -> Iterator[None]:
    """Keep log records of torch.compile and graphpass off stderr in the body: the command shows their subject itself.

    Torch 2.15 logs errors of tracing with a traceback before it raises them.
    """
    names = ("torch._dynamo", "torch._inductor", "torch._subclasses", "torch.fx", "graphpass")
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _figures(program: Program, records: Sequence[CallableRecord], notes: Sequence[Problem]) -> dict[str, Any]:
    regions = [region for record in records for region in record.regions]
    return {
        "model": program.name,
        "device": str(program.device),
        "torch": torch.__version__,
        "captured_regions": sum(region.kind == "captured" for region in regions),
        "eager_regions": sum(region.kind == "eager" for region in regions),
        "unique_regions": sum(record.artifacts for record in records),
        "graphs": list(map(graph_figures, records)),
        "notes": [{"what": note.what, "times": note.times, "remedy": note.remedy} for note in notes],
    }


def _parts(figures: Mapping[str, Any], records: Sequence[CallableRecord]) -> Iterator[Part]:
    yield (
        f"Graphs: {len(records)}. Captured regions: {figures['captured_regions']}, different ones: "
        f"{figures['unique_regions']}. Eager regions: {figures['eager_regions']}. Traced on {figures['device']}, torch "
        f"{figures['torch']}."
    )
    yield Heading("Why it is cut")
    cuts = _cuts(records)
    yield cuts
    if not cuts.rows:
        yield "Nothing is cut: each graph is one captured region."
    if figures["device"] == "cpu":
        yield "On the CPU a tensor on the CPU cuts nothing. Run this on a GPU to see such tensors."
    yield Heading("Regions")
    yield from region_maps(records)
    yield regions_table(records, with_reasons=False)
    yield Heading("Padding")
    of_proof = proof_tables(records)
    if not of_proof[0].rows:
        yield "No size is symbolic: every shape is captured as it is."
    yield from of_proof
    notes = tuple((str(note["times"]), note["what"], note["remedy"]) for note in figures["notes"])
    yield Table("Notes", ("times", "what", "what to do"), notes)


def _cuts(records: Sequence[CallableRecord]) -> Table:
    rows = [(cut.what, cut.where, listed(cut.places), cut.remedy) for cut in cuts_of(records)]
    for record in records:
        if record.ends is not None:
            end = record.ends
            rows.append((f"graph break: {end.why}", end.where, f"{record.name}.end", end.remedy))
        if record.off is not None:
            rows.append((record.off.why, record.off.where, record.name, record.off.remedy))
    return Table("Cuts", ("reason", "line", "regions", "what to do"), tuple(rows))
