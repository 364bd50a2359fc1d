"""The loop of an engine: one compilation a graph, captures inside ``capturing()`` only, replays afterwards."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import graphpass as gp
from graphpass import BatchDescriptor, CudagraphDispatcher, CUDAGraphMode, GraphRuntime
from tests.unit.models import module

SIZES = [1, 2, 4, 8]


def graphs_of_dynamo() -> int:
    return int(counters["stats"]["unique_graphs"])


@pytest.fixture(autouse=True)
def _fresh_counters() -> None:
    torch._dynamo.reset()
    counters.clear()


def captures_and_replays(rt: GraphRuntime) -> dict[tuple[str, BatchDescriptor], tuple[int, int]]:
    return {(str(mode), key): (c.captured, c.replayed) for (_, mode, key), c in rt.counts().items()}


def decoder(self: Any, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return self.out(torch.ops.cgpasstest.attend(self.embedding(ids) + positions.unsqueeze(-1)))


def buffers(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(size, dtype=torch.long), torch.zeros(size)


class Engine:
    """The loop of an engine author: ids and positions in persistent buffers, two modes."""

    def __init__(self, **options: Any) -> None:
        self.rt = GraphRuntime()
        self.model = module(decoder, embedding=nn.Embedding(50, 16), out=nn.Linear(16, 8)).eval()
        self.dispatcher = CudagraphDispatcher("FULL_AND_PIECEWISE", SIZES, max_num_reqs=8)
        given = {
            "splitting_ops": ["cgpasstest::attend"],
            "mode": "FULL_AND_PIECEWISE",
            "capture_sizes": SIZES,
            "runtime": self.rt,
            "compiler": "aot_eager",
            **options,
        }
        self.compiled = torch.compile(self.model, backend="cgpass", dynamic=True, options=given)

    def forward(self, mode: CUDAGraphMode, key: BatchDescriptor, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        with gp.set_forward_context(runtime_mode=mode, batch_descriptor=key):
            return self.compiled(ids, positions)

    def capture(self, ids: torch.Tensor, positions: torch.Tensor) -> None:
        with self.rt.capturing():
            for mode, descriptors in self.dispatcher.capture_plan():
                for key in descriptors:
                    self.forward(mode, key, ids[: key.num_tokens], positions[: key.num_tokens])
                    self.dispatcher.mark_captured(mode, key)

    def serve(self, inputs: Callable[[int], tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Every size, in both modes; results are those of eager."""
        for is_decode in (False, True):
            for num_tokens in (8, 1, 3, 2, 5, 4, 7, 6):
                step = self.dispatcher.dispatch(num_tokens, uniform_decode=is_decode)
                ids, positions = inputs(step.descriptor.num_tokens)
                assert step.mode is (CUDAGraphMode.FULL if is_decode else CUDAGraphMode.PIECEWISE)
                got = self.forward(step.mode, step.descriptor, ids, positions)
                torch.testing.assert_close(got, self.model(ids, positions))


def fill(ids: torch.Tensor, positions: torch.Tensor) -> None:
    ids.copy_(torch.randint(50, ids.shape))
    positions.copy_(torch.rand(positions.shape))


@pytest.mark.parametrize("made", ["in inference mode", "before", "before, longer than the largest batch"])
def test_buffers_are_compiled_once_and_captured_inside_the_scope_alone(
    made: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine()
    outside = buffers(9 if "longer" in made else 8)
    with torch.inference_mode(), caplog.at_level(logging.INFO, "graphpass"):
        ids, positions = buffers(8) if made == "in inference mode" else outside
        engine.capture(ids, positions)
        counts = captures_and_replays(engine.rt)
        assert set(counts.values()) == {(1, 1)}
        assert (engine.rt.stats().callables, engine.rt.compiled()) == (2, 4), "two regions, and again for size 1"
        # A slice as long as its buffer is traced by itself where Dynamo sees the buffer behind it.
        assert graphs_of_dynamo() == (3 if made == "before" else 2)
        captured, graphs = engine.rt.stats().captured, graphs_of_dynamo()

        def slices(size: int) -> tuple[torch.Tensor, torch.Tensor]:
            fill(ids[:size], positions[:size])
            return ids[:size], positions[:size]

        caplog.clear()
        for _ in range(2):
            engine.serve(slices)
    assert (engine.rt.stats().captured, graphs_of_dynamo()) == (captured, graphs)
    assert not [record for record in caplog.records if record.name == "graphpass"], "nothing new while serving"
    for (_, _, key), c in engine.rt.counts().items():
        batches = {1: 1, 2: 1, 4: 2, 8: 4}[key.num_tokens]
        assert (c.captured, c.replayed) == (1, 1 + 2 * batches), key
