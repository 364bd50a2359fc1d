"""What the graphs of a ladder cost at capture, and their use since."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass

import torch

from graphpass.keys import BatchDescriptor, CUDAGraphMode
from graphpass.ledger import Row
from graphpass.report import KeyUse, Table
from graphpass.report.figures import padding_share
from graphpass.report.records import CapturedGroup, MemoryGrowth
from graphpass.serving.estimate import Key


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """Time and memory of the capture of one key."""

    mode: CUDAGraphMode  #: PIECEWISE or FULL; always FULL for an encoder
    descriptor: BatchDescriptor  #: the padded shape
    seconds: float  #: duration of the capture, warm-up included
    memory: MemoryGrowth  #: growth of the device's memory; keys that are captured later reuse memory of earlier keys

    @property
    def key(self) -> Key:
        """Mode and padded shape."""
        return (self.mode, self.descriptor)

    @property
    def pool_bytes(self) -> int:
        """Growth of the graph pool in bytes."""
        return self.memory.pool_bytes


@dataclass(frozen=True, slots=True)
class Traffic:
    """Use of the graph of one key."""

    captured: CapturedGraph  #: the key, and time and memory of its capture
    replays: int  #: number of batches that replayed the graph
    items: int  #: images and clips of those batches; for a text model the number of batches
    real_tokens: int  #: tokens of those batches without padding
    padded_tokens: int  #: tokens of those batches with padding

    @classmethod
    def of(cls, captured: CapturedGraph, replays: Mapping[Key, Row]) -> Traffic:
        """The use of a graph among the replays of all keys."""
        row = replays.get(captured.key, Row())
        return cls(captured, row.n, row.items, row.real, row.n * captured.descriptor.num_tokens)

    @property
    def padding(self) -> float:
        """Share of padding among the computed tokens, 0 to 1."""
        return padding_share(self.real_tokens, self.padded_tokens)

    def use(self, graph: str, sizes: Mapping[str, Hashable]) -> KeyUse:
        """The same as figures of a report; ``graph`` names the group of keys, ``sizes`` are those of the key."""
        captured = self.captured
        return KeyUse(
            graph,
            str(captured.mode),
            sizes,
            graphs=1,
            calls=self.replays,
            replays=self.replays,
            real=self.real_tokens,
            padded=self.padded_tokens,
            capture_s=captured.seconds,
            pool_bytes=captured.pool_bytes,
            driver_bytes=captured.memory.driver_bytes,
        )


def traffic_table(title: str, traffic: Iterable[Traffic], *, has_items: bool = False) -> Table:
    """A row for each graph, with a column for items where a batch may have several."""
    items = ("items",) if has_items else ()
    columns = ("mode", "key", "replays", *items, "real tokens", "padded tokens", "padding", "capture ms", "pool bytes")
    rows = (
        (
            *(of.captured.mode, of.captured.descriptor, of.replays),
            *([of.items] if has_items else ()),
            *(of.real_tokens, of.padded_tokens, f"{100 * of.padding:.1f} %"),
            *(f"{1000 * of.captured.seconds:.1f}", of.captured.pool_bytes),
        )
        for of in traffic
    )
    return Table(title, columns, tuple(tuple(map(str, row)) for row in rows))


def captured_group(name: str, graphs: Collection[CapturedGraph]) -> CapturedGroup:
    """Time and memory of the captures of one group of keys."""
    memory = MemoryGrowth.sum_of(graph.memory for graph in graphs)
    return CapturedGroup(name, len(graphs), sum(graph.seconds for graph in graphs), memory)


def timed_s(run: Callable[[], object], device: torch.device, *, runs: int = 3, enough_s: float = math.inf) -> float:
    """Seconds of one run: the median after a warm-up of ``runs`` runs, or of fewer that take ``enough_s`` together."""
    seconds = list[float]()
    for _ in range(1 + runs):
        _wait(device)
        started = time.perf_counter()
        run()
        _wait(device)
        seconds.append(time.perf_counter() - started)
        if sum(seconds[1:]) >= enough_s:
            break
    return statistics.median(seconds[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
