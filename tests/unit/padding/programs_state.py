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
    P("buffer of batch sums", "b-", lambda v, buf: (v, buf.add_(v.sum(0)))[0]),
    P("running statistics", "b-", lambda v, mean, var: (F.batch_norm(v, mean, var, training=True), v)[1] * 2),
    P("running mean by hand", "b-", lambda v, mean: (v * 2, mean.lerp_(v.mean(0), 0.1))[0]),
    P("last token of the input written", "b+ s-", lambda x: put(x, slice(None), -1, value=0.0)),
    P("cache filled with the tokens", "b+ s-", lambda x, kv: put(kv, slice(None), slice(0, x.shape[1]), value=x) * 1),
    P("cache filled at slots", "s-", lambda u, slot, cache: cache.index_copy_(0, slot, u).sum(0) * 0 + u[0]),
    P("cache assigned at slots", "s-", lambda u, slot, cache: (put(cache, slot, value=u), u * 2)[1]),
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
]

INDEX = [
    P("tokens at data", "b+ s~", lambda x, at: x.gather(1, at[:, None, None].expand(-1, 1, 8))),
    P("infinities that are put in a matrix", "b+ s-", put_and_summed),
    P("rows named by data", "b~ s+", lambda x, row: x[row & 1, torch.arange(x.shape[1])]),
    P("rows at fixed places", "b~ s+", lambda x, fixed: x[fixed.clamp_min(0)]),
    P("tokens of the flattened batch, taken", "b~ s-", lambda ids, row: ids.take(row.abs() + 6)),
    P("tokens put into the flattened batch", "b~ s-", lambda x, row: put(x.flatten(0, 1), row.abs() + 6, value=0.0)),
    P("identity index of both", "b+ s+", lambda x: x[torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1])]),
    P("embedding by positions", "b+ s~", lambda x, cache: x + F.embedding(torch.arange(x.shape[1]), cache)),
    P("padded table", "b+ s~", lambda ids, u: F.embedding(ids % 2, u)),
    P("bool mask as index", "b~ s~", lambda x, m: x[m]),
    P("assigned where masked", "b+ s+", lambda x, m: put(x.clone(), ~m, value=0.0)),
    P(
        "tokens moved to data",
        "b+ s~",
        lambda x, at: torch.zeros_like(x).scatter(1, at[:, None, None].expand(-1, 1, 8), x[:, :1]),
    ),
    P("the last three by the size", "b+ s-", lambda x: x[:, x.shape[1] - 3 :]),
    P("the last token by a constant", "b+ s-", lambda x: x[:, torch.full((1,), -1)]),
    P("a host read", "b+", lambda v, at: v * at[0].item()),
    P("a host read of a mean", "b-", lambda v: v * v.mean().item()),
    P("nonzero", "b~ s-", lambda g: (g > 0).nonzero()),
    P("repeated by data", "b~", lambda v, at: v.repeat_interleave(at, 0)),
    P("unique", "b~ s~", lambda ids: ids.unique().shape[0] + ids),
    P("slice assigned from behind", "b+ s-", lambda x, y: put(x.clone(), slice(None), slice(-2, None), value=y[:, :2])),
    P("where the mask's sum points", "b~ s~", lambda x, am: x[torch.arange(x.shape[0]), am.sum(1) - 1]),
    P("where the largest id is", "b+ s-", lambda x, ids: x[torch.arange(x.shape[0]), ids.argmax(1)]),
]

VIEWS = [
    P("heads", "b+ s+", lambda x: (x.view(*x.shape[:2], 2, 4).transpose(1, 2) * 2).transpose(1, 2).reshape(x.shape)),
    P("flattened, as result", "b+ s-", lambda x: x.reshape(-1, 8) * 2),
    P("everything flattened", "b+ s-", lambda x: x.flatten()),
    P("transposed", "b+ s+", lambda x: x.mT),
    P("sizes exchanged by a view", "b- s-", lambda x: x.reshape(x.shape[1], x.shape[0], 8).transpose(0, 1) + x),
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
    P("slice of the flattened", "b+ s-", lambda x: x.flatten(0, 1)[1:]),
    P("row of flattened features", "b+ s-", lambda x: x.mT.flatten(1)[:, 7]),
    P("stacked before the tokens", "b+ s-", lambda x, y: torch.stack([x, y], 1).flatten(1, 2)),
    P("joined and masked", "b+ s~ t~", lambda mem, x, tm: torch.cat([mem * tm[..., None], x], 1).sum(1) * 0 + x[:, 0]),
    P("as strided", "b~", lambda v: v.as_strided((v.shape[0], 4), (8, 1))),
    P("pixel shuffle", "b+", lambda im: F.pixel_shuffle(im, 2)),
]
