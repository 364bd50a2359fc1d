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
        buffers: by input.
        arguments: the tensors alone, as the model is called with them.
        is_padding: which tokens are padding.
    """

    sizes: Sizes
    buffers: Mapping[str, PaddedBuffer]
    arguments: Mapping[str, torch.Tensor]
    is_padding: torch.Tensor
