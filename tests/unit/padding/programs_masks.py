"""Programs whose padding is masked, or where a mask does not do what it seems to do."""

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


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, (8,))


def scaled(x: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)


def standard(x: Tensor, epsilon: float) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + epsilon)


def over_median(x: Tensor) -> Tensor:
    return x / x.median(-1, keepdim=True).values


def hidden(x: Tensor, mask: Tensor, low: float) -> Tensor:
    return x.masked_fill(~mask[..., None], low)


def attended(x: Tensor, mask: Tensor) -> Tensor:
    rows = mask[:, None].expand(-1, x.shape[1], -1)
    return (scores(x) + torch.where(rows, 0.0, -INF)).softmax(-1) @ x


def low(x: Tensor, mask: Tensor) -> Tensor:
    return x[..., 0].masked_fill(mask, -INF)


def causal(x: Tensor) -> Tensor:
    return x.masked_fill(positions(x) > positions(x)[:, None], -INF)


def shifted(x: Tensor) -> Tensor:
    return x + torch.where(positions(x) > positions(x)[:, None], -INF, 0.0)


def by_hand(x: Tensor) -> Tensor:
    exponentials = (x - x.amax(-1, keepdim=True)).exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


def log_of(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(~mask, -INF).log_softmax(1)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


MASKED = [
    P("masked sum", "b+ s+", lambda x, fm: (x * fm[..., None]).sum(1)),
    P("masked mean", "b+ s+", lambda x, fm: (x * fm[..., None]).sum(1) / fm.sum(1, keepdim=True)),
    P("masked mean by an integer mask", "b+ s+", lambda x, am: (x * am[..., None]).sum(1) / am.sum(1)[:, None]),
    P("masked mean by a bool mask", "b+ s+", lambda x, m: (x * m[..., None]).sum(1) / m.sum(1)[:, None]),
    P("masked sum by filling", "b+ s+", lambda x, m: x.masked_fill(~m[..., None], 0.0).sum(1)),
    P("masked sum by choosing", "b+ s+", lambda x, m: torch.where(m[..., None], x, 0.0).sum(1)),
    P("chosen the wrong way", "b+ s-", lambda x, m: torch.where(m[..., None], 0.0, x).sum(1)),
    P("masked maximum", "b+ s+", lambda x, m: x.masked_fill(~m[..., None], -INF).amax(1)),
    P("masked maximum with its place", "b+ s~", lambda g, m: g.masked_fill(~m, -INF).max(1)),
    P("maximum of low values", "b+ s+", lambda g, m: (g - 1e6).masked_fill(~m, -INF).amax(1)),
    P("masked minimum", "b+ s+", lambda x, m: x.masked_fill(~m[..., None], INF).amin(1)),
    P(
        "maximum of what is filled with zero",
        "b+ s-",
        lambda x, m: (x.abs() * -1).masked_fill(~m[..., None], 0.0).amax(1),
    ),
    P(
        "squares of the least number, times zero",
        "b+ s-",
        lambda x, fm: (x.masked_fill(x > 0.5, LEAST).square() * fm[..., None]).sum(1),
    ),
    P(
        "squares of a low number, times zero",
        "b+ s+",
        lambda x, fm: (x.masked_fill(x > 0.5, -1e9).square() * fm[..., None]).sum(1),
    ),
    P("reciprocals of zeros of either sign", "b+ s-", lambda x, fm: (1 / (x * fm[..., None])).amin(1)),
    P("signs of zeros of either sign", "b+ s-", lambda x, fm: torch.signbit(x * fm[..., None]).sum(1)),
    P("numbers below zeros, counted", "b+ s-", lambda g, fm: (g < fm).sum(1)),
    P("infinities of either sign", "b+ s-", lambda g, bias: (g * bias[:, 0, 0]).softmax(1)),
    P(
        "powers that are infinities of small numbers",
        "b+ s-",
        lambda g, m: (-g.pow((g * 0).masked_fill(~m, -1e5))).softmax(1),
    ),
    P("masked product", "b+ s+", lambda g, m: g.masked_fill(~m, 1.0).prod(1)),
    P("product of what is filled with zero", "b+ s-", lambda g, m: g.masked_fill(~m, 0.0).prod(1)),
    P("masked logsumexp", "b+ s+", lambda g, m: g.masked_fill(~m, -INF).logsumexp(1)),
    P("masked softmax", "b+ s+", lambda g, m: g.masked_fill(~m, -INF).softmax(1)),
    P(
        "masked softmax, then weights",
        "b+ s+",
        lambda x, g, m: (g.masked_fill(~m, -INF).softmax(1)[..., None] * x).sum(1),
    ),
    P("any masked", "b+ s+", lambda g, m: ((g > 0.5) & m).any(1)),
    P("all unless masked", "b+ s+", lambda g, m: ((g > -0.5) | ~m).all(1)),
    P("any without a mask", "b+ s-", lambda g: (g > 1.5).any(1)),
    P("masked norm", "b+ s+", lambda x, fm: (x * fm[..., None]).norm(dim=1)),
    P("count of what is visible", "b+ s+", lambda am: am.sum(1)),
    P("zeros over a count of zero", "b- s+", lambda g, am: ((g * am)[:, 0] / am.sum(1)).sum(0)),
    P("count of what is hidden", "b+ s-", lambda am: (1 - am).sum(1)),
    P("positions from a mask", "b+ s+", lambda am, table: F.embedding((am.cumsum(1) * am) % 11, table)),
    P("length from a mask", "b+ s+", lambda x, am: x * am.sum(1)[:, None, None]),
    P("padding declared visible", "b+ s-", lambda x, seen: (x * seen[..., None]).sum(1)),
    P("mask without a declaration", "b+ s-", lambda x, free: (x * free[..., None]).sum(1)),
    P("mask of what is hidden", "b+ s+", lambda x, hide: x.masked_fill(hide[..., None], 0.0).sum(1)),
    P("mask of what is hidden, used as visible", "b+ s-", lambda x, hide: (x * hide[..., None]).sum(1)),
    P("mask from declared token ids", "b+ s+", lambda x, ids0: (x * (ids0 != 0)[..., None]).sum(1)),
    P("mask from token ids", "b+ s-", lambda x, ids: (x * (ids != 0)[..., None]).sum(1)),
    P("mask by lengths", "b+ s~", lambda x, lens: (x * (positions(x) < lens[:, None])[..., None]).sum(1)),
    P("attention with a mask", "b+ s+", lambda x, m: scores(x).masked_fill(~m[:, None], -INF).softmax(-1) @ x),
    P(
        "attention with the least number",
        "b+ s~",
        lambda x, m: scores(x).masked_fill(~m[:, None], LEAST).softmax(-1) @ x,
    ),
    P("attention with an added mask", "b+ s+", lambda x, bias: (scores(x) + bias[:, 0]).softmax(-1) @ x),
    P("added mask from an integer one", "b+ s+", lambda x, am: (scores(x) + (1 - am[:, None]) * LEAST).softmax(-1) @ x),
    P("divided by declared zeros", "b+ s-", lambda g, fm, ones: (g * fm / (ones - 1)).sum(1)),
    P("declared zeros divide", "b+ s-", lambda y, zeros: (y / zeros).sum(1)),
    P("masked, then filled where data says", "b+ s-", lambda g, fm, free: (g * fm).masked_fill(free, 1.0).sum(1)),
    P("masked, then chosen by data", "b+ s-", lambda g, fm, free: torch.where(free, g * fm, 1.0).sum(1)),
    P("bias of masked tokens, summed", "s-", lambda u, sm, w, p: F.linear(u * sm[:, None], w, p).sum(0)),
    P("masked tokens through weights, summed", "s~", lambda u, sm, w: (u * sm[:, None] @ w).sum(0)),
    P(
        "products of two flattenings",
        "b+ s-",
        lambda x, y, fm: ((x * fm[..., None]).flatten(1)[:, None] @ y.mT.flatten(1)[..., None]).flatten(),
    ),
    P("weakly masked", "b+ s-", lambda x, weak: (scores(x) + weak[:, 0]).softmax(-1) @ x),
    P("temperature before the mask", "b+ s+", lambda g, m: (g / 0.1).masked_fill(~m, -INF).softmax(1)),
    P("temperature after the mask", "b+ s+", lambda g, m: (g.masked_fill(~m, -INF) / 0.1).softmax(1)),
    P(
        "mask along the wrong dimension",
        "b+ s-",
        lambda x, m: scores(x).masked_fill(~m[..., None], -9.0).softmax(-1) @ x,
    ),
    P(
        "mask of queries and keys",
        "b+ s~",
        lambda x, m: scores(x).masked_fill(~(m[:, None] & m[..., None]), LEAST).softmax(-1) @ x * m[..., None],
    ),
    P(
        "mask of queries or keys",
        "b+ s-",
        lambda x, m: scores(x).masked_fill(~(m[:, None] | m[..., None]), -INF).softmax(-1) @ x,
    ),
    P("masked pairs, counted", "b+ s~", lambda m: (m[:, None] & m[..., None]).sum((1, 2))),
    P("softmax in half precision", "b+ s+", lambda half, m: half.masked_fill(~m[..., None], -INF).softmax(1)),
    P("mask cut short, then summed", "b+ s-", lambda x, fm: (x * fm[..., None])[:, :-1].sum(1)),
    P("mask cut at the front", "b+ s~", lambda x, fm: (x * fm[..., None])[:, 1:].sum(1)),
    P("every second masked token", "b+ s~", lambda x, fm: (x * fm[..., None])[:, ::2].sum(1)),
    P("masked, padded behind", "b+ s+", lambda x, fm: F.pad(x * fm[..., None], (0, 0, 0, 1))),
    P("masked, padded behind and before", "b+ s~", lambda x, fm: F.pad(x * fm[..., None], (0, 0, 1, 1)).sum(1)),
    P("masked, then shifted by one", "b+ s-", lambda x, fm: (x * fm[..., None] + 1).sum(1)),
    P("masked, then exponential", "b+ s-", lambda g, fm: (g * fm).clamp(-5, 5).exp().sum(1)),
    P("masked, then odd functions", "b+ s+", lambda g, fm: (g * fm).tanh().sin().sum(1)),
    P("masked tokens in a product", "b+ s+", lambda x, y, fm: (x * fm[..., None]).mT @ y),
    P("masked on the other side", "b+ s+", lambda x, y, fm: x.mT @ (y * fm[..., None])),
    P("masked over the batch as well", "b+ s~", lambda x, fm: (x * fm[..., None]).sum((0, 1))),
    P("masked in the other dimension", "b+ s-", lambda x, v: (x * (v[:, None] > 0)).sum(1)),
    P("masked twice, flattened", "b+ s~", lambda x, fm: (x * fm[..., None]).flatten(0, 1).sum(0)),
    P("declared zeros", "b+ s+", lambda zeros: zeros.sum(1)),
    P("declared zeros over the batch", "b+ s+", lambda zeros: zeros.sum(0)),
    P("declared zeros over everything", "b+ s~", lambda zeros: zeros.sum()),
    P("declared ones, multiplied", "b+ s+", lambda ones: ones.prod(1)),
    P("declared ones, summed", "b+ s-", lambda ones: ones.sum(1)),
    P(
        "masked cross attention",
        "b+ s+ t+",
        lambda x, mem, tm: (x @ mem.mT).masked_fill(~tm[:, None], -INF).softmax(-1) @ mem,
    ),
    P("cross attention", "b+ s+ t-", lambda x, mem: (x @ mem.mT).softmax(-1) @ mem),
    P(
        "cross attention, mask of the other sequence",
        "b+ s+ t-",
        lambda x, mem, m: ((x * m[..., None]) @ mem.mT).softmax(-1) @ mem,
    ),
    P("log of masked probabilities", "b+ s+", lambda g, m: g.masked_fill(~m, -INF).log_softmax(1)),
    P(
        "entropy of masked probabilities",
        "b+ s~",
        lambda g, m: -(g.masked_fill(~m, -1e9).log_softmax(1).exp() * g).sum(1),
    ),
    P(
        "labels that are ignored",
        "b+ s+",
        lambda x, am: F.cross_entropy(x.mT, torch.where(am > 0, am, -100), reduction="none").sum(1),
    ),
    P(
        "softmax over all scores at once",
        "b+ s~",
        lambda x, m: scores(x).masked_fill(~(m[:, None] & m[..., None]), -INF).flatten(1).softmax(-1)[:, :1],
    ),
    # What the padding of a mask makes NaN or infinite stays so, whatever it is multiplied by.
    P("unit rows of what is masked", "b+ s-", lambda x, fm: (unit(x * fm[..., None]) * fm[..., None]).sum(1)),
    P("unit rows, bounded", "b+ s~", lambda x, fm: (F.normalize(x * fm[..., None], dim=-1) * fm[..., None]).sum(1)),
    P("unit rows, then masked", "b+ s+", lambda x, fm: (unit(x) * fm[..., None]).sum(1)),
    P("unit rows of masked products", "b+ s-", lambda x, w, fm: (unit(x * fm[..., None] @ w) * fm[..., None]).sum(1)),
    P("unit rows, weighted", "b+ s-", lambda x, fm: fm[:, None] @ unit(x * fm[..., None])),
    P("unit rows as values", "b+ s-", lambda x, fm, m: sdpa(x, x, unit(x * fm[..., None]), m[:, None])),
    P("unit rows, backwards", "b+ s-", lambda x, fm: (unit(x * fm[..., None]).flip(-1) * fm[..., None]).sum(1)),
    P("unit rows of what is normalised", "b+ s-", lambda x, fm: (unit(norm(x * fm[..., None])) * fm[..., None]).sum(1)),
    P("masked mask over itself", "b+ s-", lambda x, fm: (x * (fm / fm * fm)[..., None]).sum(1)),
    P("divided by a mask, then masked", "b+ s-", lambda g, fm: (g / fm * fm).sum(1)),
    P("divided by a mask, then chosen", "b+ s+", lambda g, fm: torch.where(fm != 0, g / fm, 0.0).sum(1)),
    P("divided by a mask, then filled", "b+ s+", lambda g, fm: (g / fm).masked_fill(fm == 0, 0.0).sum(1)),
    P("divided by a mask, without NaN", "b+ s+", lambda g, fm: ((g / fm).nan_to_num(0.0, 0.0, 0.0) * fm).sum(1)),
    P("masked root mean squares", "b+ s-", lambda x, fm: (scaled(x * fm[..., None], 0.0) * fm[..., None]).sum(1)),
    P(
        "masked root mean squares, bounded",
        "b+ s~",
        lambda x, fm: (scaled(x * fm[..., None], 1e-6) * fm[..., None]).sum(1),
    ),
    P("masked logarithm", "b+ s-", lambda g, fm: (fm.log() * fm * g).sum(1)),
    P(
        "infinite differences",
        "b+ s-",
        lambda g, fm: ((1 / fm - 1 / fm).nan_to_num(1.0) * g * fm.reciprocal() * fm).sum(1),
    ),
    P("softmax over hidden rows", "b+ s-", lambda x, m: (hidden(x, m, -INF).softmax(-1) * m[..., None]).sum(1)),
    P("two layers behind a mask", "b+ s+", lambda x, m: attended(attended(x, m), m)),
    P("softmax over low rows", "b+ s+", lambda x, m: (hidden(x, m, -1e9).softmax(-1) * m[..., None]).sum(1)),
    P("deviation of what is masked", "b+ s-", lambda x, fm: (standard(x * fm[..., None], 0.0) * fm[..., None]).sum(1)),
    P("deviation, bounded", "b+ s~", lambda x, fm: (standard(x * fm[..., None], 1e-5) * fm[..., None]).sum(1)),
    P("median of what is masked", "b+ s-", lambda x, fm: (over_median(x * fm[..., None]) * fm[..., None]).sum(1)),
    P("joined to NaN", "b+ s-", lambda x, fm: (torch.cat([x, unit(x * fm[..., None])], 2) * fm[..., None]).sum(1)),
    # A mask fills entries with -inf also in padding of unknown contents: what is computed of them may be infinite, too.
    P("causal scores, squared", "b- s+", lambda x, fm: (causal(scores(x)).square() * fm[..., None]).sum(0)),
    P("causal scores, added and squared", "b- s+", lambda x, fm: (shifted(scores(x)).square() * fm[..., None]).sum(0)),
    P("causal scores, not hidden", "b- s+", lambda x, fm: (shifted(scores(x)) * fm[..., None]).sum(0)),
    P(
        "hidden scores times numbers of either sign",
        "b- s-",
        lambda x, g, fm: ((causal(scores(x)) * g[..., None]).softmax(-1) * fm[..., None]).sum(0),
    ),
    P("causal weights", "b+ s+", lambda x, fm: (shifted(scores(x)).softmax(-1) * fm[..., None]).sum(0)),
    P("causal weights, by hand", "b+ s+", lambda x, fm: (by_hand(shifted(scores(x))) * fm[..., None]).sum(0)),
    P(
        "mantissas of hidden entries",
        "b+ s~",
        lambda g, fm: torch.frexp(g.masked_fill(fm == 0, -torch.inf))[0].exp().sum(1),
    ),
    P("exponents of hidden entries", "b+ s~", lambda g, fm: torch.frexp(g.masked_fill(fm == 0, -torch.inf))[1].sum(1)),
    P("causal scores, bounded", "b~ s+", lambda x, fm: (causal(scores(x)).nan_to_num() * fm[..., None]).sum(0)),
    P("scores and a row of a mask, squared", "b- s+", lambda g, bias, fm: ((g + bias[0, 0]).square() * fm).sum(0)),
    P(
        "reciprocals of causal weights, squared",
        "b- s+",
        lambda x, fm: (1 / shifted(scores(x)).softmax(-1) ** 2 * fm[..., None]).sum(0),
    ),
    P(
        "causal scores of zero rows, not hidden",
        "b- s+",
        lambda x, fm: (causal(scores(x * fm[..., None])) * fm[..., None]).sum(0),
    ),
    P("weights of a row of a mask", "b+ s+", lambda g, bias, fm: ((g + bias[0, 0]).softmax(1) * fm).sum(0)),
    P("zeros, filled by data, squared", "b+ s-", lambda zeros, free, fm: (low(zeros, free).square() * fm).sum(1)),
    P("filled by a mask, divided by itself", "b+ s+", lambda x, m, fm: (low(x, m) / low(x, m) * fm).sum(1)),
    P("through weights of -inf", "b+ s~", lambda x, w, fm: (x * fm[..., None] @ w.masked_fill(w > 0, -INF)).sum(1)),
    P(
        "joined to scores of -inf",
        "b+ s-",
        lambda x, free, fm: (torch.cat([x, low(x, free)[..., None]], 2).square() * fm[..., None]).sum(1),
    ),
    P("log of masked probabilities, zeroed", "b+ s-", lambda g, m, fm: (log_of(g, m) * fm).sum(1)),
    P("log of masked probabilities, chosen", "b+ s+", lambda g, m: log_of(g, m).masked_fill(~m, 0.0).sum(1)),
    P("overflow in half precision", "b+ s-", lambda fm: (((1 - fm) * 1e9).half() * fm.half()).sum(1)),
]
