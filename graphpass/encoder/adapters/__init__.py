"""The adapter implements the encoder protocol for stock vision towers."""

from __future__ import annotations

from typing import Any

from torch import nn

from graphpass.encoder.adapters.adapter import TowerAdapter, takes_grids
from graphpass.encoder.adapters.tables import unserved_tower
from graphpass.encoder.protocol import SupportsEncoderCudaGraph

__all__ = ["TowerAdapter", "adapter_for"]


def adapter_for(tower: Any, **options: Any) -> SupportsEncoderCudaGraph:
    """The adapter for a stock tower. An object that implements the encoder protocol is returned unchanged.

    Args:
        tower: a vision tower of transformers, ``model.visual`` or ``model.vision_tower``.
        options: options of :class:`TowerAdapter`.

    Raises:
        EncoderConfigError: the adapter cannot serve the tower, or there are ``options`` for an object that implements
            the protocol.
    """
    if isinstance(tower, nn.Module) and (takes_grids(tower) or hasattr(getattr(tower, "config", None), "image_size")):
        return TowerAdapter(tower, **options)
    if isinstance(tower, SupportsEncoderCudaGraph) and not options:
        return tower
    expected = "a tower that takes grid_thw, one with config.image_size, or an encoder with the protocol and no options"
    raise unserved_tower(expected, f"{type(tower).__module__}.{type(tower).__qualname__}", tower)
