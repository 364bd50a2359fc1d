"""Operators of random programs that move entries: views, slices, joins, and entries named by index."""

from __future__ import annotations

from collections.abc import Callable

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from tests.fuzz.padding import CODES, FLOAT, INT, WIDTH, Program, Value, aten

Op = Callable[[Program], Value | None]


def on(accepts: Callable[[Value], bool]) -> Callable[[Callable[[Program, Value], Value | None]], Op]:
    """An operator that begins with a value which ``accepts``, and adds nothing where there is none."""

    def made(op: Callable[[Program, Value], Value | None]) -> Op:
        def add(p: Program) -> Value | None:
            value = p.pick(accepts)
            return None if value is None else op(p, value)

        return add

    return made


def is_float(value: Value) -> bool:
    return value.dtype == FLOAT


def has_dims(value: Value) -> bool:
    return value.rank > 0


def is_float_with_dims(value: Value) -> bool:
    return is_float(value) and has_dims(value)


def has_two(size: sympy.Expr) -> bool:
    """Whether a dimension has at least two entries at all sizes that are tried."""
    return bool(size.is_Symbol or (size.is_Integer and size >= 2))


def product(sizes: list[sympy.Expr] | tuple[sympy.Expr, ...]) -> sympy.Expr:
    return sympy.Mul(*sizes)


def resized(value: Value, dim: int, size: sympy.Expr | int) -> tuple[sympy.Expr, ...]:
    """The shape with another size at ``dim``."""
    return (*value.shape[:dim], size, *value.shape[dim + 1 :])


def contiguous(p: Program, value: Value) -> Value:
    """A copy that a view can regroup; no later node takes it."""
    copy = p.call(aten.clone.default, (value,), value.shape, value.dtype, memory_format=torch.contiguous_format)
    p.values.pop()
    return copy


def reduced(value: Value, dims: list[int], keep: bool) -> list[sympy.Expr]:
    kept = [sympy.Integer(1) if d in dims else size for d, size in enumerate(value.shape)]
    return kept if keep else [size for d, size in enumerate(kept) if d not in dims]


@on(lambda v: v.rank >= 2)
def transpose(p: Program, value: Value) -> Value | None:
    order = list(range(value.rank))
    p.choose.shuffle(order)
    return p.call(aten.permute.default, (value, order), [value.shape[d] for d in order], value.dtype)


