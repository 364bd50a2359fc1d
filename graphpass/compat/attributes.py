"""Look-up of torch attributes by dotted path."""

from __future__ import annotations

from typing import Any

import torch


def torch_attribute(path: str) -> Any | None:
    """``torch.<path>``, or None where this release has no such attribute."""
    attribute: Any = torch
    for name in path.split("."):
        attribute = getattr(attribute, name, None)
    return attribute
