"""Paged attention as an attention implementation of Hugging Face's decoders, and what their layers need of it.

One run of a decoder on a row of a few tokens finds that out, from each layer's call of the attention function: fields
of configs differ from class to class. The masks that a model builds for stock attention are functions of two positions,
with which the run compares the mask that paged attention would use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from graphpass.context import get_forward_context, set_forward_context
from graphpass.errors import GraphpassError, OptionError
from graphpass.ops import by_token, refuse_unserved, register_attention
from graphpass.text.hfmodel import restored_on_error
from graphpass.text.paged.kvcache import LayerMask, PagedLayer, PositionScale
from graphpass.text.paged.metadata import AttentionCall, PagedStep
from graphpass.text.paged.op import GIVE_BACK, NO_WINDOW

HUGGING_FACE_NAME = "graphpass_paged"
_HARMLESS = (
    "cache_position",
    "is_causal",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "s_aux",
    "softcap",
    "use_cache",
)
"""Arguments that this function reads, or that do not change the result. Saved starts compare their order."""


def register_with_hugging_face() -> str:
    """Register paged attention with transformers; returns its ``attn_implementation``."""
    register_attention(HUGGING_FACE_NAME, paged_attention_of_layer)
    return HUGGING_FACE_NAME


def scales_by_row(module: Any) -> bool:
    """Whether a layer multiplies queries by a factor of their row, which it takes for their position (Llama 4)."""
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


def paged_attention_of_layer(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """With the signature that transformers calls."""
    query, key, value, scale = by_token(
        (query, key, value),
        scaling,
        what="paged attention takes the tokens of all requests in one row: input_ids and position_ids [1, tokens]",
        remedy=f"{GIVE_BACK}; in steps of your own, concatenate the requests: the metadata says whose each token is",
    )
    is_causal = getattr(module, "is_causal", True) and kwargs.get("is_causal") is not False
    asked = {"attention_mask": attention_mask is not None, "dropout": bool(dropout), "is_causal=False": not is_causal}
    # guard: paged_unknown_arguments
    unknown = {name: argument is not None for name, argument in kwargs.items() if name not in _HARMLESS}
    refuse_unserved(
        module,
        {**asked, **unknown, "attn_temperature_tuning": scales_by_row(module)},  # guard: paged_scale_by_row
        what="paged attention",
        expected="causal attention, with or without a sliding window, chunks, a soft cap or sinks",
        remedy="use PagedAttention.for_model(model, ...); leave masks and dropout out (model.eval()); other attention "
        "needs a backend of its own",
    )
    out = query.new_empty((*query.shape[:2], value.shape[2]))
    window = NO_WINDOW if sliding_window is None else sliding_window
    softcap = kwargs.get("softcap") or 0.0
    torch.ops.graphpass.paged_attention(
        query, key, value, out, module.layer_idx, scale, window, softcap, kwargs.get("s_aux")
    )
    return out.unsqueeze(0), None


# -- the run that describes the layers ---------------------------------------------------------------------------------

_PROBE = "graphpass_probe"
_NUM_TOKENS = 3
_REMEDY = "generate with the model's own generate(); paged attention cannot serve this class"

_Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``f(batch, head, query position, key position)``: whether the query attends to the key; the shapes are broadcast."""


def served_layers(model: Any, *, max_seq_len: int) -> list[PagedLayer | None]:
    """Set a decoder to paged attention and describe its attention layers."""
    name = register_with_hugging_face()
    register_attention(_PROBE, _probed_attention)
    importlib.import_module("transformers").AttentionMaskInterface.register(_PROBE, _mask_with_rule)
    probe = _Probe(max_seq_len)
    with restored_on_error(model):
        probe.scales_of(model)
        model.set_attn_implementation(_PROBE)
        _run(model, probe)
        if not probe.layers:
            raise OptionError(
                f"{type(model).__name__} does not use the attention implementation that is set",
                expected="layers that call the function of attn_implementation "
                f"({name}), by transformers' AttentionInterface",
                found="no such call: its own attention would run over the tokens of all requests",
                remedy=_REMEDY,
            )
        _refuse_dropped_keys(model, probe.layers.values(), max_seq_len)
        model.set_attn_implementation(name)
    return [probe.layers.get(number) for number in range(max(probe.layers) + 1)]


def _refuse_dropped_keys(model: Any, layers: Iterable[PagedLayer], max_seq_len: int) -> None:
    """Refuse a model whose config has a window that its masks lack: its own generate() drops keys."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if getattr(config, "layer_types", None) is not None or not window or window >= max_seq_len:
        return
    if any(layer.mask.window != window for layer in layers):
        raise OptionError(
            f"the masks of {type(model).__name__} are not those of its config",
            expected=f"sliding windows of {window} positions in all layers, as transformers' cache has them",
            found="layers that attend to earlier positions too",
            remedy=f"set config.sliding_window to None, or serve sequences of at most {window} tokens (max_seq_len)",
        )


class _ScaledByOp:
    """Stands in for a layer's ``attn_temperature_tuning``; false, because the op scales queries itself."""

    def __init__(self, scale: PositionScale) -> None:
        self.scale = scale

    def __bool__(self) -> bool:
        return False


