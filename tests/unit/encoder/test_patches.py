"""Convolutions over whole patches: the product in their place, hooks and other convolutions as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphpass.encoder.adapters.tower import WholePatches

KERNEL = (2, 4, 4)


class Called(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def both(convolution: nn.Module, patches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """As it is, as a product, and whether it was one."""
    with torch.no_grad():
        expected = convolution(patches)
        with Called() as called, WholePatches():
            found = convolution(patches)
    return expected, found, "convolution" not in called.names


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("padding", [0, "valid", (0, 0, 0)])
def test_a_kernel_that_sees_everything(bias: bool, count: int, padding: Any) -> None:
    convolution = nn.Conv3d(3, 8, KERNEL, stride=KERNEL, bias=bias, padding=padding)
    expected, found, is_product = both(convolution, torch.randn(count, 3, *KERNEL))
    assert is_product
    assert found.shape == expected.shape == (count, 8, 1, 1, 1)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"stride": KERNEL}, (2, 8, 4)),
        ({"padding": 1}, KERNEL),
        ({"kernel_size": (1, 3, 3), "padding": "same"}, (1, 3, 3)),
        ({"padding": (0, 0, 1)}, KERNEL),
        ({"groups": 3}, KERNEL),
    ],
)
def test_others_stay(options: dict[str, Any], size: tuple[int, ...]) -> None:
    expected, found, is_product = both(nn.Conv3d(3, 6, **{"kernel_size": KERNEL, **options}), torch.randn(2, 3, *size))
    assert not is_product
    torch.testing.assert_close(found, expected)


def test_a_kernel_that_sees_more_is_refused_as_ever() -> None:
    with torch.no_grad(), WholePatches(), pytest.raises(RuntimeError, match="Kernel size"):
        nn.Conv3d(3, 6, (2, 2, 2), dilation=2)(torch.randn(1, 3, 2, 2, 2))


def test_hooks_are_called_and_autocast_casts() -> None:
    convolution, seen = nn.Conv3d(3, 8, KERNEL, stride=KERNEL), []
    convolution.register_forward_hook(lambda *_: seen.append(1))
    with torch.autocast("cpu", torch.bfloat16):
        expected, found, is_product = both(convolution, torch.randn(2, 3, *KERNEL))
    assert (is_product, len(seen)) == (True, 2)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)
