"""Operators that combine entries along dimensions; a padded dimension must have neutral padding."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

from graphpass.regions.padding.calls import DECLARE_MASK, HIDE_PADDING, OpCall, PaddingRule
from graphpass.regions.padding.nodes import TensorShape
from graphpass.regions.padding.rules.pointwise import entry_by_entry
from graphpass.regions.padding.rules.shapes import without_dims
from graphpass.regions.padding.rules.tables import aten, prims
from graphpass.regions.padding.sizes import product
from graphpass.regions.padding.values import (
    LOW_SCORES,
    VISIBLE_ENTRY,
    Approximate,
    Pad,
    PaddedValue,
    Place,
    blurred,
    is_finite,
    is_low,
    is_number,
    is_zero,
)

__all__ = ["RULES", "reduced_dims", "require_neutral"]

Neutral = Callable[[Pad], bool]

_SUMS = f"compute it from sums {DECLARE_MASK}"


def _is_true(pad: Pad) -> bool:
    return is_number(pad) and bool(pad)


def _is_one(pad: Pad) -> bool:
    return is_number(pad) and pad == 1


def _is_least(pad: Pad) -> bool:
    return pad is False or pad == -math.inf  # guard: proof_low_maximum


def _is_greatest(pad: Pad) -> bool:
    return pad is True or pad == math.inf


_NEUTRAL: dict[str, Neutral] = {
    "sum": is_zero,
    "nansum": is_zero,
    "any": is_zero,
    "count_nonzero": is_zero,
    "all": _is_true,
    "prod": _is_one,
    "amax": _is_least,
    "max": _is_least,
    "amin": _is_greatest,
    "min": _is_greatest,
    "logsumexp": is_low,
    "_softmax": is_low,
    "_log_softmax": is_low,
    "_safe_softmax": is_low,
    "softmax": is_low,
    "log_softmax": is_low,
    "prepare_softmax_online": _is_least,
    "linalg_vector_norm": is_zero,
    "norm": is_zero,
}


def reduced_dims(call: OpCall, value: PaddedValue) -> list[int]:
    """The non-negative dimensions that the call combines; all dimensions if it names none."""
    dims = call.argument("dim", "dims", "axis")
    if dims is None or dims == ():
        return list(range(value.rank))
    return sorted({call.dim(dim, value.rank) for dim in (dims if isinstance(dims, tuple) else (dims,))})


def require_neutral(call: OpCall, value: PaddedValue, dims: Sequence[int]) -> list[Place]:
    """The places of the padded factors in ``dims``, after a check that their padding is neutral for the call.

    Raises:
        Unknown: some padding is not known to be neutral, or two factors are padded.
    """
    places = call.places(value, dims)
    neutral = _NEUTRAL.get(call.name)
    for place in places:
        pad = value.pad_at(place)
        known = neutral is not None and pad is not None and neutral(pad)  # guard: proof_any_padding_is_neutral
        if known and len(places) > 1 and value.constant is None:  # guard: proof_two_padded_factors
            sizes = tuple(value.factors[dim][at] for dim, at in places)
            raise call.refuse(f"{call.name.strip('_')} over several padded dimensions at once", product(sizes))
        if not known:
            raise call.refuse_place(value, place, f"{call.name.strip('_')} over", HIDE_PADDING)
        _assume(call, pad)
    return places


def _assume(call: OpCall, pad: Pad | None) -> None:
    if is_low(pad) and pad != -math.inf:
        call.assumptions.add(VISIBLE_ENTRY)
        if pad is Approximate.MASKED or float(pad) > -1e30:  # type: ignore[arg-type]
            call.assumptions.add(LOW_SCORES)


def _reduction(call: OpCall) -> PaddedValue | tuple[PaddedValue | None, ...]:
    """The result without the combined dimensions; other padding stays known if equal entries reduce to it."""
    value = call.tensor("self", "inp", "x", "a", "input")
    call.no_padded_numbers()
    dims = reduced_dims(call, value)
    places = require_neutral(call, value, dims)
    rank = len(call.shapes[0].sizes)
    if isinstance(call.result, tuple) and places and call.name in _WITH_INDEX:
        raise call.refuse_place(value, places[0], f"the index of {call.name} over")
    # Entries with two indices in padding are unknown: beside padded sums, only whether it is finite stays.
    of_rows = blurred if places else functools.partial(_of_rows, call.name)  # guard: proof_reduced_padding
    known = {place: of_rows(pad) for place, pad in value.padding if place[0] not in dims}
    rest = without_dims(PaddedValue(value.factors).with_pads(known), dims, keepdim=rank == value.rank and rank > 0)
    if isinstance(call.result, tuple):
        return tuple(
            call.carried(rest.with_pads({}), rest) if isinstance(shape, TensorShape) else None for shape in call.result
        )
    return rest


_WITH_INDEX = ("max", "min", "mode", "median", "nanmedian", "kthvalue")


def _of_rows(name: str, pad: Pad) -> Pad | None:
    """The result of a reduction of entries that all hold ``pad``, of which the number is unknown."""
    if name in ("any", "all"):
        return bool(pad) if is_number(pad) else None
    if name in ("amax", "amin", "mean", "max", "min"):
        return pad
    if not is_finite(pad):
        return Approximate.NOT_FINITE
    if name in ("sum", "nansum", "count_nonzero", "linalg_vector_norm", "norm") and is_zero(pad):
        return 0
    above = pad is Approximate.POSITIVE or (is_number(pad) and float(pad) > 0)  # type: ignore[arg-type]
    if (above and name in ("sum", "nansum")) or ("norm" in name and (above or is_number(pad))):
        return Approximate.POSITIVE
    never_below = pad is Approximate.NONNEGATIVE and name in ("sum", "nansum")
    return Approximate.NONNEGATIVE if never_below or "norm" in name or name in ("var", "std") else Approximate.FINITE


def _statistics(call: OpCall) -> PaddedValue | tuple[PaddedValue | None, ...]:
    """Reductions for which no padding is neutral: the combined dimensions must be unpadded."""
    value = call.tensor("self", "inp", "x", "a", "input")
    remedy = _SUMS if call.name in ("mean", "nanmean", "var", "std", "var_mean", "std_mean") else ""
    call.unpadded(value, reduced_dims(call, value), f"{call.name} over", remedy)
    return _reduction(call)


def _max(call: OpCall) -> PaddedValue | tuple[PaddedValue | None, ...]:
    return entry_by_entry(call) if "other" in call.arguments else _reduction(call)


def _norm(call: OpCall) -> PaddedValue | tuple[PaddedValue | None, ...]:
    """Norms: zero padding is neutral for a positive order."""
    order = call.argument("ord", "p", default=2)
    if order is not None and not (isinstance(order, (int, float)) and order > 0):
        return _statistics(call)
    return _reduction(call)


def _softmax(call: OpCall) -> PaddedValue:
    """Softmax: along a masked dimension, the padding of the result is zero (unknown for ``log_softmax``)."""
    value = call.tensor("self")
    call.no_padded_numbers()
    places = require_neutral(call, value, reduced_dims(call, value))
    pads: dict[Place, Pad | None] = dict.fromkeys(places, None if "log_" in call.name else 0.0)
    for place in call.places(value):
        pad = value.pad_at(place)
        if place not in pads and pad is not None:
            hidden = call.name == "_safe_softmax" and pad == -math.inf
            # guard: proof_hidden_rows
            pads[place] = Approximate.NONNEGATIVE if hidden or is_finite(pad) else Approximate.NOT_FINITE
            if "log_" in call.name:
                pads[place] = blurred(pads[place])
    return PaddedValue(value.factors).with_pads(pads)


def _scan(call: OpCall) -> PaddedValue | tuple[PaddedValue | None, ...]:
    """Forward scans: an entry depends on earlier entries only, which are real if it is real."""
    value = call.tensor("self")
    call.no_padded_numbers()
    dim = call.dim(call.argument("dim"), value.rank)
    if value.rank and not call.sizes.starts_clean(value.factors[dim]):  # guard: proof_scan_inside
        of_dim = value.factors[dim]
        raise call.refuse(f"{call.name} along the padded dimension {dim} of {list(of_dim)}", product(of_dim))
    result = call.carried(PaddedValue(value.factors))
    pads = {place: pad for place, pad in result.padding if place[0] != dim or not is_finite(pad)}
    if isinstance(call.result, tuple):
        return tuple(result.with_pads(pads) for _ in call.result)
    zero = {place: 0 for place, pad in value.padding if place[0] != dim and is_zero(pad)}
    return result.with_pads({**pads, **zero} if call.name == "cumsum" else pads)


def _sorted(call: OpCall) -> PaddedValue | tuple[PaddedValue | None, ...]:
    """Sorting along an unpadded dimension, independently for each row."""
    value = call.tensor("self")
    dim = call.dim(call.argument("dim", default=-1), value.rank)
    call.unpadded(value, [dim] if value.rank else [], f"{call.name} over")  # guard: proof_sorted_padding
    call.no_padded_numbers()
    results = [
        call.carried(
            PaddedValue((*value.factors[:dim], *call.fresh(shape).factors[dim : dim + 1], *value.factors[dim + 1 :]))
        )
        for shape in call.shapes
    ]
    return tuple(results) if isinstance(call.result, tuple) else results[0]


RULES: dict[str, PaddingRule] = {
    **aten(_reduction, "sum nansum any all prod amax amin logsumexp count_nonzero"),
    **prims(_reduction, "sum prod amax amin prepare_softmax_online"),
    **aten(
        _statistics,
        "mean nanmean var std var_mean std_mean median nanmedian mode argmax argmin kthvalue aminmax",
    ),
    **prims(_statistics, "var xor_sum"),
    **aten(_max, "max min"),
    **aten(_norm, "linalg_vector_norm norm"),
    **aten(_softmax, "_softmax _log_softmax _safe_softmax softmax log_softmax"),
    **aten(_scan, "cumsum cumprod logcumsumexp cummax cummin"),
    **aten(_sorted, "sort argsort topk"),
}
