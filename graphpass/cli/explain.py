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
from graphpass.report import Problem, Report
from graphpass.report.drawing import Heading, Part
from graphpass.report.figures import graph_figures
from graphpass.report.records import CallableRecord
from graphpass.report.report import problem_parts, proof_tables, regions_parts


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
    return Result("explain", program.name, figures, tuple(_parts(figures, runtime.report(program.name))))


def _without_kernels(program: Program, options: Mapping[str, Any]) -> str:
    """The compiler that pads as the options' does; AOTAutograd takes no model of fake tensors."""
    state = program.model.state_dict() if isinstance(program.model, torch.nn.Module) else {}
    values = [*program.args, *program.kwargs.values(), *state.values()]
    return "eager" if are_fake(values) or options.get("compiler") == "eager" else "aot_eager"


@contextlib.contextmanager
def quiet_compiler() -> Iterator[None]:
    """Keep log records of torch.compile and graphpass off stderr in the body: the command shows what they say."""
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


def _parts(figures: Mapping[str, Any], report: Report) -> Iterator[Part]:
    records = report.figures.callables
    yield (
        f"Graphs: {len(records)}. Captured regions: {figures['captured_regions']}, different ones: "
        f"{figures['unique_regions']}. Eager regions: {figures['eager_regions']}. Traced on {figures['device']}, torch "
        f"{figures['torch']}."
    )
    yield from problem_parts(report.problems, is_empty=False)
    if figures["device"] == "cpu":
        yield "On the CPU a tensor on the CPU cuts nothing. Run this on a GPU to see such tensors."
    yield Heading("Regions")
    yield from regions_parts(records)
    yield Heading("Padding")
    of_proof = proof_tables(records)
    if not of_proof[0].rows:
        yield "No size is symbolic: every shape is captured as it is."
    yield from of_proof
