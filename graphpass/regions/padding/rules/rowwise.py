"""Other operators that mix entries within some dimensions only."""

from __future__ import annotations

from graphpass.regions.padding.calls import OpCall, PaddingRule
from graphpass.regions.padding.nodes import TensorShape
from graphpass.regions.padding.rules.reductions import reduced_dims
from graphpass.regions.padding.rules.tables import aten, prims
from graphpass.regions.padding.values import PaddedValue, blurred

__all__ = ["RULES"]


def _within(call: OpCall) -> PaddedValue | tuple[PaddedValue | None, ...]:
    """The dimensions within which the operator works must be unpadded; their sizes may change in the result."""
    value = call.tensor("self", "input", "a")
    call.no_padded_numbers()
    dims = _dims(call, value)
    call.unpadded(value, dims, f"{call.name.strip('_')} over")  # guard: proof_turned_padding
    results = call.result if isinstance(call.result, tuple) else (call.result,)
    values = tuple(_of_shape(call, value, dims, shape) if isinstance(shape, TensorShape) else None for shape in results)
    return values if isinstance(call.result, tuple) else values[0]  # type: ignore[return-value]


def _of_shape(call: OpCall, value: PaddedValue, dims: list[int], shape: TensorShape) -> PaddedValue:
    fresh = call.fresh(shape).factors
    factors = (of_fresh if dim in dims else value.factors[dim] for dim, of_fresh in enumerate(fresh[: value.rank]))
    kept = {place: blurred(pad) for place, pad in value.padding}
    return PaddedValue((*factors, *fresh[value.rank :])).with_pads(kept)


def _dims(call: OpCall, value: PaddedValue) -> list[int]:
    if call.name == "unfold":
        return [call.dim(call.argument("dimension"), value.rank)]
    if call.name == "glu":
        return [call.dim(call.argument("dim", default=-1), value.rank)]
    return reduced_dims(call.with_arguments(dim=call.argument("dim", "dims")), value)


RULES: dict[str, PaddingRule] = {
    **aten(_within, "flip roll unfold glu _fft_r2c _fft_c2c _fft_c2r"),
    **prims(_within, "rev"),
}
