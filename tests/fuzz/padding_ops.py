"""Operators of random programs: each adds nodes to a program and returns a value, or None where nothing fits."""

from __future__ import annotations

from collections.abc import Callable

import sympy
import torch

from tests.fuzz.padding import BOOL, FLOAT, INT, WIDTH, Program, Value, aten, world
from tests.fuzz.padding_moves import (
    MOVES,
    Op,
    has_dims,
    has_two,
    is_float,
    is_float_with_dims,
    on,
    product,
    put_from_the_end,
    reduced,
)

INF = float("inf")

_UNARY = [aten.relu, aten.neg, aten.abs, aten.sin, aten.tanh, aten.sigmoid, aten.floor, aten.sign, aten.silu, aten.gelu]
_BINARY = [aten.add, aten.sub, aten.mul, aten.maximum, aten.minimum, aten.div]
_COMPARE = [aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge]


def broadcast(a: Value, b: Value) -> tuple[sympy.Expr, ...] | None:
    """The shape of both together, None where they do not fit."""
    rank = max(a.rank, b.rank)
    left, right = ((sympy.Integer(1),) * (rank - v.rank) + v.shape for v in (a, b))
    if any(m != n and 1 not in (m, n) for m, n in zip(left, right, strict=True)):
        return None
    return tuple(n if m == 1 else m for m, n in zip(left, right, strict=True))


def fitting(p: Program, value: Value, accepts: Callable[[Value], bool]) -> tuple[Value, tuple[sympy.Expr, ...]] | None:
    """Another value that broadcasts with ``value``, if need be after a new dimension."""
    other = p.pick(lambda v: accepts(v) and broadcast(value, v) is not None)
    if other is None or p.choose.random() < 0.15:
        loose = p.pick(lambda v: accepts(v) and 0 < v.rank < max(value.rank, 2))
        if loose is not None:
            at = p.choose.randint(0, loose.rank)
            shape = (*loose.shape[:at], sympy.Integer(1), *loose.shape[at:])
            wider = p.call(aten.unsqueeze.default, (loose, at), shape, loose.dtype)
            other = wider if broadcast(value, wider) is not None else other
    return None if other is None else (other, broadcast(value, other) or ())


@on(is_float)
def unary(p: Program, value: Value) -> Value | None:
    return p.call(p.choose.choice(_UNARY).default, (value,), value.shape, FLOAT)


def scalar(p: Program) -> Value | None:
    value = p.pick(is_float)
    op = p.choose.choice([aten.add.Scalar, aten.mul.Scalar, aten.sub.Scalar, aten.div.Scalar, aten.clamp_min.default])
    return value and p.call(op, (value, p.choose.choice([0.5, 2.0, -1.0, 1.0, -1e9])), value.shape, FLOAT)


@on(is_float)
def binary(p: Program, value: Value) -> Value | None:
    fit = fitting(p, value, is_float)
    if fit is None:
        return None
    pair = [value, fit[0]] if p.choose.random() < 0.5 else [fit[0], value]
    return p.call(_overload(p.choose.choice(_BINARY)), pair, fit[1], FLOAT)


def _overload(op: torch._ops.OpOverloadPacket) -> torch._ops.OpOverload:
    return op.Tensor if "Tensor" in op.overloads() else op.default


@on(lambda v: v.dtype == INT)
def integers(p: Program, value: Value) -> Value | None:
    fit = fitting(p, value, lambda v: v.dtype == INT)
    if fit is None:
        return None
    op = p.choose.choice([aten.add, aten.sub, aten.mul, aten.maximum])
    return p.call(_overload(op), (value, fit[0]), fit[1], INT)


def shifted_integers(p: Program) -> Value | None:
    value = p.pick(lambda v: v.dtype == INT)
    op = p.choose.choice([aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor])
    return value and p.call(op, (value, p.choose.choice([0, 1, -1, 2])), value.shape, INT)


@on(lambda v: v.dtype != BOOL)
def compare(p: Program, value: Value) -> Value | None:
    fit = fitting(p, value, lambda v: v.dtype == value.dtype)
    if fit is None:
        return None
    return p.call(p.choose.choice(_COMPARE).Tensor, (value, fit[0]), fit[1], BOOL)


