"""Rotary embeddings of Hugging Face decoders whose frequencies depend on the longest text of a batch.

Two kinds do: ``dynamic`` frequencies grow with the longest text seen so far, and ``longrope`` has one set of factors
for short texts and one for long texts. Transformers compares the largest position of each call with the length of the
texts that the model was trained on, and switches the frequencies of the whole call. In a batch of many requests one
long text would so change the frequencies of the others, and a text that becomes long has keys in the cache that were
rotated with the frequencies for short ones. Up to the length of training the frequencies are fixed, and served.
"""

from __future__ import annotations

from typing import Any

import torch

from graphpass.errors import OptionError

__all__ = ["fix_frequencies"]

_FIXED = {"dynamic": "unscaled (graphpass)", "longrope": "short factors (graphpass)"}
"""{rope type: the type of a module with fixed frequencies}. Transformers does not change frequencies of the latter."""


def fix_frequencies(model: torch.nn.Module, max_seq_len: int) -> None:
    """Give the rotary embeddings of a model the frequencies of texts up to ``max_seq_len`` tokens, in every call.

    Sets ``rope_type`` and the buffer of frequencies of embeddings whose frequencies change; others are left alone.

    Args:
        model: a Hugging Face decoder.
        max_seq_len: the longest text.

    Raises:
        OptionError: longer texts have other frequencies than shorter ones; the error names the longest length that is
            served. The model is unchanged.
    """
    changing = [
        (name, module, layer_type, kind)
        for name, module in model.named_modules()
        for layer_type, rope_type in _rope_types(module)
        if (kind := _changing_kind(rope_type)) is not None
    ]
    for name, module, layer_type, kind in changing:
        longest, setting = _longest_fixed(module, layer_type, kind)
        if max_seq_len > longest:  # guard: rope_longest
            raise OptionError(
                f"the rotary frequencies of this model change once a text is longer than {longest} tokens",
                expected=f"max_seq_len of at most {longest}, the model's {setting}: a longer text would change the "
                "frequencies of all requests of its batch, and those of its own keys in the cache",
                found=f"max_seq_len={max_seq_len}, rope_type {kind!r} in {name or 'the model'} "
                f"({type(module).__name__})",
                remedy=f"pass max_seq_len={longest}, or use a model whose rope_type has fixed frequencies (yarn, "
                "llama3, linear)",
            )
    for _, module, layer_type, kind in changing:
        _fix(module, layer_type, kind)


def _rope_types(module: torch.nn.Module) -> list[tuple[str | None, str]]:
    """(type of layers, type of their rotary embedding) of a module; the first is None if all layers have the same."""
    rope_type = getattr(module, "rope_type", None)
    if isinstance(rope_type, dict):
        return list(rope_type.items())
    return [(None, rope_type)] if isinstance(rope_type, str) else []


def _changing_kind(rope_type: str) -> str | None:
    """The kind of a rotary embedding, also if it is fixed already; None if its frequencies never change."""
    by_name = {fixed: kind for kind, fixed in _FIXED.items()}
    if "dynamic" in rope_type:
        return "dynamic"
    return rope_type if rope_type == "longrope" else by_name.get(rope_type)


def _prefixed(layer_type: str | None, name: str) -> str:
    """The attribute that transformers uses for this type of layers."""
    return name if layer_type is None else f"{layer_type}_{name}"


def _longest_fixed(module: Any, layer_type: str | None, kind: str) -> tuple[int, str]:
    """The longest text that has the frequencies of shorter ones, and the setting that says so."""
    if kind == "dynamic":
        return module.original_max_seq_len, "max_position_embeddings"
    parameters = module.config.rope_parameters
    parameters = parameters if layer_type is None else parameters[layer_type]
    return parameters["original_max_position_embeddings"], "original_max_position_embeddings"


def _fix(module: Any, layer_type: str | None, kind: str) -> None:
    """Give one embedding its original frequencies for good. Does nothing if it has them: graphs may read them."""
    if dict(_rope_types(module))[layer_type] == _FIXED[kind]:
        return
    buffer = _prefixed(layer_type, "inv_freq")
    # A copy: the buffer may be the tensor of the frequencies for long texts, which transformers keeps.
    original = getattr(module, _prefixed(layer_type, "original_inv_freq"))  # guard: rope_original
    setattr(module, buffer, original.to(getattr(module, buffer).device, copy=True))
    module.rope_type = _FIXED[kind] if layer_type is None else {**module.rope_type, layer_type: _FIXED[kind]}
