"""What is tried for each operator where its padding is made: the words of the table of rules, as repairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import sympy
import torch

from graphpass.padding import averaging, combining, moving
from graphpass.padding.indexing import WRITES, index_operands, is_whole, new_places, stays_real
from graphpass.padding.making import NotMade, Operands, Repair, Repairs, Rewrite, base_name, need
from graphpass.padding.opcall import words
from graphpass.padding.program import Ref
from graphpass.padding.sizes import product
from graphpass.padding.values import PaddedValue, TensorShape

# --- operands that get a neutral value


def _reduced(fill: Callable[[torch.dtype], float | int | bool]) -> Repair:
    def repair(operands: Operands) -> None:
        call = operands.call
        value = call.arguments.get("self", call.arguments.get("x"))
        if isinstance(value, PaddedValue) and value.dtype is not None and "other" not in call.arguments:
            places = call.places(value, combining.named_dims(call, value))
            operands.filled(("self" if "self" in call.arguments else "x",), places, fill(value.dtype))

    return repair


def _zero(dtype: torch.dtype) -> int:
    return 0


def _contracted(first: str, second: Sequence[str]) -> Repair:
    """Zero in both operands: zero times infinity is NaN."""

    def repair(operands: Operands) -> None:
        call = operands.call
        name = next((name for name in second if name in call.arguments), "")
        ours, theirs = call.arguments.get(first), call.arguments.get(name)
        if not isinstance(ours, PaddedValue) or not isinstance(theirs, PaddedValue):
            return
        for path, value, dim in ((first, ours, ours.rank - 1), (name, theirs, max(theirs.rank - 2, 0))):
            operands.filled((path,), call.places(value, [dim]), 0)  # guard: made_products

    return repair


def _attended(operands: Operands) -> None:
    """Zero in padded keys and values, which a mask hides: NaN among them would reach real rows under any mask."""
    call = operands.call
    key = call.tensor("key")
    if not call.places(key, [key.rank - 2]):
        return
    for name in ("key", "value"):
        value = call.tensor(name)
        operands.filled((name,), call.places(value, [value.rank - 2]), 0)  # guard: made_keys
    name = "attn_mask" if "attn_mask" in call.arguments else "attn_bias"
    mask = call.arguments.get(name)
    if isinstance(mask, PaddedValue) and mask.rank:
        hidden = False if mask.dtype is torch.bool else -math.inf  # guard: made_mask
        operands.filled((name,), call.places(mask, [mask.rank - 1]), hidden)


def _convolved(operands: Operands) -> None:
    call = operands.call
    value = call.tensor("input")
    places = call.places(value, combining.channels_and_positions(call, value)[1:])
    operands.filled(("input",), places, 0)  # guard: made_convolution


def _pooled(fill: Callable[[torch.dtype], float | int | bool]) -> Repair:
    def repair(operands: Operands) -> None:
        value = operands.call.tensor("self")
        if value.dtype is not None:
            places = operands.call.places(value, combining.positions(operands.call, value))
            operands.filled(("self",), places, fill(value.dtype))  # guard: made_pools

    return repair


def _extended(operands: Operands) -> None:
    """What is put behind padding, in the padding."""
    call = operands.call
    value, amounts = call.tensor("self"), call.argument("pad")
    fill = call.argument("value", default=0)
    behind = [
        value.rank - 1 - turn for turn, right in enumerate(amounts[1::2]) if not isinstance(right, int) or right > 0
    ]
    if isinstance(fill, (bool, int, float)):
        operands.filled(("self",), call.places(value, behind), fill)  # guard: made_behind


def _zeroed(operands: Operands) -> None:
    """Zeros in the rows of padding; the forward context of a call marks others."""
    call = operands.call
    dims = range(call.argument("num_dims"))
    operands.filled(("x",), call.places(call.tensor("x"), dims), 0)  # guard: made_zeroed_rows


def _indices(operands: Operands) -> None:
    """Indices count in the real size of the dimension that they index.

    In padding they are 0, which exists, or for a write the index behind the last entry, which is cut off.
    """
    call, making = operands.call, operands.making
    for path, index, of_dim in index_operands(call):
        if index.dtype not in (torch.int32, torch.int64):
            continue
        ref, writes = operands.ref(*path), call.name in WRITES
        if is_whole(index, of_dim) or (not writes and stays_real(call, index, of_dim) and index.constant is None):
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

_ATTENTION = words(
    "scaled_dot_product_attention _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
)

ZERO_PADDING = "graphpass::zero_padding"
"""The operator that asks for zeros, whether or not another needs them."""

_OPERANDS: Mapping[str, Repair] = {
    name: repair
    for names, repair in (
        ("sum any", _reduced(_zero)),
        ("all", _reduced(lambda dtype: True)),
        ("prod", _reduced(lambda dtype: 1)),
        ("amax max argmax", _reduced(combining.lowest)),
        ("amin min argmin", _reduced(combining.greatest)),
        ("logsumexp _softmax _log_softmax _safe_softmax", _reduced(lambda dtype: -math.inf)),
        ("mm bmm mv dot vdot", _contracted("self", ("mat2", "vec", "other", "tensor"))),
        ("addmm", _contracted("mat1", ("mat2",))),
        ("baddbmm", _contracted("batch1", ("batch2",))),
        ("addmv", _contracted("mat", ("vec",))),
        (" ".join(_ATTENTION), _attended),
        ("convolution _convolution", _convolved),
        ("max_pool2d_with_indices max_pool3d_with_indices", _pooled(combining.lowest)),
        ("_low_memory_max_pool_with_offsets", _pooled(combining.lowest)),
        ("avg_pool2d avg_pool3d", _pooled(_zero)),
        ("constant_pad_nd", _extended),
        (ZERO_PADDING.removeprefix("graphpass::"), _zeroed),
    )
    for name in names.split()
}
"""Operator -> what its operands get. A row of :mod:`graphpass.padding.table` says what is neutral to it."""


# --- operators that are rewritten


def _size_in(operands: Operands, name: str) -> sympy.Expr:
    """The argument that is a size."""
    number = operands.call.argument(name)
    if not isinstance(number, sympy.Expr):
        raise NotMade
    return number


def _by_number(operands: Operands) -> Ref:
    """A padded size as a number: the real one, in float32 at least, as a number is not rounded to 16 bits."""
    number = _size_in(operands, "other")
    making, ref, shape = operands.making, operands.ref("self"), operands.shape
    value: PaddedValue = making.value(ref)
    is_narrow = value.dtype in (torch.float16, torch.bfloat16)  # guard: made_number_is_exact
    is_float = value.dtype is not None and value.dtype.is_floating_point
    # A number leaves the type of a tensor without dimensions as it is, a tensor of a wider type does not.
    has_own = is_float or (not value.rank and value.dtype is not torch.bool)  # guard: made_number_has_no_type
    own = value.dtype if value.dtype is not None and has_own else torch.int64
    wide = torch.float32 if is_narrow else own
    size = making.real(number, TensorShape((), wide))
    making.inserted(f"the real {number}", number, replace(shape, sizes=()))
    if is_narrow:
        ref = making.emit("prims::convert_element_type", replace(making.shape_of(ref), dtype=wide), a=ref, dtype=wide)
    first, second, op = (
        (size, ref, "aten::sub.Tensor") if operands.call.name == "rsub" else (ref, size, operands.node.op)
    )
    arguments = {**dict(operands.node.arguments), "self": first, "other": second}
    computed = making.emit(op, replace(shape, dtype=wide) if is_narrow else shape, **arguments)
    return making.emit("prims::convert_element_type", shape, a=computed, dtype=shape.dtype) if is_narrow else computed


def _bounded(operands: Operands) -> Ref:
    """``clamp`` by a padded size: by the real one."""
    call, making, ref, shape = operands.call, operands.making, operands.ref("self"), operands.shape
    need(call.tensor("self").dtype is shape.dtype)
    for name, op in (("min", "aten::maximum"), ("max", "aten::minimum")):
        number = call.argument(name)
        if isinstance(number, sympy.Expr):
            bound = making.real(number, TensorShape((), shape.dtype))
            making.inserted(f"the real {number}", number, replace(shape, sizes=()))
            ref = making.emit(op, shape, self=ref, other=bound)
        elif number is not None:
            ref = making.emit("aten::clamp", shape, self=ref, **{"min": None, "max": None, name: number})
    return ref


def _scalar(operands: Operands) -> Ref:
    """A tensor of a padded size: of the real one."""
    number, shape = _size_in(operands, "s"), operands.shape
    operands.making.inserted(f"the real {number}", number, shape)
    return operands.making.real(number, shape)


def _attention(operands: Operands) -> Ref:
    """Attention without a mask gets one that hides padded keys."""
    call, making = operands.call, operands.making
    query, key = call.tensor("query"), call.tensor("key")
    is_masked = isinstance(call.argument("attn_mask", "attn_bias"), PaddedValue)
    need(not is_masked and operands.read <= {0} and not call.argument("is_causal", default=False))
    need(not call.argument("dropout_p", default=0.0) and query.rank == 4)
    operator, mask_name, is_expanded = _WITH_MASK[base_name(operands.node.op)]
    _attended(operands)
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

_REWRITES: Mapping[str, Rewrite] = {
    "mean": averaging.mean,
    **dict.fromkeys(words("var var_mean"), averaging.variance),
    **dict.fromkeys(words("avg_pool2d avg_pool3d"), averaging.averaged_windows),
    **dict.fromkeys(words("_embedding_bag _embedding_bag_forward_only"), averaging.bags),
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
    **dict.fromkeys(_WITH_MASK, _attention),
}
"""Operator -> the nodes in its place."""

REPAIRS = Repairs(_indices, _OPERANDS, _REWRITES)
"""The repairs of all operators."""
