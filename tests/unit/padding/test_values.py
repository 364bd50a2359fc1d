"""The algebra of the padding pass: factors, views as regrouped factors, values of padding."""

from __future__ import annotations

import itertools
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._sympy.functions import CeilToInt, FloatTrueDiv, FloorDiv, Max, PythonMod, ToFloat

from graphpass.padding import PaddedValue, PaddingFinding
from graphpass.padding.program import _in_steps, _Reader, _unrounded, _whole
from graphpass.padding.sizes import Question, Regrouping, Sizes, product
from graphpass.padding.values import Approximate, IndexAlong, Size

b, s, t, w = (sympy.Symbol(name, positive=True, integer=True) for name in "bstw")
SIZES = Sizes({b: "batch", s: "seq", t: "seq"})


def test_symbols_of_one_field_are_one_size() -> None:
    assert SIZES.renamed(t + 1) == s + 1
    assert SIZES.fields_of(b * s) == ("batch", "seq")
    assert SIZES.fields_of(w) == ()
    assert SIZES.merged([2, 3, w, s, 1, 5, 7]) == (6 * w, s, 35)


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


@pytest.mark.parametrize("divisor", [2, 3])
def test_a_quotient_is_the_same_however_it_is_written(divisor: int) -> None:
    for rest, number in itertools.product(range(-7, 8), range(1, 20)):
        found, written = _whole(FloorDiv(s + rest, divisor)), FloorDiv(s + rest - divisor, divisor)
        assert found.xreplace({s: number}) == (number + rest) // divisor
        assert _whole(written) + 1 == found


@pytest.mark.parametrize(("step", "known"), [(1.0, 2 * s), (-1.0, -2 * s), (2.0, None)])
def test_steps_that_are_counted_in_floats(step: float, known: object) -> None:
    steps = CeilToInt(FloatTrueDiv(ToFloat(s) + ToFloat(s), step))
    assert _unrounded(steps) == (steps if known is None else known)


@pytest.mark.parametrize(("least", "known"), [(1, True), (3, True), (0, False), (-4, False), (None, False)])
def test_the_largest_of_one_and_what_is_larger(least: int | None, known: bool) -> None:
    reader: Any = SimpleNamespace(_bounds=lambda size: (least, None))
    assert _Reader._large(reader, Max(1, s - 3)) == (s - 3 if known else Max(1, s - 3))


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


def test_real_entries_are_told_from_padding_where_they_are_infinite() -> None:
    value = PaddedValue(((b,), (s,))).with_pads({(0, 0): None}).with_real(Approximate.HIDDEN)
    assert value.pad_at((0, 0)) is None
    assert value.pad_at((1, 0)) is Approximate.HIDDEN


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
