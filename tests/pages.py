"""Reads pages: their elements, references and text."""

from __future__ import annotations

from html.parser import HTMLParser

__all__ = ["Page"]


class Page(HTMLParser):
    """Elements, references and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.handlers: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("href", "src", "srcset", "action", "data", "poster", "xlink:href"):
                self.references.append(value or "")
            elif name.startswith("on"):
                self.handlers.append(name)

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)
