"""Reads {size: number} from JSON and CSV files."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from graphpass.errors import CommandError

__all__ = ["read_sizes"]

_REMEDY = 'write {"8": 120, "16": 40} as JSON, or lines size,count as CSV'


def read_sizes(path: Path) -> dict[int, float]:
    """{size: number}; numbers of a size that comes several times are added.

    Raises:
        CommandError: the file cannot be read, or is in another form.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error
    pairs = _json_pairs(path, text) if text.lstrip()[:1] in ("{", "[") else _csv_pairs(text)
    sizes: dict[int, float] = {}
    for place, size, number in pairs:
        whole, value = _number(path, place, size), _number(path, place, number)
        if not whole.is_integer():
            raise _unreadable(path, f"size {size!r} in {place}")
        sizes[int(whole)] = sizes.get(int(whole), 0.0) + value
    return sizes


def _json_pairs(path: Path, text: str) -> Iterable[tuple[str, Any, Any]]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise _unreadable(path, str(error)) from error
    if isinstance(content, Mapping) and "histogram" in content:
        content = content["histogram"]
    if isinstance(content, Mapping):
        return [(f"entry {size!r}", size, number) for size, number in content.items()]
    if not isinstance(content, list):
        raise _unreadable(path, f"sizes are {type(content).__name__}")
    return [
        (f"entry {position}", *(item if isinstance(item, list) and len(item) == 2 else (item, 1)))
        for position, item in enumerate(content)
    ]


def _csv_pairs(text: str) -> Iterable[tuple[str, Any, Any]]:
    rows = [
        (number, row) for number, row in enumerate(csv.reader(text.splitlines()), start=1) if row and row[0].strip()
    ]
    if rows and not rows[0][1][0].strip().replace(".", "", 1).isdigit():
        rows = rows[1:]  # the names of the columns
    return [(f"line {number}", row[0], row[1] if len(row) > 1 else 1) for number, row in rows]


def _number(path: Path, place: str, value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError) as error:
        raise _unreadable(path, f"{value!r} in {place}") from error


def _unreadable(path: Path, found: str) -> CommandError:
    return CommandError(f"{path} cannot be read", expected="sizes and their counts", found=found, remedy=_REMEDY)
