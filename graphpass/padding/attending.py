"""Attention, and what becomes of entries that a mask or another operator makes infinite."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

import torch

from graphpass.padding.combining import softmax, weight_of
from graphpass.padding.opcall import (
    HIDE_PADDING,
    MOVES,
    OpCall,
    PaddingReason,
    PaddingRule,
    Returned,
    tensors_of,
)
from graphpass.padding.pointwise import broadcast, draws, entry_by_entry, real_entries
from graphpass.padding.sizes import product
from graphpass.padding.values import (
    ALL_FINITE,
    Approximate,
    Factors,
    Pad,
    PaddedValue,
    blurred,
    by_data,
    cast_pad,
    is_extreme,
    is_finite,
    is_number,
    shown,
)

# --- attention: padded keys need a mask or causal order

_HIDE_WITH_INFINITY = (
    "pass a mask of numbers that holds -inf where it hides (cuDNN's attention adds -65504 where a mask is False), or do"
    " not split the graph at this attention: in a captured region graphpass adds -inf. A row whose keys all get one"
    " number attends to them, and to padding"
)
"""The remedy where the hidden keys get a finite number."""


def attention(call: OpCall) -> Returned:
    """``softmax(q @ k.T + mask) @ v`` over [..., length, features]; all outputs but the first are for the backward."""
    _fill_keys(call, call.tensor("key"))
    return _attended(call, _check_keys)


def attention_to_keys(call: OpCall) -> Returned:
    """The same without a mask, by a kernel that is given the number of keys."""
    return _attended(call, _check_count)


def _attended(call: OpCall, check: Callable[[OpCall, PaddedValue, Factors, PaddedValue | None], None]) -> Returned:
    if call.argument("dropout_p", default=0.0) != 0.0:  # guard: proof_attention_dropout
        draws(call)
    query, key, value = call.tensor("query"), call.tensor("key"), call.tensor("value")
    for tensor in (query, key, value):
        call.unpadded(tensor, [tensor.rank - 1], "attends with features over")  # guard: proof_attention_features
    given = call.argument("attn_mask", "attn_bias")
    mask = given if isinstance(given, PaddedValue) else None
    batches = _batches_of(call, query, (key, value, *([mask] if mask is not None else [])))
    keys = call.unify(key.factors[-2], value.factors[-2])
    queries = query.factors[-2]
    if mask is not None and mask.rank > 1 and call.sizes.unified(mask.factors[-2], queries) != queries:
        raise call.refuse(f"a mask of rows {list(mask.factors[-2])} for queries {list(queries)}", queries[0])
    if call.sizes.any_padded(keys):
        check(call, query, keys, mask)
    elif call.argument("is_causal", default=False) and call.sizes.any_padded(queries[1:]):
        raise call.refuse(f"causal attention of queries with padding inside: {list(queries)}", queries[-1])
    result = call.carried(PaddedValue((*batches, queries, value.factors[-1])), query, key, value)
    if mask is not None:
        result = _without_hidden_rows(call, result, mask)
    if not isinstance(call.result, tuple):
        return result
    reason = PaddingReason("the outputs for its backward are not followed")
    return (result, *call.sides(lambda shape: call.reached(call.fresh(shape), reason)))


def _batches_of(call: OpCall, query: PaddedValue, others: Iterable[PaddedValue]) -> tuple[Factors, ...]:
    """The dimensions of batches and heads; several heads of the query may share one of the keys and values."""
    batches = query.factors[:-2]
    for other in others:
        own = other.factors[max(0, other.rank - query.rank) : -2]
        if own and batches and not call.sizes.any_padded((*own[-1], *batches[-1])):
            heads, shared = product(batches[-1]), product(own[-1])
            is_shared = isinstance(heads, int) and isinstance(shared, int) and heads % shared == 0
            own = (*own[:-1], batches[-1]) if is_shared else own
        batches = tuple(call.unify_into(batches, PaddedValue(own)))
    return batches


def _fill_keys(call: OpCall, key: PaddedValue) -> None:
    """Zero in padded keys and values, which a mask hides: NaN among them would reach real rows under any mask."""
    if not call.places(key, [key.rank - 2]):
        return
    for name in ("key", "value"):
        value = call.tensor(name)
        call.wants([name], call.places(value, [value.rank - 2]), 0)  # guard: made_keys
    mask = call.argument("attn_mask", "attn_bias")
    if isinstance(mask, PaddedValue) and mask.rank:
        hidden = False if mask.dtype is torch.bool else -math.inf  # guard: made_mask
        call.wants(["attn_mask", "attn_bias"], call.places(mask, [mask.rank - 1]), hidden)


def _without_hidden_rows(call: OpCall, result: PaddedValue, mask: PaddedValue) -> PaddedValue:
    """``result``, not finite in padding from which the mask hides all keys: some kernels compute NaN there."""
    wide = broadcast(call, mask, (*result.factors[:-1], mask.factors[-1]))
    pads = {place: wide.pad_at(place) for place in call.places(result)}
    hidden = [place for place, pad in pads.items() if pad is False or not is_finite(shown(pad))]
    return result.with_pads({**result.pads, **dict.fromkeys(hidden, Approximate.NOT_FINITE)})


def _check_count(call: OpCall, query: PaddedValue, keys: Factors, mask: PaddedValue | None) -> None:
    """Refuse a number of keys that is not that of the real ones."""
    if keys != (call.argument("size"),) or call.asks_independence:  # guard: made_count_of_its_keys
        raise call.refuse(f"attends to the first {call.argument('size')} keys of {list(keys)}", keys[0])


def _check_keys(call: OpCall, query: PaddedValue, keys: Factors, mask: PaddedValue | None) -> None:
    """Refuse padded keys that a real query may see, and values that a weight of zero does not make zero."""
    _check_hidden(call, query, keys, mask)
    for tensor in (call.tensor("key"), call.tensor("value")):
        for place in call.places(tensor, [tensor.rank - 2]):  # a weight of zero times infinity is NaN
            if not is_finite(tensor.pad_at(place)):  # guard: proof_nan_as_values
                raise call.refuse_place(tensor, place, "multiplies by weights of zero over", HIDE_PADDING)


def _check_hidden(call: OpCall, query: PaddedValue, keys: Factors, mask: PaddedValue | None) -> None:
    """Refuse padded keys that a real query may see."""
    at_fault, is_causal = call.sizes.first_padded(keys), call.argument("is_causal", default=False)
    # Scores of padded keys would be NaN, which no mask that is added hides.
    if not is_finite(query.held):  # guard: proof_attention_infinite_queries
        raise call.refuse("multiplies infinite queries by padded keys", at_fault, HIDE_PADDING)
    if mask is not None and mask.factors[-1] == keys:
        places = call.places(mask, [mask.rank - 1])
        pad = mask.pad_at(places[0]) if len(places) == 1 else None
        # guard: proof_attention_bool_mask, proof_attention_mask
        hides = pad is False if mask.dtype is torch.bool else pad == -math.inf
        if hides:
            call.assumptions.add(ALL_FINITE)
            return
        if not is_causal:
            contents = "" if pad is None else f" (its padding holds {getattr(pad, 'value', pad)})"
            why = f"attends to padded keys: the mask does not hide them{contents}"
            is_low = is_number(pad) and pad < 0  # type: ignore[operator]
            raise call.refuse(why, at_fault, _HIDE_WITH_INFINITY if is_low else HIDE_PADDING)
    if is_causal and query.factors[-2] == keys and call.sizes.starts_clean(keys):
        call.assumptions.add(ALL_FINITE)
        return
    # guard: proof_attention_without_mask
    raise call.refuse("attends to padded keys without a mask", at_fault, HIDE_PADDING)


def flex_attention(call: OpCall) -> Returned:
    """``higher_order.flex_attention``: batches are apart, unless its functions read what differs between them."""
    others = dict(call.arguments)
    attended = [others.pop(str(position)) for position in range(3)]
    for tensor in tensors_of(others.values()):
        call.unpadded(tensor, range(tensor.rank), "has a function or block mask that reads")
    batch = call.tensor("0").factors[0]
    for tensor in attended:
        call.unpadded(tensor, range(1, tensor.rank), "attends over")  # guard: proof_flex_attention
        if call.places(tensor, [0]):
            batch = call.unify(batch, tensor.factors[0])
    if call.sizes.any_padded(batch) and call.argument("reads_batch"):  # guard: proof_flex_attention_batch
        raise call.refuse("has a function that reads the number of the batch", batch[-1])
    return call.each(lambda shape: PaddedValue((batch, *call.fresh(shape).factors[1:]), dtype=shape.dtype))


# --- infinities: entries of a result that a mask, or an operator, makes infinite


def infinities_of(call: OpCall, rule: PaddingRule | None, value: PaddedValue) -> Pad | None:
    """What real entries of ``value`` hold if the graph makes some of them infinite, else None."""
    held = [tensor.held for tensor in tensors_of(call.arguments.values())]
    numbers = [number for number in call.arguments.values() if isinstance(number, float) and is_extreme(number)]
    if call.asks_independence or value.dtype is None or not (numbers or any(map(is_extreme, held))):
        return None
    if call.op == "graphpass.neutral":  # guard: made_infinities_are_padding
        return call.tensor("self").real
    if rule is entry_by_entry and not isinstance(call.result, tuple):
        found = real_entries(call)
    elif rule is softmax:
        found = weight_of(call.name, *held)
    elif call.name in MOVES:
        found = functools.reduce(by_data, (*held, *numbers))
    else:
        found = blurred(
            *(map(shown, held) if rule in (attention, attention_to_keys) or call.name == "logsumexp" else held)
        )
    found = cast_pad(found, value.dtype)
    return by_data(None, found) if is_extreme(found) else None
