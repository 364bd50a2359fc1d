"""``graphpass::zero_padding``, which zeroes the rows that the forward context marks as padding."""

from __future__ import annotations

from graphpass.regions.padding.calls import OpCall, PaddingRule
from graphpass.regions.padding.values import PaddedValue

__all__ = ["RULES"]

_MARKED_ROWS = "the forward context marks the padded rows"


def zero_padding_rows(call: OpCall) -> PaddedValue:
    """The padding of one key field becomes zero: the forward context marks these rows.

    Refused for several padded fields, because the order in which the context counts rows is unknown here.
    """
    x, num_dims = call.tensor("x"), call.argument("num_dims")
    rows = tuple(size for of_dim in x.factors[:num_dims] for size in of_dim)
    if len(set(call.sizes.fields.values())) != 1 or len(rows) != 1 or not call.padded(rows[0]):
        raise call.refuse(f"it asks the forward context which of the rows {list(rows)} are padding")
    call.assumptions.add(_MARKED_ROWS)
    (place,) = call.places(x, range(num_dims))
    return x.with_pads({**x.pads, place: 0.0})


RULES: dict[str, PaddingRule] = {"graphpass::zero_padding": zero_padding_rows}
