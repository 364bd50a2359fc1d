"""Input buffers of graphs, and the padding of inputs to the size of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphpass.capture.layout import storage_id
from graphpass.compat import memory
from graphpass.errors import ShapeError
from graphpass.padrules import PadRule, fill_by_function, fill_parts, padding_parts

__all__ = ["PaddedBuffer", "PaddedBuffers", "by_tensor", "versions_of", "written_since"]


@dataclass(frozen=True, slots=True)
class PaddedBuffer:
    """The buffer of one input at one size. Its address is static: graphs read it in place, without another copy.

    Attributes:
        name: name of the model's argument.
        tensor: the padded input that the model reads.
        dims: {padded dimension: size field}.
        rule: how the padding is filled; None leaves it unchanged.
    """

    name: str
    tensor: torch.Tensor
    dims: Mapping[int, str]
    rule: PadRule | None

    def real(self, sizes: Mapping[str, int]) -> torch.Tensor:
        """A view of the real entries of the buffer.

        Args:
            sizes: {size field: real size}.
        """
        view = self.tensor
        for dim, field in self.dims.items():
            if view.shape[dim] != sizes[field]:
                view = view.narrow(dim, 0, sizes[field])
        return view

    def check(self, value: Any, real: torch.Tensor) -> None:
        """Refuse a value that ``copy_`` into ``real`` would broadcast, convert or move to another device.

        Args:
            value: the user's input.
            real: the view of the buffer's real entries, see :meth:`real`.

        Raises:
            ShapeError: the value is not a tensor with the shape, dtype and device of ``real``.
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
            remedy="pass the unpadded input with the dtype and device of the capture; create another manager for other "
            "inputs",
        )

    def fill_padding(self, sizes: Mapping[str, int]) -> None:
        """Fill the padding. The caller has already copied the real entries.

        Args:
            sizes: {size field: real size}. If there are no real entries, ``"repeat"`` fills with zero.

        Raises:
            ShapeError: a padding function returned another shape.
        """
        real_sizes = {dim: sizes[field] for dim, field in self.dims.items()}
        if not callable(self.rule):
            fill_parts(() if self.rule is None else padding_parts(self.tensor, real_sizes, self.rule))
        elif any(self.tensor.shape[dim] != size for dim, size in real_sizes.items()):
            fill_by_function(self.tensor, self.real(sizes), self.rule, name=f"input {self.name!r}")


class PaddedBuffers:
    """One allocation for each input, large enough for the largest size; smaller sizes use the start of it.

    A subclass defines the start (of each padded dimension, or of the flat memory), and when padding is filled (after a
    batch that is smaller than the batch before, or after each value).

    Args:
        allocated: {name of an input: its allocation}.
    """

    def __init__(self, allocated: Mapping[str, torch.Tensor]) -> None:
        self._memory = dict(allocated)

    def num_bytes(self) -> int:
        """Size of all allocations in bytes."""
        return sum(tensor.nbytes for tensor in self._memory.values())

    def storages(self) -> frozenset[int]:
        """Storage ids of all allocations."""
        return frozenset(map(storage_id, self._memory.values()))


def by_tensor(buffers: Mapping[str, PaddedBuffer]) -> dict[int, PaddedBuffer]:
    """{id of a buffer's tensor: the buffer}."""
    return {id(buffer.tensor): buffer for buffer in buffers.values()}


def versions_of(buffers: Mapping[str, PaddedBuffer]) -> dict[str, int | None]:
    """{name: version counter of the buffer's tensor}. Every in-place write increments the counter."""
    return {name: memory.version_of(buffer.tensor) for name, buffer in buffers.items()}


def written_since(buffers: Mapping[str, PaddedBuffer], versions: Mapping[str, int | None]) -> list[str]:
    """Names of the inputs whose buffers were written to since :func:`versions_of` returned ``versions``."""
    return [name for name, version in versions_of(buffers).items() if version != versions[name]]
