"""The table of stock encoders in docs/models.md: ``python -m tests.e2e.encoder_table`` writes it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.e2e.one_argument import Outcome, for_each, two_passes
from tests.e2e.pagetable import PageTable
from tests.e2e.stock_encoders import ENCODERS

COLUMNS = ("classes", "input", "result", "replayed", "graphs", "batch", "length", "without a graph in the second pass")
TABLE = PageTable("models.md", "encoders", COLUMNS)
LARGEST, NUM_CALLS = 17, 10
WORDS = {"proved": "proved", "made": "made", "unproved": "exact"}


def measured(name: str) -> Outcome:
    """Two passes of one model."""
    return two_passes(ENCODERS[name], LARGEST, NUM_CALLS)


def row_of(name: str, outcome: Outcome) -> str:
    """The row of one class, after the class; classes with equal rows share one."""
    kind = ENCODERS[name].kind
    if outcome.problem:
        return f"{kind} | **{_cell(outcome.problem)}** | | | | | |"
    if outcome.refusal:
        return f"{kind} | refused: {_cell(outcome.refusal)} | | | | | |"
    batch, length = (_verdicts(outcome, of_batch) for of_batch in (True, False))
    reasons = "; ".join(f"{_cell(reason)} ({count})" for reason, count in sorted(outcome.reasons.items()))
    share = f"{outcome.replays} of {outcome.calls}"
    return f"{kind} | equal | {share} | {outcome.graphs} | {batch} | {length} | {reasons} |"


def _verdicts(outcome: Outcome, of_batch: bool) -> str:
    found = {WORDS[verdict] for size, verdict in outcome.verdicts if size.endswith("[0]") == of_batch}
    return ", ".join(sorted(found)) or "-"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def main(names: Sequence[str]) -> None:
    """Measure ``names``, or all encoders, and write their rows."""

    def written(name: str) -> str:
        row = row_of(name, measured(name))
        rows = {**TABLE.rows(), name: row}
        TABLE.write({known: rows[known] for known in ENCODERS if known in rows})
        return f"{name}: {row}"

    for_each(names or ENCODERS, written)


if __name__ == "__main__":
    main(sys.argv[1:])
