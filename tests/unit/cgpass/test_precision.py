"""How close the check of padding asks results to be: by type, by the precision of products, by the noise of replays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cgpass import paddingcheck
from tests.unit.cgpass.attended import Make
from tests.unit.cgpass.test_made import SIZES, made, mean, of_calls


def convolved(x: torch.Tensor) -> torch.Tensor:
    return F.conv1d(x.mT, torch.ones(3, 6, 3), padding=1).softmax(-1)


def multiplied(x: torch.Tensor) -> torch.Tensor:
    return (x @ torch.ones(6, 3)).softmax(1)


@contextlib.contextmanager
def precision(value: str, *settings: Any) -> Iterator[None]:
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = value
        yield
    finally:
        for setting, was in zip(settings, before, strict=True):
            setting.fp32_precision = was


@pytest.mark.parametrize(
    ("model", "setting", "is_padded"),
    [
        (convolved, "conv", True),
        (convolved, "matmul", False),  # one kind of product has nothing to say about another
        (multiplied, "matmul", True),
        (mean, "conv", False),
    ],
)
def test_products_of_fewer_bits_are_compared_as_16_bit_types(
    compiled: Make, monkeypatch: pytest.MonkeyPatch, model: Any, setting: str, *, is_padded: bool
) -> None:
    """A device that computes them as TF32 may differ by 1e-3 between sizes; what has none keeps 1e-4."""
    unpadded = paddingcheck.PaddedCall.unpadded
    rounded = lambda call: {name: one * 1.002 for name, one in unpadded(call).items()}  # noqa: E731
    monkeypatch.setattr(paddingcheck.PaddedCall, "unpadded", rounded)
    backends: Any = torch.backends
    fast = made(compiled, model)
    with precision("tf32", getattr(backends.mkldnn, setting)):
        fast.serve(of_calls(SIZES), passes=2)
    assert fast.is_padded == is_padded
    assert any("differ from a run without padding" in problem.what for problem in fast.problems) != is_padded


def test_each_device_and_kind_of_product_has_its_own_setting() -> None:
    backends: Any = torch.backends
    cpu, cuda, kinds = torch.device("cpu"), torch.device("cuda"), ("conv", "matmul", "rnn")
    settings = {
        ("conv", cuda): backends.cudnn.conv,
        ("rnn", cuda): backends.cudnn.rnn,
        ("matmul", cuda): backends.cuda.matmul,
        ("conv", cpu): backends.mkldnn.conv,
    }
    with precision("ieee", *settings.values()):
        assert not any(paddingcheck.may_round(kinds, device) for device in (cpu, cuda))
        for at, setting in settings.items():
            with precision("tf32", setting):
                found = {
                    (kind, device) for kind in kinds for device in (cpu, cuda) if paddingcheck.may_round([kind], device)
                }
                assert found == {at}


def test_replays_that_differ_may_differ_as_much_from_a_run_without_padding() -> None:
    """As the atomic additions of a scatter on a GPU do: in bfloat16 more than the allowance for rounding."""
    replayed, unpadded = {"output 0": torch.tensor([1.0, 2.0])}, {"output 0": torch.tensor([1.0, 2.01])}
    assert paddingcheck._fault_of_sizes(replayed, unpadded, {"output 0": 0.0}, is_coarse=False) is not None
    assert paddingcheck._fault_of_sizes(replayed, unpadded, {"output 0": 0.001}, is_coarse=False) is not None
    assert paddingcheck._fault_of_sizes(replayed, unpadded, {"output 0": 0.004}, is_coarse=False) is None
