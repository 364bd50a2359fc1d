"""Every small program of the tables, with its verdict by hand."""

from __future__ import annotations

from tests.unit.padding.programs_causal import ATTENTION, CAUSAL
from tests.unit.padding.programs_masks import MASKED
from tests.unit.padding.programs_rows import MIXING, ROWS, SIZE
from tests.unit.padding.programs_state import INDEX, STATE, VIEWS
from tests.unit.padding.table import Program

TABLES: dict[str, list[Program]] = {
    "row-wise": ROWS,
    "mixing": MIXING,
    "size as a number": SIZE,
    "masked": MASKED,
    "causal": CAUSAL,
    "attention": ATTENTION,
    "stateful": STATE,
    "indexing": INDEX,
    "views": VIEWS,
}
PROGRAMS = [program for table in TABLES.values() for program in table]
