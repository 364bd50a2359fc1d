"""Draws parts as one HTML page that needs nothing else: no script, no network, light and dark."""

from __future__ import annotations

from collections.abc import Iterable

from graphpass.report.figures import counted
from graphpass.report.markup import Markup, element
from graphpass.report.parts import Bars, Columns, Heading, Part, Strip, Table, Text

__all__ = ["html_page"]

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
    """A page of parts; every name and value in it is escaped.

    Args:
        title: the title.
        parts: in reading order; empty tables are not drawn.
        failure: a failed check, shown below the title; None: there is none.
    """
    alert = (element("p", failure, class_="failure", role="alert"),) if failure is not None else ()
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("link", rel="icon", href="data:,"),
        element("title", title),
        element("style", Markup(_STYLE)),
    )
    main = element("main", element("h1", title), *alert, *map(_part, parts))
    return "<!doctype html>\n" + element("html", head, element("body", main), lang="en") + "\n"


def _part(part: Part) -> Markup:
    match part:
        case Table():
            return _table(part)
        case Text():
            return element("p", part.text)
        case Heading():
            return element("h2", part.text)
        case Bars():
            return _bars(part)
        case Columns():
            return _columns(part)
        case Strip():
            return _strip(part)


def _table(table: Table) -> Markup:
    if not table.rows:
        return Markup("")
    head = element("tr", *(element("th", column, scope="col") for column in table.columns))
    rows = (element("tr", *(element("td", cell) for cell in row), **_row_id(table, row)) for row in table.rows)
    drawn = element("table", element("caption", table.title), element("thead", head), element("tbody", *rows))
    # A box that scrolls takes the focus, so that the keyboard can scroll it.
    return element("div", drawn, class_="scroll", tabindex="0", role="region", aria_label=table.title)


def _row_id(table: Table, row: tuple[str, ...]) -> dict[str, str]:
    return {"id": _anchor(row[0])} if table.columns[0] == "region" else {}


def _anchor(name: str) -> str:
    return f"region-{name}"


def _strip(strip: Strip) -> Markup:
    cells = (
        element("li", element("a", cell.name, href=f"#{_anchor(cell.row)}", title=cell.about), class_=cell.kind)
        for cell in strip.cells
    )
    return element("figure", element("figcaption", strip.title), element("ol", *cells, class_="strip"))


def _picture(title: str, height: float, shapes: Iterable[Markup]) -> Markup:
    drawn = element(
        "svg", element("title", title), *shapes, viewBox=f"0 0 {_WIDTH} {height:g}", width=_WIDTH, role="img"
    )
    return element("figure", element("figcaption", title), drawn)


def _bars(bars: Bars) -> Markup:
    if not bars.bars:
        return Markup("")
    longest = max(bar.value for bar in bars.bars) or 1.0
    shapes = []
    for number, bar in enumerate(bars.bars):
        top = number * _BAR_HEIGHT
        length = 400 * bar.value / longest
        shapes += [
            element("text", bar.label, x=0, y=top + 15),
            element("rect", x=200, y=top + 3, width=f"{length:.1f}", height=_BAR_HEIGHT - 6, class_="bar"),
            element("text", bar.shown, x=f"{208 + length:.1f}", y=top + 15),
        ]
    return _picture(bars.title, len(bars.bars) * _BAR_HEIGHT, shapes)


def _columns(columns: Columns) -> Markup:
    largest = columns.weights[-1][0]
    num_bins = min(_WIDTH // 4, largest)
    weights = [0.0] * num_bins
    for size, weight in columns.weights:
        weights[(size - 1) * num_bins // largest] += weight
    top, width = max(weights) or 1.0, _WIDTH / num_bins
    shapes = [
        element(
            "rect",
            x=f"{number * width:.1f}",
            y=f"{_PLOT_HEIGHT * (1 - weight / top):.1f}",
            width=f"{max(width - 1, 0.5):.1f}",
            height=f"{_PLOT_HEIGHT * weight / top:.1f}",
            class_="bar",
        )
        for number, weight in enumerate(weights)
        if weight
    ]
    bottom = _PLOT_HEIGHT + 16
    shapes.append(element("line", x1=0, x2=_WIDTH, y1=_PLOT_HEIGHT, y2=_PLOT_HEIGHT, class_="axis"))
    shapes.append(element("text", "1", x=0, y=bottom))
    shapes.append(element("text", str(largest), x=_WIDTH, y=bottom, text_anchor="end"))
    for number, (name, sizes) in enumerate(columns.marks.items()):
        y = bottom + 10 + number * 2 * _MARKS_HEIGHT
        shapes.append(element("text", f"{name}: {counted(len(sizes), 'graph')}", x=0, y=y + 10))
        marked = sorted({round((size / largest) * _WIDTH, 1) for size in sizes if size <= largest})
        shapes += [
            element("line", x1=x, x2=x, y1=y + 14, y2=y + 14 + _MARKS_HEIGHT / 1.6, class_="mark") for x in marked
        ]
    return _picture(columns.title, bottom + 10 + len(columns.marks) * 2 * _MARKS_HEIGHT, shapes)
