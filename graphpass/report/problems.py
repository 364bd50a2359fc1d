"""What is slow or missing, from the figures of a report: one problem for each cause, however many regions have it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from graphpass.keys import CUDAGraphMode
from graphpass.report.drawing import counted, listed
from graphpass.report.figures import Problem, ReportFigures, SizeTraffic
from graphpass.report.records import CallableRecord

OF_A_NEW_KEY = "first calls of a key"
_CALLS_THAT_TELL = 16
_KINDS = ("never captured", "no graph", "not captured", "graph break", "cut", "not padded", "note")


def problems_of(figures: ReportFigures) -> tuple[Problem, ...]:
    """All problems, the gravest kind first; first calls of a key, which run without a graph, are none."""
    found = (
        *figures.problems,
        *_merged(_uncaptured(figures)),
        *_first_calls(figures),
        *_merged(_endings(figures.callables)),
        *_merged(_cuts(figures.callables)),
        *_merged(_unpadded(figures.callables)),
    )
    return tuple(sorted(found, key=lambda problem: _KINDS.index(problem.kind)))


def _merged(found: Iterable[Problem]) -> tuple[Problem, ...]:
    causes: dict[Problem, tuple[dict[str, None], list[int]]] = {}
    for problem in found:
        places, times = causes.setdefault(replace(problem, places=(), times=None), ({}, []))
        places.update(dict.fromkeys(problem.places))
        times += [] if problem.times is None else [problem.times]
    return tuple(
        replace(cause, places=tuple(places), times=sum(times) if times else None)
        for cause, (places, times) in causes.items()
    )


def _uncaptured(figures: ReportFigures) -> Iterator[Problem]:
    off = {record.name for record in figures.callables if record.off is not None}
    for calls in figures.uncaptured:
        reason = calls.reason
        if not reason.is_expected and calls.subject not in off:
            named = tuple(f"{calls.subject} {sizes}" for sizes in calls.sizes())
            yield Problem("no graph", reason.why, named or (calls.subject,), times=calls.n, remedy=reason.remedy)


def _first_calls(figures: ReportFigures) -> Iterator[Problem]:
    """Traffic in which a size seldom comes twice: each first call of a key runs without a graph."""
    first = [use for use in figures.uncaptured if use.reason.is_expected and use.reason.why == OF_A_NEW_KEY]
    times = sum(use.n for use in first)
    calls = sum(use.calls for use in figures.keys) + sum(use.n for use in figures.uncaptured)
    fields = [seen for seen in figures.traffic if seen.option == "capture_sizes" and any(seen.histogram.values())]
    if fields and calls >= _CALLS_THAT_TELL and 2 * times >= calls:
        what = f"{counted(times, 'call')} of {calls} were the first of their sizes"
        places = tuple(dict.fromkeys(use.subject for use in first))
        yield Problem("no graph", what, places, times=times, remedy=_ladder_of(fields))


def _ladder_of(fields: Sequence[SizeTraffic]) -> str:
    """The ladder to declare; a dimension that has too many sizes for one has to be padded first."""
    ladders = {seen.field: list(seen.ladder) for seen in fields if seen.ladder}
    declare = f"declare a ladder, capture_sizes={ladders}"
    too_many = [seen for seen in fields if not seen.ladder]
    if not too_many:
        return f"{declare}, and capture it ahead of the calls (capture(), precapture())"
    sizes = listed(f"{seen.field} ({counted(len(seen.histogram), 'size')})" for seen in too_many)
    pad = f"make {sizes} padded, as the row 'not padded' says: each of these sizes is captured"
    return f"{pad}; and {declare}" if ladders else pad


def _endings(callables: Sequence[CallableRecord]) -> Iterator[Problem]:
    for record in callables:
        for kind, reason in (("graph break", record.ends), ("never captured", record.off)):
            if reason is not None and reason.remedy:
                yield Problem(kind, reason.why, (record.name,), reason.where, remedy=reason.remedy)


def _cuts(callables: Sequence[CallableRecord]) -> Iterator[Problem]:
    """Why regions are eager, without cuts that a FULL graph holds or that a callable without graphs has on purpose."""
    for record in callables:
        if record.mode is CUDAGraphMode.FULL or (record.off is not None and not record.off.remedy):
            continue
        for region in record.regions:
            for reason in region.reasons:
                if reason.remedy:
                    place = f"{record.name}.{region.name}"
                    yield Problem("cut", reason.why, (place,), reason.where, remedy=reason.remedy)


def _unpadded(callables: Sequence[CallableRecord]) -> Iterator[Problem]:
    for record in callables:
        for size in record.sizes:
            if size.remedy:
                cause = next(iter(size.causes), None)
                why = "no proof covers it" if cause is None else f"{cause.op} ({cause.why})"
                effect = "padded without a check" if size.is_padded else "not padded, each of its sizes is captured"
                where = "" if cause is None else cause.where
                what = f"{size.field} is {effect}: {why}"
                yield Problem("not padded", what, (record.name,), where, remedy=size.remedy)
