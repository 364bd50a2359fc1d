"""The parts of a report, text, tables and pictures, drawn by rich in the terminal and on an HTML page."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Table:
    """A titled table of text cells; every row has one cell for each column. Empty tables are not drawn."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Heading:
    """The title of the parts that follow."""

    text: str


@dataclass(frozen=True, slots=True)
class Picture:
    """Lines below a title. Empty pictures are not drawn."""

    title: str
    lines: tuple[str, ...]


Part = Table | str | Heading | Picture
"""A part of a report; a string is a paragraph."""


def bar_chart(title: str, values: Sequence[tuple[str, float, str]]) -> Picture:
    """Horizontal bars that start at 0: (label, length in the unit of the chart, the figure as text)."""
    longest = max((value for _, value, _ in values), default=0) or 1.0
    width = max((len(label) for label, _, _ in values), default=0)
    lines = (
        f"{label:<{width}}  {'█' * max(round(_BAR_COLUMNS * value / longest), value > 0)} {shown}"
        for label, value, shown in values
    )
    return Picture(title, tuple(lines))


def size_chart(title: str, weights: Sequence[tuple[int, float]], marks: Mapping[str, Sequence[int]]) -> Picture:
    """Weights over sizes, (size, weight) ascending by size, in bins of equal width, and rows of marks by name."""
    largest = weights[-1][0]
    bins = [0.0] * min(_HISTOGRAM_COLUMNS, largest)
    for size, weight in weights:
        bins[(size - 1) * len(bins) // largest] += weight
    top, width = max(bins) or 1.0, max(map(len, ("traffic", *marks)))
    lines = [f"{'traffic':<{width}}  {''.join(_LEVELS[max(round(8 * n / top), n > 0)] for n in bins)}"]
    for name, sizes in marks.items():
        marked = {(size - 1) * len(bins) // largest for size in sizes if size <= largest}
        lines.append(f"{name:<{width}}  {''.join('|' if column in marked else '·' for column in range(len(bins)))}")
    return Picture(title, tuple(lines))


def counted(number: int, noun: str) -> str:
    """``1 call``, ``2 calls``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(names: Iterable[str], most: int = 4) -> str:
    """The first names, and how many more there are."""
    known = list(names)
    shown = ", ".join(known[:most])
    return f"{shown} and {len(known) - most} more" if len(known) > most else shown


_WIDTH_COLUMNS, _PAGE_COLUMNS = 140, 200
_BAR_COLUMNS, _HISTOGRAM_COLUMNS = 40, 64
_LEVELS = " ▁▂▃▄▅▆▇█"


def text_of(parts: Iterable[Part], *, most_rows: int | None = None) -> str:
    """The text that :func:`print_parts` prints, 140 columns wide."""
    from rich.console import Console

    file = io.StringIO()
    print_parts(parts, Console(file=file, width=_WIDTH_COLUMNS, highlight=False), most_rows=most_rows)
    return file.getvalue()


def html_page(title: str, parts: Iterable[Part], *, failure: str | None = None) -> str:
    """What :func:`print_parts` prints below a title, 200 columns wide, as a page without scripts or references."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=_PAGE_COLUMNS, highlight=False, record=True)
    print_parts([Heading(title), *parts], console, failure=failure)
    return console.export_html()


def print_parts(
    parts: Iterable[Part], console: Console, *, failure: str | None = None, most_rows: int | None = None
) -> None:
    """Print parts in reading order; names in them are never read as markup."""
    for part in parts:
        if isinstance(part, Table):
            _print_table(part, console, most_rows)
        elif isinstance(part, Heading):
            _print(console, part.text, "bold")
        elif isinstance(part, str):
            _print(console, part, after="\n")
        else:
            _print_picture(part, console)
    if failure is not None:
        _print(console, failure, "bold red")


def _print(console: Console, text: str, style: str = "", *, after: str = "", no_wrap: bool = False) -> None:
    end = f"{after}\n"
    console.print(text, style=style, end=end, markup=False, emoji=False, highlight=False, no_wrap=no_wrap)


def _print_picture(picture: Picture, console: Console) -> None:
    if picture.lines:
        _print(console, picture.title, "italic")
        for line in picture.lines:
            _print(console, line, no_wrap=True)
        console.print()


def _print_table(table: Table, console: Console, most_rows: int | None) -> None:
    from rich.table import Table as RichTable
    from rich.text import Text as RichText

    if not table.rows:
        return
    drawn = RichTable(title=RichText(table.title), title_justify="left", show_edge=False, pad_edge=False)
    for column in table.columns:
        drawn.add_column(RichText(column), overflow="fold")
    for row in table.rows[:most_rows]:
        drawn.add_row(*map(RichText, row))
    console.print(drawn)
    if most_rows is not None and len(table.rows) > most_rows:
        _print(console, f"and {len(table.rows) - most_rows} more rows")
    console.print()
