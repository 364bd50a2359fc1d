"""Runs commands in this process, and reads the pages that they write."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner, Result

from graphpass.cli.app import app


class Page(HTMLParser):
    """Elements, references and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.handlers: list[str] = []
        self.ids: list[str] = []
        self.contents: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("href", "src", "srcset", "action", "data", "poster", "xlink:href"):
                self.references.append(value or "")
            elif name.startswith("on"):
                self.handlers.append(name)
            elif name == "content":
                self.contents.append(value or "")
            elif name == "id":
                self.ids.append(value or "")

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


@pytest.fixture
def command() -> Callable[..., Result]:
    """``command("plan", "sizes.json")``: the result, with ``exit_code``, ``stdout`` and ``stderr``."""
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])
