"""Look-up of torch by path."""

from __future__ import annotations

from typing import Any

import torch


def torch_attribute(path: str) -> Any | None:
    """``torch.<path>``, or None where this release has no such attribute."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found
