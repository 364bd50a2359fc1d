"""``zero_padding``: what the forward context says is padding becomes zero, and everything else is a copy."""

from __future__ import annotations

import pytest
import torch

import graphpass as gp
from graphpass.errors import ShapeError


@pytest.mark.parametrize("num_dims", [1, 2])
def test_zero_padding_is_a_copy_where_nothing_is_padding(num_dims: int) -> None:
    x = torch.randn(3, 4)
    y = gp.zero_padding(x, num_dims)
    assert torch.equal(x, y)
    assert y.data_ptr() != x.data_ptr()
    rows = torch.zeros(x.shape[:num_dims], dtype=torch.bool)
    rows[1] = True
    with gp.set_forward_context(is_padding=rows.flatten()):
        zeroed = gp.zero_padding(x, num_dims)
    assert torch.equal(zeroed, torch.stack([x[0], torch.zeros(4), x[2]]))


def test_zero_padding_keeps_the_layout() -> None:
    x = torch.randn(3, 4, 5).transpose(1, 2)
    with gp.set_forward_context(is_padding=torch.tensor([False, True, False])):
        zeroed = gp.zero_padding(x)
    assert zeroed.stride() == torch.empty_like(x).stride()
    assert torch.equal(zeroed, x * torch.tensor([1.0, 0.0, 1.0])[:, None, None])


def test_zero_padding_of_a_dimension_with_one_size() -> None:
    """The mask covers the requests alone if each has the same number of tokens."""
    x = torch.randn(3, 3, 2)
    with gp.set_forward_context(is_padding=torch.tensor([False, True, False])):
        zeroed = gp.zero_padding(x, 2)
    assert torch.equal(zeroed, x * torch.tensor([1.0, 0.0, 1.0])[:, None, None])


@pytest.mark.parametrize("shape", [(1,), (4,), (2, 3)])
def test_a_tensor_with_other_rows_is_refused(shape: tuple[int, ...]) -> None:
    refused = pytest.raises(ShapeError, match=r"does not have the rows of the batch.*leading dimensions")
    with gp.set_forward_context(is_padding=torch.zeros(shape, dtype=torch.bool)), refused:
        gp.zero_padding(torch.randn(3, 3, 2), 2)