@on(lambda v: v.dtype != BOOL)
def compare_scalar(p: Program, value: Value) -> Value | None:
    return p.call(p.choose.choice(_COMPARE).Scalar, (value, p.choose.choice([0, 1])), value.shape, BOOL)


def logical(p: Program) -> Value | None:
    value = p.pick(lambda v: v.dtype == BOOL)
    if value is None or p.choose.random() < 0.3:
        return value and p.call(aten.logical_not.default, (value,), value.shape, BOOL)
    fit = fitting(p, value, lambda v: v.dtype == BOOL)
    op = p.choose.choice([aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.logical_and.default])
    return fit and p.call(op, (value, fit[0]), fit[1], BOOL)


@on(lambda v: v.dtype != FLOAT)
def convert(p: Program, value: Value) -> Value | None:
    return p.call(aten._to_copy.default, (value,), value.shape, FLOAT, dtype=FLOAT)


@on(is_float)
def fill(p: Program, value: Value) -> Value | None:
    fit = fitting(p, value, lambda v: v.dtype == BOOL)
    if fit is None:
        return None
    content = p.choose.choice([0.0, 0.0, 1.0, -INF, -INF, -1e9, INF])
    return p.call(aten.masked_fill.Scalar, (value, fit[0], content), fit[1], FLOAT)


@on(is_float)
def where(p: Program, value: Value) -> Value | None:
    fit = fitting(p, value, lambda v: v.dtype == BOOL)
    if fit is None:
        return None
    other = p.pick(lambda v: is_float(v) and v.shape == value.shape) or value
    pair = (value, other) if p.choose.random() < 0.5 else (other, value)
    return p.call(aten.where.self, (fit[0], *pair), fit[1], FLOAT)


def some_dims(p: Program, value: Value) -> list[int]:
    count = p.choose.choices([1, 2], [4, 1])[0]
    return sorted(p.choose.sample(range(value.rank), min(count, value.rank)))


@on(is_float_with_dims)
def reduction(p: Program, value: Value) -> Value | None:
    dims, keep = some_dims(p, value), p.choose.random() < 0.3
    ops = [*[aten.sum.dim_IntList] * 2, aten.amax.default, aten.amin.default, aten.mean.dim, aten.logsumexp.default]
    if p.choose.random() < 0.1:
        op = p.choose.choice([aten.prod.dim_int])
        return p.call(op, (value, dims[0], keep), reduced(value, dims[:1], keep), FLOAT)
    return p.call(p.choose.choice(ops), (value, dims, keep), reduced(value, dims, keep), FLOAT)


@on(lambda v: has_dims(v) and v.dtype == BOOL)
def truth(p: Program, value: Value) -> Value | None:
    dim, keep = p.choose.randrange(value.rank), p.choose.random() < 0.3
    if p.choose.random() < 0.3:
        return p.call(aten.sum.dim_IntList, (value, [dim], keep), reduced(value, [dim], keep), INT)
    return p.call(p.choose.choice([aten.any.dim, aten.all.dim]), (value, dim, keep), reduced(value, [dim], keep), BOOL)


@on(is_float_with_dims)
def extremum(p: Program, value: Value) -> Value | None:
    dim = p.choose.randrange(value.rank)
    if p.choose.random() < 0.5:
        return p.call(aten.argmax.default, (value, dim), reduced(value, [dim], False), INT)
    shape = reduced(value, [dim], False)
    return p.call_many(aten.max.dim, (value, dim), [(shape, FLOAT), (shape, INT)])


