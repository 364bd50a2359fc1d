"""Draws a result as text, with rich."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text as RichText

from graphpass.cli.result import Bars, Columns, Heading, Part, Result, Strip, Text
from graphpass.report import Table

__all__ = ["print_result"]

_BAR_COLUMNS, _HISTOGRAM_COLUMNS = 40, 64
_LEVELS = " ▁▂▃▄▅▆▇█"
_MOST_CELLS = 48
_STYLES = {"captured": "green", "eager": "yellow", "end": "red"}


def print_result(result: Result, console: Console) -> None:
    """Print all parts of ``result``; names in them are never read as markup."""
    for part in result.parts:
        _print_part(part, console)
    if result.failure is not None:
        console.print(RichText(result.failure, style="bold red"))


def _print_part(part: Part, console: Console) -> None:
    match part:
        case Table():
            if part.rows:
                console.print(part.draw())
                console.print()
        case Text():
            console.print(RichText(part.text), soft_wrap=False)
            console.print()
        case Heading():
            console.print(RichText(part.text, style="bold"))
            console.print()
        case Bars():
            _print_bars(part, console)
        case Columns():
            _print_columns(part, console)
        case Strip():
            _print_strip(part, console)


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
