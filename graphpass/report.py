"""Plain tables for reports: frozen rows of text, drawn by rich when printed."""

from __future__ import annotations

import io
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

__all__ = ["Report", "Table"]

_WIDTH_COLUMNS = 140


@dataclass(frozen=True, slots=True)
class Table:
    """A titled table of text cells; every row has one cell for each column."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def draw(self) -> RichTable:
        """The table as an object that rich can print; brackets in cells are text, no markup."""
        drawn = RichTable(title=Text(self.title), title_justify="left", show_edge=False, pad_edge=False)
        for column in self.columns:
            drawn.add_column(Text(column), overflow="fold")
        for row in self.rows:
            drawn.add_row(*map(Text, row))
        return drawn


@dataclass(frozen=True, slots=True)
class Report:
    """Tables in reading order; ``str(report)`` is the text that ``print`` shows."""

    tables: tuple[Table, ...]

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=_WIDTH_COLUMNS)
        for table in self.tables:
            if table.rows:
                console.print(table.draw(), markup=False)
                console.print()
        text = console.file.getvalue()  # type: ignore[attr-defined]
        return str(text)

    def __getitem__(self, title: str) -> Table:
        for table in self.tables:
            if table.title == title:
                return table
        raise KeyError(title)
