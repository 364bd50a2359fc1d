"""The pages: their code runs, and their links lead somewhere."""

from __future__ import annotations

import re
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.test_house import PUBLIC_NAMES

ROOT = Path(__file__).parent.parent
# The programs of the gallery run with small models, in tests/e2e/test_gallery.py.
GALLERY = ROOT / "docs" / "gallery"
DOCS = [page for page in sorted((ROOT / "docs").rglob("*.md")) if not {"_build", "generated"} & {*page.parts}]
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "tests" / "README.md", *DOCS]
# What a block may be: code that runs everywhere or on a GPU only, text, or a directive of the pages' builder.
KINDS = {"python", "python cuda", "text", "{toctree}", "{eval-rst}", "{include}"}


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: the words after its fence, its text, and the line of the page on which that begins."""

    kind: str
    text: str
    line: int

    @property
    def is_code(self) -> bool:
        return self.kind.startswith("python")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^(`{3,})([^\n`]*)\n(.*?)^\1$", text, flags=re.DOTALL | re.MULTILINE)
    return [Block(m[2].strip(), m[3], text.count("\n", 0, m.start(3)) + 1) for m in found]


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and MyST make it."""
    plain = re.sub(r"`|\[(.*?)\]\(.*?\)", r"\1", heading.strip()).lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def anchors_of(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return {slug(heading) for heading in re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE)}


def links_of(page: Path) -> list[str]:
    """Targets of the links and pictures of a page, without those to other hosts."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"\]\(([^()\s]+)\)", re.sub(r"`[^`\n]*`", "", text))
    return [target for target in found if not re.match(r"https?://", target)]


def marked(page: Path) -> Any:
    blocks = [block for block in blocks_of(page) if block.is_code]
    needs_gpu = all(block.kind == "python cuda" for block in blocks)
    return pytest.param(page, id=name_of(page), marks=[pytest.mark.cuda] if needs_gpu else [])


WITH_CODE = [page for page in PAGES if page.parent != GALLERY and any(b.is_code for b in blocks_of(page))]


@pytest.mark.parametrize("page", [marked(page) for page in WITH_CODE])
def test_documented_code_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of one page run in order, as one module; those marked ``cuda`` where there is a GPU."""
    import torch

    module = ModuleType(f"documented_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks_of(page):
        if block.kind == "python" or (block.kind == "python cuda" and torch.cuda.is_available()):
            code = "\n" * (block.line - 1) + block.text  # so that tracebacks name lines of the page
            exec(compile(code, name_of(page), "exec"), vars(module))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_each_block_says_what_it_is(page: Path) -> None:
    """Code without a mark would not be run."""
    kinds = {re.sub(r"(?<=}).*", "", block.kind) for block in blocks_of(page)}
    assert kinds - KINDS == set()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    broken = []
    for target in links_of(page):
        path, _, anchor = target.partition("#")
        to = (page.parent / path).resolve() if path else page
        if not to.exists() or (anchor and to.suffix == ".md" and anchor not in anchors_of(to)):
            broken.append(target)
    assert broken == []


def test_the_check_of_links_sees_broken_ones(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Some `code`: one, two\n[a](page.md#some-code-one-two) [b](gone.md)\n```text\n[c](no.md)\n```\n")
    assert links_of(page) == ["page.md#some-code-one-two", "gone.md"]
    assert anchors_of(page) == {"some-code-one-two"}


def test_what_is_made_from_the_code_is_as_the_code_is() -> None:
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    stale = [name_of(page) for page, text in generate["committed"]() if page.read_text(encoding="utf-8") != text]
    assert stale == [], "write them: python docs/generate.py"
    made = {name: page() for name, page in generate["NOT_COMMITTED"].items()}
    assert "\n- `graphedmodel.py`: " in made["generated/tree.md"]
    assert set(re.findall(r"automodule:: (\S+)", made["generated/api.md"])) == PUBLIC_NAMES.keys()


def test_the_dump_of_how_it_works_is_what_its_program_prints(capsys: pytest.CaptureFixture[str]) -> None:
    program, dump = blocks_of(ROOT / "docs" / "concepts" / "how_it_works.md")
    exec(program.text, {"__name__": "how_it_works"})
    assert capsys.readouterr().out == dump.text + "\n"


def test_each_option_and_each_argument_is_described() -> None:
    """In the code: the pages only repeat it."""
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    rows = [*generate["options_block"]().splitlines(), *generate["commands_block"]().splitlines()]
    cells = [row.strip("| ").rsplit(" | ", 1) for row in rows if row.startswith("| `")]
    assert len(cells) > 30
    assert [name for name, meaning in cells if len(meaning) < 12] == []
