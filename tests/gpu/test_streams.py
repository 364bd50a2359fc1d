"""Replays on streams: each is ordered after its caller's work, and after the forward before it, whatever its stream.

A long wait is enqueued in front of what a replay reads, so that work which does not wait for it reads old values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import cgpass
import graphpass as gp

pytestmark = pytest.mark.cuda

SPLIT = "graphpass_gpu_streams::flipped"
ROWS, WIDTH = 64, 256
SLEEP_CYCLES = 20_000_000
"""About ten milliseconds: far longer than a forward, so that whatever does not wait comes first."""
WAYS = ["FULL", "PIECEWISE", "graphed"]
Call = Callable[[torch.Tensor], torch.Tensor]


@torch.library.custom_op(SPLIT, mutates_args=())
def flipped(x: torch.Tensor) -> torch.Tensor:
    return x.flip(-1) * 2


flipped.register_fake(torch.empty_like)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.ops.graphpass_gpu_streams.flipped(self.first(x).tanh()))


@pytest.fixture
def runtime(cuda: torch.device) -> Iterator[gp.GraphRuntime]:
    with gp.GraphRuntime() as made:
        yield made


def graphs_of(model: nn.Module, way: str, runtime: gp.GraphRuntime, **options: Any) -> Call:
    """The captured model as a function of one batch."""
    options = {"compiler": "eager", "splitting_ops": [SPLIT], "mode": "FULL_AND_PIECEWISE", **options}
    example = torch.randn(ROWS, WIDTH, device="cuda")
    if way == "graphed":
        fast = gp.graphed(model, [ROWS], {"x": 0}, runtime=runtime, **options)
        fast.capture(example)
        return fast
    compiled = torch.compile(model, backend="cgpass", options=cgpass.options(runtime=runtime, **options))

    def call(x: torch.Tensor) -> torch.Tensor:
        mode, key = gp.CUDAGraphMode[way], gp.BatchDescriptor(ROWS)
        with torch.inference_mode(), gp.set_forward_context(runtime_mode=mode, batch_descriptor=key):
            result: torch.Tensor = compiled(x)
            return result

    with runtime.capturing():
        call(example)
    torch.cuda.synchronize()
    return call


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
        torch.testing.assert_close(
            one, other, rtol=1e-4, atol=1e-4, msg=lambda text, number=number: f"round {number}: {text}"
        )


@pytest.mark.parametrize("way", WAYS)
def test_a_replay_waits_for_what_its_callers_stream_has_enqueued(
    cuda: torch.device, runtime: gp.GraphRuntime, way: str
) -> None:
    inputs, expected, model = batches(10)
    fast = graphs_of(model, way, runtime)
    x = torch.zeros(ROWS, WIDTH, device=cuda)
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


@pytest.mark.parametrize("way", WAYS)
def test_two_streams_take_turns_through_one_runtime(cuda: torch.device, runtime: gp.GraphRuntime, way: str) -> None:
    """The first stream is still waiting when the second one's forward is enqueued."""
    inputs, expected, model = batches(100)
    fast = graphs_of(model, way, runtime)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    found = []
    for first, second in zip(inputs[::2], inputs[1::2], strict=True):
        with torch.cuda.stream(streams[0]):
            torch.cuda._sleep(SLEEP_CYCLES)
            found.append(fast(first))
        with torch.cuda.stream(streams[1]):
            found.append(fast(second))
    all_close(found, expected)


@pytest.mark.parametrize("way", WAYS)
def test_the_default_stream_and_a_side_stream(cuda: torch.device, runtime: gp.GraphRuntime, way: str) -> None:
    inputs, expected, model = batches(40)
    fast = graphs_of(model, way, runtime)
    side = torch.cuda.Stream()
    found = []
    for number, x in enumerate(inputs):
        on_side = number % 2 == 1
        with torch.cuda.stream(side if on_side else torch.cuda.default_stream()):
            if number % 4 < 2:
                torch.cuda._sleep(SLEEP_CYCLES)
            found.append(fast(x))
    all_close(found, expected)


