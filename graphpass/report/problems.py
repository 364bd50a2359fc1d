"""What is slow or missing, from the figures of a report: one problem for each cause, however many regions have it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from graphpass.modes import CUDAGraphMode
from graphpass.report.drawing import counted
from graphpass.report.figures import Problem, ReportFigures
from graphpass.report.records import CallableRecord

OF_A_NEW_KEY = "first calls of a key"
_CALLS_THAT_TELL = 16
_LARGEST_GRID = 64
_KINDS = ("never captured", "no graph", "not captured", "graph break", "cut", "not padded", "note")


def problems_of(figures: ReportFigures) -> tuple[Problem, ...]:
    """All problems, the gravest kind first; first calls of a key, which run without a graph, are none."""
    found = (
        *figures.problems,
        *_uncaptured(figures),
        *_first_calls(figures),
        *_endings(figures.callables),
        *(problem for problem in cuts_of(figures.callables) if problem.remedy),
        *_unpadded(figures.callables),
    )
    return tuple(sorted(found, key=lambda problem: _KINDS.index(problem.kind)))


def cuts_of(callables: Sequence[CallableRecord]) -> Iterator[Problem]:
    """Why regions are eager: one problem for each reason and line, with all regions that have it.

    The cuts that a callable's FULL graph holds have no remedy, nor those of a callable without graphs that nothing is
    lost by: they cost nothing.
    """
    regions: dict[tuple[str, str, str], list[str]] = {}
    for record in callables:
        is_free = record.mode is CUDAGraphMode.FULL or (record.off is not None and not record.off.remedy)
        for region in record.regions:
            for reason in region.reasons:
                remedy = "" if is_free else reason.remedy
                regions.setdefault((reason.why, reason.where, remedy), []).append(f"{record.name}.{region.name}")
    for (why, where, remedy), names in regions.items():
        yield Problem("cut", why, tuple(names), where, remedy=remedy)


def _uncaptured(figures: ReportFigures) -> Iterator[Problem]:
    off = {record.name for record in figures.callables if record.off is not None}
    graphs: dict[tuple[str, str], list[str]] = {}
    times: dict[tuple[str, str], int] = {}
    for calls in figures.uncaptured:
        if not calls.reason.is_expected and calls.subject not in off:
            cause = (calls.reason.why, calls.reason.remedy)
            named = [f"{calls.subject} {sizes}" for sizes in calls.sizes()]
            graphs.setdefault(cause, []).extend(named or [calls.subject])
            times[cause] = times.get(cause, 0) + calls.n
    for (reason, remedy), names in graphs.items():
        yield Problem("no graph", reason, tuple(names), times=times[reason, remedy], remedy=remedy)


def _first_calls(figures: ReportFigures) -> Iterator[Problem]:
    """Traffic in which a size seldom comes twice: each first call of a key runs without a graph."""
    first = [use for use in figures.uncaptured if use.reason.is_expected and use.reason.why == OF_A_NEW_KEY]
    times = sum(use.n for use in first)
    calls = sum(use.calls for use in figures.keys) + sum(use.n for use in figures.uncaptured)
    fields = [seen for seen in figures.traffic if seen.option == "capture_sizes" and seen.suggested]
    most = round(_LARGEST_GRID ** (1 / max(len(fields), 1)))
    sizes = {seen.field: list(replace(seen, limit=min(seen.limit, most)).suggested) for seen in fields}
    if sizes and calls >= _CALLS_THAT_TELL and 2 * times >= calls:
        what = f"{counted(times, 'call')} of {calls} were the first of their sizes"
        remedy = f"declare a ladder, capture_sizes={sizes}, and capture it ahead of the calls (capture(), precapture())"
        yield Problem("no graph", what, tuple(dict.fromkeys(use.subject for use in first)), times=times, remedy=remedy)


def _endings(callables: Sequence[CallableRecord]) -> Iterator[Problem]:
    names: dict[tuple[str, str, str, str], list[str]] = {}
    for record in callables:
        for kind, reason in (("graph break", record.ends), ("never captured", record.off)):
            if reason is not None and reason.remedy:
                names.setdefault((kind, reason.why, reason.where, reason.remedy), []).append(record.name)
    for (kind, why, where, remedy), graphs in names.items():
        yield Problem(kind, why, tuple(graphs), where, remedy=remedy)


def _unpadded(callables: Sequence[CallableRecord]) -> Iterator[Problem]:
    found: dict[tuple[str, str, str], list[str]] = {}
    for record in callables:
        for size in record.sizes:
            if size.remedy:
                cause = size.causes[0] if size.causes else None
                why = "no proof covers it" if cause is None else f"{cause.op} ({cause.why})"
                effect = "padded without a check" if size.is_padded else "not padded, each of its sizes is captured"
                where = "" if cause is None else cause.where
                found.setdefault((f"{size.field} is {effect}: {why}", where, size.remedy), []).append(record.name)
    for (what, where, remedy), graphs in found.items():
        yield Problem("not padded", what, tuple(dict.fromkeys(graphs)), where, remedy=remedy)
