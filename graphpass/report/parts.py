"""The parts of a report, in reading order: text, tables and pictures. They are drawn as text and as a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Bar", "Bars", "Cell", "Columns", "Heading", "Part", "Strip", "Table", "Text"]


@dataclass(frozen=True, slots=True)
class Table:
    """A titled table of text cells; every row has one cell for each column."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True)
class Heading:
    """The title of the parts that follow."""

    text: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its label, its length in the unit of the chart, and the figure as text."""

    label: str
    value: float
    shown: str


@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars that start at 0."""

    title: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Columns:
    """Weights over sizes, with marks on the axis.

    Attributes:
        title: the title.
        weights: (size, weight), ascending by size.
        marks: {name of a row of marks: sizes}.
    """

    title: str
    weights: tuple[tuple[int, float], ...]
    marks: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Cell:
    """One region of a strip.

    Attributes:
        name: its name.
        kind: ``captured``, ``eager``, or ``end`` for the end of a graph before the end of the model.
        about: a description of it.
        row: the first cell of the row of the region table that describes it.
    """

    name: str
    kind: str
    about: str
    row: str


@dataclass(frozen=True, slots=True)
class Strip:
    """Regions in program order."""

    title: str
    cells: tuple[Cell, ...]


Part = Table | Text | Heading | Bars | Columns | Strip
