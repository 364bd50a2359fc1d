"""The page about logging lists every warning of the code, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCES = sorted([*(ROOT / "graphpass").rglob("*.py"), *(ROOT / "backends" / "cgpass").rglob("*.py")])
LEAST_LETTERS = 12


def phrases() -> list[str]:
    """The texts of records in the page's first table."""
    table = (ROOT / "docs" / "logging.md").read_text(encoding="utf-8").split("## Levels")[0]
    return [match[1] for match in re.finditer(r"^\|[^|]+\| `([^`|]+)`", table, re.MULTILINE)]


def constants(node: ast.AST) -> str:
    """The text of a string, also of the constant parts of an f-string."""
    return "".join(
        part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)
    )


def warned() -> Iterator[tuple[str, str]]:
    """(place, text) of each call of ``warn`` whose text is written there."""
    for source in SOURCES:
        tree = ast.parse(source.read_text(encoding="utf-8"))
        for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
            assigned = {
                target.id: constants(node.value)
                for node in ast.walk(function)
                if isinstance(node, ast.Assign)
                for target in node.targets
                if isinstance(target, ast.Name)
            }
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("warn", "warning") and node.args:
                    text = constants(node.args[0])
                    names = [part.id for part in ast.walk(node.args[0]) if isinstance(part, ast.Name)]
                    whole = text + "".join(assigned.get(name, "") for name in names)
                    if len(re.sub(r"\W", "", whole)) >= LEAST_LETTERS:
                        yield f"{source.relative_to(ROOT)}:{node.lineno}", whole


def test_every_warning_has_a_row() -> None:
    rows = phrases()
    missing = {place: text for place, text in warned() if not any(phrase.split(": ")[0] in text for phrase in rows)}
    assert missing == {}


def test_every_row_is_a_text_of_the_code() -> None:
    texts = [constants(ast.parse(source.read_text(encoding="utf-8"))) for source in SOURCES]
    assert len(phrases()) > 30
    assert [phrase for phrase in phrases() if not any(phrase.split(": ")[0] in text for text in texts)] == []
