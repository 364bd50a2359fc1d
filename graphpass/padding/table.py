"""The table of padding rules: what each operator does to the dimensions of its arguments.

Most rows are one of these relations. Sizes of an operator's arguments that a row does not name stay as they are.

==============  ======================================================  ===============================================
relation        what it does to dimensions                              what may be padded
==============  ======================================================  ===============================================
keeps           each entry comes from the entries of the same indices   all dimensions, if the operands agree on them
makes           the entries come from sizes and numbers                 all dimensions
mixes           entries depend on all entries along some dimensions     all other dimensions
weighs          the same, by weights or in windows                      these, too, where their padding is neutral
reduces         the same, and these dimensions are gone                 these, too, where their padding is neutral
contracts       products are summed over a dimension of two operands    this, too, where one operand's padding is zero
indexes         data names the entries that are read or written         those that data does not name
regroups        the factors are divided into dimensions in another way  all factors that no dimension cuts through
cuts and joins  parts of a dimension are taken, or put together         the part that stands last
==============  ======================================================  ===============================================
"""

from __future__ import annotations

from typing import Any

import torch

from graphpass.compat import operators
from graphpass.errors import OptionError, did_you_mean
from graphpass.padding import attending, combining, indexing, neutral, pointwise, rearranging
from graphpass.padding.combining import contracts, extremes, reduces
from graphpass.padding.opcall import OpCall, PaddingReason, PaddingRule, Returned
from graphpass.padding.values import operator_named

_KEEPS: list[tuple[PaddingRule, str]] = [
    # Pointwise operators without the tag, in torch 2.11 or at all.
    (
        pointwise.entry_by_entry,
        "where masked_fill floor_divide logical_and logical_or logical_xor logical_not clamp polar complex leaky_relu"
        " _conj _neg_view"
        " | abs acos acosh asin asinh atan atan2 atanh add"
        " bitwise_and bitwise_not bitwise_or bitwise_xor ceil cos cosh"
        " div eq erf erfc exp exp2 expm1 floor fmax"
        " fmin fmod ge gt isfinite le lgamma log log10"
        " log1p log2 lt maximum minimum mul ne neg pow"
        " reciprocal remainder round rsqrt shift_left sign signbit"
        " sin sinh sqrt sub tan tanh trunc where",
    ),
    (
        pointwise.cast,
        "clone alias detach lift_fresh lift_fresh_copy _to_copy to | convert_element_type device_put view_of clone",
    ),
    (pointwise.zeroed, pointwise.ZERO_PADDING),
    (pointwise.copied, "copy copy_"),
    (pointwise.cast, "_c10d_functional::wait_tensor"),
    (pointwise.over_ranks, "_c10d_functional::all_reduce"),
    (pointwise.dropout, "native_dropout"),
    (neutral.neutral, neutral.NEUTRAL),
    (neutral.real_index, neutral.REAL_INDEX),
    (neutral.real_order, neutral.REAL_ORDER),
    (attending.attention_to_keys, neutral.KEYS),
]

_MAKES: list[tuple[PaddingRule, str]] = [
    (
        pointwise.filled,
        "full new_full zeros new_zeros zero ones new_ones zeros_like ones_like full_like fill scalar_tensor"
        " | full full_like scalar_tensor",
    ),
    (OpCall.fresh, "empty new_empty empty_like empty_strided new_empty_strided empty_permuted eye | empty_strided"),
    (pointwise.counted, "arange | iota"),
    (neutral.real_size, neutral.REAL_SIZE),
    # Those of torch have a tag.
    (
        pointwise.random_numbers,
        "| inductor_random inductor_randint inductor_random_for_pallas _uniform_helper",
    ),
]

