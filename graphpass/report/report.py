"""A report answers four questions: what is slow or missing, what replays, where padding goes, and what it cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from graphpass.ledger import CountedReason
from graphpass.report.drawing import cost_parts, padding_parts, problem_parts, replay_parts
from graphpass.report.figures import Problem, ReportFigures, SizeTraffic, counted, graph_figures
from graphpass.report.parts import Part, Table
from graphpass.report.problems import problems_of
from graphpass.report.records import CapturedGroup

__all__ = ["Report"]

_MOST_ROWS = 24


class Report:
    """What is slow or missing, what replays, where padding goes, and what it cost, in this order.

    ``print(report)`` shows text, at most 24 rows of a table; :meth:`to_dict` has everything as numbers, and
    :meth:`to_html` is a page.

    Args:
        figures: what it shows.
    """

    __slots__ = ("figures",)

    def __init__(self, figures: ReportFigures) -> None:
        self.figures = figures

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is slow or missing, the gravest first."""
        return problems_of(self.figures)

    def _parts(self, *, with_pictures: bool = True) -> Iterator[Part]:
        """Texts, tables and, if asked for, pictures in reading order."""
        yield from problem_parts(self.problems)
        yield from replay_parts(self.figures, with_pictures=with_pictures)
        yield from padding_parts(self.figures, with_pictures=with_pictures)
        yield from cost_parts(self.figures.costs, with_pictures=with_pictures)

    def suggested_sizes(self, limit: int = 16) -> dict[str, list[int]]:
        """The sizes with the least padding for the calls so far: ``capture_sizes``, or an encoder's ``token_budgets``.

        Args:
            limit: the most sizes of a key field.

        Returns:
            {key field: sizes}; without fields that are not padded, or that no call had.
        """
        planned = {seen.field: list(replace(seen, limit=limit).suggested) for seen in self.figures.traffic}
        return {field: sizes for field, sizes in planned.items() if sizes}

    def __str__(self) -> str:
        from graphpass.report.console import text_of

        return text_of(self._parts(with_pictures=False), most_rows=_MOST_ROWS)

    def __repr__(self) -> str:
        problems, keys = counted(len(self.problems), "problem"), counted(len(self.figures.keys), "key")
        return f"<report on {self.figures.subject}: {problems}, {keys}>"

    def __getitem__(self, title: str) -> Table:
        """The table of this title, as it is printed."""
        for part in self._parts(with_pictures=False):
            if isinstance(part, Table) and part.title == title:
                return part
        raise KeyError(title)

    def to_html(self) -> str:
        """One page that needs nothing else: no script and no network; light and dark, usable by keyboard."""
        from graphpass.report.page import html_page

        return html_page(f"graphpass: {self.figures.subject}", self._parts())

    def to_dict(self) -> dict[str, Any]:
        """The figures as dicts, lists, strings, numbers, booleans and None: ready for ``json.dumps``.

        The keys ``problems``, ``replays``, ``padding`` and ``cost`` are in the order of the questions. Seconds are
        floats, bytes and counts ints, shares 0 to 1; what was not measured is None.
        """
        figures, costs = self.figures, asdict(self.figures.costs)
        return {
            "subject": figures.subject,
            "problems": [{**asdict(problem), "places": list(problem.places)} for problem in self.problems],
            "replays": {
                "keys": [{**asdict(key), "sizes": dict(key.sizes), "padding": key.padding} for key in figures.keys],
                "without_graph": list(map(_uncaptured, figures.uncaptured)),
                "graphs": list(map(graph_figures, figures.callables)),
                "attention": [asdict(use) for use in figures.kernels],
            },
            "padding": [_traffic(seen) for seen in figures.traffic],
            "cost": {**costs, "groups": list(map(_group, figures.costs.groups))},
        }


def _uncaptured(calls: CountedReason) -> dict[str, Any]:
    return {
        "graph": calls.subject,
        "reason": calls.reason.why,
        "calls": calls.n,
        "is_expected": calls.reason.is_expected,
        "remedy": calls.reason.remedy,
        "sizes": list(calls.sizes()),
    }


def _group(group: CapturedGroup) -> dict[str, Any]:
    return {"name": group.name, "keys": group.num_keys, "seconds": group.seconds, **asdict(group.memory)}


def _traffic(seen: SizeTraffic) -> dict[str, Any]:
    return {
        "field": seen.field,
        "option": seen.option,
        "histogram": [list(pair) for pair in sorted(seen.histogram.items())],
        "captured": list(seen.captured),
        "waste": seen.waste(seen.captured),
        "suggested": list(seen.suggested),
        "suggested_waste": seen.waste(seen.suggested),
    }
