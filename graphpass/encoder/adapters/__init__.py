"""Adapters implement the encoder protocol for stock vision towers; :func:`adapter_for` selects one by class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from graphpass.encoder.adapters.fixed import ClipAdapter, FixedSizeAdapter, SiglipAdapter
from graphpass.encoder.adapters.qwen import GridAdapter, Qwen3VLAdapter, Qwen25VLAdapter
from graphpass.encoder.adapters.tower import refuse_changed
from graphpass.encoder.protocol import SupportsEncoderCudaGraph
from graphpass.errors import EncoderConfigError

__all__ = [
    "ClipAdapter",
    "FixedSizeAdapter",
    "GridAdapter",
    "Qwen3VLAdapter",
    "Qwen25VLAdapter",
    "SiglipAdapter",
    "adapter_for",
]

_ADAPTERS: Mapping[str, Callable[..., SupportsEncoderCudaGraph]] = {
    "CLIPVisionModel": ClipAdapter,
    "Qwen2_5_VisionTransformerPretrainedModel": Qwen25VLAdapter,
    "Qwen3VLVisionModel": Qwen3VLAdapter,
    "SiglipVisionModel": SiglipAdapter,
}


def adapter_for(tower: Any, **options: Any) -> SupportsEncoderCudaGraph:
    """The adapter for a stock tower. An object that implements the encoder protocol itself is returned unchanged.

    Args:
        tower: a vision tower of transformers, ``model.visual`` or ``model.vision_model``, or an instance of a subclass.
        options: options of the adapter, see its class.

    Raises:
        EncoderConfigError: there is no adapter for the class of the tower, the tower overrides parts that the adapter
            replaces, or ``options`` are passed for an object that implements the protocol itself.
    """
    for kind in type(tower).__mro__:
        if kind.__name__ in _ADAPTERS:
            refuse_changed(tower, kind)  # guard: encoder_tower_changed
            return _ADAPTERS[kind.__name__](tower, **options)
    if isinstance(tower, SupportsEncoderCudaGraph) and not options:
        return tower
    raise EncoderConfigError(
        f"there is no adapter for {type(tower).__name__}",
        expected="a tower of the class " + ", ".join(_ADAPTERS) + ", or an encoder with the protocol and no options",
        found=f"{type(tower).__module__}.{type(tower).__qualname__}",
        remedy='pass the vision tower and not the whole model, or follow "Add your tower" in docs/encoder.md',
    )