_MIXES: list[tuple[PaddingRule, str]] = [
    (rearranging.framed, "unfold"),
    (
        reduces(None, combining.positions, "moves a window over"),
        "_adaptive_avg_pool3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    ),
    (
        reduces(None),
        "flip roll _fft_r2c _fft_c2c _fft_c2r sort topk mean var var_mean median nanmedian mode kthvalue"
        " | rev var xor_sum",
    ),
    (reduces(None, combining.last(1), "makes complex numbers of"), "view_as_complex"),
    (reduces(None, combining.last(0)), "view_as_real"),
    (combining.scan, "cumsum cumprod logcumsumexp cummax cummin"),
    (combining.recurrent_layer, "mkldnn_rnn_layer"),
    (attending.flex_attention, "higher_order::flex_attention"),
    (combining.distances, "_cdist_forward"),
    (
        combining.rows_of_a_product,
        "_scaled_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu _weight_int8pack_mm",
    ),
]

_WEIGHS: list[tuple[PaddingRule, str]] = [
    (combining.convolution, "convolution _convolution"),
    (combining.whole_maxima, "adaptive_max_pool2d adaptive_max_pool3d"),
    (
        combining.windows(combining.lowest),
        "max_pool2d_with_indices max_pool3d_with_indices"
        " | _low_memory_max_pool_with_offsets _low_memory_max_pool2d_with_offsets",
    ),
    (combining.windows(combining.zero), "avg_pool2d avg_pool3d"),
    (combining.softmax, "_softmax _log_softmax _safe_softmax"),
    (
        attending.attention,
        "scaled_dot_product_attention _scaled_dot_product_attention_math _scaled_dot_product_flash_attention"
        " _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention"
        " _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable",
    ),
]

_REDUCES: list[tuple[PaddingRule, str]] = [
    (reduces(combining.zero), "sum any | sum"),
    (reduces(combining.one), "all prod | prod"),
    (reduces(combining.lowest), "amax | amax prepare_softmax_online"),
    (reduces(combining.greatest), "amin | amin"),
    (extremes(combining.lowest), "max"),
    (extremes(combining.greatest), "min"),
    (reduces(combining.hidden), "logsumexp"),
    (combining.place_of_extreme, "argmax argmin"),
]

_CONTRACTS: list[tuple[PaddingRule, str]] = [
    (
        contracts(["self"], ["mat2", "other", "vec", "vec2", "tensor"]),
        "mm bmm mv dot vdot _int_mm",
    ),
    (contracts(["mat1", "batch1", "mat"], ["mat2", "batch2", "vec"], bias="self"), "addmm baddbmm addmv"),
]

_INDEXES: list[tuple[PaddingRule, str]] = [
    (indexing.index, "index _unsafe_index"),
    (indexing.index_select, "index_select embedding"),
    (indexing.embedding_bag, " ".join(indexing.BAGS)),
    (indexing.gather, "gather"),
    (indexing.bucketize, "bucketize"),
    (indexing.scatter, "scatter scatter_add scatter_reduce"),
    (indexing.index_add, "index_add index_copy index_fill"),
    (indexing.index_put, "index_put _unsafe_index_put"),
]

_REGROUPS: list[tuple[PaddingRule, str]] = [
    (
        rearranging.view,
        "view _unsafe_view _reshape_alias view_copy squeeze unsqueeze | reshape squeeze split_dim collapse_view",
    ),
    (rearranging.permute, "permute transpose t | transpose"),
    (rearranging.expand, "expand | broadcast_in_dim"),
    (rearranging.gathered, "_c10d_functional::all_gather_into_tensor"),
]

_CUTS_AND_JOINS: list[tuple[PaddingRule, str]] = [
    (rearranging.slice_of, "slice"),
    (rearranging.select, "select"),
    (
        rearranging.split,
        "split split_with_sizes unsafe_split unsafe_split_with_sizes unbind",
    ),
    (rearranging.cat, "cat stack | cat"),
    (rearranging.constant_pad, "constant_pad_nd"),
    (rearranging.replaced_part, "slice_scatter select_scatter"),
]

BUILT_IN: dict[str, PaddingRule] = {
    name if "::" in name else f"{namespace}::{name}": rule
    for rows in (_KEEPS, _MAKES, _MIXES, _WEIGHS, _REDUCES, _CONTRACTS, _INDEXES, _REGROUPS, _CUTS_AND_JOINS)
    for rule, names in rows
    for namespace, part in zip(("aten", "prims"), names.split("|"), strict=False)
    for name in part.split()
}
"""Qualified name without overload -> rule. A row names operators of ``aten``, and behind a bar those of ``prims``."""

FILLING = frozenset(
    [pointwise.zeroed, rearranging.constant_pad]
    + [rule for rows in (_WEIGHS, _REDUCES, _CONTRACTS) for rule, _ in rows]
)
"""Rules that say what padding they want."""

_WITHOUT_SIZES = {
    pointwise.entry_by_entry,
    pointwise.cast,
    *(rule for rows in (_MIXES, _WEIGHS, _REDUCES, _CONTRACTS, _INDEXES) for rule, _ in rows),
}
_COUNTS = ("N", "padding_idx")
"""Arguments that only repeat a size of a tensor, or name a row of a table."""

_REGISTERED: dict[str, PaddingRule] = {}
_IGNORES_NUMBERS: set[str] = set()  # the names among them whose rules read no plain numbers


def rule_for(name: str) -> PaddingRule | None:
    """The rule for a qualified operator name (``aten::add.Tensor``): registered, built in, or implied by its tags."""
    packet = name.partition(".")[0]
    rule = _REGISTERED.get(name) or _REGISTERED.get(packet) or BUILT_IN.get(packet)
    op = operator_named(name) if rule is None else None
    if op is None:
        return rule
    if torch.Tag.nondeterministic_seeded in op.tags:
        return pointwise.random_numbers
    return pointwise.entry_by_entry if torch.Tag.pointwise in op.tags else None


def ignores_numbers(target: Any) -> bool:
    """Whether proofs do not depend on the numbers in a call of an op: it returns nothing, and no rule reads them."""
    name = operators.operator_name(target)
    op = None if name is None else operator_named(name)
    if name is None or op is None or op._schema.returns:
        return False
    return name in _IGNORES_NUMBERS or rule_for(name) is None  # guard: proof_numbers_of_rules


def applied(rule: PaddingRule, call: OpCall) -> Returned | PaddingReason:
    """What a rule returns; in most relations a padded size must not be a number among the arguments."""
    if rule in _WITHOUT_SIZES:
        call.no_padded_numbers(*_COUNTS)  # guard: proof_size_as_number
    return rule(call)


def is_registered(name: str) -> bool:
    """Whether a user registered the rule of the operator with this qualified name."""
    return name in _REGISTERED or name.partition(".")[0] in _REGISTERED


def register_padding_rule(op: Any, rule: PaddingRule, *, ignores_numbers: bool = False) -> None:
    """Register the padding rule of a custom operator, for all graphs of this process.

    Args:
        op: an overload, a packet (all its overloads), or the qualified name of either: ``mylib::attention``.
        rule: takes an :class:`OpCall`; returns the :class:`PaddedValue` of the result, a tuple of them for several
            results, or a :class:`PaddingReason` if real entries may depend on padding. One of the call's arguments
            stands for each result of its sizes, and says that row i depends on row i of it alone. An exception in the
            rule counts as such a reason.
        ignores_numbers: the rule reads no plain numbers of a call. Calls that differ in these alone, such as the number
            of a layer, are then traced for proofs once.

    Raises:
        OptionError: ``op`` names no operator, ``rule`` is not callable, or the operator has a rule already.

    Example:
        An operator that works row by row along all dimensions but the last::

            def scaled(call: OpCall) -> PaddedValue:
                x = call.tensor("x")
                call.unpadded(x, [x.rank - 1], "normalises over")
                return x


            register_padding_rule("mylib::scale_rows", scaled)
    """
    name = _qualified(op)
    if not callable(rule):
        raise OptionError(
            f"the padding rule of {name} cannot be called",
            expected="a function of one OpCall",
            found=type(rule).__name__,
            remedy="pass a function that returns a PaddedValue or a PaddingReason",
        )
    if name in _REGISTERED or name.partition(".")[0] in {*BUILT_IN, *_REGISTERED}:
        raise OptionError(
            f"{name} has a padding rule already",
            expected="one registration for each operator",
            found="a second one",
            remedy="register the rule once, where the operator is defined",
        )
    _REGISTERED[name] = rule
    if ignores_numbers:
        _IGNORES_NUMBERS.add(name)


def _qualified(op: Any) -> str:
    if isinstance(op, operators.OpOverload):
        return str(op.name())
    if isinstance(op, operators.OpOverloadPacket):
        return str(operators.schema_of(operators.overloads_of(op)[0]).name)
    if not isinstance(op, str):
        raise OptionError(
            "the operator of a padding rule cannot be identified",
            expected="an OpOverload, an OpOverloadPacket or a qualified name such as 'mylib::attention'",
            found=repr(op),
            remedy="pass torch.ops.mylib.attention or its name",
        )
    namespace, separator, rest = op.partition("::")
    base, _, overload = rest.partition(".")
    packet = operators.operator_packet(namespace, base) if separator else None
    if packet is None or (overload and operator_named(op) is None):
        raise OptionError(
            f"no operator is named {op!r}",
            expected="the qualified name of a registered operator",
            found=repr(op),
            remedy=did_you_mean(
                op, operators.registered_operator_names(), otherwise="define the operator before its padding rule"
            ),
        )
    return op