@on(lambda v: is_float(v) and v.rank >= 2 and all(map(has_two, v.shape)))
def by_places(p: Program, value: Value) -> Value | None:
    """Statistics and entries at other places, which count in the real sizes."""
    dim, (size, last) = p.choose.randrange(value.rank), value.shape[-2:]
    kind = p.choose.randrange(6)
    if kind == 0:
        return p.call(aten.var.correction, (value, [dim]), reduced(value, [dim], False), FLOAT, correction=0)
    if kind == 1:
        exchanged = (*value.shape[:-2], last, size)
        return p.call(aten.reshape.default, (value, p.sizes(exchanged)), exchanged, FLOAT)
    if kind == 2:
        return p.call(aten.arange.start_step, (p.number(last - 1), -1, -1), (last,), INT)
    if kind == 3 and value.rank <= 3:
        return p.call(aten.replication_pad1d.default, (value, [2, 1]), (*value.shape[:-1], last + 3), FLOAT)
    if kind == 4 and value.rank <= 3:
        frames = (*value.shape[:dim], value.shape[dim] - 1, *value.shape[dim + 1 :], 2)
        return p.call(aten.unfold.default, (value, dim, 2, 1), frames, FLOAT)
    half = p.call(
        aten.floor_divide.default, (p.call(aten.arange.default, (p.number(last),), (last,), INT), 2), (last,), INT
    )
    return p.call(aten.index.Tensor, (value, [*[None] * (value.rank - 1), half]), value.shape, FLOAT)


def softmax(p: Program) -> Value | None:
    value = p.pick(is_float_with_dims)
    op = p.choose.choice([aten._softmax.default, aten._softmax.default, aten._log_softmax.default])
    return value and p.call(op, (value, p.choose.randrange(value.rank), False), value.shape, FLOAT)


def scan(p: Program) -> Value | None:
    value = p.pick(is_float_with_dims)
    op = p.choose.choice([aten.cumsum.default, aten.cumsum.default, aten.cumprod.default])
    return value and p.call(op, (value, p.choose.randrange(value.rank)), value.shape, FLOAT)


@on(is_float_with_dims)
def reorder(p: Program, value: Value) -> Value | None:
    dim = p.choose.randrange(value.rank)
    if p.choose.random() < 0.4:
        return p.call_many(aten.sort.default, (value, dim), [(value.shape, FLOAT), (value.shape, INT)])
    if p.choose.random() < 0.5:
        return p.call(aten.flip.default, (value, [dim]), value.shape, FLOAT)
    return p.call(aten.roll.default, (value, [1], [dim]), value.shape, FLOAT)


@on(lambda v: is_float(v) and v.rank in (2, 3))
def matmul(p: Program, left: Value) -> Value | None:
    right = p.pick(lambda v: is_float(v) and v.rank == left.rank and v.shape[:-2] == left.shape[:-2]
                   and left.shape[-1] in v.shape[-2:])  # fmt: skip
    if right is None:
        return None
    if right.shape[-2] != left.shape[-1] or (right.shape[-1] == left.shape[-1] and p.choose.random() < 0.5):
        shape = (*right.shape[:-2], right.shape[-1], right.shape[-2])
        right = p.call(aten.transpose.int, (right, right.rank - 2, right.rank - 1), shape, FLOAT)
    op = aten.mm.default if left.rank == 2 else aten.bmm.default
    return p.call(op, (left, right), (*left.shape[:-1], right.shape[-1]), FLOAT)


def triangle(p: Program) -> Value | None:
    value = p.pick(lambda v: v.rank >= 2 and v.dtype != INT)
    op = p.choose.choice([aten.tril.default, aten.tril.default, aten.triu.default])
    return value and p.call(op, (value, p.choose.choice([0, 0, 0, 1, -1])), value.shape, value.dtype)


def creation(p: Program) -> Value | None:
    sizes = list(p.symbols)
    size = p.choose.choice([*sizes, product(sizes)])
    match p.choose.randrange(6):
        case 0 | 1:
            return p.call(aten.arange.default, (p.number(size),), (size,), INT)
        case 2:
            return p.call(aten.arange.start, (1, p.number(size + 1)), (size,), INT)
        case 3:
            shape = [p.choose.choice(sizes), p.choose.choice(sizes)]
            return p.call(aten.ones.default, (p.sizes(shape),), shape, FLOAT, dtype=FLOAT)
        case 4:
            content = ([p.number(size)], p.choose.choice([0.0, 1.0, 2.0]))
            return p.call(aten.full.default, content, (size,), FLOAT, dtype=FLOAT)
        case _:
            shape = [p.choose.choice(sizes)] * 2
            return p.call(aten.full.default, (p.sizes(shape), True), shape, BOOL, dtype=BOOL)


