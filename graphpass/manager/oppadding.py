"""What padded rows do in graphpass's own ops: the rules that the padding pass has for them."""

from __future__ import annotations

from graphpass.regions import OpCall, PaddedValue

__all__ = ["add_lora_by_row", "paged_attention_by_row", "zero_padding_rows"]

SCRATCH_SLOTS = "padded tokens of paged attention write to scratch slots alone"
MARKED_ROWS = "the forward context marks the padded rows"


def zero_padding_rows(call: OpCall) -> PaddedValue:
    """The rows that the forward context marks become zero, and it marks the padding of one key field.

    With several padded fields nothing here says in which order the context counts rows.
    """
    x, num_dims = call.tensor("x"), call.argument("num_dims")
    rows = tuple(size for of_dim in x.factors[:num_dims] for size in of_dim)
    if len(set(call.sizes.fields.values())) != 1 or len(rows) != 1 or not call.padded(rows[0]):
        raise call.refuse(f"it asks the forward context which of the rows {list(rows)} are padding")
    call.assumptions.add(MARKED_ROWS)
    (place,) = call.places(x, range(num_dims))
    return x.with_pads({**x.pads, place: 0.0})


def paged_attention_by_row(call: OpCall) -> tuple[PaddedValue, ...]:
    """A row depends on its own query, and on the pages that the metadata names for its request."""
    rows = call.tensor("query").factors[0]
    for name in ("query", "key", "value", "out"):
        tensor = call.tensor(name)
        call.unpadded(tensor, range(1, tensor.rank), "attends with features over")
        rows = call.unify(rows, tensor.factors[0])
    if not call.sizes.is_prefix(rows):
        raise call.refuse(f"its metadata counts tokens, and padding stands inside rows {list(rows)}", rows[-1])
    call.assumptions.add(SCRATCH_SLOTS)
    return (PaddedValue((rows, *call.tensor("out").factors[1:])),)


def add_lora_by_row(call: OpCall) -> tuple[PaddedValue, ...]:
    """A row gets what the adapter of its own token makes of it."""
    x, out, slots = call.tensor("x"), call.tensor("out"), call.tensor("slots")
    for name in ("lora_a", "lora_b", "order"):
        tensor = call.tensor(name)
        call.unpadded(tensor, range(tensor.rank), "adapters lie along")
    for tensor in (x, out):
        call.unpadded(tensor, [tensor.rank - 1], "multiplies matrices over")
        call.unify(tuple(size for of_dim in tensor.factors[:-1] for size in of_dim), slots.factors[0])
    return (PaddedValue(out.factors),)
