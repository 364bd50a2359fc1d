"""Fused attention: padded keys need a mask or causal order."""

from __future__ import annotations

from dataclasses import replace

import torch

from graphpass.regions.padding.calls import HIDE_PADDING, OpCall, PaddingReason, PaddingRule
from graphpass.regions.padding.nodes import TensorShape
from graphpass.regions.padding.rules.pointwise import broadcast
from graphpass.regions.padding.rules.randomness import draws
from graphpass.regions.padding.rules.tables import aten
from graphpass.regions.padding.values import (
    ALL_FINITE,
    LOW_SCORES,
    VISIBLE_ENTRY,
    Approximate,
    Factors,
    Pad,
    PaddedValue,
    Place,
    is_finite,
    is_low,
    is_number,
)

__all__ = ["RULES"]


def _attention(call: OpCall) -> PaddedValue | tuple[PaddedValue | None, ...]:
    """``softmax(q @ k.T + mask) @ v`` over [..., length, features]; all outputs but the first are for the backward."""
    call.no_padded_numbers()
    if call.argument("dropout_p", default=0.0) != 0.0:  # guard: proof_attention_dropout
        draws(call)
    query, key, value = call.tensor("query"), call.tensor("key"), call.tensor("value")
    for tensor in (query, key, value):
        call.unpadded(tensor, [tensor.rank - 1], "attends with features over")  # guard: proof_attention_features
    mask = call.argument("attn_mask", "attn_bias")
    batches = _batches(call, query, key, value, mask if isinstance(mask, PaddedValue) else None)
    keys = call.unify(key.factors[-2], value.factors[-2])
    queries = query.factors[-2]
    if isinstance(mask, PaddedValue):
        _check_rows(call, mask, queries)
    if call.sizes.any_padded(keys):
        _check_keys(call, queries, keys, mask)
        for tensor in (key, value):
            _check_finite(call, tensor)
    elif call.argument("is_causal", default=False) and call.sizes.any_padded(queries[1:]):
        raise call.refuse(f"causal attention of queries with padding inside: {list(queries)}", queries[-1])
    result = call.carried(PaddedValue((*batches, queries, value.factors[-1])), query, key, value)
    if isinstance(mask, PaddedValue):
        result = _without_hidden_rows(call, result, mask)
    if not isinstance(call.result, tuple):
        return result
    reason = PaddingReason("the outputs for its backward are not followed")
    sides = (call.reached(call.fresh(of), reason) if isinstance(of, TensorShape) else None for of in call.result[1:])
    return (result, *sides)


def _batches(
    call: OpCall, query: PaddedValue, key: PaddedValue, value: PaddedValue, mask: PaddedValue | None
) -> list[Factors]:
    """The factors of the dimensions before the last two. Keys and values may have fewer heads if heads are unpadded."""
    batches: list[Factors] = []
    for at in range(query.rank - 2):
        met = query.factors[at]
        for other in (key, value, mask):
            dim = at - query.rank + (other.rank if other is not None else 0)
            if other is not None and dim >= 0:
                met = call.unify(met, other.factors[dim])
        batches.append(met)
    return batches


def _check_rows(call: OpCall, mask: PaddedValue, queries: Factors) -> None:
    if mask.rank > 1 and call.sizes.unified(mask.factors[-2], queries) != queries:
        raise call.refuse(f"a mask of rows {list(mask.factors[-2])} for queries {list(queries)}", queries[0])


def _without_hidden_rows(call: OpCall, result: PaddedValue, mask: PaddedValue) -> PaddedValue:
    """``result``, not finite in padding from which the mask hides all keys: some kernels compute NaN there."""
    wide = broadcast(call, mask, (*result.factors[:-1], mask.factors[-1]))
    pads = {place: wide.pad_at(place) for place in call.places(result)}
    hidden = [place for place, pad in pads.items() if pad is False or not is_finite(pad)]
    return result.with_pads({**result.pads, **dict.fromkeys(hidden, Approximate.NOT_FINITE)})


def _check_finite(call: OpCall, tensor: PaddedValue) -> None:
    """Refuse keys and values whose padding is not finite: a weight of zero times infinity is NaN."""
    for place in call.places(tensor, [tensor.rank - 2]):
        if not is_finite(tensor.pad_at(place)):  # guard: proof_nan_as_values
            raise call.refuse_place(tensor, place, "multiplies by weights of zero over", HIDE_PADDING)


