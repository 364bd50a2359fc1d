"""A model of equal layers, and figures whose every name is hostile."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from graphpass import GraphedModel, graphed
from graphpass.capture import CallableRecord, RegionRecord, SizeRecord
from graphpass.ledger import PaddingFinding
from graphpass.report import Costs, CountedReason, KernelUse, KeyUse, Problem, Reason, ReportFigures, SizeTraffic
from graphpass.serving import CapturedGroup, MemoryGrowth

HOSTILE = "</td><script>alert('x')</script>\"><a href=//evil.example onclick=y>[/red]"
ATTENTION = "torch.nn.functional.scaled_dot_product_attention"
DIMS = {name: {0: "batch", 1: "seq"} for name in ("ids", "mask")}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        return x + self.out(
            nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None].bool())
        )


class Encoder(nn.Module):
    """Embeds tokens, attends in ``depth`` equal layers, and takes the first token."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return x[:, 0]


def encoder(depth: int, **options: Any) -> GraphedModel:
    """A graphed encoder with key fields ``batch`` and ``seq``."""
    model = Encoder(depth).eval()
    return graphed(model, None, DIMS, padding={"mask": 0}, compiler="eager", **options)


def call(model: GraphedModel, batch: int, seq: int, times: int = 1) -> None:
    """Call an encoder with random tokens."""
    for _ in range(times):
        model(ids=torch.randint(0, 32, (batch, seq)), mask=torch.ones(batch, seq))


def hostile_figures() -> ReportFigures:
    """Figures in which every name and every text is hostile."""
    reason = Reason(HOSTILE, HOSTILE, HOSTILE)
    cause = PaddingFinding(HOSTILE, HOSTILE, HOSTILE, field=HOSTILE, op=HOSTILE, target=HOSTILE)
    regions = (
        RegionRecord("r0", "captured", 5, like="r0"),
        RegionRecord(HOSTILE, "eager", 1, (reason,), HOSTILE),
        RegionRecord("r2", "captured", 5, like="r0"),
    )
    size = SizeRecord(HOSTILE, HOSTILE, 4, 2, None, False, "unproved", (cause,), HOSTILE)
    record = CallableRecord(HOSTILE, regions, 1, ends=reason, sizes=(size,), assumptions=(HOSTILE,), off=reason)
    group = CapturedGroup(HOSTILE, 1, 0.5, MemoryGrowth(1 << 20, 0, 1 << 18))
    return ReportFigures(
        HOSTILE,
        problems=(Problem("note", HOSTILE, (HOSTILE,), HOSTILE, 2, HOSTILE),),
        callables=(record,),
        keys=(KeyUse(HOSTILE, HOSTILE, {HOSTILE: HOSTILE}, 1, 3, 3, real=9, padded=12),),
        uncaptured=(CountedReason(HOSTILE, Reason(HOSTILE, HOSTILE), 4),),
        kernels=(KernelUse(HOSTILE, HOSTILE, HOSTILE),),
        traffic=(SizeTraffic(HOSTILE, HOSTILE, {3: 5, 8: 1}, (4, 8)),),
        costs=Costs(1, 1, graphs=1, pool_bytes=1 << 20, groups=(group,)),
    )
