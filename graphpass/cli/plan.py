"""``graphpass plan``: capture sizes for traffic from a JSON or CSV file, beside doubling and fixed strides."""

from __future__ import annotations

import bisect
import csv
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphpass.cli.usermodel import Result
from graphpass.errors import CommandError
from graphpass.report.drawing import Picture, Table, bar_chart, counted, size_chart
from graphpass.sizeplan import plan_sizes

_REMEDY = 'write {"8": 120, "16": 40} as JSON, or lines size,count as CSV'


def read_sizes(path: Path) -> dict[int, float]:
    """{size: number}; numbers of a size that comes several times are added."""
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


_MOST_STRIDE_SIZES = 100_000


def plan(traffic: Path, max_graphs: int, strides: Sequence[int], bytes_file: Path | None) -> Result:
    """Choose sizes for the traffic in a file."""
    histogram = read_sizes(traffic)
    bytes_of = read_sizes(bytes_file) if bytes_file is not None else {}
    start_s = time.perf_counter()
    planned = plan_sizes(histogram, max_graphs).sizes
    seconds = time.perf_counter() - start_s
    largest = planned[-1]
    doubling = (*(1 << power for power in range((largest - 1).bit_length())), largest)
    chosen = {f"planned, at most {max_graphs}": planned, "doubling": doubling}
    for stride in strides or (math.ceil(largest / len(planned)),):
        chosen[f"stride {stride}"] = _strided(largest, stride)
    ladders = [_measured(name, sizes, histogram, bytes_of) for name, sizes in chosen.items()]
    total = sum(histogram.values())
    figures = {
        "traffic": {"file": str(traffic), "sizes": len(histogram), "batches": total, "largest": largest},
        "seconds": seconds,
        "ladders": ladders,
    }
    return Result("plan", traffic.name, figures, _parts(ladders, histogram, seconds))


def _strided(largest: int, stride: int) -> tuple[int, ...]:
    """The multiples of a stride, and the largest size; a stride so small that they are too many is made larger."""
    stride = max(stride, math.ceil(largest / _MOST_STRIDE_SIZES), 1)
    return (*range(stride, largest, stride), largest)


def _measured(
    name: str, sizes: tuple[int, ...], histogram: Mapping[int, float], bytes_of: Mapping[int, float]
) -> dict[str, Any]:
    padded = math.fsum(weight * sizes[bisect.bisect_left(sizes, size)] for size, weight in histogram.items())
    return {
        "name": name,
        "graphs": len(sizes),
        "waste": 1 - math.fsum(size * weight for size, weight in histogram.items()) / padded,
        "rows_a_batch": padded / math.fsum(histogram.values()),
        "bytes": math.fsum(_bytes_at(size, bytes_of) for size in sizes) if bytes_of else None,
        "sizes": list(sizes),
    }


def _bytes_at(size: int, bytes_of: Mapping[int, float]) -> float:
    """Linear between the nearest sizes of the file; in proportion to the size outside of them."""
    known = sorted(bytes_of)
    between = np.interp(size, [0, *known], [0.0, *(bytes_of[other] for other in known)])
    return float(between) * max(1.0, size / known[-1])


def _parts(
    ladders: Sequence[Mapping[str, Any]], histogram: Mapping[int, float], seconds: float
) -> tuple[str | Table | Picture, ...]:
    has_bytes = ladders[0]["bytes"] is not None
    rows = tuple(
        (
            ladder["name"],
            str(ladder["graphs"]),
            f"{ladder['waste']:.2%}",
            f"{ladder['rows_a_batch']:.2f}",
            *((f"{ladder['bytes'] / 2**20:.1f}",) if has_bytes else ()),
        )
        for ladder in ladders
    )
    columns = ("sizes", "graphs", "padding", "rows a batch", *(("MiB",) if has_bytes else ()))
    weights = tuple(sorted(histogram.items()))
    waste = [(ladder["name"], ladder["waste"], f"{ladder['waste']:.2%}") for ladder in ladders]
    note = " The graphs of one runtime share a pool, so together they need less than the sum." if has_bytes else ""
    return (
        f"{counted(len(histogram), 'size')} up to {weights[-1][0]}, planned in {seconds:.2f} s.{note}",
        Table("Ladders", columns, rows),
        bar_chart("Share of padding among the computed rows", waste),
        size_chart("Traffic by size", weights, {ladder["name"]: ladder["sizes"] for ladder in ladders}),
        f"capture_sizes={ladders[0]['sizes']}",
    )