@on(lambda v: has_dims(v) and all(size.is_Symbol or size.is_Integer or size.is_Mul for size in v.shape))
def regroup(p: Program, value: Value) -> Value | None:
    """A view of other sizes with the same product, which may or may not keep the sizes apart."""
    factors: list[sympy.Expr] = []
    for size in value.shape:
        number, rest = size.as_coeff_Mul()
        parts = [] if number == 1 else [number]
        parts += [] if rest == 1 else list(sympy.Mul.make_args(rest))
        factors += [part for base in parts for part in ([base.base] * int(base.exp) if base.is_Pow else [base])]
    if p.choose.random() < 0.3:
        factors = [
            part for size in factors for part in ([2, size // 2] if size.is_Integer and size % 2 == 0 else [size])
        ]
    if p.choose.random() < 0.25:
        p.choose.shuffle(factors)
    shape: list[sympy.Expr] = []
    for factor in factors:
        if shape and p.choose.random() < 0.45:
            shape[-1] = shape[-1] * factor
        else:
            shape.append(sympy.sympify(factor))
    shape = shape or [sympy.Integer(1)]
    return p.call(aten.view.default, (contiguous(p, value), p.sizes(shape)), shape, value.dtype)


def back(p: Program) -> Value | None:
    """A view back to the shape of an earlier value."""
    value = p.pick(has_dims)
    like = value and p.pick(lambda v: product(v.shape) == product(value.shape) and v.shape != value.shape)
    if not value or not like:
        return None
    return p.call(aten.view.default, (contiguous(p, value), p.sizes(like.shape)), like.shape, value.dtype)


@on(lambda v: v.rank < 4)
def unsqueeze(p: Program, value: Value) -> Value | None:
    at = p.choose.randint(0, value.rank)
    return p.call(
        aten.unsqueeze.default, (value, at), (*value.shape[:at], sympy.Integer(1), *value.shape[at:]), value.dtype
    )


@on(lambda v: 1 in v.shape)
def squeeze(p: Program, value: Value) -> Value | None:
    at = value.shape.index(sympy.Integer(1))
    return p.call(aten.squeeze.dim, (value, at), (*value.shape[:at], *value.shape[at + 1 :]), value.dtype)


@on(lambda v: 1 in v.shape)
def expand(p: Program, value: Value) -> Value | None:
    at = value.shape.index(sympy.Integer(1))
    size = p.choose.choice([*(list(p.symbols)), sympy.Integer(2)])
    shape = resized(value, at, size)
    return p.call(aten.expand.default, (value, p.sizes(shape)), shape, value.dtype)


@on(has_dims)
def select(p: Program, value: Value) -> Value | None:
    dim = p.choose.randrange(value.rank)
    index = p.choose.choice([0, 0, 0, 1, -1]) if has_two(value.shape[dim]) else 0
    return p.call(aten.select.int, (value, dim, index), reduced(value, [dim], False), value.dtype)


@on(lambda v: any(size.free_symbols for size in v.shape))
def cut(p: Program, value: Value) -> Value | None:
    dim = p.choose.choice([d for d, size in enumerate(value.shape) if size.free_symbols])
    size = value.shape[dim]
    if size.is_Add:
        return None
    one, end_of_all = sympy.Integer(1), 2**63 - 1
    ways = [(1, end_of_all, 1, size - 1), (0, -1, 1, size - 1), (0, 2, 1, sympy.Integer(2)), (-1, end_of_all, 1, one)]
    ways += [(0, end_of_all, 2, FloorDiv(size + 1, 2)), (0, 1, 1, one), (1, 2, 1, one)]
    start, end, step, left = p.choose.choice(ways)
    shape = resized(value, dim, left)
    return p.call(aten.slice.Tensor, (value, dim, start, end, step), shape, value.dtype)


@on(lambda v: has_dims(v) and v.shape[-1] == WIDTH)
def features(p: Program, value: Value) -> Value | None:
    start = p.choose.choice([0, 1, 2])
    shape = resized(value, value.rank - 1, sympy.Integer(WIDTH - start))
    return p.call(aten.slice.Tensor, (value, value.rank - 1, start), shape, value.dtype)


@on(has_dims)
def join(p: Program, value: Value) -> Value | None:
    dim = p.choose.randrange(value.rank)
    rest = reduced(value, [dim], True)
    other = p.pick(lambda v: v.rank == value.rank and v.dtype == value.dtype and reduced(v, [dim], True) == rest)
    pair = [value, other] if p.choose.random() < 0.5 else [other, value]
    shape = resized(value, dim, value.shape[dim] + (other.shape[dim] if other else 0))
    return other and p.call(aten.cat.default, (pair, dim), shape, value.dtype)


@on(is_float_with_dims)
def pad(p: Program, value: Value) -> Value | None:
    before, after = p.choose.choice([(1, 0), (0, 1), (1, 1), (2, 0)])
    dim = p.choose.randrange(value.rank)
    amounts = [0] * (2 * (value.rank - dim - 1)) + [before, after]
    shape = resized(value, dim, value.shape[dim] + before + after)
    return p.call(aten.constant_pad_nd.default, (value, amounts, p.choose.choice([0.0, 1.0])), shape, FLOAT)


@on(has_dims)
def repeat(p: Program, value: Value) -> Value | None:
    times = [p.choose.choice([1, 1, 2]) for _ in value.shape]
    shape = [size * count for size, count in zip(value.shape, times, strict=True)]
    return p.call(aten.repeat.default, (value, times), shape, value.dtype)


def lookup(p: Program) -> Value | None:
    table = p.pick(lambda v: is_float(v) and v.shape == (CODES, WIDTH))
    index = p.pick(lambda v: v.dtype == INT and v.node.op == "placeholder" and v.node.name != "count")
    if table is None or index is None:
        return None
    return p.call(aten.embedding.default, (table, index), (*index.shape, WIDTH), FLOAT)


def gather(p: Program) -> Value | None:
    """Entries named by data, among the first two or, from the end, the last two, so that they exist at every size."""
    value = p.pick(lambda v: has_dims(v) and all(map(has_two, v.shape)))
    index = p.pick(lambda v: v.dtype == INT and v.rank == 1)
    if value is None or index is None:
        return None
    small = p.call(aten.remainder.Scalar, (index, 2), index.shape, INT)
    if p.choose.random() < 0.5:
        last = p.call(aten.sub.Tensor, (small, 2), index.shape, INT)
        return p.call(aten.index.Tensor, (value, [last]), (*index.shape, *value.shape[1:]), value.dtype)
    dim = p.choose.randrange(value.rank)
    if p.choose.random() < 0.5:
        return p.call(aten.index_select.default, (value, dim, small), resized(value, dim, index.shape[0]), value.dtype)
    return p.call(aten.index.Tensor, (value, [small]), (*index.shape, *value.shape[1:]), value.dtype)


@on(lambda v: v.rank >= 2 and v.shape[0].is_Symbol and has_two(v.shape[1]))
def by_range(p: Program, value: Value) -> Value | None:
    """An index by ranges of whole dimensions, and perhaps one by data."""
    size = value.shape[0]
    span = p.call(aten.arange.default, (p.number(size),), (size,), INT)
    rest = value.shape[2:]
    other = p.pick(lambda v: v.dtype == INT and v.shape in ((size,), ()))
    if other is None or p.choose.random() < 0.4:
        return p.call(aten.index.Tensor, (value, [span]), value.shape, value.dtype)
    small = p.call(aten.remainder.Scalar, (other, 2), other.shape, INT)
    if p.choose.random() < 0.3:
        small = p.call(aten.sub.Tensor, (small, 2), other.shape, INT)
    return p.call(aten.index.Tensor, (value, [span, small]), (size, *rest), value.dtype)


def scatter(p: Program) -> Value | None:
    index = p.pick(lambda v: v.dtype == INT and v.rank == 1 and v.node.op == "placeholder" and v.node.name != "count")
    target = p.pick(lambda v: v.shape == (CODES, WIDTH) or v.shape == (CODES,))
    source = (
        index and target and p.pick(lambda v: v.dtype == target.dtype and v.shape == (*index.shape, *target.shape[1:]))
    )
    if not index or not target or not source:
        return None
    if p.choose.random() < 0.5:
        return p.call(aten.index_add.default, (target, 0, index, source), target.shape, target.dtype)
    if p.choose.random() < 0.3:
        index = p.call(aten.sub.Tensor, (index, CODES), index.shape, INT)
    return p.call(aten.index_put.default, (target, [index], source, True), target.shape, target.dtype)


def put_from_the_end(p: Program) -> Value | None:
    """Writes to the last rows, or the first ones, as data says."""
    target = p.pick(lambda v: has_dims(v) and is_float(v) and has_two(v.shape[0]))
    index = p.pick(lambda v: v.dtype == INT and v.rank == 1)
    if target is None or index is None:
        return None
    small = p.call(aten.remainder.Scalar, (index, 2), index.shape, INT)
    if p.choose.random() < 0.7:
        small = p.call(aten.sub.Tensor, (small, 2), index.shape, INT)
    content = p.call(aten.full.default, ([], 1.0), (), FLOAT, dtype=FLOAT)
    return p.call(aten.index_put.default, (target, [small], content), target.shape, FLOAT)


@on(lambda v: has_dims(v) and all(map(has_two, v.shape)))
def assign(p: Program, value: Value) -> Value | None:
    dim = p.choose.randrange(value.rank)
    rest = tuple(reduced(value, [dim], False))
    source = p.pick(lambda v: v.dtype == value.dtype and v.shape == rest)
    index = p.choose.choice([0, 0, 1, -1])
    return source and p.call(aten.select_scatter.default, (value, source, dim, index), value.shape, value.dtype)


MOVES: dict[Op, int] = {
    transpose: 3, regroup: 4, back: 3, unsqueeze: 2, squeeze: 1, expand: 3, select: 2, cut: 4, features: 1, join: 3,
    pad: 2, repeat: 1, lookup: 2, gather: 1, by_range: 1, scatter: 2, assign: 2,
}  # fmt: skip
"""How often each of them is chosen."""
