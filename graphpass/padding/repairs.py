"""What is tried for each operator where its padding is made: the words of the table of rules, as repairs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import sympy
import torch

from graphpass.compat import operators
from graphpass.padding import moving
from graphpass.padding.indexing import WRITES, index_operands, is_whole, new_places, stays_real
from graphpass.padding.making import Operands, Repair, base_name, is_computed, need
from graphpass.padding.neutral import KEYS
from graphpass.padding.opcall import words
from graphpass.padding.program import Ref
from graphpass.padding.sizes import product
from graphpass.padding.values import PaddedValue, TensorShape

# --- indices


def _with_operands(operands: Operands) -> Ref:
    """The call with other operands."""
    node = operands.node
    _indices(operands)
    operands.fill()
    return operands.making.added(operands.node, is_repaired=operands.node != node)


def _indices(operands: Operands) -> None:
    """Indices count in the real size of the dimension that they index.

    In padding they are 0, which exists, or for a write the index behind the last entry, which is cut off.
    """
    call, making = operands.call, operands.making
    for path, index, of_dim in index_operands(call):
        if index.dtype not in (torch.int32, torch.int64):
            continue
        ref, writes = operands.ref(*path), call.name in WRITES
        if is_whole(index, of_dim) or (not writes and stays_real(call, index, of_dim)):
            continue
        if writes:
            if call.sizes.is_prefix(of_dim) and (call.sizes.any_padded(of_dim) or call.places(index)):
                is_longer, wraps = bool(call.places(index)), call.name in _WRAPS
                counted = making.counted(ref, product(of_dim), wraps=wraps, is_longer=is_longer)
                operands.replaced(path, counted)  # guard: made_writes
        elif call.sizes.any_padded(of_dim):
            if not stays_real(call, index, of_dim) and call.sizes.is_prefix(of_dim) and call.name in _READS:
                counted = making.counted(ref, product(of_dim), wraps=call.name in _WRAPS)
                operands.replaced(path, counted)  # guard: made_index
        else:
            operands.filled(path, new_places(call, index), 0)  # guard: made_bounds


_WRAPS = words("index _unsafe_index index_put _unsafe_index_put index_fill")
_READS = words("index _unsafe_index gather index_select embedding")


# --- operators that are rewritten


def _by_number(operands: Operands) -> Ref:
    """A padded size as a number: the real one, in float32 at least, as a number is not rounded to 16 bits."""
    making, ref, shape = operands.making, operands.ref("self"), operands.shape
    value: PaddedValue = making.value(ref)
    own = value.known_dtype
    is_narrow = own in (torch.float16, torch.bfloat16)  # guard: made_number_is_exact
    # A number leaves the type of a tensor without dimensions as it is, a tensor of a wider type does not.
    has_own = own.is_floating_point or (not value.rank and own is not torch.bool)  # guard: made_number_has_no_type
    wide = torch.float32 if is_narrow else own if has_own else torch.int64
    size, ref = operands.real_size("other", wide), making.cast(ref, wide) if is_narrow else ref
    first, second, op = (
        (size, ref, "aten::sub.Tensor") if operands.call.name == "rsub" else (ref, size, operands.node.op)
    )
    arguments = {**dict(operands.node.arguments), "self": first, "other": second}
    computed = making.emit(op, replace(shape, dtype=wide) if is_narrow else shape, **arguments)
    return making.cast(computed, shape.dtype)


def _bounded(operands: Operands) -> Ref:
    """``clamp`` by a padded size: by the real one."""
    call, making, ref, shape = operands.call, operands.making, operands.ref("self"), operands.shape
    need(call.tensor("self").dtype is shape.dtype)
    for name, op in (("min", "aten::maximum"), ("max", "aten::minimum")):
        number = call.argument(name)
        if isinstance(number, sympy.Expr):
            ref = making.emit(op, shape, self=ref, other=operands.real_size(name, shape.dtype))
        elif number is not None:
            ref = making.emit("aten::clamp", shape, self=ref, **{"min": None, "max": None, name: number})
    return ref


def _scalar(operands: Operands) -> Ref:
    """A tensor of a padded size: of the real one."""
    return operands.real_size("s", operands.shape.dtype)


def _measured(operands: Operands) -> Ref:
    """``cdist`` in the mode in which no size decides how it computes."""
    arguments = {**dict(operands.node.arguments), "compute_mode": 2}
    operands.making.inserted(
        "distances without a product of matrices", operands.shape.sizes[-1], replace(operands.shape, sizes=())
    )
    return operands.making.added(replace(operands.node, arguments=tuple(arguments.items())))


def _attends_to_all(operands: Operands) -> tuple[PaddedValue, PaddedValue]:
    """Query and key of attention that may be exchanged for another kernel: its first result alone is read."""
    call = operands.call
    query, key = call.tensor("query"), call.tensor("key")
    is_masked = isinstance(call.argument("attn_mask", "attn_bias"), PaddedValue)
    need(not is_masked and operands.read <= {0} and not call.argument("is_causal", default=False))
    need(not call.argument("dropout_p", default=0.0) and query.rank == 4)
    return query, key


def _counted_keys(operands: Operands) -> Ref:
    """Attention without a mask by a kernel that is given the number of real keys."""
    (query, key), making = _attends_to_all(operands), operands.making
    each = [operands.call.tensor(name).factors for name in ("query", "key", "value")]
    batches, widths = ({of_each[dim] for of_each in each} for dim in (0, 3))
    need(base_name(operands.node.op) in _ON_CUDA and len(batches) == len(widths) == len(key.factors[2]) == 1)
    kernel = operators.attention_to_lengths(query.known_dtype, product(query.factors[3]))
    need(kernel and (query.factors[1] == key.factors[1] or kernel == "flash"))
    given, (size,) = dict(operands.node.arguments), key.factors[2]
    need(is_computed(size) and all(isinstance(product(heads), int) for _, heads, *_ in each))
    arguments = {one: given[one] for one in ("query", "key", "value")} | {"size": size, "scale": given.get("scale")}
    making.inserted("the number of real keys", size, TensorShape((), torch.int32))
    return making.added(replace(operands.node, op=KEYS, arguments=tuple(arguments.items())))


def _attention(operands: Operands) -> Ref:
    """Attention without a mask gets one that hides padded keys."""
    call, making = operands.call, operands.making
    query, key = _attends_to_all(operands)
    operator, mask_name, is_expanded = _WITH_MASK[base_name(operands.node.op)]
    need(query.factors[1] == key.factors[1] or not is_expanded)
    operands.fill()
    keys = making.shape_of(operands.ref("key")).sizes[2]
    places = call.places(key, [2])
    of_queries = making.shape_of(operands.ref("query"))
    sizes, dtype = of_queries.sizes, of_queries.dtype
    row = making.emit("aten::full", TensorShape((keys,), dtype), size=(keys,), fill_value=0.0, dtype=dtype)
    need(making.value(row).factors == (key.factors[2],))
    hidden = making.filled(row, [(0, at) for _, at in places], -math.inf)
    wide = (*sizes[:3], keys) if is_expanded else (1, 1, 1, keys)
    mask = making.emit("aten::expand", TensorShape(wide, dtype), self=hidden, size=wide)
    given = dict(operands.node.arguments)
    arguments = {one: given[one] for one in ("query", "key", "value")} | {mask_name: mask}
    arguments |= {"compute_log_sumexp": False} if mask_name == "attn_bias" else {}
    arguments |= {"dropout_p": 0.0, "is_causal": False, "scale": given.get("scale")}
    node = replace(operands.node, op=operator, arguments=tuple(arguments.items()))
    making.inserted("a mask of padded keys", keys, TensorShape((keys,), dtype))
    return making.added(node)


_WITH_MASK: Mapping[str, tuple[str, str, bool]] = {
    "_scaled_dot_product_flash_attention_for_cpu": (
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "attn_mask",
        False,
    ),
    "_scaled_dot_product_flash_attention": ("aten::_scaled_dot_product_efficient_attention", "attn_bias", True),
    "_scaled_dot_product_efficient_attention": ("aten::_scaled_dot_product_efficient_attention", "attn_bias", True),
    "_scaled_dot_product_cudnn_attention": ("aten::_scaled_dot_product_cudnn_attention", "attn_bias", False),
}
"""Kernel -> (the kernel that takes a mask, the name of the mask, whether it wants it at the size of the scores)."""

_ON_CUDA = _WITH_MASK.keys() - {"_scaled_dot_product_flash_attention_for_cpu"}

_REWRITES: Mapping[str, Repair] = {
    **dict.fromkeys(words("sort topk"), moving.ordered),
    **dict.fromkeys(words("slice_scatter select_scatter"), moving.replaced_part),
    "select": moving.selected,
    "slice": moving.sliced,
    **dict.fromkeys(words("flip rev"), moving.flipped),
    "roll": moving.rolled,
    "cat": moving.joined,
    **dict.fromkeys(words("arange iota"), moving.counted),
    **dict.fromkeys(words("view reshape _unsafe_view"), moving.viewed),
    **dict.fromkeys(words("add sub rsub mul div"), _by_number),
    "clamp": _bounded,
    "scalar_tensor": _scalar,
    "_cdist_forward": _measured,
    **dict.fromkeys(_WITH_MASK, _attention),
}
"""Operator -> the nodes in its place."""


def repairs_of(op: str) -> list[Repair]:
    """The repairs of an operator, in the order in which they are tried."""
    name = base_name(op)
    counted = [_counted_keys] if name in _WITH_MASK else []
    return [_with_operands, *counted, _REWRITES[name]] if name in _REWRITES else [_with_operands]
