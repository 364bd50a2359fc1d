"""Replays on streams: each is ordered after its caller's work, and after the forward before it, whatever its stream.

A long wait is enqueued in front of what a replay reads, so that work which does not wait for it reads old values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import cgpass
import graphpass as gp
from tests.gpu.shared import call, fresh_op
from tests.threads import in_threads

pytestmark = pytest.mark.cuda

SPLIT = "graphpass_gpu_streams::flipped"
ROWS, WIDTH = 64, 256
SLEEP_CYCLES = 20_000_000
"""About ten milliseconds: far longer than a forward, so that whatever does not wait comes first."""
Call = Callable[[torch.Tensor], torch.Tensor]


@fresh_op(SPLIT)
def flipped(x: torch.Tensor) -> torch.Tensor:
    return x.flip(-1) * 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.ops.graphpass_gpu_streams.flipped(self.first(x).tanh()))


@dataclass(frozen=True)
class Way:
    """How a model is captured: under a mode, or by graphed."""

    name: str
    runtime: gp.GraphRuntime

    def graphs_of(self, model: nn.Module, **given: Any) -> Call:
        """The model over graphs, as a function of one batch; nothing is captured yet."""
        options = {"compiler": "eager", "splitting_ops": [SPLIT], "mode": "FULL_AND_PIECEWISE", **given}
        if self.name == "graphed":
            return gp.graphed(model, [ROWS], {"x": 0}, runtime=self.runtime, **options)
        compiled = torch.compile(model, backend="cgpass", options=cgpass.options(runtime=self.runtime, **options))

        def run(x: torch.Tensor) -> torch.Tensor:
            with torch.inference_mode():
                result: torch.Tensor = call(compiled, ROWS, x, mode=gp.CUDAGraphMode[self.name])
                return result

        return run

    def captured(self, model: nn.Module) -> Call:
        fast, example = self.graphs_of(model), torch.randn(ROWS, WIDTH, device="cuda")
        if isinstance(fast, gp.GraphedModel):
            fast.capture(example)
        else:
            with self.runtime.capturing():
                fast(example)
        torch.cuda.synchronize()
        return fast

    def batches(self, number: int) -> tuple[list[torch.Tensor], list[torch.Tensor], Call]:
        """Inputs, what an eager model makes of them, and the captured model."""
        inputs, expected, model = batches(number)
        return inputs, expected, self.captured(model)


@pytest.fixture(params=["FULL", "PIECEWISE", "graphed"])
def way(request: pytest.FixtureRequest, cuda: torch.device) -> Iterator[Way]:
    with gp.GraphRuntime() as runtime:
        yield Way(request.param, runtime)


def batches(number: int) -> tuple[list[torch.Tensor], list[torch.Tensor], Model]:
    """Inputs, what an eager model makes of them, and the model; all of it computed."""
    model = Model().cuda().eval()
    inputs = [torch.randn(ROWS, WIDTH, device="cuda") for _ in range(number)]
    with torch.inference_mode():
        expected = [model(x) for x in inputs]
    torch.cuda.synchronize()
    return inputs, expected, model


def all_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    torch.cuda.synchronize()
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        says = lambda text, number=number: f"round {number}: {text}"  # noqa: E731
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, msg=says)


def test_a_replay_waits_for_what_its_callers_stream_has_enqueued(way: Way) -> None:
    inputs, expected, fast = way.batches(10)
    x = torch.zeros(ROWS, WIDTH, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    found = []
    with torch.cuda.stream(stream):
        for late in inputs:
            torch.cuda._sleep(SLEEP_CYCLES)
            x.copy_(late)
            found.append(fast(x))
            x.fill_(float("nan"))  # enqueued behind the replay, which has read its input by then
    all_close(found, expected)


def test_two_streams_take_turns_through_one_runtime(way: Way) -> None:
    """The first stream is still waiting when the second one's forward is enqueued."""
    inputs, expected, fast = way.batches(100)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    found = []
    for first, second in zip(inputs[::2], inputs[1::2], strict=True):
        with torch.cuda.stream(streams[0]):
            torch.cuda._sleep(SLEEP_CYCLES)
            found.append(fast(first))
        with torch.cuda.stream(streams[1]):
            found.append(fast(second))
    all_close(found, expected)


def test_outputs_are_cloned_before_the_next_streams_replay(way: Way) -> None:
    """A clone is enqueued on its caller's stream: the next forward, on another one, waits for it too."""
    inputs, expected, fast = way.batches(20)
    streams = [torch.cuda.Stream() for _ in range(4)]
    found = []
    for number, x in enumerate(inputs):
        with torch.cuda.stream(streams[number % 4]):
            found.append(fast(x))
    all_close(found, expected)
    assert len({result.data_ptr() for result in found}) == len(found)


def test_two_models_on_two_streams_share_one_pool(way: Way) -> None:
    inputs, expected, model = batches(40)
    other = Model().cuda().eval()
    with torch.no_grad():
        other.first.weight.mul_(-1)
        other_expected = [other(x) for x in inputs]
    fast = [way.captured(model), way.captured(other)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    found: list[list[torch.Tensor]] = [[], []]
    for x in inputs:
        for which, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if not which:
                    torch.cuda._sleep(SLEEP_CYCLES // 4)
                found[which].append(fast[which](x))
    all_close(found[0], expected)
    all_close(found[1], other_expected)


def test_threads_each_on_a_stream_of_its_own(way: Way) -> None:
    inputs, expected, fast = way.batches(80)
    found: dict[int, torch.Tensor] = {}

    def work(thread: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for step in range(20):
                if step % 4 == thread:
                    torch.cuda._sleep(SLEEP_CYCLES)
                found[thread * 20 + step] = fast(inputs[thread * 20 + step])
            torch.cuda.current_stream().synchronize()

    in_threads(work)
    all_close([found[number] for number in range(80)], expected)


def test_a_capture_waits_for_what_its_callers_stream_has_enqueued(way: Way) -> None:
    """Warm-up and capture run on a stream of their own, and the result is there for the caller's stream."""
    (late,), expected, model = batches(1)
    x = torch.zeros(ROWS, WIDTH, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.inference_mode():
        fast = way.graphs_of(model, lazy_capture=True)
        torch.cuda._sleep(SLEEP_CYCLES)
        x.copy_(late)
        found = fast(x)
    all_close([found], expected)
    assert way.runtime.stats().captured == (1 if way.name == "FULL" else 2)
