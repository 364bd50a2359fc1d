"""Draws parts as text, with rich."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text as RichText

from graphpass.report.parts import Bars, Columns, Heading, Part, Strip, Table, Text

__all__ = ["print_parts", "text_of"]

_WIDTH_COLUMNS = 140
_BAR_COLUMNS, _HISTOGRAM_COLUMNS = 40, 64
_LEVELS = " ▁▂▃▄▅▆▇█"
_MOST_CELLS = 48
_STYLES = {"captured": "green", "eager": "yellow", "end": "red"}


def print_parts(
    parts: Iterable[Part], console: Console, *, failure: str | None = None, most_rows: int | None = None
) -> None:
    """Print parts; names in them are never read as markup.

    Args:
        parts: in reading order; empty tables are not drawn.
        console: where to.
        failure: a failed check, printed at the end; None: there is none.
        most_rows: the most rows of a table to print; None: all.
    """
    for part in parts:
        _print_part(part, console, most_rows)
    if failure is not None:
        console.print(RichText(failure, style="bold red"))


def _print_part(part: Part, console: Console, most_rows: int | None) -> None:
    match part:
        case Table():
            _print_table(part, console, most_rows)
        case Text():
            console.print(RichText(part.text), soft_wrap=False)
            console.print()
        case Heading():
            console.print(RichText(part.text, style="bold"))
        case Bars():
            _print_bars(part, console)
        case Columns():
            _print_columns(part, console)
        case Strip():
            _print_strip(part, console)


def _print_table(table: Table, console: Console, most_rows: int | None) -> None:
    if not table.rows:
        return
    drawn = RichTable(title=RichText(table.title), title_justify="left", show_edge=False, pad_edge=False)
    for column in table.columns:
        drawn.add_column(RichText(column), overflow="fold")
    for row in table.rows[:most_rows]:
        drawn.add_row(*map(RichText, row))
    console.print(drawn)
    if most_rows is not None and len(table.rows) > most_rows:
        console.print(RichText(f"and {len(table.rows) - most_rows} more rows"))
    console.print()


def _print_bars(bars: Bars, console: Console) -> None:
    if not bars.bars:
        return
    longest = max(bar.value for bar in bars.bars) or 1.0
    width = max(len(bar.label) for bar in bars.bars)
    console.print(RichText(bars.title, style="italic"))
    for bar in bars.bars:
        drawn = "█" * max(round(_BAR_COLUMNS * bar.value / longest), bar.value > 0)
        console.print(RichText(f"{bar.label:<{width}}  {drawn} {bar.shown}"), no_wrap=True)
    console.print()


def _print_columns(columns: Columns, console: Console) -> None:
    largest = columns.weights[-1][0]
    num_bins = min(_HISTOGRAM_COLUMNS, largest)
    weights = [0.0] * num_bins
    for size, weight in columns.weights:
        weights[(size - 1) * num_bins // largest] += weight
    top = max(weights) or 1.0
    console.print(RichText(columns.title, style="italic"))
    levels = (_LEVELS[max(round(8 * weight / top), weight > 0)] for weight in weights)
    width = max((len(name) for name in columns.marks), default=0)
    console.print(RichText(f"{'traffic':<{max(width, 7)}}  {''.join(levels)}"), no_wrap=True)
    for name, sizes in columns.marks.items():
        marked = {(size - 1) * num_bins // largest for size in sizes if size <= largest}
        row = "".join("|" if column in marked else "·" for column in range(num_bins))
        console.print(RichText(f"{name:<{max(width, 7)}}  {row}"), no_wrap=True)
    console.print()


def _print_strip(strip: Strip, console: Console) -> None:
    line = RichText(f"{strip.title}: ")
    for number, cell in enumerate(strip.cells[:_MOST_CELLS]):
        line.append(" │ " if number else "")
        line.append(cell.name if cell.kind != "eager" else f"{cell.name} eager", style=_STYLES.get(cell.kind, ""))
    if len(strip.cells) > _MOST_CELLS:
        line.append(f" │ and {len(strip.cells) - _MOST_CELLS} more")
    console.print(line)
    console.print()


def text_of(parts: Iterable[Part], *, most_rows: int | None = None) -> str:
    """The text that :func:`print_parts` prints, 140 columns wide."""
    console = Console(file=io.StringIO(), width=_WIDTH_COLUMNS, highlight=False)
    print_parts(parts, console, most_rows=most_rows)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text
