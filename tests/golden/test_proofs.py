# ruff: noqa: E501  (golden text is as wide as a dump)
"""Golden dumps: what the padding proof says of small programs.

A parameter's name says what an input is (``tests/unit/padding/tracing.py``): ``x`` and ``y`` are [b, s, 8], ``m`` a mask
of [b, s] whose padding is declared, ``w`` a weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphpass.regions import padding_of
from tests.unit.padding.tracing import trace

assert_expected_inline = pytest.importorskip("expecttest").assert_expected_inline


def proof_of(function: Callable[..., Any]) -> str:
    """The verdict on each size of a program, and what stands against it."""
    traced = trace(function)
    proof = padding_of(traced.graph, traced.symbols, traced.declared)
    lines = [f"{field}: {verdict}" for field, verdict in sorted(proof.verdicts.items())]
    lines += [f"because {finding}" for finding in proof.findings]
    lines += [f"assuming {assumption}" for assumption in proof.assumptions]
    return re.sub(r"\bs\d+\b", "s00", "\n".join(lines)) + "\n"


def test_rows_that_do_not_mix() -> None:
    assert_expected_inline(
        proof_of(lambda x, w: (x @ w).relu() + 1),
        """\
b: proved
s: proved
""",
    )


def test_a_mean_over_a_padded_size() -> None:
    assert_expected_inline(
        proof_of(lambda x: x - x.mean(1, keepdim=True)),
        """\
b: proved
s: unproved
because row i of output 0 depends on padding of 's' through aten.mean.dim (mean over the padded dimension 1)
""",
    )


def test_a_sum_under_a_mask() -> None:
    assert_expected_inline(
        proof_of(lambda x, m: torch.where(m[..., None], x, 0).sum(1)),
        """\
b: proved
s: proved
""",
    )


def test_a_softmax_over_hidden_keys() -> None:
    def attention(x: Tensor, m: Tensor) -> Tensor:
        scores = (x @ x.transpose(1, 2)).masked_fill(~m[:, None], -torch.inf)
        return scores.softmax(-1) @ x

    assert_expected_inline(
        proof_of(attention),
        """\
b: proved
s: proved
assuming padding is finite, also in intermediate results
""",
    )


def test_a_softmax_over_keys_that_show() -> None:
    assert_expected_inline(
        proof_of(lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x),
        """\
b: proved
s: unproved
because row i of output 0 depends on padding of 's' through aten._softmax (softmax over the padded dimension 2)
because row i of output 0 depends on padding of 's' through aten.bmm (sums products over the padded dimension 2)
""",
    )


def test_a_size_as_a_number() -> None:
    assert_expected_inline(
        proof_of(lambda x: x / x.shape[1]),
        """\
b: proved
s: unproved
because row i of output 0 depends on padding of 's' through aten.div.Tensor (the padded size s00 is a number in it)
""",
    )


def test_the_last_entry() -> None:
    assert_expected_inline(
        proof_of(lambda x: x[:, -1]),
        """\
b: proved
s: unproved
because row i of output 0 depends on padding of 's' through aten.select.int (entry -1 of the padded dimension 1 is counted from its end)
""",
    )


def test_a_norm_of_declared_zeros() -> None:
    assert_expected_inline(
        proof_of(lambda zeros: (zeros / zeros.norm(dim=-1, keepdim=True)).nan_to_num()),
        """\
b: proved
s: proved
""",
    )


def test_a_write_to_an_input() -> None:
    def counted(x: Tensor, buf: Tensor) -> Tensor:
        buf += x.sum((0, 1))
        return x * 2

    assert_expected_inline(
        proof_of(counted),
        """\
b: unproved
s: unproved
because row i of written input 'arg1_1' depends on padding of 'b' through aten.sum.dim_IntList (sum over the padded dimension 0)
because row i of written input 'arg1_1' depends on padding of 's' through aten.sum.dim_IntList (sum over the padded dimension 1)
""",
    )
