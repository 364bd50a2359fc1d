"""The model's inputs at one padded shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from graphpass.engine.buffers import Sizes
from graphpass.ladder.padding import PaddedBuffer

__all__ = ["PaddedInputs"]


@dataclass(frozen=True, slots=True)
class PaddedInputs:
    """The model's inputs at one padded shape: views of the persistent buffers.

    Attributes:
        sizes: the padded size of each key field.
        buffers: {input name: view of its buffer, with its padding rule}.
        arguments: {input name: the same view}, the keyword arguments of the model.
        is_padding: mask of the padded tokens, bool (num_tokens,).
    """

    sizes: Sizes
    buffers: Mapping[str, PaddedBuffer]
    arguments: Mapping[str, torch.Tensor]
    is_padding: torch.Tensor
