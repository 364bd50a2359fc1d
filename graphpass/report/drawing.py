"""The parts of a report, text, tables and pictures, drawn in the terminal by rich, and as one HTML page.

The page needs nothing else: no script, no network. Its tables are tables, so that a screen reader reads them, a browser
folds them, and a picture can refer to their rows.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element, tostring

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Table:
    """A titled table of text cells; every row has one cell for each column. Empty tables are not drawn."""

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
    """One bar."""

    label: str
    value: float  #: its length in the unit of the chart
    shown: str  #: the figure as text


@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars that start at 0."""

    title: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Columns:
    """Weights over sizes, with marks on the axis."""

    title: str
    weights: tuple[tuple[int, float], ...]  #: (size, weight), ascending by size
    marks: Mapping[str, tuple[int, ...]]  #: {name of a row of marks: sizes}

    def bins(self, most: int) -> list[float]:
        """The weights in at most ``most`` bins of equal width, from size 1 to the largest."""
        largest = self.weights[-1][0]
        bins = [0.0] * min(most, largest)
        for size, weight in self.weights:
            bins[(size - 1) * len(bins) // largest] += weight
        return bins


@dataclass(frozen=True, slots=True)
class Cell:
    """One region of a strip."""

    name: str
    kind: str  #: ``captured``, ``eager``, or ``end`` for the end of a graph before the end of the model
    about: str  #: a description of it
    row: str  #: the first cell of the row of the region table that describes it


@dataclass(frozen=True, slots=True)
class Strip:
    """Regions in program order."""

    title: str
    cells: tuple[Cell, ...]


Part = Table | Text | Heading | Bars | Columns | Strip


def counted(number: int, noun: str) -> str:
    """``1 call``, ``2 calls``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(names: Iterable[str], most: int = 4) -> str:
    """The first names, and how many more there are."""
    known = list(names)
    shown = ", ".join(known[:most])
    return f"{shown} and {len(known) - most} more" if len(known) > most else shown


# -- in the terminal --------------------------------------------------------------------------------------------------

_WIDTH_COLUMNS = 140
_BAR_COLUMNS, _HISTOGRAM_COLUMNS = 40, 64
_LEVELS = " ▁▂▃▄▅▆▇█"
_MOST_CELLS = 48
_STYLES = {"captured": "green", "eager": "yellow", "end": "red"}


def text_of(parts: Iterable[Part], *, most_rows: int | None = None) -> str:
    """The text that :func:`print_parts` prints, 140 columns wide."""
    from rich.console import Console

    file = io.StringIO()
    print_parts(parts, Console(file=file, width=_WIDTH_COLUMNS, highlight=False), most_rows=most_rows)
    return file.getvalue()


def print_parts(
    parts: Iterable[Part], console: Console, *, failure: str | None = None, most_rows: int | None = None
) -> None:
    """Print parts in reading order; names in them are never read as markup."""
    for part in parts:
        if isinstance(part, Table):
            _print_table(part, console, most_rows)
        elif isinstance(part, Heading):
            _print(console, part.text, "bold")
        elif isinstance(part, Text):
            _print(console, part.text, after="\n")
        elif isinstance(part, Bars):
            _print_lines(console, part.title, _bar_lines(part))
        elif isinstance(part, Columns):
            _print_lines(console, part.title, _column_lines(part))
        else:
            _print_strip(part, console)
    if failure is not None:
        _print(console, failure, "bold red")


def _print(console: Console, text: str, style: str = "", *, after: str = "", no_wrap: bool = False) -> None:
    end = f"{after}\n"
    console.print(text, style=style, end=end, markup=False, emoji=False, highlight=False, no_wrap=no_wrap)


def _print_lines(console: Console, title: str, lines: list[str]) -> None:
    if lines:
        _print(console, title, "italic")
        for line in lines:
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


def _bar_lines(bars: Bars) -> list[str]:
    longest = max((bar.value for bar in bars.bars), default=0) or 1.0
    width = max((len(bar.label) for bar in bars.bars), default=0)
    lengths = [max(round(_BAR_COLUMNS * bar.value / longest), bar.value > 0) for bar in bars.bars]
    return [f"{bar.label:<{width}}  {'█' * n} {bar.shown}" for bar, n in zip(bars.bars, lengths, strict=True)]


def _column_lines(columns: Columns) -> list[str]:
    bins, largest = columns.bins(_HISTOGRAM_COLUMNS), columns.weights[-1][0]
    top, width = max(bins) or 1.0, max(map(len, ("traffic", *columns.marks)))
    lines = [f"{'traffic':<{width}}  {''.join(_LEVELS[max(round(8 * n / top), n > 0)] for n in bins)}"]
    for name, sizes in columns.marks.items():
        marked = {(size - 1) * len(bins) // largest for size in sizes if size <= largest}
        lines.append(f"{name:<{width}}  {''.join('|' if column in marked else '·' for column in range(len(bins)))}")
    return lines


def _print_strip(strip: Strip, console: Console) -> None:
    from rich.text import Text as RichText

    line = RichText(f"{strip.title}: ")
    for number, cell in enumerate(strip.cells[:_MOST_CELLS]):
        line.append(" │ " if number else "")
        line.append(cell.name if cell.kind != "eager" else f"{cell.name} eager", style=_STYLES.get(cell.kind, ""))
    if len(strip.cells) > _MOST_CELLS:
        line.append(f" │ and {len(strip.cells) - _MOST_CELLS} more")
    console.print(line)
    console.print()


# -- as a page --------------------------------------------------------------------------------------------------------

# The policy forbids every request; styles stand in the page.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --dim: #5a6675; --paper: #ffffff; --line: #d5dbe3; --band: #f3f5f8;
  --captured: #1f7a4d; --eager: #a35a00; --end: #b3261e; --bar: #2f6fb5; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9f0; --dim: #9aa7b7; --paper: #14181e; --line: #343d49;
  --band: #1d232b; --captured: #56c98d; --eager: #f0a64a; --end: #ff8a80; --bar: #74aef0; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  padding: 1.5rem; max-width: 76rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 1.8rem 0 .4rem; }
code, td, .figure { font-family: ui-monospace, monospace; font-size: .87rem; }
.scroll { overflow-x: auto; }
.scroll:focus-visible, a:focus-visible { outline: 3px solid var(--bar); outline-offset: 2px; }
table { border-collapse: collapse; min-width: 40%; } caption { text-align: left; color: var(--dim); padding: .3rem 0; }
th, td { text-align: left; vertical-align: top; padding: .25rem .7rem; border-bottom: 1px solid var(--line); }
th { white-space: nowrap; } td { overflow-wrap: break-word; min-width: 4rem; max-width: 34rem; }
thead th { background: var(--band); } tbody tr:target td { background: var(--band); }
.failure { color: var(--end); font-weight: bold; }
.strip { display: flex; flex-wrap: wrap; gap: 3px; padding: 0; list-style: none; }
.strip a { display: block; padding: .15rem .5rem; border: 2px solid; border-radius: .3rem; text-decoration: none; }
.strip .captured a { color: var(--captured); } .strip .eager a { color: var(--eager); border-style: dashed; }
.strip .end a { color: var(--end); border-style: dotted; }
svg { max-width: 100%; height: auto; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
.bar { fill: var(--bar); } .mark { stroke: var(--eager); stroke-width: 1.5; } .axis { stroke: var(--line); }
"""
_WIDTH, _BAR_HEIGHT, _PLOT_HEIGHT, _MARKS_HEIGHT = 760, 22, 120, 20


def html_page(title: str, parts: Iterable[Part], *, failure: str | None = None) -> str:
    """A page of parts in reading order; every name and value in it is escaped."""
    head = _element(
        "head",
        _element("meta", charset="utf-8"),
        _element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        _element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        _element("link", rel="icon", href="data:,"),
        _element("title", title),
        _element("style", _STYLE),
    )
    alert = () if failure is None else (_element("p", failure, class_="failure", role="alert"),)
    main = _element("main", _element("h1", title), *alert, *(made for part in parts for made in _elements(part)))
    page = tostring(_element("html", head, _element("body", main), lang="en"), encoding="unicode", method="html")
    return f"<!doctype html>\n{page}\n"


def _element(tag: str, *children: str | Element, **attributes: str | float) -> Element:
    """An element. A trailing underscore of an attribute's name is dropped, others become hyphens: ``class_``."""
    named = {name.removesuffix("_").replace("_", "-"): str(value) for name, value in attributes.items()}
    made = Element(tag, named)
    for child in children:
        if isinstance(child, str):
            made.text = child
        else:
            made.append(child)
    return made


def _elements(part: Part) -> Iterator[Element]:
    if isinstance(part, Table):
        if part.rows:
            yield _html_table(part)
    elif isinstance(part, Heading | Text):
        yield _element("h2" if isinstance(part, Heading) else "p", part.text)
    elif isinstance(part, Strip):
        cells = (
            _element("li", _element("a", cell.name, href=f"#{_anchor(cell.row)}", title=cell.about), class_=cell.kind)
            for cell in part.cells
        )
        yield _element("figure", _element("figcaption", part.title), _element("ol", *cells, class_="strip"))
    elif isinstance(part, Columns) or part.bars:
        shapes, height = _column_shapes(part) if isinstance(part, Columns) else _bar_shapes(part)
        view = f"0 0 {_WIDTH} {height:g}"
        svg = _element("svg", _element("title", part.title), *shapes, viewBox=view, width=_WIDTH, role="img")
        yield _element("figure", _element("figcaption", part.title), svg)


def _html_table(table: Table) -> Element:
    head = _element("tr", *(_element("th", column, scope="col") for column in table.columns))
    has_anchors = table.columns[0] == "region"
    rows = (
        _element("tr", *(_element("td", cell) for cell in row), **({"id": _anchor(row[0])} if has_anchors else {}))
        for row in table.rows
    )
    drawn = _element("table", _element("caption", table.title), _element("thead", head), _element("tbody", *rows))
    # A box that scrolls takes the focus, so that the keyboard can scroll it.
    return _element("div", drawn, class_="scroll", tabindex="0", role="region", aria_label=table.title)


def _anchor(name: str) -> str:
    return f"region-{name}"


def _bar_shapes(bars: Bars) -> tuple[list[Element], float]:
    longest = max(bar.value for bar in bars.bars) or 1.0
    shapes = []
    for number, bar in enumerate(bars.bars):
        top, length = number * _BAR_HEIGHT, 400 * bar.value / longest
        shapes += [
            _element("text", bar.label, x=0, y=top + 15),
            _element("rect", x=200, y=top + 3, width=f"{length:.1f}", height=_BAR_HEIGHT - 6, class_="bar"),
            _element("text", bar.shown, x=f"{208 + length:.1f}", y=top + 15),
        ]
    return shapes, len(bars.bars) * _BAR_HEIGHT


def _column_shapes(columns: Columns) -> tuple[list[Element], float]:
    bins, largest = columns.bins(_WIDTH // 4), columns.weights[-1][0]
    top, width, bottom = max(bins) or 1.0, _WIDTH / len(bins), _PLOT_HEIGHT + 16
    shapes = [
        _element(
            "rect",
            x=f"{number * width:.1f}",
            y=f"{_PLOT_HEIGHT * (1 - weight / top):.1f}",
            width=f"{max(width - 1, 0.5):.1f}",
            height=f"{_PLOT_HEIGHT * weight / top:.1f}",
            class_="bar",
        )
        for number, weight in enumerate(bins)
        if weight
    ]
    shapes.append(_element("line", x1=0, x2=_WIDTH, y1=_PLOT_HEIGHT, y2=_PLOT_HEIGHT, class_="axis"))
    shapes.append(_element("text", "1", x=0, y=bottom))
    shapes.append(_element("text", str(largest), x=_WIDTH, y=bottom, text_anchor="end"))
    for number, (name, sizes) in enumerate(columns.marks.items()):
        y = bottom + 10 + number * 2 * _MARKS_HEIGHT
        shapes.append(_element("text", f"{name}: {counted(len(sizes), 'graph')}", x=0, y=y + 10))
        for x in sorted({round((size / largest) * _WIDTH, 1) for size in sizes if size <= largest}):
            shapes.append(_element("line", x1=x, x2=x, y1=y + 14, y2=y + 14 + _MARKS_HEIGHT / 1.6, class_="mark"))
    return shapes, bottom + 10 + len(columns.marks) * 2 * _MARKS_HEIGHT
