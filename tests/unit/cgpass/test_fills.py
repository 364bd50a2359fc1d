"""Inputs whose padding is filled where that proves a graph as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.unit.cgpass.attended import Make
from tests.unit.cgpass.test_made import SIZES, made, verdicts
from tests.unit.compiled import agrees

EMBEDDING = nn.Embedding.from_pretrained(torch.linspace(-1, 1, 36).view(6, 6))


def embedded(ids: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = EMBEDDING(ids)
    return found


def hidden(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    q = embedded(ids)[:, None]
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask[:, None, None].bool())


def left_out(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    x = embedded(ids)
    return (x @ x.mT).masked_fill(mask[:, None], -torch.inf).softmax(-1) @ x


FILLS: dict[str, tuple[Callable[..., Any], torch.Tensor, str]] = {
    "a mask of integers": (hidden, torch.tensor(1), "padding of mask filled with 0"),
    "a mask": (hidden, torch.tensor(True), "padding of mask filled with False"),
    "a mask of what is left out": (left_out, torch.tensor(False), "padding of mask filled with True"),
}


def reasons(fast: Any) -> set[str]:
    """What the report says is made."""
    (record,) = fast.rt.callables()
    return {finding.why for size in record.sizes for finding in size.made}


@pytest.mark.parametrize("name", FILLS)
def test_an_input_is_filled_where_nothing_else_need_be_made(name: str, compiled: Make) -> None:
    model, real, what = FILLS[name]
    dims = {one: {0: "rows", 1: "length"} for one in ("ids", "mask")}
    fast = made(compiled, model, dynamic_dims=dims)
    for size in SIZES * 2:
        ids, mask = torch.randint(6, size), real.expand(size).clone()
        agrees(fast(ids, mask), model(ids, mask))
    assert fast.is_padded
    assert fast.problems == ()
    assert verdicts(fast, "length") == ["made"]
    assert reasons(fast) == {what}


def test_nothing_is_filled_beside_floats_that_may_be_infinite(compiled: Make) -> None:
    def model(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x * mask).sum(1)

    fast = made(compiled, model, dynamic_dims={one: {0: "rows", 1: "length"} for one in ("x", "mask")})
    for size in SIZES * 2:
        x, mask = torch.randn(size), torch.ones(size, dtype=torch.int64)
        x[:, -1] = -torch.inf
        agrees(fast(x, mask), model(x, mask))
    assert fast.is_padded
    assert verdicts(fast, "length") == ["made"]
    assert fast.problems == ()
    assert not any("filled" in why for why in reasons(fast))


def test_what_a_user_says_of_padding_is_not_decided_otherwise(compiled: Make) -> None:
    dims = {one: {0: "rows", 1: "length"} for one in ("ids", "mask")}
    fast = made(compiled, hidden, dynamic_dims=dims, padding={"mask": True})
    for size in SIZES * 2:
        ids, mask = torch.randint(6, size), torch.ones(size, dtype=torch.bool)
        agrees(fast(ids, mask), hidden(ids, mask))
    assert verdicts(fast, "length") == ["made"]
    assert not any("filled" in why for why in reasons(fast))
