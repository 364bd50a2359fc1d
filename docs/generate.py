"""Writes the pages that are made from the code: ``python docs/generate.py``."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.mutations import GUARANTEES, guarantees, mutations  # noqa: E402

GUARANTEES_HEAD = """\
# What graphpass guarantees

A replay runs what was recorded, at the addresses of the capture. Each line below is a guarantee that prevents a wrong
answer, with its tests. The code that holds it is marked as a guard; `tox run -e mutate` removes every guard, one at a
time, and requires its tests to fail. `python docs/generate.py` writes this page from `tests/mutations`.
"""
TREE_HEAD = """\
# The tree

Imports run downwards: `tool.importlinter` in `pyproject.toml` states the layers, and the lint run checks them. The
library never imports the backend. Each line is the first sentence of a file's docstring; `python docs/generate.py`
writes this page.
"""


def guarantees_page() -> str:
    """Each guarantee with its tests and the number of its guards, from the tables of ``tests/mutations``."""
    sections = tomllib.loads(GUARANTEES.read_text(encoding="utf-8"))
    lines = GUARANTEES_HEAD.splitlines()
    section = ""
    for guarantee in guarantees(mutations()):
        if guarantee.section != section:
            section = guarantee.section
            intro = sections[section].get("intro")
            lines += ["", f"## {section}", "", *([intro, ""] if intro else [])]
        links = [f"[{test.partition('::')[2]}](../{test.partition('::')[0]})" for test in guarantee.tests]
        guards = [f"{guarantee.num_guards} guard{'s' * (guarantee.num_guards != 1)}"] * bool(guarantee.num_guards)
        lines += [f"- {guarantee.text}", f"  *{', '.join([*guards, *links])}*"]
    unseen = [f"- {item}" for item in sections["What it cannot see"]["items"]]
    return "\n".join([*lines, "", "## What it cannot see", "", *unseen]) + "\n"


def tree_page() -> str:
    """Every file of the product with the first sentence of its docstring."""
    lines = TREE_HEAD.splitlines()
    for folder, files in _folders():
        lines += ["", f"## {folder}", ""]
        lines += [f"- `{file.name}`: {_first_sentence(file)}" for file in files]
    return "\n".join(lines) + "\n"


def _folders() -> Iterator[tuple[str, list[Path]]]:
    for source in ("graphpass", "backends/cgpass"):
        files = sorted((ROOT / source).rglob("*.py"))
        for folder in sorted({file.parent for file in files}):
            yield str(folder.relative_to(ROOT)), [file for file in files if file.parent == folder]


def _first_sentence(file: Path) -> str:
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".")


PAGES: Mapping[str, Callable[[], str]] = {"guarantees.md": guarantees_page, "design/tree.md": tree_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (ROOT / "docs" / name).write_text(page(), encoding="utf-8")
