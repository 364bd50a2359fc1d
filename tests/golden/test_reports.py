# ruff: noqa: E501  (golden text is as wide as a dump)
"""Golden dumps: reports of small models on the tape, without their seconds."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphpass as gp

assert_expected_inline = pytest.importorskip("expecttest").assert_expected_inline


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


class Median(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.median(0).values


class Layers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = (x + 1).relu()
        return x * 2


def report_of(model: Callable[..., Any], sizes: list[tuple[int, ...]], **options: Any) -> str:
    """What is slow, what replays and where padding goes, of a model called at these sizes."""
    fast = torch.compile(model, backend="cgpass", dynamic=True, options={"compiler": "aot_eager", **options})
    with torch.no_grad():
        for size in sizes:
            fast(torch.randn(*size))
    text = str(gp.runtime_of(fast).report()).partition("What it cost")[0]
    text = text.translate(str.maketrans("┃│━╇", "||-+"))  # expecttest takes ASCII only
    text = re.sub(r"test_reports\.py:\d+", "test_reports.py:00", re.sub(r"\bs\d+\b", "s00", text))
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def test_sizes_that_share_graphs() -> None:
    sizes = [(5, 4), (7, 4), (6, 4), (5, 4), (8, 4), (7, 4), (6, 4)]
    assert_expected_inline(
        report_of(Twice(), sizes),
        """\
What is slow or missing, and what to do about it
Nothing that is known.

What replays
5 calls replayed graphs, 2 ran without a graph (first calls of a key: 2).

Keys
graph | mode | key           | graphs | calls | replays | padding
------+------+---------------+--------+-------+---------+--------
g0    | FULL | x[1]=4 x[0]=6 | 1      | 3     | 3       | 5.6%
g0    | FULL | x[1]=4 x[0]=8 | 1      | 2     | 2       | 6.2%

Where padding goes
Sizes
graph | size | symbol | traced | admitted | padding | padded
------+------+--------+--------+----------+---------+-------
g0    | x[1] | s00    | 4      | 2 to any | proved  | yes
g0    | x[0] | s00    | 5      | 2 to any | proved  | yes

Traffic
size | different | largest | captured | padding | suggested  | padding then
-----+-----------+---------+----------+---------+------------+-------------
x[1] | 1         | 4       | 4        | 0.0%    | 4          | 0.0%
x[0] | 4         | 8       | 6, 8     | 8.3%    | 5, 6, 7, 8 | 0.0%

Suggested for this traffic: capture_sizes={'x[1]': [4], 'x[0]': [5, 6, 7, 8]}

""",
    )


def test_padding_that_is_made() -> None:
    assert_expected_inline(
        report_of(Mean(), [(3, 5, 4), (3, 7, 4), (3, 6, 4)] * 2),
        """\
What is slow or missing, and what to do about it
Nothing that is known.

What replays
4 calls replayed graphs, 2 ran without a graph (first calls of a key: 2).

Keys
graph | mode | key                  | graphs | calls | replays | padding
------+------+----------------------+--------+-------+---------+--------
g0    | FULL | x[1]=6 x[2]=4 x[0]=3 | 1      | 3     | 3       | 5.6%
g0    | FULL | x[1]=8 x[2]=4 x[0]=3 | 1      | 1     | 1       | 12.5%

Where padding goes
Sizes
graph | size | symbol | traced | admitted | padding | padded
------+------+--------+--------+----------+---------+-------
g0    | x[1] | s00    | 5      | 2 to any | made    | yes
g0    | x[2] | s00    | 4      | 2 to any | proved  | yes
g0    | x[0] | s00    | 3      | 2 to any | proved  | yes

What is made of padding
graph | size | through                                                                                                              | times
------+------+----------------------------------------------------------------------------------------------------------------------+------
g0    | x[1] | aten.mean.dim (0 in the padding of dimension 1, 240 bytes) at test_reports.py:00: return x - x.mean(1, keepdim=True) | 1
g0    | x[1] | aten.mean.dim (the real size as a number, 4 bytes) at test_reports.py:00: return x - x.mean(1, keepdim=True)         | 1

