"""The algebra of the padding pass: factors, views as regrouped factors, padding values and their casts."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._sympy.functions import PythonMod

from graphpass.padding import PaddedValue, PaddingFinding
from graphpass.padding.program import _in_steps
from graphpass.padding.sizes import Question, Regrouping, Sizes, product, quotient
from graphpass.padding.values import (
    Approximate,
    Entry,
    Filled,
    IndexAlong,
    Size,
    by_data,
    cast_pad,
    evaluated,
    is_finite,
)

b, s, t, w = (sympy.Symbol(name, positive=True, integer=True) for name in "bstw")
SIZES = Sizes({b: "batch", s: "seq", t: "seq"})


@pytest.mark.parametrize(
    ("size", "factor", "expected"),
    [
        (12, 4, 3),
        (12, 5, None),
        (12, s, None),
        (s, s, 1),
        (s, 1, s),
        (6 * s, 2, 3 * s),
        (6 * s, 4, None),
        (2 * s + 2, 2, s + 1),
        (2 * s + 1, 2, None),
        (6 * b * s, 3 * s, 2 * b),
        (b * s, w, None),
        (s**2, s, s),
        (s, s**2, None),
        (b * s + b, s + 1, b),
        (b * s + b, b, s + 1),
        ((s + 3) * (2 * s + 6), 2, (s + 3) ** 2),
        (b * s + b + 1, b, None),
        (s, 0, None),
    ],
)
def test_a_quotient_is_exact_or_none(size: Size, factor: Size, expected: Size | None) -> None:
    assert quotient(size, factor) == expected


def test_symbols_of_one_field_are_one_size() -> None:
    assert SIZES.renamed(t + 1) == s + 1
    assert SIZES.fields_of(b * s) == ("batch", "seq")
    assert SIZES.fields_of(w) == ()
    assert SIZES.merged([2, 3, w, s, 1, 5, 7]) == (6 * w, s, 35)


@pytest.mark.parametrize(
    ("size", "grows"),
    [
        (s + 1, True),
        (s - 3, True),
        (3 * b * s, True),
        (sympy.Max(s, 4), True),
        (sympy.Min(s, 4), True),
        (64 - s, False),
        (b - s, False),
        (sympy.Mod(s, 4), False),
        (w, True),
        (7, True),
    ],
)
def test_a_size_that_may_shrink_is_seen(size: Size, grows: bool) -> None:
    assert SIZES.grows(size) is grows


@pytest.mark.parametrize(
    ("size", "is_multiple"),
    [
        (s + PythonMod(-s, 4), True),
        (2 * s + w + PythonMod(-2 * s - w, 8), True),
        (s + PythonMod(-b, 4), False),
        (s + PythonMod(s, 4), False),
        (s + PythonMod(-s, -4), False),
        (s + 1, False),
    ],
)
def test_the_least_multiple_of_a_step(size: Any, is_multiple: bool) -> None:
    steps = _in_steps(size)
    assert SIZES.grows(steps) if is_multiple else steps == size
    for number in range(1, 20):
        at = {s: number, b: number + 2, w: 3}
        assert steps.xreplace(at) == size.xreplace(at)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((s,), (s,), (s,)),
        ((s,), (), (s,)),
        ((), (b, s), (b, s)),
        ((b, s), (b * s,), None),
        ((b, s), (s, b), None),
        ((s, 2), (2 * s,), (2 * s,)),
        ((2, s), (2 * s,), None),
        ((w, 3), (3 * w,), (w, 3)),
        ((s,), (b,), None),
    ],
)
def test_two_dimensions_meet_where_their_clean_entries_agree(
    first: tuple[Size, ...], second: tuple[Size, ...], expected: tuple[Size, ...] | None
) -> None:
    assert SIZES.unified(first, second) == expected


def test_without_order_only_equal_factors_meet() -> None:
    unordered = Sizes({s: "seq"}, Question.INDEPENDENCE)
    assert unordered.unified((s, 2), (2 * s,)) is None
    assert unordered.unified((s,), (s,)) == (s,)
    assert not unordered.starts_clean((s,))
    assert SIZES.starts_clean((s,))
    assert not SIZES.starts_clean((2, s))


@pytest.mark.parametrize(
    ("factors", "shape", "expected"),
    [
        (((b,), (s,), (8,)), (b * s, 8), [(b, s), (8,)]),
        (((b, s), (8,)), (b, s, 2, 4), [(b,), (s,), (2,), (4,)]),
        (((b, s), (8,)), (b * s * 2, 4), [(b, s, 2), (4,)]),
        (((b,), (6,)), (b, 2, 3), [(b,), (2,), (3,)]),
        (((b,), (2,), (3,)), (b, 6), [(b,), (6,)]),
        (((4,), (6,)), (3, 8), [(3,), (8,)]),
        (((2 * s,), (3,)), (s, 6), [(s,), (6,)]),
        (((b, s),), (s, b), None),
        (((2 * s,),), (2, s), None),
        (((4,), (s,)), (2, 2 * s), [(2,), (2, s)]),
        (((4,), (s,)), (2 * s, 2), None),
        (((s,), (3,)), (3, s), None),
        (((s, s),), (s, s), [(s,), (s,)]),
        (((w,), (b,)), (w * b,), [(w, b)]),
        (((w // 2 + 1,), (b,), (4,)), (w, b, 4), [(w,), (b,), (4,)]),
        (((w // 2 + 1,), (b,), (4,)), (w, b * 4), [(w,), (b, 4)]),
        (((w // 2 + 1,), (b,), (4,)), (w, b, w), None),
    ],
)
def test_a_view_regroups_factors_or_is_refused(
    factors: tuple[tuple[Size, ...], ...], shape: tuple[Size, ...], expected: list[tuple[Size, ...]] | None
) -> None:
    walk = Regrouping(SIZES, factors)
    taken = [walk.take(size) for size in shape]
    if expected is None:
        assert None in taken or walk.left
    else:
        assert not walk.left
        assert [SIZES.merged(dim or ()) for dim in taken] == expected


@given(st.lists(st.sampled_from([2, 3, 4, s, b, w]), max_size=6), st.data())
def test_a_view_back_restores_the_factors(flat: list[Size], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(flat)), max_size=3)))
    bounds = [0, *cuts, len(flat)]
    factors = tuple(SIZES.merged(flat[i:j]) for i, j in itertools.pairwise(bounds))
    walk = Regrouping(SIZES, factors)
    whole = walk.take(product(tuple(flat)))
    assert whole is not None
    assert not walk.left
    back = Regrouping(SIZES, (SIZES.merged(whole),))
    taken = [back.take(product(of_dim)) for of_dim in factors]
    assert [SIZES.merged(dim or ()) for dim in taken] == list(factors)


@pytest.mark.parametrize(
    ("pad", "dtype", "expected"),
    [
        (0, torch.float32, 0.0),
        (True, torch.int64, 1),
        (2.5, torch.bool, True),
        (-1e9, torch.float16, -math.inf),
        (-math.inf, torch.int64, None),
        (math.nan, torch.float32, Approximate.NOT_FINITE),
        (math.nan, torch.int64, None),
        (math.inf, torch.complex64, Approximate.NOT_FINITE),
        (Approximate.NOT_FINITE, torch.bool, None),
        (300, torch.uint8, None),
        (-1.7, torch.int32, -1),
        (Approximate.FINITE, torch.bfloat16, Approximate.FINITE),
        (Approximate.FINITE, torch.int64, None),
        (1.0, torch.complex64, None),
        (Filled(-1e9, -math.inf), torch.float16, -math.inf),
        (Filled(0.0, -math.inf), torch.bfloat16, Filled(0.0, -math.inf)),
        (Filled(0.0, -math.inf), torch.int64, None),
        (Filled(None, -math.inf), torch.complex64, Approximate.NOT_FINITE),
    ],
)
def test_a_padding_value_is_cast_or_forgotten(pad: object, dtype: torch.dtype, expected: object) -> None:
    found = cast_pad(pad, dtype)  # type: ignore[arg-type]
    assert found == expected
    assert type(found) is type(expected)


def test_an_operator_is_evaluated_on_single_entries() -> None:
    half = Entry(1.0, torch.float16, has_dims=True)
    assert evaluated("aten::rsub.Scalar", [("self", half), ("other", 1.0), ("alpha", 1)]) == 0.0
    assert evaluated("aten::log", [("self", Entry(0.0, torch.float32, has_dims=True))]) == -math.inf
    assert evaluated("aten::log", [("self", Entry(-1.0, torch.float32, has_dims=True))]) is Approximate.NOT_FINITE
    zero = Entry(0.0, torch.float16, has_dims=False)
    assert evaluated("aten::reciprocal", [("self", zero)]) is Approximate.NOT_FINITE  # of either sign
    assert evaluated("aten::exp", [("self", zero)]) == 1.0
    # A tensor without dimensions does not decide the type: this is a sum in half precision.
    small = Entry(1e-4, torch.float32, has_dims=False)
    assert evaluated("aten::add.Tensor", [("self", half), ("other", small), ("alpha", 1)]) == 1.0
    assert evaluated("aten::no_such_operator", [("self", half)]) is None


@pytest.mark.parametrize(
    ("op", "pads", "expected"),
    [
        ("aten::rsqrt", [Approximate.FINITE], Approximate.NOT_FINITE),
        ("aten::acos", [Approximate.FINITE], Approximate.NOT_FINITE),
        ("aten::atanh", [Approximate.FINITE], Approximate.NOT_FINITE),
        ("aten::exp", [Approximate.FINITE], Approximate.FINITE),
        ("aten::log", [Approximate.FINITE], Approximate.NOT_FINITE),
        ("aten::gelu", [Approximate.FINITE], Approximate.FINITE),
        ("aten::div.Tensor", [Approximate.FINITE, Approximate.FINITE], Approximate.NOT_FINITE),
        ("aten::div.Tensor", [None, 0.0], Approximate.NOT_FINITE),
        ("aten::div.Tensor", [0.0, None], Approximate.FINITE),
        ("aten::add.Tensor", [Approximate.FINITE, 1e-6], Approximate.FINITE),
        ("aten::add.Tensor", [Approximate.FINITE, None], Approximate.FINITE),
        ("aten::mul.Tensor", [Approximate.NOT_FINITE, 0.0], Approximate.NOT_FINITE),
        ("aten::nan_to_num", [Approximate.NOT_FINITE], Approximate.FINITE),
        ("aten::isnan", [Approximate.NOT_FINITE], None),
    ],
)
def test_what_is_known_of_padding_goes_through_pointwise_operators(op: str, pads: list[Any], expected: object) -> None:
    entries = (Entry(pad, torch.float32, has_dims=True) for pad in pads)
    found = evaluated(op, list(zip(("self", "other"), entries, strict=False)))
    assert found is expected


LOW, HIGH = (Filled(None, sign * math.inf) for sign in (-1, 1))


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        (None, -math.inf, LOW),
        (0.0, -math.inf, Filled(0.0, -math.inf)),
        (-math.inf, -math.inf, -math.inf),
        (Filled(0.0, -math.inf), None, LOW),
        (LOW, -math.inf, LOW),
        (LOW, math.inf, Approximate.NOT_FINITE),
        (LOW, HIGH, Approximate.NOT_FINITE),
        (Approximate.NOT_FINITE, -math.inf, Approximate.NOT_FINITE),
        (-math.inf, math.inf, Approximate.NOT_FINITE),
    ],
)
def test_contents_that_a_mask_fills_are_kept_beside_the_infinity(first: Any, second: Any, found: object) -> None:
    assert by_data(first, second) == found
    assert by_data(second, first) == found
    assert not is_finite(found)  # type: ignore[arg-type]


def test_real_entries_are_told_from_padding_where_they_are_infinite() -> None:
    value = PaddedValue(((b,), (s,))).with_pads({(0, 0): None}).with_real(LOW)
    assert value.pad_at((0, 0)) is None
    assert value.pad_at((1, 0)) == LOW


def test_values_are_hashable_and_canonical() -> None:
    value = PaddedValue(((b,), (s,)), index=IndexAlong(1, 0)).with_pads({(1, 0): False, (0, 0): None}).with_real(None)
    assert value.padding == (((1, 0), False),)
    assert hash(value) == hash(pickle.loads(pickle.dumps(value)))
    assert value.pad_at((1, 0)) is False
    assert value.pad_at((0, 0)) is None
    assert PaddedValue(((b,),), constant=3).pad_at((0, 0)) == 3
    finding = PaddingFinding("mean over the padded dimension 1", field="seq", op="aten.mean.dim")
    assert value.with_findings([finding]).with_findings([finding]).findings == {finding}
    assert value.with_findings([]) is value


def test_a_finding_names_operator_and_line() -> None:
    finding = PaddingFinding(
        "mean over the padded dimension 1", "", "model.py:123: x.mean(1)", field="ids", op="aten.mean.dim"
    )
    assert str(finding.reaching("output 0")) == (
        "row i of output 0 depends on padding of 'ids' through aten.mean.dim (mean over the padded dimension 1)"
        " at model.py:123: `x.mean(1)`"
    )
    soft = PaddingFinding("by data", field="ids", op="aten.index", is_by_contents=True, target="random numbers")
    assert str(soft) == "random numbers may depend on padding of 'ids' through aten.index (by data)"
