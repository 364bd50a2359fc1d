"""Which tensors have no negative entry in the run at the real sizes, so that an index counts from the start."""

from __future__ import annotations

from typing import Any

import sympy
import torch

from graphpass.regions.padding.calls import OpCall
from graphpass.regions.padding.rules.indexing import FROM_START
from graphpass.regions.padding.values import PaddedValue, Sign

__all__ = ["sign_of"]

_UNSIGNED = frozenset({torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64})


def _words(*lines: str) -> frozenset[str]:
    return frozenset(" ".join(lines).split())


_NEVER_NEGATIVE = _words(
    "abs square argmax argmin argsort nonzero bincount searchsorted bucketize count_nonzero zeros new_zeros zeros_like",
    "zero ones new_ones ones_like",
)

_WITH_PLACES = _words("sort topk kthvalue max min median nanmedian mode cummax cummin")
"""Operators whose second result is the places of the first among the entries."""

_FROM_VALUES = _words(
    "add mul div true_divide floor_divide pow minimum maximum clamp_max where cumsum cumprod sum prod mean amax amin",
    "max min sort topk kthvalue median nanmedian mode cummax cummin floor ceil round trunc bitwise_or bitwise_xor",
    "clone alias detach lift_fresh lift_fresh_copy _to_copy contiguous to convert_element_type copy",
    "full new_full full_like fill scalar_tensor",
    "view reshape _unsafe_view _reshape_alias view_copy flatten unflatten squeeze unsqueeze permute transpose t",
    "expand broadcast_in_dim repeat select slice narrow split split_with_sizes unbind chunk cat stack flip roll",
    "index _unsafe_index index_select gather take embedding diagonal constant_pad_nd repeat_interleave",
    "masked_fill scatter index_put _unsafe_index_put",
)
"""Operators without a negative result where none of their values is negative."""

_VALUES = _words("self a input x other b min max alpha src source value values tensors fill_value s weight exponent")
"""Names of the arguments that are values, not indices, conditions, dimensions or sizes."""


def sign_of(call: OpCall, value: PaddedValue, at: int) -> Sign:
    """What is known of the signs in a result.

    Args:
        call: the call.
        value: the result.
        at: its position among the results.
    """
    known = value.index.offset if value.index is not None else value.constant
    if value.dtype in _UNSIGNED or _is_nonnegative(known) or _by_operator(call, at):
        return Sign.NONNEGATIVE
    return Sign.UNKNOWN


def _by_operator(call: OpCall, at: int) -> bool:
    if call.name == FROM_START:
        return _known(call, "self") or call.tensor("length").sign is Sign.REAL_SIZE  # guard: proof_index_from_elsewhere
    if not call.op.startswith(("aten.", "prims.")):
        return False
    if call.name in _NEVER_NEGATIVE or (call.name in _WITH_PLACES and at == 1):
        return True
    if call.name in ("clamp", "clamp_min", "maximum", "bitwise_and"):  # one side decides
        return _known(call, "min", "other", "b") or (_known(call, "self", "a") and _known(call, "max", absent=True))
    if call.name == "remainder":
        return _known(call, "other", "b")
    if call.name == "fmod":
        return _known(call, "self", "a")
    if call.name in ("arange", "iota"):
        return _known(call, "start", absent=True) and _known(call, "step", absent=True)
    values = [argument for name, argument in call.arguments.items() if name in _VALUES and argument is not None]
    return call.name in _FROM_VALUES and all(map(_is_nonnegative, values))


def _known(call: OpCall, *names: str, absent: bool = False) -> bool:
    """Whether the first argument among ``names`` is known not to be negative; ``absent`` if there is none."""
    value = call.argument(*names)
    return absent if value is None else _is_nonnegative(value)


def _is_nonnegative(value: Any) -> bool:
    if isinstance(value, PaddedValue):
        return value.sign is not Sign.UNKNOWN
    if isinstance(value, tuple):
        return all(map(_is_nonnegative, value))
    if isinstance(value, sympy.Basic):
        return value.is_nonnegative is True
    return isinstance(value, (bool, int, float)) and value >= 0
