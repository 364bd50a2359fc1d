"""The table of stock encoders in docs/models.md: ``python -m tests.e2e.encoder_table`` writes it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.e2e.one_argument import Outcome, for_each, two_passes
from tests.e2e.stock_encoders import ENCODERS

PAGE = Path(__file__).parents[2] / "docs/models.md"
BEGIN, END = "<!-- encoders: begin -->\n", "<!-- encoders: end -->"
HEADER = (
    "| classes | input | result | replayed | graphs | batch | length | without a graph in the second pass |\n"
    "|---|---|---|---|---|---|---|---|\n"
)
LARGEST, NUM_CALLS = 17, 10
TORCH, TRANSFORMERS = "2.13.0", "5.17.0"
"""The versions of the page."""
WORDS = {"proved": "proved", "made": "made", "unproved": "exact"}


def measured(name: str) -> Outcome:
    """Two passes of one model."""
    return two_passes(ENCODERS[name], 1, LARGEST, NUM_CALLS)


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


def rows_of_page() -> dict[str, str]:
    """{class: its row} of the page."""
    found = {}
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    for line in table.removeprefix(HEADER).splitlines():
        names, _, row = line.removeprefix("| ").partition(" | ")
        found.update(dict.fromkeys(re.findall(r"`(\w+)`", names), row))
    return found


def write_page(rows: Mapping[str, str]) -> None:
    """Write the table with these rows."""
    alike: dict[str, list[str]] = {}
    for name in ENCODERS:
        if name in rows:
            alike.setdefault(rows[name], []).append(f"`{name}`")
    table = "".join(f"| {', '.join(names)} | {row}\n" for row, names in alike.items())
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{HEADER}{table}{END}{rest.partition(END)[2]}", encoding="utf-8")


def _verdicts(outcome: Outcome, of_batch: bool) -> str:
    found = {WORDS[verdict] for size, verdict in outcome.verdicts if size.endswith("[0]") == of_batch}
    return ", ".join(sorted(found)) or "-"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def main(names: Sequence[str]) -> None:
    """Measure ``names``, or all encoders, and write their rows."""

    def written(name: str) -> str:
        row = row_of(name, measured(name))
        write_page({**rows_of_page(), name: row})
        return f"{name}: {row}"

    for_each(names or ENCODERS, written)


if __name__ == "__main__":
    main(sys.argv[1:])
