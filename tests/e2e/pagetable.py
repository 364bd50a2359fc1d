"""Tables of pages that a program measures and writes: a row for each thing; those with equal rows share one."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

DOCS = Path(__file__).parents[2] / "docs"
TORCH, TRANSFORMERS = "2.13.0", "5.17.0"
"""The versions of docs/models.md."""


def is_version_of_page() -> bool:
    """Whether what is measured now has to be what docs/models.md says."""
    return torch.__version__.startswith(TORCH) and importlib.metadata.version("transformers") == TRANSFORMERS


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table between two marks of a page."""

    page: str  #: below docs
    name: str  #: of the marks
    columns: tuple[str, ...]

    def text(self) -> str:
        """The page."""
        return (DOCS / self.page).read_text(encoding="utf-8")

    def rows(self) -> dict[str, str]:
        """{name: its row, after the names}."""
        lines = self._parts()[1].splitlines()[2:]
        parts = [line.removeprefix("| ").partition(" | ") for line in lines]
        return {name.strip("`"): row for names, _, row in parts for name in names.split(", ")}

    def write(self, rows: Mapping[str, str]) -> None:
        """Write the table with these rows, in their order."""
        alike: dict[str, list[str]] = {}
        for name, row in rows.items():
            alike.setdefault(row, []).append(f"`{name}`")
        head = f"| {' | '.join(self.columns)} |\n|{'---|' * len(self.columns)}\n"
        table = "".join(f"| {', '.join(names)} | {row}\n" for row, names in alike.items())
        before, _, after = self._parts()
        (DOCS / self.page).write_text(f"{before}{head}{table}{after}", encoding="utf-8")

    def _parts(self) -> tuple[str, str, str]:
        before, begin, rest = self.text().partition(f"<!-- {self.name}: begin -->\n")
        table, end, after = rest.partition(f"<!-- {self.name}: end -->")
        return before + begin, table, end + after
