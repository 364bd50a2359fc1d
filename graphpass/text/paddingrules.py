"""Padding rules of the ops that text models call: paged attention, LoRA adapters per token, experts per token."""

from __future__ import annotations

from graphpass.regions.padding import OpCall, PaddedValue

__all__ = ["add_lora_by_row", "expert_linear_by_row", "paged_attention_by_row"]

SCRATCH_SLOTS = "padded tokens of paged attention write to scratch slots alone"


def paged_attention_by_row(call: OpCall) -> tuple[PaddedValue, ...]:
    """Padding rule of paged attention: a row depends on its query and on the pages of its request."""
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
    """Padding rule of ``add_lora``: a row depends on its input and on its token's adapter."""
    x, out, slots = call.tensor("x"), call.tensor("out"), call.tensor("slots")
    for name in ("lora_a", "lora_b", "order"):
        tensor = call.tensor(name)
        call.unpadded(tensor, range(tensor.rank), "adapters lie along")
    for tensor in (x, out):
        call.unpadded(tensor, [tensor.rank - 1], "multiplies matrices over")
        call.unify(tuple(size for of_dim in tensor.factors[:-1] for size in of_dim), slots.factors[0])
    return (PaddedValue(out.factors),)


def expert_linear_by_row(call: OpCall) -> PaddedValue:
    """Padding rule of ``expert_linear``: a row depends on its input and on the numbers of its token's experts."""
    x, experts, weight, bias = call.tensor("x"), call.tensor("experts"), call.tensor("weight"), call.argument("bias")
    for tensor in (weight, bias):
        if isinstance(tensor, PaddedValue):  # guard: expert_rows
            call.unpadded(tensor, range(tensor.rank), "multiplies by weights along")
    for tensor in (x, experts):
        call.unpadded(tensor, range(1, tensor.rank), "multiplies matrices over")
    rows = call.unify(x.factors[0], experts.factors[0])
    return PaddedValue((rows, *call.fresh().factors[1:]))