def by_size(p: Program) -> Value | None:
    value, sizes = p.pick(is_float), list(p.symbols)
    op = p.choose.choice([aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor])
    return value and p.call(op, (value, p.number(p.choose.choice(sizes))), value.shape, FLOAT)


@on(is_float_with_dims)
def layer_norm(p: Program, value: Value) -> Value | None:
    stats = ([*value.shape[:-1], sympy.Integer(1)], FLOAT)
    given = (value, [p.number(value.shape[-1])], None, None, 1e-5)
    return p.call_many(aten.native_layer_norm.default, given, [(value.shape, FLOAT), stats, stats])


@on(lambda v: v.rank >= 2 and is_float(v))
def batch_norm(p: Program, value: Value) -> Value | None:
    stats = (value.shape[1:2], FLOAT)
    given = (value, None, None, True, 0.1, 1e-5)
    return p.call_many(aten._native_batch_norm_legit.no_stats, given, [(value.shape, FLOAT), stats, stats])


def attention(p: Program) -> Value | None:
    """Attention kept whole, with no mask, a causal one, or one made of a mask of the keys."""
    keys = p.pick(lambda v: v.rank == 3 and is_float(v) and v.shape[-1] == WIDTH and v.shape[1].is_Symbol)
    query = keys and p.pick(lambda v: v.rank == 3 and is_float(v) and v.shape == keys.shape)
    if not keys or not query:
        return None
    (n, length, width), heads = keys.shape, sympy.Integer(1)
    four = [p.call(aten.unsqueeze.default, (v, 1), (n, heads, length, width), FLOAT) for v in (query, keys, keys)]
    mask, causal = None, p.choose.random() < 0.4
    low = p.pick(lambda v: v.shape == (n, length) and is_float(v) and v.node.name in ("low", "zeros", "masked_fill"))
    if not causal and low is not None:
        wide = p.call(aten.view.default, (low, p.sizes((n, heads, heads, length))), (n, heads, heads, length), FLOAT)
        square = (n, heads, length, length)
        mask = p.call(aten.expand.default, (wide, p.sizes(square)), square, FLOAT)
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    results = [((n, heads, length, width), FLOAT), ((n, heads, length), FLOAT)]
    return p.call_many(op, (*four, 0.0, causal), results, attn_mask=mask)


@on(is_float)
def noise(p: Program, value: Value) -> Value | None:
    return p.call(aten.rand_like.default, (value,), value.shape, FLOAT)


def masked_sum(p: Program) -> Value | None:
    """A sum, maximum or average with a mask of the right shape: what models do."""
    value = p.pick(lambda v: is_float(v) and v.rank in (2, 3) and v.shape[:2] == (world().b, world().s))
    mask = p.pick(lambda v: v.dtype == BOOL and v.shape == (world().b, world().s))
    if value is None or mask is None:
        return None
    wide = mask if value.rank == 2 else p.call(aten.unsqueeze.default, (mask, 2), (*mask.shape, sympy.Integer(1)), BOOL)
    content, op = p.choose.choice([(0.0, aten.sum.dim_IntList), (-INF, aten.amax.default), (0.0, aten.amax.default)])
    filled = p.call(aten.masked_fill.Scalar, (value, wide, content), value.shape, FLOAT)
    dims = [p.choose.choice([0, 1, 1])]
    return p.call(op, (filled, dims), reduced(filled, dims, False), FLOAT)


@on(lambda v: is_float(v) and v.rank == 3 and v.shape[1].is_Symbol and v.shape[2] == WIDTH)
def causal_scores(p: Program, value: Value) -> Value | None:
    """Scores of tokens against tokens, hidden by positions, and their softmax."""
    n, length, _ = value.shape
    other = p.call(aten.transpose.int, (value, 1, 2), (n, value.shape[2], length), FLOAT)
    scores = p.call(aten.bmm.default, (value, other), (n, length, length), FLOAT)
    span = p.call(aten.arange.default, (p.number(length),), (length,), INT)
    rows = p.call(aten.unsqueeze.default, (span, 1), (length, sympy.Integer(1)), INT)
    if p.choose.random() < 0.2:
        span = p.call(aten.add.Tensor, (span, p.choose.choice([1, -1])), span.shape, INT)
    hide = p.call(p.choose.choice([aten.gt, aten.gt, aten.ge, aten.lt]).Tensor, (span, rows), (length, length), BOOL)
    low = p.choose.choice([-INF, -1e300, -1e9])
    filled = p.call(aten.masked_fill.Scalar, (scores, hide, low), scores.shape, FLOAT)
    weights = p.call(aten._softmax.default, (filled, p.choose.choice([2, 2, 2, 1]), False), scores.shape, FLOAT)
    return p.call(aten.bmm.default, (weights, value), value.shape, FLOAT)