class _Probe(PagedStep):
    """Stands in for a step's metadata, and describes each layer that calls the op."""

    def __init__(self, max_seq_len: int) -> None:
        self.layers: dict[int, PagedLayer] = {}
        self._max_seq_len = max_seq_len
        self._scales: dict[Any, PositionScale] = {}
        self._masks: dict[_Rule, LayerMask] = {}
        self.module: Any = None  #: the layer whose call of the op comes next
        self.rule: _Rule | None = None  #: its mask

    def scales_of(self, model: torch.nn.Module) -> None:
        """Turn off the scales by row: the op scales by position."""
        layers: Iterable[Any] = model.modules()
        for module in layers:
            if scales_by_row(module):
                scale = PositionScale(float(module.floor_scale), float(module.attn_scale))
                module.attn_temperature_tuning = _ScaledByOp(scale)
            setting = getattr(module, "attn_temperature_tuning", None)
            if isinstance(setting, _ScaledByOp):
                self._scales[module] = setting.scale

    def attend(self, call: AttentionCall) -> None:
        name = type(self.module).__name__
        if call.layer in self.layers:  # guard: paged_layer_twice
            raise OptionError(
                f"{name} runs attention twice as layer {call.layer}",
                expected="one call for each layer_idx in a forward: keys and values are stored by layer",
                found="a second call, which would overwrite the keys of the first",
                remedy="paged attention cannot serve a model that runs a layer several times",
            )
        rule, device = self.rule, call.out.device
        mask = LayerMask(window=call.window) if rule is None else self._mask_of(name, rule, device)
        self.layers[call.layer] = PagedLayer(
            num_kv_heads=call.key.shape[1],
            head_dim=call.key.shape[2],
            value_dim=call.value.shape[2],
            mask=mask.within(self._max_seq_len),
            is_plain=call.is_plain,
            query_scale=self._scales.get(self.module),
        )
        call.out.zero_()

    def _mask_of(self, name: str, rule: _Rule, device: torch.device) -> LayerMask:
        """The mask that is equal to a rule up to the longest sequence."""
        if rule not in self._masks:
            try:
                mask = _mask_like(rule, torch.arange(self._max_seq_len, device=device))
            except (IndexError, RuntimeError, TypeError, ValueError) as error:  # it depends on the tokens of this run
                raise _unserved_mask(name, f"a mask that is no function of positions: {error}") from error
            if mask is None:
                raise _unserved_mask(name, "another mask")
            self._masks[rule] = mask
        return self._masks[rule]


def _unserved_mask(name: str, found: str) -> OptionError:
    return OptionError(
        f"paged attention does not support the mask of {name}",
        expected="causal attention, with or without a sliding window or chunks",
        found=found,
        remedy=_REMEDY,
    )


def _probed_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """The attention function of the run."""
    probe = get_forward_context().attn_metadata
    assert isinstance(probe, _Probe)
    rule = getattr(attention_mask, "graphpass_rule", None)
    if not isinstance(getattr(module, "layer_idx", None), int):
        raise OptionError(
            f"{type(module).__name__} does not know the number of its layer",
            expected="layer_idx, which selects the layer's keys and values in the cache",
            found=repr(getattr(module, "layer_idx", None)),
            remedy=_REMEDY,
        )
    probe.module, probe.rule = module, rule
    return paged_attention_of_layer(module, query, key, value, attention_mask if rule is None else None, **kwargs)


def _mask_with_rule(*, q_length: int, kv_length: int, mask_function: _Rule, **more: Any) -> torch.Tensor:
    """The mask function of the run: any tensor, with the rule as its attribute."""
    mask = torch.ones(1, 1, int(q_length), int(kv_length), dtype=torch.bool, device=more.get("device"))
    mask.graphpass_rule = mask_function  # type: ignore[attr-defined]
    return mask


def _run(model: Any, probe: _Probe) -> None:
    tokens = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device=model.device)
    positions = torch.arange(_NUM_TOKENS, device=model.device).unsqueeze(0)
    try:
        with torch.no_grad(), set_forward_context(probe):
            model(input_ids=tokens, position_ids=positions, use_cache=False)
    except GraphpassError:
        raise
    except Exception as error:
        raise OptionError(
            f"{type(model).__name__} does not run on a row of tokens",
            expected="a decoder: model(input_ids=[1, tokens], position_ids=[1, tokens], use_cache=False)",
            found=f"{type(error).__name__}: {error}",
            remedy=_REMEDY,
        ) from error


def _visible(rule: _Rule, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    first = torch.zeros((), dtype=torch.int64, device=queries.device)
    return rule(first, first, queries.unsqueeze(1), keys.unsqueeze(0)).expand(len(queries), len(keys))


def _mask_like(rule: _Rule, positions: torch.Tensor) -> LayerMask | None:
    """The mask that is equal to ``rule`` at all positions, 0, 1, 2...; None if there is none.

    A limit is the first position that does not see key 0; whether it sees key 1 tells a window from a chunk. Then the
    mask is compared in all rows, or in rows around the multiples of the limit and others.
    """
    is_blind = ~_visible(rule, positions, positions[:1]).flatten()
    mask = LayerMask()
    if is_blind.any():
        limit = int(is_blind.nonzero()[0])
        sees_next = limit > 0 and bool(_visible(rule, positions[limit : limit + 1], positions[1:2]))
        mask = LayerMask(window=limit) if sees_next else LayerMask(chunk=limit)
    for row in _compared_rows(len(positions), mask.window or mask.chunk):
        query = positions[row : row + 1]
        if not torch.equal(_visible(rule, query, positions), mask.visible(query.unsqueeze(1), positions)):
            return None  # guard: paged_mask_of_model
    return mask


_ALL_ROWS = 512


def _compared_rows(max_seq_len: int, limit: int) -> list[int]:
    if max_seq_len <= _ALL_ROWS:
        return list(range(max_seq_len))
    bounds = [limit * n + more for n in (1, 2, 3) for more in (-1, 0, 1) if limit]
    spread = [max_seq_len * n // 32 for n in range(32)]
    return sorted({*range(32), *(row for row in bounds if 0 <= row < max_seq_len), *spread, max_seq_len - 1})
