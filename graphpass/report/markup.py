"""HTML elements whose text is escaped unless it is markup already."""

from __future__ import annotations

import html

__all__ = ["Markup", "element"]

_VOID = frozenset({"meta", "link"})


class Markup(str):
    """Text that is valid HTML."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: str | float) -> Markup:
    """An HTML element.

    Args:
        tag: the name of the element.
        children: its content; every string that is no :class:`Markup` is escaped.
        attributes: its attributes, escaped. A trailing underscore is dropped, others become hyphens: ``class_``.
    """
    inside = "".join(child if isinstance(child, Markup) else html.escape(child) for child in children)
    named = "".join(
        f' {name.removesuffix("_").replace("_", "-")}="{html.escape(str(value))}"' for name, value in attributes.items()
    )
    return Markup(f"<{tag}{named}>" if tag in _VOID else f"<{tag}{named}>{inside}</{tag}>")
