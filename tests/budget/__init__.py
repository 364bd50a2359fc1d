"""Budgets of lines, one for each package: ``tox run -e lint`` fails above them, and CI prints what a change adds.

A line is 6.1 words, which is what one held when the budgets began, so that the count does not depend on the layout:
lines that are joined, or moved into a data file, a string or a generated file of a package, count as before. A word has
at most 20 characters, so that a line of 120 columns without a space is one, too. All files below the source folders
count.

``python -m tests.budget --update`` writes the figures of now into ``lines.toml``. A budget that was raised is a commit
of its own, which says for what.
"""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath

ROOT = Path(__file__).parent.parent.parent
TABLE = Path(__file__).parent / "lines.toml"
SOURCES = ("graphpass", "backends")
UPDATE = "python -m tests.budget --update"
WORDS_OF_A_LINE = 6.1
SLACK = 20
"""How many lines a package may be below its budget."""


def lines_of(texts: Iterable[tuple[PurePath, bytes]]) -> dict[str, int]:
    """{package: its lines}, of the files at paths below the root."""
    words: Counter[str] = Counter()
    for path, text in texts:
        words[path.parent.as_posix()] += len(re.findall(r"\w{1,20}", text.decode("latin-1")))
    return {package: round(count / WORDS_OF_A_LINE) for package, count in sorted(words.items())}


def files_now(root: Path = ROOT) -> Iterator[tuple[PurePath, bytes]]:
    for path in (path for folder in SOURCES for path in sorted((root / folder).rglob("*"))):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(root), path.read_bytes()


def files_at(commit: str, root: Path = ROOT) -> Iterator[tuple[PurePath, bytes]]:
    """The files of a commit; ``subprocess.CalledProcessError`` if there is none of that name."""
    command = ["git", "archive", "--format=tar", commit, *SOURCES]
    archive = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            content = files.extractfile(member)
            if content is not None:
                yield PurePath(member.name), content.read()


def budgets(table: Path = TABLE) -> dict[str, int]:
    return tomllib.loads(table.read_text(encoding="utf-8"))


def write(found: Mapping[str, int], table: Path = TABLE) -> None:
    table.write_text("".join(f'"{package}" = {lines}\n' for package, lines in found.items()), encoding="utf-8")


def problems(found: Mapping[str, int], allowed: Mapping[str, int]) -> list[str]:
    """What does not fit, as expected, found and remedy."""
    said = []
    for package in sorted({*found, *allowed}):
        lines, budget = found.get(package), allowed.get(package)
        if lines is None or budget is None:
            why = "a package and no budget" if budget is None else "a budget and no package"
            said.append(f"{package}: {why}; write the table: {UPDATE}")
        elif lines > budget:
            said.append(
                f"{package}: {lines:,} lines, budget {budget:,}: retire {lines - budget:,}, or raise it: {UPDATE}"
            )
        elif lines < budget - SLACK:
            said.append(f"{package}: {lines:,} lines, budget {budget:,}: lower it: {UPDATE}")
    return said


def differences(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """A row for each package that changed, and one for the sum."""
    rows = [(package, before.get(package, 0), now.get(package, 0)) for package in sorted({*before, *now})]
    changed = [row for row in rows if row[1] != row[2]]
    total = ("all packages", sum(before.values()), sum(now.values()))
    return [f"{package:<28}{old:>8,}{new:>8,}{new - old:>+8,}" for package, old, new in (*changed, total)]
