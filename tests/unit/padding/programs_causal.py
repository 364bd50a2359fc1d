"""Causal programs, some of them not quite causal, and attention kept whole."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.padding.table import program as P

INF = float("inf")
LEAST = torch.finfo(torch.float64).min


def scores(x: Tensor) -> Tensor:
    return x @ x.mT


def positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])


def lower(x: Tensor, dtype: torch.dtype = torch.bool) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=dtype).tril()


def first_causal(x: Tensor) -> Tensor:
    return scores(x).masked_fill(positions(x) > positions(x)[:, None], -INF)[..., 0]


CAUSAL = [
    P("cumsum", "b+ s+", lambda x: x.cumsum(1)),
    P("cumprod", "b+ s+", lambda g: g.cumprod(1)),
    P("cumulative logsumexp", "b+ s+", lambda g: g.logcumsumexp(1), (1.0,)),
    P("cumulative maximum", "b+ s+", lambda g: g.cummax(1)[0]),
    P("cumsum, the last", "b+ s-", lambda g: g.cumsum(1)[:, -1]),
    P("cumsum over both, flattened", "b+ s-", lambda g: g.flatten().cumsum(0).view(g.shape)),
    P("cumsum of masked entries, then summed", "b+ s-", lambda g, fm: (g * fm).cumsum(1).sum(1)),
    P("differences", "b+ s+", lambda x: x[:, 1:] - x[:, :-1]),
    P("shifted right", "b+ s+", lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1] + x),
    P("shifted left", "b+ s-", lambda x: F.pad(x, (0, 0, 0, 1))[:, 1:] + x),
    P("triangle of averages", "b+ s+", lambda x: lower(x, torch.float64) @ x),
    P("triangle the wrong way", "b+ s-", lambda x: torch.ones(x.shape[1], x.shape[1], dtype=torch.float64).triu() @ x),
    P("triangle with one more", "b+ s-", lambda x: torch.ones(x.shape[1], x.shape[1], dtype=torch.float64).tril(1) @ x),
    P(
        "triangle with one less",
        "b+ s+",
        lambda x: torch.ones(x.shape[1], x.shape[1], dtype=torch.float64).tril(-1) @ x,
    ),
    P("causal attention", "b+ s+", lambda x: scores(x).masked_fill(~lower(x), -INF).softmax(-1) @ x),
    P("attention to what follows", "b+ s-", lambda x: scores(x).masked_fill(~lower(x).T, -INF).softmax(-1) @ x),
    P(
        "causal by an upper triangle",
        "b+ s+",
        lambda x: (scores(x) + torch.full((x.shape[1],) * 2, -INF).triu(1)).softmax(-1) @ x,
    ),
    P(
        "causal, itself hidden as well",
        "b+ s~",
        lambda x: (scores(x) + torch.full((x.shape[1],) * 2, -1e35).triu(0)).softmax(-1)[:, 1:],
    ),
    P(
        "causal, one token ahead",
        "b+ s-",
        lambda x: (scores(x) + torch.full((x.shape[1],) * 2, -INF).triu(2)).softmax(-1) @ x,
    ),
    P(
        "causal by comparison",
        "b+ s+",
        lambda x: scores(x).masked_fill(positions(x) > positions(x)[:, None], -INF).softmax(-1) @ x,
    ),
    P(
        "causal, compared the other way",
        "b+ s+",
        lambda x: scores(x).masked_fill(positions(x)[:, None] < positions(x), -INF).softmax(-1) @ x,
    ),
    P(
        "unit rows of causal scores",
        "b- s~",
        lambda zeros, fm: (first_causal(zeros) / first_causal(zeros).square().sum(1, keepdim=True) * fm).sum(0),
    ),
    P(
        "allowed positions",
        "b+ s+",
        lambda x: scores(x).where(positions(x)[:, None] >= positions(x), -INF).softmax(-1) @ x,
    ),
    P(
        "comparison the wrong way",
        "b+ s-",
        lambda x: scores(x).masked_fill(positions(x) < positions(x)[:, None], -INF).softmax(-1) @ x,
    ),
    P(
        "comparison one ahead",
        "b+ s-",
        lambda x: scores(x).masked_fill(positions(x) - 1 > positions(x)[:, None], -INF).softmax(-1) @ x,
    ),
    P(
        "comparison one behind",
        "b+ s+",
        lambda x: scores(x).masked_fill(positions(x) + 1 > positions(x)[:, None] + 1, -INF).softmax(-1) @ x,
    ),
    P(
        "positions scaled apart",
        "b+ s-",
        lambda x: scores(x).masked_fill(positions(x) > 2 * positions(x)[:, None], -INF).softmax(-1) @ x,
    ),
    P(
        "positions halved",
        "b+ s-",
        lambda x: scores(x).masked_fill(positions(x) // 2 > positions(x)[:, None], -INF).softmax(-1) @ x,
    ),
    P(
        "sliding window",
        "b+ s+",
        lambda x: (
            scores(x)
            .where((positions(x)[:, None] >= positions(x)) & (positions(x)[:, None] - positions(x) < 3), -INF)
            .softmax(-1)
            @ x
        ),
    ),
    P(
        "window on both sides",
        "b+ s-",
        lambda x: scores(x).where((positions(x)[:, None] - positions(x)).abs() < 2, -INF).softmax(-1) @ x,
    ),
    P("causal and masked", "b+ s~", lambda x, m: scores(x).where(lower(x) & m[:, None], LEAST).softmax(-1) @ x),
    P("causal or masked", "b+ s-", lambda x, free: scores(x).where(lower(x) | free[:, None], LEAST).softmax(-1) @ x),
    P("prefix seen by all", "b+ s~", lambda x: scores(x).where(lower(x) | (positions(x) < 2), LEAST).softmax(-1) @ x),
    P(
        "same token",
        "s-",
        lambda r: (torch.arange(r.shape[0])[:, None] == torch.arange(r.shape[0])).sum(1).sum(0) + r[:1],
    ),
    P(
        "identity, then summed",
        "s-",
        lambda u: ((torch.arange(u.shape[0])[:, None] == torch.arange(u.shape[0])).double() @ u).sum(0),
    ),
    P("tokens before, counted", "s-", lambda r: lower(r[None]).sum(1).sum(0) + r[:1]),
    P("rows of the triangle", "s+", lambda r: lower(r[None]).sum(1) + r),
    P("columns of the triangle", "s-", lambda r: lower(r[None]).sum(0) + r),
    P(
        "distance bias",
        "b+ s+",
        lambda x: (scores(x) - (positions(x)[:, None] - positions(x)).abs()).where(lower(x), -INF).softmax(-1) @ x,
    ),
    P("causal, then columns", "b+ s-", lambda x: scores(x).masked_fill(~lower(x), -INF).softmax(-1).sum(1)),
    P("causal weights, turned round", "b+ s-", lambda x: scores(x).masked_fill(~lower(x), -INF).softmax(-1).mT @ x),
    P(
        "range starts at one",
        "b+ s-",
        lambda x: scores(x).masked_fill(positions(x) > torch.arange(1, x.shape[1] + 1)[:, None], -INF).softmax(-1) @ x,
    ),
    P(
        "keys without the last",
        "b+ s-",
        lambda x: scores(x)[..., :-1].masked_fill(positions(x)[:-1] > positions(x)[:, None], -INF).softmax(-1),
    ),
    P(
        "neither first key nor first query",
        "b+ s+",
        lambda x: scores(x)[:, 1:, 1:].masked_fill(positions(x)[1:] > positions(x)[1:, None], -INF).softmax(-1),
    ),
    P(
        "keys without the first",
        "b+ s-",
        lambda x: scores(x)[..., 1:].masked_fill(positions(x)[1:] > positions(x)[:, None] + 1, -INF).softmax(-1),
    ),
    P(
        "steps of two compared",
        "b+ s-",
        lambda x: (
            scores(x).masked_fill(positions(x) > torch.arange(0, 2 * x.shape[1], 2)[:, None], -INF).softmax(-1) @ x
        ),
    ),
]

ATTENTION = [
    P("attention", "b+ s-", lambda q, k, c: F.scaled_dot_product_attention(q, k, c)),
    P("causal attention, whole", "b+ s+", lambda q, k, c: F.scaled_dot_product_attention(q, k, c, is_causal=True)),
    P(
        "attention with a bool mask, whole",
        "b+ s+",
        lambda q, k, c, m: F.scaled_dot_product_attention(q, k, c, m[:, None, None]),
    ),
    P(
        "attention with a float mask, whole",
        "b+ s+",
        lambda q, k, c, bias: F.scaled_dot_product_attention(q, k, c, bias),
    ),
    P(
        "attention with a weak mask, whole",
        "b+ s-",
        lambda q, k, c, weak: F.scaled_dot_product_attention(q, k, c, weak),
    ),
    P(
        "attention with an unknown mask, whole",
        "b+ s-",
        lambda q, k, c, free: F.scaled_dot_product_attention(q, k, c, free[:, None, None]),
    ),
    P(
        "attention, mask of the queries",
        "b+ s-",
        lambda q, k, c, seen: F.scaled_dot_product_attention(q, k, c, seen[:, None, :, None]),
    ),
    P(
        "attention with a causal mask, whole",
        "b+ s+",
        lambda q, k, c: F.scaled_dot_product_attention(
            q, k, c, torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        ),
    ),
    P(
        "attention, causal mask the wrong way",
        "b+ s-",
        lambda q, k, c: F.scaled_dot_product_attention(
            q, k, c, torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu()
        ),
    ),
    P(
        "causal and masked, whole",
        "b+ s+",
        lambda q, k, c, m: F.scaled_dot_product_attention(
            q, k, c, torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril() & m[:, None, None]
        ),
    ),
    P(
        "causal, first queries",
        "b+ s+",
        lambda q, k, c: F.scaled_dot_product_attention(q[:, :, :2], k[:, :, :2], c[:, :, :2]),
    ),
    P(
        "causal attention of infinite queries",  # no score is finite: kernels return 0 or NaN
        "b+ s!",
        lambda q, k, c: F.scaled_dot_product_attention(q.masked_fill(q[..., :1] > 0, -INF), k, c, is_causal=True),
    ),
    P("causal, fewer queries", "b+ s-", lambda q, k, c: F.scaled_dot_product_attention(q[:, :, -2:], k, c)),
    P("attention between features", "b+ s-", lambda q, k, c: F.scaled_dot_product_attention(q.mT, k.mT, c.mT).mT),
    P(
        "attention among heads",
        "b+ s+",
        lambda q, k, c: F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), c.transpose(1, 2)),
    ),
    P(
        "attention over the batch",
        "b- s+",
        lambda q, k, c: F.scaled_dot_product_attention(
            q.permute(2, 1, 0, 3), k.permute(2, 1, 0, 3), c.permute(2, 1, 0, 3)
        ).permute(2, 1, 0, 3),
    ),
    P(
        "attention to memory",
        "b+ s+ t-",
        lambda x, mem: F.scaled_dot_product_attention(x[:, None], mem[:, None], mem[:, None]),
    ),
    P(
        "attention to masked memory",
        "b+ s+ t+",
        lambda x, mem, tm: F.scaled_dot_product_attention(x[:, None], mem[:, None], mem[:, None], tm[:, None, None]),
    ),
    P(
        "attention with dropout",
        "b- s-",
        lambda q, k, c: F.scaled_dot_product_attention(q, k, c, dropout_p=0.5, is_causal=True),
    ),
    P(
        "projected causal attention",
        "b+ s+",
        lambda x, w: (
            F.scaled_dot_product_attention(*((x @ w).view(*x.shape[:2], 2, 4).transpose(1, 2),) * 3, is_causal=True)
            .transpose(1, 2)
            .reshape(x.shape)
        ),
    ),
    P(
        "attention with a mask that shows padding, whole",
        "b+ s-",
        lambda q, k, c, seen: F.scaled_dot_product_attention(q, k, c, seen[:, None, None]),
    ),
    P(
        "attention to values of minus infinity",
        "b+ s-",
        lambda q, k, c, m: F.scaled_dot_product_attention(
            q, k, c.masked_fill(~m[:, None, :, None], -INF), is_causal=True
        ),
    ),
]
