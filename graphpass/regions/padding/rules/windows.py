"""Convolutions, pooling and resampling: they mix positions, so only the batch (and a pool's channels) may be padded."""

from __future__ import annotations

import re

from graphpass.regions.padding.calls import OpCall, PaddingRule
from graphpass.regions.padding.nodes import TensorShape
from graphpass.regions.padding.rules.tables import aten, prims
from graphpass.regions.padding.values import PaddedValue, blurred

__all__ = ["RULES"]


def _convolution(call: OpCall) -> PaddedValue:
    value, weight = call.tensor("input", "self"), call.tensor("weight")
    call.no_padded_numbers()
    for name in ("weight", "bias"):
        other = call.argument(name)
        if isinstance(other, PaddedValue):
            call.unpadded(other, range(other.rank), f"has a {name} with")
    batch = 1 if value.rank == weight.rank else 0
    call.unpadded(value, range(batch, value.rank), "moves a window over")  # guard: proof_convolved_padding
    return call.carried(PaddedValue((*value.factors[:batch], *call.fresh().factors[batch:])), value)


def _pool(call: OpCall) -> PaddedValue | tuple[PaddedValue | None, ...]:
    """Pooling and resampling over the last dimensions, whose number is in the operator's name or in its window."""
    value = call.tensor("self", "input")
    call.no_padded_numbers()
    named = re.search(r"([123])d", call.name)
    window = call.argument("kernel_size", "output_size", default=())
    positions = int(named[1]) if named else len(window)
    if not 1 <= positions <= value.rank:
        raise call.refuse("its window is not known")
    rows = value.rank - positions
    call.unpadded(value, range(rows, value.rank), "moves a window over")  # guard: proof_pooled_padding
    results = tuple(
        call.carried(PaddedValue((*value.factors[:rows], *call.fresh(shape).factors[rows:])))
        if isinstance(shape, TensorShape)
        else None
        for shape in (call.result if isinstance(call.result, tuple) else (call.result,))
    )
    return results if isinstance(call.result, tuple) else results[0]  # type: ignore[return-value]


def _grid_sample(call: OpCall) -> PaddedValue:
    value, grid = call.tensor("input", "a"), call.tensor("grid")
    call.no_padded_numbers()
    call.unpadded(value, range(1, value.rank), "samples")
    call.unpadded(grid, range(1, grid.rank), "samples at")
    batch = call.unify(value.factors[0], grid.factors[0])
    return call.carried(PaddedValue((batch, *call.fresh().factors[1:])))


def _rearranged(call: OpCall) -> PaddedValue:
    """Operators that move entries within a row: all dimensions but the batch are new."""
    value = call.tensor("self", "input")
    call.no_padded_numbers()
    within = {"col2im": 2, "channel_shuffle": value.rank - 1}.get(call.name, 3)
    batch = max(value.rank - within, 0)
    call.unpadded(value, range(batch, value.rank), "moves the entries of")
    kept = {place: blurred(pad) for place, pad in value.padding}
    return PaddedValue((*value.factors[:batch], *call.fresh().factors[batch:])).with_pads(kept)


RULES: dict[str, PaddingRule] = {
    **aten(_convolution, "convolution _convolution"),
    **aten(
        _pool,
        "avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d max_pool2d_with_indices"
        " max_pool3d_with_indices _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d"
        " adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d upsample_nearest1d upsample_nearest2d"
        " upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d"
        " upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa"
        " _upsample_bicubic2d_aa reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d"
        " replication_pad2d replication_pad3d",
    ),
    **prims(_pool, "_low_memory_max_pool_with_offsets _low_memory_max_pool2d_with_offsets"),
    **aten(_grid_sample, "grid_sampler_2d grid_sampler_3d"),
    **aten(_rearranged, "im2col col2im pixel_shuffle pixel_unshuffle channel_shuffle"),
}
