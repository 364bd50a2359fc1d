"""The check of padding in float64 on a GPU, whose kernels round otherwise for other sizes."""

from __future__ import annotations

import pytest
import torch

from tests.unit.cgpass.leaks import BOTH, LEAKS, RIGHT, agree, around, is_padded, refusals

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("closed_runtimes")]

FIVE = ("softmax", "batch norm in training", "centred in place", "attention of a query", "relative positions")
STAY = ("masked attention", "multilayer perceptron", "convolution of each row", "mean pooling with a trash row")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@DTYPES
@pytest.mark.parametrize("size", [64, 1000, 100_000])
@pytest.mark.parametrize("name", BOTH)
def test_a_mean_is_refused_at_any_size_and_type(name: str, size: int, dtype: torch.dtype, cuda: torch.device) -> None:
    runtime = agree(LEAKS[name], around(size), dtype, device=str(cuda), compiler="inductor")
    assert len(refusals(runtime)) == 1
    assert not is_padded(runtime)


@pytest.mark.parametrize("name", FIVE)
def test_a_leak_is_refused(name: str, cuda: torch.device) -> None:
    runtime = agree(LEAKS[name], around(1024), torch.float32, device=str(cuda), compiler="inductor")
    assert len(refusals(runtime)) == 1
    assert not is_padded(runtime)


@DTYPES
@pytest.mark.parametrize("name", STAY)
def test_what_does_not_leak_is_padded(name: str, dtype: torch.dtype, cuda: torch.device) -> None:
    runtime = agree(RIGHT[name], around(1024), dtype, device=str(cuda), compiler="inductor")
    assert refusals(runtime) == []
    assert is_padded(runtime)