def _check_keys(call: OpCall, queries: Factors, keys: Factors, mask: object) -> None:
    """Refuse padded keys that a real query may see."""
    at_fault = next(size for size in keys if call.padded(size))
    if isinstance(mask, PaddedValue) and mask.factors[-1] == keys:
        places = call.places(mask, [mask.rank - 1])
        pad = mask.pad_at(places[0]) if len(places) == 1 else None
        # guard: proof_attention_bool_mask, proof_attention_mask
        hides = pad is False if mask.dtype is torch.bool else is_low(pad)
        if hides:
            call.assumptions.update([ALL_FINITE, VISIBLE_ENTRY, *([LOW_SCORES] if pad is Approximate.MASKED else [])])
            return
        contents = "" if pad is None else f" (its padding holds {getattr(pad, 'value', pad)})"
        if not call.argument("is_causal", default=False):
            why = f"attends to padded keys: the mask does not hide them{contents}"
            raise call.refuse(why, at_fault, HIDE_PADDING)
    if call.argument("is_causal", default=False) and queries == keys and call.sizes.starts_clean(keys):
        call.assumptions.add(ALL_FINITE)
        return
    # guard: proof_attention_without_mask
    raise call.refuse("attends to padded keys without a mask", at_fault, HIDE_PADDING)


def _self_attention(call: OpCall) -> PaddedValue:
    """``nn.TransformerEncoderLayer`` in eval mode: self-attention, then operators within rows."""
    value = call.tensor("src")
    _check_weights(call, "src", "mask")
    attended = _attention(call.with_arguments(query=value, key=value, value=value, attn_mask=_shown(call)))
    assert isinstance(attended, PaddedValue)
    return attended


def _multi_head(call: OpCall) -> tuple[PaddedValue | None, ...]:
    """``nn.MultiheadAttention`` in eval mode: its second result are the weights [batch, (heads,) queries, keys]."""
    _check_weights(call, "query", "key", "value", "mask")
    attended = _attention(replace(call.with_arguments(attn_mask=_shown(call)), result=call.shapes[0]))
    assert isinstance(attended, PaddedValue)
    weights: list[PaddedValue | None] = []
    for shape in call.result[1:] if isinstance(call.result, tuple) else ():
        if isinstance(shape, TensorShape):
            middle, keys = call.fresh(shape).factors[1:-2], call.tensor("key").factors[1]
            value = PaddedValue((attended.factors[0], *middle, attended.factors[1], keys))
            to = {0: 0, 1: value.rank - 2}
            pads: dict[Place, Pad] = {(to[dim], at): pad for (dim, at), pad in attended.padding}
            hidden = dict.fromkeys(call.places(value, [value.rank - 1]), 0.0)
            weights.append(value.with_pads({**pads, **hidden}))
        else:
            weights.append(None)
    return (attended, *weights)


def _check_weights(call: OpCall, *but: str) -> None:
    for name, weight in call.arguments.items():
        if isinstance(weight, PaddedValue) and name not in but:
            call.unpadded(weight, range(weight.rank), f"has a {name} with")


def _shown(call: OpCall) -> PaddedValue | None:
    """The mask as attention takes it. True, or a number other than zero, hides a key; ``mask_type`` names the shape.

    0: [queries, keys], 1: [batch, keys], 2: [batch, heads, queries, keys]
    """
    mask = call.argument("mask")
    if not isinstance(mask, PaddedValue):
        return None
    dims = {0: (0, 1), 1: (0, None, 1), 2: (0, 2, 3)}[call.argument("mask_type", default=0) or 0]
    factors = tuple(mask.factors[dim] if dim is not None else () for dim in dims)
    pads = {(dims.index(dim), at): not pad for (dim, at), pad in mask.padding if dim in dims and is_number(pad)}
    return PaddedValue(factors, dtype=torch.bool).with_pads(pads)


RULES: dict[str, PaddingRule] = {
    **aten(_self_attention, "_transformer_encoder_layer_fwd"),
    **aten(_multi_head, "_native_multi_head_attention"),
    **aten(
        _attention,
        "scaled_dot_product_attention _scaled_dot_product_attention_math _scaled_dot_product_flash_attention"
        " _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention"
        " _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable",
    ),
}
