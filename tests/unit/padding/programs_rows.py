"""Programs that work row by row, that mix rows, or that need the size as a number."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.padding.table import program as P


def lstm(f: Tensor, state: Tensor | None = None, *, reverse: bool = False) -> tuple[Tensor, ...]:
    """One direction of a layer over [rows, steps, features], as Dynamo calls it on a CPU."""
    steps = f.transpose(0, 1).contiguous()
    first = torch.zeros(1, steps.shape[1], 8) if state is None else state
    weights = [torch.linspace(-1, 1, 32 * 8).sin().reshape(32, 8)] * 2 + [torch.linspace(-1, 1, 32)] * 2
    found: tuple[Tensor, ...] = torch.ops.aten.mkldnn_rnn_layer(
        steps, *weights, first, first, reverse, [], 2, 8, 1, True, False, False, False
    )
    return found


ROWS = [
    P("pointwise", "b+ s+", lambda x, y: (x + y).relu() * 2 - x.sigmoid()),
    P("linear", "b+ s+", lambda x, w, p: F.linear(x, w, p)),
    P("matmul", "b+ s+", lambda x, w: x @ w),
    P("two layers", "b+ s+", lambda x, w, p: F.gelu(F.linear(x, w, p)) @ w.t()),
    P("rms norm", "b+ s+", lambda x, p: F.rms_norm(x, (8,), p)),
    P("group norm of images", "b+", lambda im: F.group_norm(im, 2)),
    P("prelu", "b+ s+", lambda x, p: F.prelu(x, p[:1])),
    P("huber loss of each entry", "b+ s+", lambda x, y: F.huber_loss(x, y, reduction="none")),
    P("smooth loss of each entry", "b+ s+", lambda x, y: F.smooth_l1_loss(x, y, reduction="none")),
    P("squared error, averaged", "b- s-", lambda x, y: F.mse_loss(x, y)),
    P(
        "squared error under a mask",
        "b+ s+",
        lambda x, y, fm: (F.mse_loss(x, y, reduction="none") * fm[..., None]).sum(1),
    ),
    P("log sigmoid under a mask, summed", "b+ s-", lambda g, fm: F.logsigmoid(g * fm).sum(1)),
    P("softmax over features", "b+ s+", lambda x: x.softmax(-1)),
    P("split features", "b+ s+", lambda x: x.split([3, 5], -1)),
    P("unbound features", "b+ s+", lambda x: x.unbind(-1)[3]),
    P(
        "a whole in another order",
        "b+ s+",
        lambda x: (x * 2).as_strided((x.shape[0], 8, x.shape[1]), (x.stride(0), 1, 8)) + 1,
    ),
    P("a part of a whole", "b~ s~", lambda x: (x * 2).as_strided((x.shape[0], x.shape[1]), (x.stride(0), 8))),
    P("gated", "b+ s+", lambda x, w: F.silu(x @ w) * x),
    P("integers", "b+ s+", lambda i: (i * 3) // 2 + i % 4),
    P("bytes", "b+ s+", lambda byte: byte + 250),
    P("complex numbers", "b+ s+", lambda z: z * z.conj()),
    P("embedding", "b+ s+", lambda ids, table: F.embedding(ids, table)),
    P("index select of a table", "b+", lambda at, table: table.index_select(0, at)),
    P("bags of rows", "b+ s-", lambda ids, table: F.embedding_bag(ids, table, mode="sum")),
    P("bags that count their padding", "b+ s-", lambda ids0, table: F.embedding_bag(ids0, table, mode="max")),
    P(
        "bags weighted by a mask",
        "b+ s+",
        lambda ids, table, fm: F.embedding_bag(ids, table, mode="sum", per_sample_weights=fm),
    ),
    P(
        "bags with offsets",
        "b- s-",
        lambda row, table, at: F.embedding_bag(row, table, at * 0, mode="sum"),
    ),
    P(
        "bags whose end is listed",
        "s-",
        lambda row, table: F.embedding_bag(row, table, torch.tensor([0, 2]), mode="sum", include_last_offset=True),
    ),
    P(
        "bags of flattened rows",
        "b~ s-",
        lambda ids0, table: F.embedding_bag(ids0.flatten(), table, torch.tensor([0, 7]), mode="sum", padding_idx=0),
    ),
    P("a layer of an LSTM, backwards", "b+ s-", lambda f: lstm(f, reverse=True)[0]),
    P("the last state of an LSTM", "b+ s-", lambda f: lstm(f)[1]),
    P("one-hot", "b~ s~", lambda ids: F.one_hot(ids, 11)),
    P("equality with a range", "b+ s+", lambda ids: ids[..., None] == torch.arange(11)),
    P("buckets", "b+ s+", lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64))),
    P("router of experts", "b+ s+", lambda x, w: torch.zeros_like(x).scatter(-1, (x @ w).topk(2, -1)[1], 1.0) * x),
    P("pooled images", "b+", lambda im: F.max_pool2d(im, 2)),
    P("averaged images", "b+", lambda im: F.avg_pool2d(im, 2)),
    P("batch norm in evaluation", "b+", lambda v, mean, var: F.batch_norm(v, mean, var)),
    P("random numbers of a fixed size", "b+", lambda v: v + torch.rand(8, dtype=torch.float64)),
    P("tensor of ones, multiplied", "b+ s+", lambda x: x * torch.ones_like(x) * 2),
    P("new zeros", "b+ s+", lambda x: x.new_zeros(x.shape[0], x.shape[1], 4) + x[..., :4]),
    P("expanded", "b+ s+", lambda v, r: v[:, None].expand(v.shape[0], r.shape[0], 8) * r[:, None]),
    P("each image's own norm", "b+", lambda im: F.instance_norm(im)),
    P("weights from rows", "b+ s+", lambda x, y: torch.lerp(x, y, x.sigmoid())),
    P("bits", "b+ s+", lambda i: (i & 3) | (i << 1)),
    P("addcmul", "b+ s+", lambda x, y, p: torch.addcmul(x, y, p, value=0.5)),
]

MIXING = [
    P("mean over tokens", "b+ s-", lambda x: x.mean(1)),
    P("sum over tokens", "b+ s-", lambda x: x.sum(1)),
    P("softmax over the batch", "b- s+", lambda x: x.softmax(0)),
    P("variance over the batch", "b- s+", lambda x: x.var(0)),
    P("flipped tokens", "b+ s-", lambda x: x.flip(1)),
    P("rolled tokens", "b+ s-", lambda x: x.roll(1, 1)),
    P("sorted tokens", "b+ s-", lambda x: x.sort(1)[0]),
    P("top tokens", "b+ s-", lambda g: g.topk(2, 1)[0]),
    P("median of tokens", "b+ s-", lambda g: g.median(1)[0]),
    P("the last token", "b+ s-", lambda x: x[:, -1]),
    P("the last tokens", "b+ s-", lambda x: x[:, -2:]),
    P("a row behind the tokens", "b+ s-", lambda x: F.pad(x, (0, 0, 0, 1)) + 1),
    P("tokens twice", "b+ s-", lambda x: torch.cat([x, x], 1)),
    P("tokens repeated as a whole", "b+ s-", lambda x: x.repeat(1, 2, 1)),
    P("gram matrix over the batch", "b-", lambda v: v.T @ v),
    P("norm over tokens", "b+ s-", lambda x: F.layer_norm(x.mT, (x.shape[1],))),
    P("convolution over tokens", "b+ s-", lambda x, w4: F.conv1d(x[..., :4].mT, w4, padding=1)),
    P("pooled tokens", "b+ s-", lambda x: F.adaptive_avg_pool1d(x.mT, 1)),
    P("interpolated tokens", "b+ s-", lambda x: F.interpolate(x.mT, scale_factor=2.0, mode="linear")),
    P("unfolded tokens", "b+ s+", lambda x: x.unfold(1, 2, 1)),
    P("batch norm in training", "b-", lambda v, p: F.batch_norm(v, None, None, p, p, training=True)),
    P("mean loss", "b- s-", lambda x, ids: F.cross_entropy(x.mT, ids % 8)),
    P("all rows agree", "b-", lambda v: (v > -1).all(0)),
    P("reversed cumulative maximum", "b+ s-", lambda g: g.flip(1).cummax(1)[0].flip(1)),
    P("fourier transform over tokens", "b+ s-", lambda x: torch.fft.fft(x, dim=1).real),
    P("distances between rows", "b~", lambda v: torch.cdist(v, v)),
    P("lower half of the tokens", "b+ s-", lambda x: x[:, x.shape[1] // 2 :]),
    P("second chunk of the tokens", "b+ s-", lambda x: x.chunk(2, 1)[1]),
    P("mean against the row", "b+ s-", lambda x: x - x.mean(1, keepdim=True)),
    P("quantised with one scale", "b- s-", lambda x: (x / x.abs().amax() * 127).round()),
    P("log of the sum over tokens", "b+ s-", lambda g: g.logsumexp(1)),
]

SIZE = [
    P("divided by the size", "b+ s-", lambda x: x / x.shape[1]),
    P("multiplied by the size", "b- s+", lambda x: x * x.shape[0]),
    P("the size is added", "b+ s-", lambda x: x + x.shape[1]),
    P("root of the size", "b+ s-", lambda x: x * x.shape[1] ** 0.5),
    P("logarithm of the size", "b+ s-", lambda x: x * torch.log(torch.full((), x.shape[1], dtype=torch.float64))),
    P("filled with the size", "b+ s-", lambda x: x + torch.full((8,), x.shape[1])),
    P("mean of ones", "b+ s-", lambda x: x / torch.ones(x.shape[1]).sum()),
    P("number of elements", "b- s-", lambda x: x / x.numel()),
    P("a range that ends at the size", "b+ s-", lambda x: x + torch.arange(x.shape[1] - 1, -1, -1)[:, None]),
    P("a range counted back", "b+ s-", lambda x: x + (x.shape[1] - 1 - torch.arange(x.shape[1]))[:, None]),
    P("position", "b+ s+", lambda x: x + torch.arange(x.shape[1])[:, None]),
    P("rotary angles", "b+ s+", lambda x, p: x * torch.outer(torch.arange(x.shape[1], dtype=torch.float64), p).cos()),
    P(
        "relative positions",
        "s+",
        lambda r: (torch.arange(r.shape[0])[None] - torch.arange(r.shape[0])[:, None]).clamp(-2, 2),
    ),
    P("largest position", "b+ s-", lambda x: x + torch.arange(x.shape[1]).max()),
    P("smallest position", "b+ s~", lambda x: x + torch.arange(x.shape[1]).amin()),
    P("identity matrix", "s+", lambda r: torch.eye(r.shape[0], dtype=torch.float64) * r),
    P("triangle", "s+", lambda r: torch.ones(r.shape[0], r.shape[0], dtype=torch.float64).tril() * r),
    P("the size is a result", "b+ s+", lambda x: (x * 2, x.shape[1])),
    P("attention scale by length", "b+ s-", lambda x: x * math.log2(2.0) * torch.full((), x.shape[1] * 2)),
    P("random noise of the input's size", "b- s-", lambda x: x + torch.rand_like(x)),
    P("dropout in training", "b- s-", lambda x: F.dropout(x, 0.5)),
    P("noise for each token", "b+ s-", lambda x: x + torch.randn(x.shape[1], 1, dtype=torch.float64)),
    P("coin for each entry", "b- s-", lambda x: torch.bernoulli(x.sigmoid())),
    P("a permutation of the tokens", "b+ s-", lambda x: x[:, torch.randperm(x.shape[1])]),
    P("sampled token", "b-", lambda v: torch.multinomial(v.softmax(-1), 1)),
]
