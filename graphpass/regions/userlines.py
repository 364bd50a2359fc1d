"""The line of the user's code behind a node."""

from __future__ import annotations

import functools
import os
import re

import torch

__all__ = ["where_of"]

_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+)')
_TORCH = os.path.dirname(torch.__file__) + os.sep


@functools.lru_cache(maxsize=1024)
def where_of(stack_trace: str | None) -> str:
    """The innermost line of a stack trace outside torch, as ``model.py:123: x.mean(1)``; empty without a trace."""
    best, inside_torch = "", ""
    lines = (stack_trace or "").splitlines()
    for number, line in enumerate(lines):
        match = _FRAME.search(line)
        if match is None:
            continue
        source = lines[number + 1].strip() if number + 1 < len(lines) and not _FRAME.search(lines[number + 1]) else ""
        place = f"{os.path.basename(match['file'])}:{match['line']}" + (f": {source}" if source else "")
        if match["file"].startswith(_TORCH):
            inside_torch = place
        else:
            best = place
    return best or inside_torch
