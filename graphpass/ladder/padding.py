"""Memory that graphs read their inputs from, and how each input is padded in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphpass.capture.layout import storage_id
from graphpass.compat import memory
from graphpass.errors import ShapeError
from graphpass.padrules import PadRule

__all__ = ["PaddedBuffer", "PaddedBuffers", "by_tensor", "versions_of", "written_since"]


@dataclass(frozen=True, slots=True)
class PaddedBuffer:
    """Memory of one input at one size: static, so that graphs bake its address in and nothing is copied twice.

    Attributes:
        name: the model's argument.
        tensor: the padded input that the model reads.
        dims: {dimension: size field} of the dimensions that are padded.
        rule: what fills the padding; None leaves there what is there.
    """

    name: str
    tensor: torch.Tensor
    dims: Mapping[int, str]
    rule: PadRule | None

    def real(self, sizes: Mapping[str, int]) -> torch.Tensor:
        """The part of the buffer that holds real values, for the real size of each field."""
        view = self.tensor
        for dim, field in self.dims.items():
            if view.shape[dim] != sizes[field]:
                view = view.narrow(dim, 0, sizes[field])
        return view

    def check(self, value: Any, real: torch.Tensor) -> None:
        """Refuse a value that a copy into the ``real`` part would broadcast, convert or move.

        Raises:
            ShapeError: not a tensor of the captured dtype and device, or of the real shape.
        """
        if (
            isinstance(value, torch.Tensor)
            and value.shape == real.shape
            and value.dtype == real.dtype
            and value.device == real.device
        ):
            return
        tensor = isinstance(value, torch.Tensor)
        raise ShapeError(
            f"input {self.name!r} does not fit its buffer",
            expected=f"{tuple(real.shape)} {real.dtype} on {real.device}",
            found=f"{tuple(value.shape)} {value.dtype} on {value.device}" if tensor else repr(value)[:200],
            remedy="pass the real entries alone, in the dtype and on the device of the capture; other inputs need "
            "another manager",
        )

    def fill_padding(self, sizes: Mapping[str, int]) -> None:
        """Fill what lies outside of the real part, which the caller has filled, fused with other inputs.

        Args:
            sizes: the real size of each field. Of no real entries, the last one that ``"repeat"`` repeats is zero.

        Raises:
            ShapeError: a padding function returned another shape.
        """
        if self.rule is None or all(self.tensor.shape[dim] == sizes[field] for dim, field in self.dims.items()):
            return
        if callable(self.rule):
            padded = self.rule(self.real(sizes), tuple(self.tensor.shape))
            if padded.shape != self.tensor.shape:
                raise ShapeError(
                    f"the padding function of input {self.name!r} returned another shape",
                    expected=str(tuple(self.tensor.shape)),
                    found=str(tuple(padded.shape)),
                    remedy="return a tensor of the padded shape it is given",
                )
            self.tensor.copy_(padded)
            return
        inside = self.tensor
        for dim, field in self.dims.items():
            real, padded_size = sizes[field], self.tensor.shape[dim]
            if real == padded_size:
                continue
            rest = inside.narrow(dim, real, padded_size - real)
            if self.rule != "repeat":
                rest.fill_(self.rule)
                inside = inside.narrow(dim, 0, real)
            elif real:
                rest.copy_(inside.narrow(dim, real - 1, 1).expand_as(rest))
            else:
                rest.zero_()


class PaddedBuffers:
    """One memory for each input, as large as the largest size needs; every size reads the start of it.

    A subclass says what the start is (of each padded dimension, or of the flat memory), and when padding has to be
    filled (after a batch that is smaller than the one before, or after each value).
    """

    def __init__(self, allocated: Mapping[str, torch.Tensor]) -> None:
        self._memory = dict(allocated)

    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(tensor.nbytes for tensor in self._memory.values())

    def storages(self) -> frozenset[int]:
        """Addresses of their storages."""
        return frozenset(map(storage_id, self._memory.values()))


def by_tensor(buffers: Mapping[str, PaddedBuffer]) -> dict[int, PaddedBuffer]:
    """Id of a buffer's tensor -> the buffer."""
    return {id(buffer.tensor): buffer for buffer in buffers.values()}


def versions_of(buffers: Mapping[str, PaddedBuffer]) -> dict[str, int | None]:
    """The version of each buffer's contents: whoever writes to one counts it up."""
    return {name: memory.version_of(buffer.tensor) for name, buffer in buffers.items()}


def written_since(buffers: Mapping[str, PaddedBuffer], versions: Mapping[str, int | None]) -> list[str]:
    """The inputs whose contents were written to since :func:`versions_of` returned these."""
    return [name for name, version in versions_of(buffers).items() if version != versions[name]]