def spoiled(p: Program) -> Value | None:
    """What is NaN or infinite wherever the padding is known to be zero or -inf, and seldom among real entries."""
    declared = ("zeros", "blank", "low", "mask", "masked_fill")
    names = declared if p.choose.random() < 0.7 else ("",)
    value = p.pick(lambda v: is_float(v) and has_dims(v) and v.node.name.startswith(names))
    if value is None:
        return None
    square = p.call(aten.mul.Tensor, (value, value), value.shape, FLOAT)
    match p.choose.randrange(6):
        case 0:
            return p.call(aten.div.Tensor, (value, p.choose.choice([value, square])), value.shape, FLOAT)
        case 1:
            op = p.choose.choice([aten.rsqrt, aten.log, aten.reciprocal])
            return p.call(op.default, (square,), value.shape, FLOAT)
        case 2:
            dims = [value.rank - 1]
            shape = reduced(value, dims, True)
            if p.choose.random() < 0.5:
                norm = p.call(aten.linalg_vector_norm.default, (value, 2, dims, True), shape, FLOAT)
            else:
                norm = p.call(aten.sum.dim_IntList, (square, dims, True), shape, FLOAT)
            return p.call(aten.div.Tensor, (value, norm), value.shape, FLOAT)
        case 3:
            return p.call(aten.sub.Tensor, (value, value), value.shape, FLOAT)
        case 4:
            low = p.call(aten.log.default, (square,), value.shape, FLOAT)
            return p.call(aten._softmax.default, (low, value.rank - 1, False), value.shape, FLOAT)
        case _:
            return p.call(aten.div.Tensor, (square, value), value.shape, FLOAT)


def silenced(p: Program) -> Value | None:
    """A mask that is declared as zero in the padding, multiplied, and perhaps a sum: what is NaN there stays NaN."""
    value = p.pick(lambda v: is_float(v) and v.rank in (2, 3) and v.shape[:2] == (world().b, world().s))
    if value is None or p.choose.random() < 0.5:
        made = spoiled(p)
        value = made if made is not None and made.shape[:2] == (world().b, world().s) else value
    mask = p.pick(lambda v: v.node.name in ("mask", "zeros"))
    if value is None or mask is None:
        return None
    if mask.dtype == BOOL:
        mask = p.call(aten._to_copy.default, (mask,), mask.shape, FLOAT, dtype=FLOAT)
    if value.rank == 3:
        mask = p.call(aten.unsqueeze.default, (mask, 2), (*mask.shape, sympy.Integer(1)), FLOAT)
    product_of_both = p.call(aten.mul.Tensor, (value, mask), value.shape, FLOAT)
    if p.choose.random() < 0.3:
        return product_of_both
    dims = [p.choose.choice([0, 1, 1])]
    return p.call(aten.sum.dim_IntList, (product_of_both, dims), reduced(product_of_both, dims, False), FLOAT)


OPS: dict[Op, int] = {
    unary: 4, scalar: 3, binary: 8, integers: 2, shifted_integers: 2, compare: 3, compare_scalar: 2, logical: 3,
    convert: 3, fill: 8, where: 4, reduction: 8, truth: 3, extremum: 1, softmax: 4, scan: 2, reorder: 2, matmul: 6,
    by_places: 4, triangle: 3, creation: 6, by_size: 1, layer_norm: 2, batch_norm: 1, attention: 4, noise: 1,
    masked_sum: 6, causal_scores: 4, **MOVES, spoiled: 3, silenced: 5, put_from_the_end: 2,
}  # fmt: skip
"""How often each operator is chosen."""