@pytest.mark.parametrize("way", WAYS)
def test_outputs_are_cloned_before_the_next_streams_replay(
    cuda: torch.device, runtime: gp.GraphRuntime, way: str
) -> None:
    """A clone is enqueued on its caller's stream: the next forward, on another one, waits for it too."""
    inputs, expected, model = batches(20)
    fast = graphs_of(model, way, runtime)
    streams = [torch.cuda.Stream() for _ in range(4)]
    found = []
    for number, x in enumerate(inputs):
        with torch.cuda.stream(streams[number % 4]):
            found.append(fast(x))
    all_close(found, expected)
    addresses = {result.data_ptr() for result in found}
    assert len(addresses) == len(found)


@pytest.mark.parametrize("way", WAYS)
def test_two_models_on_two_streams_share_one_pool(cuda: torch.device, runtime: gp.GraphRuntime, way: str) -> None:
    inputs, expected, model = batches(40)
    other = Model().cuda().eval()
    with torch.no_grad():
        other.first.weight.mul_(-1)
        other_expected = [other(x) for x in inputs]
    fast = [graphs_of(model, way, runtime), graphs_of(other, way, runtime)]
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


@pytest.mark.parametrize("way", WAYS)
def test_an_event_after_a_call_is_recorded_behind_its_result(
    cuda: torch.device, runtime: gp.GraphRuntime, way: str
) -> None:
    inputs, expected, model = batches(20)
    fast = graphs_of(model, way, runtime)
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    found = []
    for x in inputs:
        with torch.cuda.stream(producer):
            torch.cuda._sleep(SLEEP_CYCLES)
            result = fast(x)
            ready = producer.record_event()
        with torch.cuda.stream(consumer):
            consumer.wait_event(ready)
            result.record_stream(consumer)
            found.append(result + 0)
    all_close(found, expected)


@pytest.mark.parametrize("way", WAYS)
def test_threads_each_on_a_stream_of_its_own(cuda: torch.device, runtime: gp.GraphRuntime, way: str) -> None:
    inputs, expected, model = batches(80)
    fast = graphs_of(model, way, runtime)
    found: dict[int, torch.Tensor] = {}
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for step in range(20):
                    if step % 4 == thread:
                        torch.cuda._sleep(SLEEP_CYCLES)
                    found[thread * 20 + step] = fast(inputs[thread * 20 + step])
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    all_close([found[number] for number in range(80)], expected)


@pytest.mark.parametrize("way", WAYS)
def test_a_capture_waits_for_what_its_callers_stream_has_enqueued(
    cuda: torch.device, runtime: gp.GraphRuntime, way: str
) -> None:
    """Warm-up and capture run on a stream of their own, and the result is there for the caller's stream."""
    (late,), expected, model = batches(1)
    x = torch.zeros(ROWS, WIDTH, device=cuda)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    options: dict[str, Any] = {
        "compiler": "eager",
        "splitting_ops": [SPLIT],
        "mode": "FULL_AND_PIECEWISE",
        "lazy_capture": True,
    }
    with torch.cuda.stream(stream), torch.inference_mode():
        if way == "graphed":
            fast: Any = gp.graphed(model, [ROWS], {"x": 0}, runtime=runtime, **options)
        else:
            fast = torch.compile(model, backend="cgpass", options=cgpass.options(runtime=runtime, **options))
        torch.cuda._sleep(SLEEP_CYCLES)
        x.copy_(late)
        if way == "graphed":
            found = fast(x)
        else:
            mode, key = gp.CUDAGraphMode[way], gp.BatchDescriptor(ROWS)
            with gp.set_forward_context(runtime_mode=mode, batch_descriptor=key):
                found = fast(x)
    all_close([found], expected)
    assert runtime.stats().captured == (1 if way != "PIECEWISE" else 2)
