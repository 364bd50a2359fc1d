"""Reads the weights of one adapter from a state dict, and checks that they fit their layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from graphpass.errors import OptionError, ShapeError, did_you_mean
from graphpass.text.lora.op import LoraLinear

__all__ = ["Pair", "adapter_pairs", "checked_pairs"]

Pair = tuple[torch.Tensor, torch.Tensor]
"""Down-projection (rank, in features) and up-projection (out features, rank)."""

_STATE_DICT_NAME = re.compile(r"(?:base_model\.model\.)?(?P<path>.+)\.lora_(?P<which>[AB])(?:\.[^.]+)?\.weight")


def adapter_pairs(name: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an adapter's weights to {layer: (A, B)}; they may have this form, or be a state dict with PEFT's names.

    Raises:
        OptionError: a name is not that of a low-rank adapter of a linear layer, or one tensor of a pair is missing.
    """
    if not any(isinstance(value, torch.Tensor) for value in weights.values()):
        return dict(weights)
    halves: dict[str, dict[str, Any]] = {}
    for key, tensor in weights.items():
        found = _STATE_DICT_NAME.fullmatch(key)
        if found is None:
            raise OptionError(
                f"adapter {name!r} contains something else than low-rank pairs of linear layers",
                expected="names like base_model.model.<layer>.lora_A.weight, or {layer: (A, B)}",
                found=repr(key),
                remedy="pass only lora_A and lora_B of linear layers; other kinds of adapters are not supported",
            )
        halves.setdefault(found["path"], {})[found["which"]] = tensor
    for path, pair in halves.items():
        if len(pair) < 2:
            raise OptionError(
                f"adapter {name!r} has only one half of a pair",
                expected=f"lora_A and lora_B of {path}",
                found=f"lora_{next(iter(pair))} alone",
                remedy="pass the whole state dict of the adapter",
            )
    return {path: (pair["A"], pair["B"]) for path, pair in halves.items()}


def checked_pairs(
    name: str, pairs: Mapping[str, Any], layers: Mapping[str, LoraLinear], max_rank: int
) -> dict[str, Pair]:
    """Check that every pair fits its layer; returns the pairs.

    Raises:
        OptionError: a layer is not a target, or there is no pair.
        ShapeError: a tensor has a wrong shape, dtype or device for its layer, or is not finite.
    """
    if not pairs:
        raise OptionError(
            f"adapter {name!r} has no weights",
            expected="{layer: (A, B)}, at least one pair",
            found="none",
            remedy="run requests without an adapter (None) instead",
        )
    for path, pair in pairs.items():
        if path not in layers:
            raise OptionError(
                f"adapter {name!r} has weights for a layer that takes no adapters",
                expected=f"layers among the targets: {', '.join(sorted(layers)[:4])}, ...",
                found=repr(path),
                remedy=did_you_mean(path, layers, otherwise="name its layers in LoraAdapters(targets=...)"),
            )
        _check_pair(f"{path} of adapter {name!r}", pair, layers[path], max_rank)
    return dict(pairs)


def _check_pair(what: str, pair: Any, layer: LoraLinear, max_rank: int) -> None:
    weight = layer.weight
    is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(t, torch.Tensor) for t in pair)
    shown = ", ".join(f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in pair) if is_pair else repr(pair)[:80]
    rank = pair[0].shape[0] if is_pair and pair[0].dim() == 2 else 0
    if (
        not 1 <= rank <= max_rank
        or pair[0].shape != (rank, layer.in_features)
        or pair[1].shape != (layer.out_features, rank)
        or any(t.dtype != weight.dtype or t.device != weight.device for t in pair)
    ):
        raise ShapeError(
            f"{what} does not fit",
            expected=f"A (rank, {layer.in_features}) and B ({layer.out_features}, rank), rank at most {max_rank}, "
            f"{weight.dtype} on {weight.device}",
            found=shown,
            remedy="pass it in the layer's dtype and on its device, or make LoraAdapters with a larger max_rank",
        )
    if not all(bool(t.isfinite().all()) for t in pair):
        raise ShapeError(
            f"{what} is not finite",
            expected="finite numbers: for tokens of other adapters they are multiplied by zero",
            found="an infinity or NaN",
            remedy="check the file that the weights were loaded from",
        )
