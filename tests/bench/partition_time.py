"""CPU seconds that tracing and partitioning take by depth: they should grow as the number of layers does, no faster.

``python -m tests.bench.partition_time [layers ...]``; needs no GPU. One thread works, so that CPU seconds are the
elapsed ones of an idle machine, whatever else runs beside.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import fx, nn

from graphpass import partition
from graphpass.regions import split
from tests.bench.decoder import RMSNorm
from tests.bench.timing import table_of

LAYERS = (24, 96, 240)
ROUNDS = 3
HIDDEN, NUM_HEADS, NUM_TOKENS = 32, 2, 8
ATTENTION = "graphpass_bench::attention"

# The steps of partition(), by the name under which graphpass.regions.split calls them.
PHASES = {
    "uncompiled_copy": "copy",
    "annotate": "annotate",
    "sizes_as_symbols": "sizes",
    "tuples_unpacked": "tuples",
    "tuples_stay_home": "items",
    "assign": "assign",
    "build_regions": "regions",
    "Stitching": "stitch",
}


@torch.library.custom_op(ATTENTION, mutates_args=())
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention over ``[num_tokens, num_heads, head_dim]``, opaque to Dynamo."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).contiguous()


@attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(q)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of ``[num_tokens, num_heads, head_dim]``."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.output_norm = RMSNorm(HIDDEN), RMSNorm(HIDDEN)
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(HIDDEN, 2 * HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        normed = self.input_norm(x)
        heads = (x.shape[0], NUM_HEADS, HIDDEN // NUM_HEADS)
        q, k, v = (projection(normed).view(heads) for projection in (self.q, self.k, self.v))
        attended = attention(rotated(q, cos, sin), rotated(k, cos, sin), v)
        x = x + self.o(attended.reshape(x.shape[0], -1))
        normed = self.output_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    """``[num_tokens, hidden]`` and positions in, hidden states out."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.norm = RMSNorm(HIDDEN)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        frequencies = torch.arange(HIDDEN // NUM_HEADS // 2) / HIDDEN
        angles = positions[:, None, None] * frequencies.repeat(2)
        cos, sin = angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


@dataclass(frozen=True, slots=True)
class Timing:
    """CPU seconds of one run over one depth, the partition's also by phase."""

    num_nodes: int
    trace_s: float
    partition_s: float
    phase_s: dict[str, float]


@contextmanager
def clocked(phase_s: dict[str, float]) -> Iterator[None]:
    """Within the body, the CPU seconds of each phase of ``partition`` are added to ``phase_s``."""

    def timed(phase: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            result = run(*args, **kwargs)
            phase_s[phase] = phase_s.get(phase, 0.0) + time.process_time() - start
            return result

        return call

    replaced = {name: timed(phase, getattr(split, name)) for name, phase in PHASES.items()}
    with mock.patch.multiple(split, **replaced):
        yield


def measure(num_layers: int) -> Timing:
    """Trace a fresh decoder and partition its graph while Dynamo waits, as the backend does."""
    made: list[Timing] = []
    entered_s = 0.0

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        trace_s = time.process_time() - entered_s
        phase_s: dict[str, float] = {}
        with clocked(phase_s):
            start = time.process_time()
            partition(gm, [ATTENTION])
            partition_s = time.process_time() - start
        made.append(Timing(len(gm.graph.nodes), trace_s, partition_s, phase_s))
        return gm.forward

    torch.compiler.reset()
    gc.collect()
    model = Decoder(num_layers).eval()
    x = torch.randn(NUM_TOKENS, HIDDEN)
    torch._dynamo.mark_dynamic(x, 0)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    with torch.no_grad():
        entered_s = time.process_time()
        compiled(x, torch.arange(NUM_TOKENS))
    (timing,) = made
    return timing


def main(layers: tuple[int, ...] = LAYERS) -> None:
    """Print the table: medians over the rounds, after one run that warms torch's own caches."""
    measure(1)
    rows = []
    for num_layers in layers:
        rounds = [measure(num_layers) for _ in range(ROUNDS)]
        partition_s = statistics.median(r.partition_s for r in rounds)
        phases = [statistics.median(r.phase_s[phase] for r in rounds) for phase in PHASES.values()]
        num_nodes = rounds[0].num_nodes
        seconds = [statistics.median(r.trace_s for r in rounds), partition_s, *phases]
        rows.append((num_layers, num_nodes, *(f"{s:.3f}" for s in seconds), f"{partition_s / num_nodes * 1e3:.3f}"))
    title = f"torch {torch.__version__}, CPU seconds, median of {ROUNDS}"
    columns = f"layers | nodes | trace | partition | {' | '.join(PHASES.values())} | ms a node"
    Console(width=120).print(table_of(title, columns, rows))


if __name__ == "__main__":
    main(tuple(map(int, sys.argv[1:])) or LAYERS)
