"""Programs that write inputs and buffers, that index by data, that regroup sizes, and that combine several of these."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.padding.table import program as P


def written(buffer: Tensor, value: Tensor) -> Tensor:
    buffer.copy_(value)
    return value


def put(buffer: Tensor, *index: object, value: Tensor | float) -> Tensor:
    buffer[index] = value
    return buffer


def put_and_summed(ones: Tensor) -> Tensor:
    """The sum of products of zeros and infinities in padding."""
    zeros = ones - 1
    rows, columns = (torch.arange(size) for size in ones.shape)
    return (put(torch.zeros_like(ones), rows[:, None], columns, value=1 / zeros) * zeros).sum(1)


STATE = [
    P("counter", "b+ s+", lambda x, step: (x * 2, step.add_(1))),
    P("counter of tokens", "b+ s-", lambda x, step: (x * 2, step.add_(x.shape[1]))[0]),
    P("buffer of sums", "b- s-", lambda x, buf: (x * 2, buf.add_(x.sum((0, 1))))[0]),
    P("buffer of batch sums", "b-", lambda v, buf: (v, buf.add_(v.sum(0)))[0]),
    P(
        "buffer of masked sums",
        "b- s+",
        lambda x, fm, buf: (x * 2, buf.add_((x * fm[..., None]).sum(1)[0] + x.mean(0)[0]))[0],
    ),
    P("buffer of the first row", "b+ s+", lambda x, buf: (x * 2, buf.copy_(x[0, 0]))[0]),
    P("buffer of the last row", "b- s+", lambda x, buf: (x * 2, buf.copy_(x[-1, 0]))[0]),
    P("running statistics", "b-", lambda v, mean, var: (F.batch_norm(v, mean, var, training=True), v)[1] * 2),
    P("running statistics, results too", "b-", lambda v, mean, var: F.batch_norm(v, mean, var, training=True)),
    P("running mean by hand", "b-", lambda v, mean: (v * 2, mean.lerp_(v.mean(0), 0.1))[0]),
    P("buffer scaled", "b+ s+", lambda x, buf: (x + buf, buf.mul_(0.9))[0]),
    P("input written in place", "b+ s+", lambda x: x.add_(1)),
    P("input written row by row", "b+ s+", lambda x, p: (x.mul_(p), x.sum(-1))[1]),
    P("input replaced by its mean", "b+ s-", lambda x: x.copy_(x.mean(1, keepdim=True).expand(x.shape))),
    P("input turned round in place", "b+ s-", lambda x: x.copy_(x.flip(1))),
    P("first token of the input written", "b+ s+", lambda x: put(x, slice(None), 0, value=0.0)),
    P("last token of the input written", "b+ s-", lambda x: put(x, slice(None), -1, value=0.0)),
    P("features of the input written", "b+ s+", lambda x: put(x, Ellipsis, slice(0, 4), value=1.0)),
    P("input written, nothing returned of it", "b+ s-", lambda x, y: (x.sub_(y.mean(1, keepdim=True)), y * 2)[1]),
    P("cache filled with the tokens", "b+ s-", lambda x, kv: put(kv, slice(None), slice(0, x.shape[1]), value=x) * 1),
    P("cache filled at slots", "s-", lambda u, slot, cache: cache.index_copy_(0, slot, u).sum(0) * 0 + u[0]),
    P("cache assigned at slots", "s-", lambda u, slot, cache: (put(cache, slot, value=u), u * 2)[1]),
    P(
        "cache filled at fixed places",
        "b+",
        lambda v, fixed, cache: (put(cache, fixed, value=v[0].expand(3, 8)), v)[1] * 2,
    ),
    P("row of each request written", "b+", lambda v, kv: (put(kv, slice(None), 3, value=v), v * 2)[1]),
    P(
        "row of each request at its place",
        "b+",
        lambda v, at, kv: (put(kv, torch.arange(v.shape[0]), at, value=v), v * 2)[1],
    ),
    P(
        "tokens counted",
        "b- s-",
        lambda ids, count: (count.index_add_(0, ids.flatten(), torch.ones_like(ids).flatten()), ids)[1] * 2,
    ),
    P(
        "tokens counted by scatter",
        "s-",
        lambda pos, count: (count.scatter_add_(0, pos, torch.ones_like(pos)), pos)[1] * 2,
    ),
    P(
        "tokens counted, added at slots",
        "s-",
        lambda pos, count: (count.index_put_((pos,), torch.ones_like(pos), accumulate=True), pos)[1] * 2,
    ),
    P("histogram of experts", "b- s-", lambda x, w, buf: (x, buf.add_((x @ w).softmax(-1).sum((0, 1))))[0] * 2),
    P("largest value seen", "b- s-", lambda x, step: (x * 2, step.copy_(x.abs().max().long()))[0]),
    P("seen before", "b-", lambda v, buf: (v + buf, written(buf, v.mean(0)))[0]),
    P("previous input kept", "b+ s+", lambda x, y: (x + y, y.copy_(x))[0]),
    P("two buffers, one of them mixes", "b-", lambda v, mean, var: (v, mean.mul_(0.5), var.copy_(v.var(0)))[0] * 2),
    P("written and read again", "b-", lambda v, buf: v + written(buf, v.sum(0))),
    P(
        "buffer from a masked sum",
        "b+ s+",
        lambda g, m, buf: (g, buf.copy_(g.masked_fill(~m, 0).sum(1)[0].expand(8)))[0] * 2,
    ),
]

INDEX = [
    P("tokens at data", "b+ s~", lambda x, at: x.gather(1, at[:, None, None].expand(-1, 1, 8))),
    P("a token of each row", "b+ s~", lambda x, at: x[torch.arange(x.shape[0]), at]),
    P("a token of each row, from the end", "b+ s-", lambda x, at: x[torch.arange(x.shape[0]), -1 - at]),
    P("infinities that are put in a matrix", "b+ s-", put_and_summed),
    P("last token by length", "b+ s~", lambda x, lens: x[torch.arange(x.shape[0]), (lens - 1).clamp(min=0)]),
    P("a token of each row, rows shifted", "b- s~", lambda x, at: x[torch.arange(x.shape[0]).flip(0), at % 2]),
    P("rows named by data", "b~ s+", lambda x, row: x[row & 1, torch.arange(x.shape[1])]),
    P("rows at fixed places", "b~ s+", lambda x, fixed: x[fixed.clamp_min(0)]),
    P("tokens at fixed places", "b+ s~", lambda x, fixed: x.index_select(1, fixed)),
    P("tokens at negative places", "b+ s-", lambda x: x[:, torch.tensor([0, -1])]),
    P("tokens at places of a list", "b+ s~", lambda x: x[:, [0, 1]]),
    P("tokens of the flattened batch", "b~ s-", lambda x, row: x.flatten(0, 1)[row.abs() + 6]),
    P("tokens of the flattened batch, taken", "b~ s-", lambda ids, row: ids.take(row.abs() + 6)),
    P("tokens put into the flattened batch", "b~ s-", lambda x, row: put(x.flatten(0, 1), row.abs() + 6, value=0.0)),
    P("identity index", "b+ s+", lambda x: x[torch.arange(x.shape[0])]),
    P("identity index of both", "b+ s+", lambda x: x[torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1])]),
    P("diagonal by index", "s+", lambda u: (u @ u.T)[torch.arange(u.shape[0]), torch.arange(u.shape[0])]),
    P("positions look up a padded table", "b+ s~", lambda ids, u: u[ids % 2]),
    P("embedding by positions", "b+ s~", lambda x, cache: x + F.embedding(torch.arange(x.shape[1]), cache)),
    P("embedding of given positions", "b+ s+", lambda x, pos, cache: x + cache[pos]),
    P("padded table", "b+ s~", lambda ids, u: F.embedding(ids % 2, u)),
    P("bool mask as index", "b~ s~", lambda x, m: x[m]),
    P("bool mask as index, unknown padding", "b~ s-", lambda x, free: x[free]),
    P("assigned where masked", "b+ s+", lambda x, m: put(x.clone(), ~m, value=0.0)),
    P("assigned where data says", "b+ s+", lambda x: put(x.clone(), x > 0, value=0.0)),
    P(
        "tokens moved to data",
        "b+ s~",
        lambda x, at: torch.zeros_like(x).scatter(1, at[:, None, None].expand(-1, 1, 8), x[:, :1]),
    ),
    P("sorted by length and back", "b-", lambda v, lens: v[lens.argsort()]),
    P("gathered features", "b+ s+", lambda x: x.gather(-1, x.argsort(-1))),
    P("gathered tokens", "b+ s-", lambda x: x.gather(1, x.argsort(1))),
    P("the last three by the size", "b+ s-", lambda x: x[:, x.shape[1] - 3 :]),
    P("the last token by a constant", "b+ s-", lambda x: x[:, torch.full((1,), -1)]),
    P("the first token by a constant", "b+ s+", lambda x: x[:, torch.full((1,), 0)]),
    P("every second token", "b+ s+", lambda x: x[:, ::2]),
    P("the first tokens", "b+ s+", lambda x: x[:, :2]),
    P("the first token", "b+ s+", lambda x: x[:, 0]),
    P("the third token", "b+ s+", lambda x: x[:, 2]),
    P("without the first token", "b+ s+", lambda x: x[:, 1:]),
    P("without the last token", "b+ s+", lambda x: x[:, :-1]),
    P("without both ends", "b+ s+", lambda x: x[:, 1:-1]),
    P("first chunk", "b+ s+", lambda x: x.chunk(2, 1)[0]),
    P("the first row", "b+ s+", lambda x: x[0]),
    P("a host read", "b+", lambda v, at: v * at[0].item()),
    P("a host read of a mean", "b-", lambda v: v * v.mean().item()),
    P("nonzero", "b~ s-", lambda g: (g > 0).nonzero()),
    P("repeated by data", "b~", lambda v, at: v.repeat_interleave(at, 0)),
    P("unique", "b~ s~", lambda ids: ids.unique().shape[0] + ids),
    P("slice assigned", "b+ s+", lambda x, y: put(x.clone(), slice(None), slice(1, None), value=y[:, :-1])),
    P("slice assigned from behind", "b+ s-", lambda x, y: put(x.clone(), slice(None), slice(-2, None), value=y[:, :2])),
    P("where the mask's sum points", "b~ s~", lambda x, am: x[torch.arange(x.shape[0]), am.sum(1) - 1]),
    P("where the largest id is", "b+ s-", lambda x, ids: x[torch.arange(x.shape[0]), ids.argmax(1)]),
]

VIEWS = [
    P("heads", "b+ s+", lambda x: (x.view(*x.shape[:2], 2, 4).transpose(1, 2) * 2).transpose(1, 2).reshape(x.shape)),
    P("flattened and back", "b+ s+", lambda x, w: (x.reshape(-1, 8) @ w).view(x.shape)),
    P("flattened, as result", "b+ s-", lambda x: x.reshape(-1, 8) * 2),
    P("flattened the other way round", "b- s+", lambda x: x.transpose(0, 1).reshape(-1, 8) * 2),
    P("everything flattened", "b+ s-", lambda x: x.flatten()),
    P("tokens and features flattened", "b+ s+", lambda x: x.flatten(1)),
    P("features and tokens flattened", "b+ s-", lambda x: x.mT.flatten(1)),
    P("transposed", "b+ s+", lambda x: x.mT),
    P("permuted", "b+ s+", lambda x: x.permute(2, 1, 0)),
    P("sizes exchanged by a view", "b- s-", lambda x: x.reshape(x.shape[1], x.shape[0], 8).transpose(0, 1) + x),
    P("sizes exchanged and back", "b~ s~", lambda x: x.reshape(x.shape[1], x.shape[0], 8).view(x.shape)),
    P("features grouped with tokens", "b+ s+", lambda x: x.view(x.shape[0], -1, 4).relu().view(x.shape)),
    P("features grouped with tokens, as result", "b+ s+", lambda x: x.view(x.shape[0], -1, 4) * 2),
    P("each token twice", "b+ s+", lambda x: x.repeat_interleave(2, 1)),
    P(
        "each token twice by expanding",
        "b+ s+",
        lambda x: x[:, :, None].expand(-1, -1, 2, -1).reshape(x.shape[0], -1, 8),
    ),
    P("tokens twice, regrouped", "b+ s+", lambda x: x.repeat(1, 2, 1).view(x.shape[0], 2, x.shape[1], 8).sum(1)),
    P(
        "tokens twice, regrouped wrongly",
        "b+ s-",
        lambda x: x.repeat(1, 2, 1).view(x.shape[0], x.shape[1], 2, 8).sum(2),
    ),
    P(
        "each token twice, regrouped wrongly",
        "b+ s-",
        lambda x: x.repeat_interleave(2, 1).view(x.shape[0], 2, x.shape[1], 8).sum(1),
    ),
    P("batch repeated for beams", "b+ s+", lambda x: x.repeat_interleave(2, 0) * 2),
    P("two flattenings added", "b- s-", lambda x: x.flatten(0, 1) + x.transpose(0, 1).flatten(0, 1)),
    P(
        "two flattenings side by side",
        "b- s-",
        lambda x: torch.cat([x.flatten(0, 1), x.transpose(0, 1).flatten(0, 1)], 1).sum(1),
    ),
    P(
        "two flattenings multiplied",
        "b- s-",
        lambda x: (x.flatten(0, 1)[:, None] @ x.transpose(0, 1).flatten(0, 1)[..., None]).view(x.shape[:2]),
    ),
    P(
        "two flattenings chosen from",
        "b- s-",
        lambda x: torch.where(x.flatten(0, 1) > 0, x.flatten(0, 1), x.transpose(0, 1).flatten(0, 1)).view(x.shape),
    ),
    P("rows of the flattened", "b+ s-", lambda x: x.flatten(0, 1)[7]),
    P("first row of the flattened", "b+ s~", lambda x: x.flatten(0, 1)[0]),
    P("slice of the flattened", "b+ s-", lambda x: x.flatten(0, 1)[1:]),
    P("steps through the flattened", "b+ s-", lambda x: x.flatten(0, 1)[::2]),
    P("first rows of the flattened", "b+ s-", lambda x: x.flatten(0, 1)[:7]),
    P("third feature of the flattened", "b+ s+", lambda x: x.flatten(1)[:, 3]),
    P("row of flattened features", "b+ s-", lambda x: x.mT.flatten(1)[:, 7]),
    P("softmax of the flattened", "b+ s-", lambda x: x.flatten(1).softmax(-1)),
    P("stacked", "b+ s+", lambda x, y: torch.stack([x, y], 2).flatten(2)),
    P("stacked before the tokens", "b+ s-", lambda x, y: torch.stack([x, y], 1).flatten(1, 2)),
    P("stacked behind the tokens", "b+ s+", lambda x, y: torch.stack([x, y], 2).flatten(1, 2)),
    P("class token before", "b+ s+", lambda x, p: torch.cat([p.expand(x.shape[0], 1, 8), x], 1)),
    P("class token behind", "b+ s-", lambda x, p: torch.cat([x, p.expand(x.shape[0], 1, 8)], 1)),
    P(
        "class token before, then removed",
        "b+ s+",
        lambda x, p: torch.cat([p.expand(x.shape[0], 1, 8), x], 1)[:, 1:] * 2,
    ),
    P("two sequences joined", "b+ s- t+", lambda x, mem: torch.cat([x, mem], 1)),
    P("two sequences along the features", "b+ s+", lambda x, y: torch.cat([x, y], -1)),
    P("joined and masked", "b+ s~ t~", lambda mem, x, tm: torch.cat([mem * tm[..., None], x], 1).sum(1) * 0 + x[:, 0]),
    P("squeezed", "b+ s+", lambda x: x[:, :, :1].squeeze(-1).unsqueeze(1)),
    P("windows of two", "b+ s+", lambda x: torch.cat([x[:, :-1], x[:, 1:]], -1)),
    P("zeros before", "b+ s+", lambda x: F.pad(x, (0, 0, 2, 0))),
    P("features padded", "b+ s+", lambda x: F.pad(x, (1, 1))),
    P("as strided", "b~", lambda v: v.as_strided((v.shape[0], 4), (8, 1))),
    P("expanded, then summed", "b+ s-", lambda v, r: v[:, None].expand(-1, r.shape[0], -1).sum(1)),
    P(
        "expanded, then flattened",
        "b+ s+",
        lambda v, r: v[:, None].expand(-1, r.shape[0], -1).reshape(-1, 8).view(v.shape[0], -1, 8),
    ),
    P("pixel shuffle", "b+", lambda im: F.pixel_shuffle(im, 2)),
    P("unflattened batch", "b+", lambda im: im.flatten(0, 1).view(-1, 4, 6, 6) * 2),
    P("channels of the batch, as result", "b+", lambda im: im.flatten(0, 1)),
    P("einsum with a shared dimension", "b+ s-", lambda x, y: torch.einsum("bsi,bsj->bij", x, y)),
    P("bilinear over both", "b+ s+", lambda x, w: torch.einsum("bsi,ij,bsj->bs", x, w, x)),
    P("scores of two sequences", "b+ s+ t+", lambda x, mem: torch.einsum("bsd,btd->bst", x, mem)),
    P(
        "meshgrid of positions",
        "b+ s+",
        lambda g: torch.stack(torch.meshgrid(torch.arange(g.shape[0]), torch.arange(g.shape[1]), indexing="ij"), -1),
    ),
    P("movement of dimensions", "b+ s+", lambda x: x.movedim(1, 0).contiguous() * 2),
    P("view as real", "b+ s+", lambda z: torch.view_as_real(z) * 2),
    P("strided rows of a batch", "b+", lambda v: v[::2] * 2),
    P("tril of the batch scores", "b+", lambda v: (v @ v.T).tril()),
    P("tril over tokens and features", "b+ s+", lambda x: x.tril()),
    P("triu over tokens and features", "b+ s+", lambda x: x.triu()),
]