Traffic
size | different | largest | captured | padding | suggested | padding then
-----+-----------+---------+----------+---------+-----------+-------------
x[1] | 3         | 7       | 6, 8     | 10.0%   | 5, 6, 7   | 0.0%
x[2] | 1         | 4       | 4        | 0.0%    | 4         | 0.0%
x[0] | 1         | 3       | 3        | 0.0%    | 3         | 0.0%

Suggested for this traffic: capture_sizes={'x[1]': [5, 6, 7], 'x[2]': [4], 'x[0]': [3]}

""",
    )


def test_a_size_that_is_not_padded() -> None:
    assert_expected_inline(
        report_of(Median(), [(5, 4), (7, 4)] * 3),
        """\
What is slow or missing, and what to do about it
Problems
what                                     | graph | line                                    | times | what to do
-----------------------------------------+-------+-----------------------------------------+-------+----------------------------------------
not padded: x[0] is not padded, each of  | g0    | test_reports.py:00: return x -          |       | no padding suits this operation: keep
its sizes is captured: aten.median.dim   |       | x.median(0).values                      |       | the sizes few, or leave the operation
(median over the padded dimension 0)     |       |                                         |       | out of the compiled model

What replays
4 calls replayed graphs, 2 ran without a graph (first calls of a key: 2).

Keys
graph | mode | key           | graphs | calls | replays | padding
------+------+---------------+--------+-------+---------+--------
g0    | FULL | x[1]=4 x[0]=5 | 1      | 2     | 2       | 0.0%
g0    | FULL | x[1]=4 x[0]=7 | 1      | 2     | 2       | 0.0%

Where padding goes
Sizes
graph | size | symbol | traced | admitted | padding  | padded
------+------+--------+--------+----------+----------+---------------------
g0    | x[1] | s00    | 4      | 2 to any | proved   | yes
g0    | x[0] | s00    | 5      | 2 to any | unproved | no, captured exactly

Where padding is not proved
graph | size | through                                                                                                   | reaches
------+------+-----------------------------------------------------------------------------------------------------------+---------
g0    | x[0] | aten.median.dim (median over the padded dimension 0) at test_reports.py:00: return x - x.median(0).values | output 0

Traffic
size | different | largest | captured | padding | suggested | padding then
-----+-----------+---------+----------+---------+-----------+-------------
x[1] | 1         | 4       | 4        | 0.0%    | 4         | 0.0%
x[0] | 2         | 7       | 5, 7     |         |           |

""",
    )


def test_regions_around_an_operation() -> None:
    options = {"splitting_ops": ["aten::relu"], "mode": "PIECEWISE"}
    assert_expected_inline(
        report_of(Layers(), [(5, 4)] * 3, **options),
        """\
What is slow or missing, and what to do about it
Nothing that is known.

What replays
2 calls replayed graphs, 1 ran without a graph (first calls of a key: 1).

Keys
graph | mode      | key           | graphs | calls | replays | padding
------+-----------+---------------+--------+-------+---------+--------
g0    | PIECEWISE | x[1]=4 x[0]=6 | 4      | 2     | 8       | 16.7%

Regions
region | kind     | nodes | equal regions | reason
-------+----------+-------+---------------+--------------------------------------------------------------------
g0.r0  | captured | 6     | g0.r2, g0.r4  |
g0.r1  | eager    | 5     | g0.r3, g0.r5  | splitting op: Tensor.relu at test_reports.py:00: x = (x + 1).relu()
g0.r6  | captured | 6     |               |

Where padding goes
Sizes
graph | size | symbol | traced | admitted | padding | padded
------+------+--------+--------+----------+---------+-------
g0    | x[1] | s00    | 4      | 2 to any | proved  | yes
g0    | x[0] | s00    | 5      | 2 to any | proved  | yes

Traffic
size | different | largest | captured | padding | suggested | padding then
-----+-----------+---------+----------+---------+-----------+-------------
x[1] | 1         | 4       | 4        | 0.0%    | 4         | 0.0%
x[0] | 1         | 5       | 6        | 16.7%   | 5         | 0.0%

Suggested for this traffic: capture_sizes={'x[1]': [4], 'x[0]': [5]}

""",
    )
