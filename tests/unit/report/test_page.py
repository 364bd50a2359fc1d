"""The pages: every part is drawn, every name is text, and nothing refers to anything outside."""

from __future__ import annotations

import io

from rich.console import Console

from graphpass.report.drawing import Bar, Bars, Cell, Columns, Heading, Strip, Table, Text, html_page, print_parts
from tests.pages import Page

HOSTILE = "</td><script>alert('x')</script>\"><a href=//evil.example onclick=y>[/red]"
EVERY_PART = (
    Heading(HOSTILE),
    Text(HOSTILE),
    Table(HOSTILE, ("region", HOSTILE), (("g0.r0", HOSTILE), (HOSTILE, "b"))),
    Table("empty", ("a",), ()),
    Bars(HOSTILE, (Bar(HOSTILE, 2.0, HOSTILE), Bar("zero", 0.0, "0"))),
    Bars("no bars", ()),
    Columns(HOSTILE, ((1, 3.0), (90, 1.0)), {HOSTILE: (8, 90)}),
    Strip(HOSTILE, (Cell("g0.r0", "captured", HOSTILE, "g0.r0"), Cell(HOSTILE, "eager", HOSTILE, HOSTILE))),
)


def test_hostile_names_are_text_in_every_part() -> None:
    page = Page(html_page(HOSTILE, EVERY_PART, failure=HOSTILE))
    assert "script" not in page.tags
    assert page.handlers == []
    assert page.text.count(HOSTILE) >= 12
    assert page.tags.count("table") == 1
    assert page.tags.count("svg") == 2


def test_a_page_refers_to_nothing_outside() -> None:
    text = html_page(HOSTILE, EVERY_PART, failure=HOSTILE)
    page = Page(text)
    assert any("default-src 'none'" in content for content in page.contents)
    assert all(reference == "data:," or reference.startswith("#") for reference in page.references)
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme: dark" in style


def test_regions_link_to_their_rows() -> None:
    page = Page(html_page(HOSTILE, EVERY_PART, failure=HOSTILE))
    targets = [reference.removeprefix("#") for reference in page.references if reference.startswith("#")]
    assert targets == ["region-g0.r0", f"region-{HOSTILE}"]
    assert set(targets) <= set(page.ids)


def test_text_shows_every_name_as_it_is() -> None:
    file = io.StringIO()
    print_parts(EVERY_PART, Console(file=file, width=400), failure=HOSTILE)
    assert file.getvalue().count(HOSTILE) >= 10
    assert "█" in file.getvalue()
