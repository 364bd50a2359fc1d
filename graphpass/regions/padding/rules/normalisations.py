"""Normalisations: over the features of each row, or over the batch in training."""

from __future__ import annotations

from dataclasses import replace

from graphpass.regions.padding.calls import OpCall, PaddingReason, PaddingRule
from graphpass.regions.padding.nodes import TensorShape
from graphpass.regions.padding.rules.tables import aten
from graphpass.regions.padding.values import Approximate, PaddedValue

__all__ = ["RULES"]


def _over_features(call: OpCall) -> PaddedValue | tuple[PaddedValue | None, ...]:
    """``layer_norm`` and ``rms_norm``: statistics over the last dimensions."""
    value = call.tensor("input")
    call.no_padded_numbers()
    last = len(call.argument("normalized_shape"))
    call.unpadded(value, range(value.rank - last, value.rank), "normalises over")
    _check_weights(call)
    result = _normalised(call, value)
    if not isinstance(call.result, tuple):
        return result
    statistics = call.carried(PaddedValue((*value.factors[: value.rank - last], *((),) * last)), result)
    sides = (statistics if isinstance(shape, TensorShape) else None for shape in call.result[1:])
    return (result, *sides)


def _normalised(call: OpCall, value: PaddedValue) -> PaddedValue:
    """The normalised value. Rows of equal entries have a variance of zero, so without an epsilon they become NaN."""
    result = call.carried(PaddedValue(value.factors), value)  # guard: proof_computed_zeros
    if call.argument("eps") == 0:
        result = result.with_pads({place: Approximate.NOT_FINITE for place, _ in result.padding})
    return result


_WEIGHTS = ("weight", "bias", "running_mean", "running_var")


def _check_weights(call: OpCall) -> None:
    for name in _WEIGHTS:
        weight = call.argument(name)
        if isinstance(weight, PaddedValue):
            call.unpadded(weight, range(weight.rank), f"has a {name} with")


def _over_groups(call: OpCall) -> PaddedValue | tuple[PaddedValue | None, ...]:
    """``group_norm``: statistics over groups of channels and all positions of one row."""
    value = call.tensor("input")
    call.no_padded_numbers("N")
    call.unpadded(value, range(1, value.rank), "normalises over")
    _check_weights(call)
    result = _normalised(call, value)
    if not isinstance(call.result, tuple):
        return result
    of_rows = result.with_pads({place: pad for place, pad in result.padding if place[0] == 0})
    statistics = tuple(
        replace(of_rows, factors=(value.factors[0], *call.fresh(shape).factors[1:]))
        if isinstance(shape, TensorShape)
        else None
        for shape in call.result[1:]
    )
    return (result, *statistics)


def _over_batch(call: OpCall) -> PaddedValue | tuple[PaddedValue | None, ...]:
    """``batch_norm``: rows are independent with running statistics; in training, all rows of a channel are combined."""
    value = call.tensor("input")
    call.no_padded_numbers()
    channels = value.factors[1]
    for name in _WEIGHTS:
        weight = call.argument(name)
        if isinstance(weight, PaddedValue) and call.unify(channels, weight.factors[0]) != channels:
            raise call.refuse(f"a {name} of factors {list(weight.factors[0])} for channels {list(channels)}")
    results = call.result if isinstance(call.result, tuple) else (call.result,)
    of_channels = PaddedValue((channels,))
    normalised = _normalised(call, value)
    values: list[PaddedValue | None] = [normalised]
    for shape in results[1:]:
        is_statistic = isinstance(shape, TensorShape) and call.fresh(shape).factors != ((0,),)
        values.append(of_channels if is_statistic else call.fresh(shape) if isinstance(shape, TensorShape) else None)
    if _trains(call):  # guard: proof_training_statistics
        for place in call.places(value, [dim for dim in range(value.rank) if dim != 1]):
            size = value.factors[place[0]][place[1]]
            reason = PaddingReason(f"its statistics run over the padded dimension {place[0]}", size=size)
            values = [call.reached(result, reason) if result is not None else None for result in values]
    return tuple(values) if isinstance(call.result, tuple) else normalised


def _trains(call: OpCall) -> bool:
    """Whether the operator computes the statistics from the batch."""
    if "_with_update" in call.name or call.argument("running_mean") is None:
        return True
    if call.name.endswith(("_no_update", "_no_training")):
        return False
    return call.argument("training", "train", default=True) is not False  # guard: proof_named_training


RULES: dict[str, PaddingRule] = {
    **aten(_over_features, "layer_norm native_layer_norm rms_norm _fused_rms_norm"),
    **aten(_over_groups, "native_group_norm group_norm"),
    **aten(
        _over_batch,
        "batch_norm native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit"
        " _native_batch_norm_legit_functional _native_batch_norm_legit_no_training _batch_norm_no_update"
        " _batch_norm_with_update _batch_norm_with_update_functional",
    ),
}
