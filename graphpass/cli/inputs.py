"""Example inputs for a model: shapes from the command line, or what a Hugging Face configuration says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from graphpass.errors import CommandError

__all__ = ["inputs_for_config", "inputs_of_shapes"]

_SHAPE = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<dims>\d+(?:x\d+)*)(?::(?P<dtype>\w+))?(?:<(?P<below>\d+))?")
# Sizes that no other dimension of a model is likely to have: equal sizes would count as one.
_BATCH, _LENGTH, _FRAMES, _SAMPLES = 3, 11, 3000, 4000
_REMEDY = "write NAME=SHAPE:DTYPE<BELOW, as 6x16, x=6x16:float16 or input_ids=3x11:int64<30522"


def inputs_of_shapes(shapes: Sequence[str], device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Random tensors for ``--input``: positional arguments and keyword arguments.

    Raises:
        CommandError: a shape or dtype is invalid.
    """
    args: list[torch.Tensor] = []
    kwargs: dict[str, Any] = {}
    for text in shapes:
        match = _SHAPE.fullmatch(text)
        if match is None:
            raise CommandError("an input cannot be read", expected="a shape", found=repr(text), remedy=_REMEDY)
        shape = [int(size) for size in match["dims"].split("x")]
        tensor = _random(shape, _dtype(match["dtype"] or "float32"), int(match["below"] or 2), device)
        if match["name"]:
            kwargs[match["name"]] = tensor
        else:
            args.append(tensor)
    return tuple(args), kwargs


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CommandError("an input has an unknown dtype", expected="a dtype of torch", found=name, remedy=_REMEDY)
    return dtype


def _random(shape: Sequence[int], dtype: torch.dtype, below: int, device: torch.device) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, device=device).to(dtype)
    return torch.randint(0, below, tuple(shape), device=device).to(dtype)


def inputs_for_config(model: Any, device: torch.device) -> dict[str, torch.Tensor]:
    """Small inputs for a Hugging Face model, by the name of its main input.

    Raises:
        CommandError: the main input is of an unknown kind.
    """
    config, name = model.config, str(model.main_input_name)
    text = getattr(config, "text_config", config)
    if name == "input_ids" and hasattr(text, "vocab_size"):
        ids = _random((_BATCH, _LENGTH), torch.int64, min(text.vocab_size, 1000), device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    shape = {"pixel_values": _picture, "input_features": _spectrogram, "input_values": _sound}.get(name)
    if shape is None:
        raise CommandError(
            f"graphpass knows no small inputs for {type(model).__name__}",
            expected="a model whose main input is input_ids, pixel_values, input_features or input_values",
            found=name,
            remedy="write a factory that returns (model, inputs), and name it as module:factory",
        )
    return {name: _random(shape(config), dtype, 2, device)}


def _picture(config: Any) -> tuple[int, ...]:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 224
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return (_BATCH, int(getattr(vision, "num_channels", 3)), int(height), int(width))


def _spectrogram(config: Any) -> tuple[int, ...]:
    return (_BATCH, int(config.num_mel_bins), 2 * int(getattr(config, "max_source_positions", _FRAMES // 2)))


def _sound(_: Any) -> tuple[int, ...]:
    return (_BATCH, _SAMPLES)
