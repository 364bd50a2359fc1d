"""How much memory a capture will take, from the capture of a few keys in a throwaway pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphpass.encoder.costs import spread
from graphpass.encoder.graphs import EncoderGraphs
from graphpass.encoder.protocol import EncoderGraphKey

__all__ = ["EncoderEstimate", "estimated"]

MAX_KEYS = 3


@dataclass(frozen=True, slots=True)
class EncoderEstimate:
    """What the capture of all keys is expected to take.

    Attributes:
        num_graphs: how many keys that are.
        pool_bytes: of the graph pool, which all share; 0 on the CPU tape.
        graph_bytes: of the graphs themselves, outside of torch's allocator; 0 on the CPU tape.
        buffer_bytes: of the buffers that graphs read.
    """

    num_graphs: int
    pool_bytes: int
    graph_bytes: int
    buffer_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.pool_bytes + self.graph_bytes + self.buffer_bytes

    def __str__(self) -> str:
        mib = 1 << 20
        return (
            f"encoder: {self.num_graphs} graphs, {self.total_bytes / mib:.1f} MiB "
            f"(pool {self.pool_bytes / mib:.1f}, graphs {self.graph_bytes / mib:.1f}, "
            f"buffers {self.buffer_bytes / mib:.1f})"
        )


def estimated(graphs: EncoderGraphs, keys: Sequence[EncoderGraphKey], device: torch.device) -> EncoderEstimate:
    """Capture the largest of ``keys`` and up to two more, and say what all of them take.

    The largest key sizes the pool, which smaller ones reuse: what each of the others adds is taken for what every
    smaller key adds. The graphs are dropped afterwards.

    Args:
        graphs: of a runtime of their own, nothing captured.
        keys: all that will be captured, the largest first.
        device: whose free memory is watched.

    Raises:
        CaptureError: one of the keys could not be captured.
    """
    pool_bytes, graph_bytes = [], []
    try:
        with graphs.capturing():
            for key in spread(keys, MAX_KEYS):
                before = _outside_allocator(device)
                pool_bytes.append(graphs.capture(key).pool_bytes)
                graph_bytes.append(max(0, _outside_allocator(device) - before))
        buffer_bytes = graphs.buffers.num_bytes()
    finally:
        graphs.close()
    return EncoderEstimate(
        len(keys), _extrapolated(pool_bytes, len(keys)), _extrapolated(graph_bytes, len(keys)), buffer_bytes
    )


def _extrapolated(num_bytes: Sequence[int], count: int) -> int:
    """The first, which is like no other, and as much as the mean of the rest for every other key."""
    first, *others = num_bytes
    return first + (round(sum(others) / len(others) * (count - 1)) if others else 0)


def _outside_allocator(device: torch.device) -> int:
    """Bytes of the device in use that torch's allocator does not hold; other processes' count, too."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free - torch.cuda.memory_reserved(device))
