"""Whether an encoder's weights are where its graphs read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from graphpass import compat
from graphpass.capture.ambient import training_of
from graphpass.capture.places import Places

__all__ = ["EncoderWeights"]


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """Every parameter, buffer and submodule of an encoder at capture, and where it was.

    The weights are held, so that memory that a graph reads is never given away. Found are the modules that the encoder
    is, or has as attributes.
    """

    _places: Places
    _tensors: list[Any]
    _addresses: list[int | None]
    _positions: list[int]
    modules: tuple[torch.nn.Module, ...]

    @classmethod
    def of(cls, model: object) -> EncoderWeights:
        """The weights as of now."""
        attributes = getattr(model, "__dict__", {}).values()
        roots = [part for part in (model, *attributes) if isinstance(part, torch.nn.Module)]
        modules = tuple({id(module): module for root in roots for module in root.modules()}.values())
        places = [
            (owner, name, kept)
            for module in modules
            for owner in (module._parameters, module._buffers, module._modules)
            for name, kept in owner.items()
        ]
        tensors = [kept for _, _, kept in places if isinstance(kept, torch.Tensor)]
        addresses: list[int | None] = [tensor.data_ptr() for tensor in tensors]
        return cls(Places.of(places), tensors, addresses, list(range(len(tensors))), modules)

    def in_place(self) -> bool:
        """Whether all of it is what it was, at the address where it was."""
        return self._places.in_place() and compat.data_ptrs_equal(self._tensors, self._addresses, self._positions)

    def training(self) -> tuple[bool, ...]:
        """Whether each of the modules is in training mode now."""
        return training_of(self.modules)
