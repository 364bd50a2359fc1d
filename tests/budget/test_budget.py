"""The count of lines is that of the text and not of its layout, and a package that does not fit its budget is named."""

from __future__ import annotations

import subprocess
from pathlib import Path, PurePath

import pytest

from tests.budget import SLACK, UPDATE, budgets, differences, files_at, files_now, lines_of, problems, write

SPREAD = """
def served(
    sizes: list[int],
) -> dict[str, int]:
    # A size that is larger
    # runs eagerly.
    return {
        "one": 1,
    }
"""
JOINED = """
def served(sizes: list[int]) -> dict[str, int]:
    # A size that is larger runs eagerly.
    return {"one": 1}
"""
ROWS = [str(number) for number in range(100, 130)]


def counted(**files: str) -> dict[str, int]:
    return lines_of((PurePath(name.replace("_in_", "/")), f"{text}\n".encode() * 50) for name, text in files.items())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"p_in_a.py": SPREAD}, {"p_in_a.py": JOINED}),
        ({"p_in_a.py": str(ROWS)}, {"p_in_a.toml": "\n".join(ROWS)}),
        ({"p_in_a.py": str(ROWS)}, {"p_in_generated.json": ",".join(ROWS)}),
        ({"p_in_a.py": str(ROWS)}, {"p_in_a.py": f'ROWS = """{" ".join(ROWS)}"""'.removeprefix("ROWS")}),
        ({"p_in_a.py": SPREAD + str(ROWS)}, {"p_in_a.py": SPREAD, "p_in_b.dat": str(ROWS)}),
    ],
    ids=["joined", "in a data file", "in a generated file", "in a string", "half of it elsewhere"],
)
def test_what_is_laid_out_otherwise_counts_as_before(one: dict[str, str], other: dict[str, str]) -> None:
    assert counted(**one) == counted(**other) != {"p": 0}


def test_a_solid_block_counts_its_lines_of_120_columns() -> None:
    assert counted(p_in_a="x" * 120) == counted(p_in_a="\n".join(["word"] * 6))


def test_a_line_of_the_product_counts_as_about_one() -> None:
    files = list(files_now())
    assert sum(lines_of(files).values()) == pytest.approx(sum(text.count(b"\n") for _, text in files), rel=0.05)
    assert {"graphpass", "graphpass/padding", "backends/cgpass"} <= lines_of(files).keys() == budgets().keys()


@pytest.mark.parametrize(
    ("found", "allowed", "expected"),
    [
        ({"p": 100}, {"p": 100}, []),
        ({"p": 100 - SLACK}, {"p": 100}, []),
        ({"p": 101}, {"p": 100}, [f"p: 101 lines, budget 100: retire 1, or raise it: {UPDATE}"]),
        ({"p": 99 - SLACK}, {"p": 100}, [f"p: {99 - SLACK} lines, budget 100: lower it: {UPDATE}"]),
        ({"p": 100, "p/data": 1}, {"p": 100}, [f"p/data: a package and no budget; write the table: {UPDATE}"]),
        ({}, {"p": 100}, [f"p: a budget and no package; write the table: {UPDATE}"]),
    ],
)
def test_what_does_not_fit_is_named(found: dict[str, int], allowed: dict[str, int], expected: list[str]) -> None:
    assert problems(found, allowed) == expected


def test_the_command_that_is_named_makes_it_fit(tmp_path: Path) -> None:
    table, found = tmp_path / "lines.toml", {"p": 7, "p/q": 3}
    write(found, table)
    assert problems(found, budgets(table)) == []


def test_differences_are_those_to_the_commit(tmp_path: Path) -> None:
    def git(*command: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *command], cwd=tmp_path, check=True, capture_output=True)

    for folder in ("graphpass/kept", "backends/cgpass"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text("word " * 61)
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    (tmp_path / "graphpass" / "kept" / "table.json").write_text("word " * 122)
    (tmp_path / "backends" / "cgpass" / "a.py").write_text("word\n" * 61)
    rows = differences(lines_of(files_at("HEAD", tmp_path)), lines_of(files_now(tmp_path)))
    assert [row.split() for row in rows] == [
        ["graphpass/kept", "10", "30", "+20"],
        ["all", "packages", "20", "40", "+20"],
    ]
