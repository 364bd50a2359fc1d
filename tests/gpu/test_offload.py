"""Offloaded weights on a GPU: right in every mode and order, a quarter of the memory, copies beside kernels."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from graphpass import Batch, CudaGraphManager
from graphpass.errors import OffloadError
from graphpass.offload import WeightOffloader
from tests.gpu import shared
from tests.gpu.shared import rows_of
from tests.unit.offload.test_offload import Stack

pytestmark = pytest.mark.cuda

WIDTH, LARGEST, NUM_LAYERS = 512, 10, 8
SIZES = (2, 4, 8)
MODES = pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
CLOSE = {"rtol": 1e-3, "atol": 1e-3}


def offloaded(cuda: torch.device, num_slots: int = 2, width: int = WIDTH) -> tuple[Stack, Stack, WeightOffloader]:
    """(the model, the same one with all weights on the device, the first one's offloader)"""
    reference = Stack(NUM_LAYERS, width).eval()
    model = copy.deepcopy(reference)
    offloader = WeightOffloader(model.layers, num_slots=num_slots, device=cuda)
    model.first.to(cuda)
    model.last.to(cuda)
    return model, reference.to(cuda), offloader


@contextlib.contextmanager
def managed(
    model: Any, offloader: WeightOffloader, mode: str, *, largest: int = LARGEST, width: int = WIDTH, **options: Any
) -> Iterator[CudaGraphManager]:
    """A captured manager, closed at the end."""
    sizes = [size for size in (*SIZES, largest) if size != LARGEST]
    with shared.managed(model, mode, sizes, rows=largest, width=width, offloader=offloader, **options) as manager:
        if manager.needs_capture():
            manager.capture()
        yield manager


rows = functools.partial(rows_of, width=WIDTH)


def run(manager: CudaGraphManager, x: torch.Tensor, *, uniform: bool = False) -> torch.Tensor:
    result: torch.Tensor = manager.run(Batch(len(x), inputs={"x": x}, num_reqs=len(x), uniform_decode=uniform))
    return result.clone()


@torch.no_grad()
def expected(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(x)
    return result


@pytest.mark.parametrize("num_slots", [2, 3])
def test_200_forwards_in_any_order_at_any_pace(num_slots: int, cuda: torch.device) -> None:
    model, reference, offloader = offloaded(cuda, num_slots)
    order = random.Random(num_slots)
    busy = torch.randn(2048, 2048, device=cuda)
    inputs = {num_tokens: rows(num_tokens) for num_tokens in range(1, LARGEST + 1)}
    wanted = {num_tokens: expected(reference, x) for num_tokens, x in inputs.items()}
    others = [torch.cuda.Stream(), torch.cuda.Stream()]
    with managed(model, offloader, "FULL_AND_PIECEWISE") as one, managed(model, offloader, "FULL") as other:
        results = []
        for _ in range(200):
            for _ in range(order.choice([0, 0, 1, 8])):  # the host is ahead of the device, by more or by less
                busy.mm(busy)
            if order.random() < 0.1:
                torch.cuda.synchronize()
            num_tokens = order.randint(1, LARGEST)
            x = inputs[num_tokens]
            stream = order.choice([torch.cuda.current_stream(), *others])
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                kind = order.choice([one, one, other, None])
                result = expected(model, x) if kind is None else run(kind, x, uniform=order.random() < 0.5)
            torch.cuda.current_stream().wait_stream(stream)
            result.record_stream(torch.cuda.current_stream())
            results.append((num_tokens, result))
        torch.cuda.synchronize()
        for num_tokens, result in results:
            torch.testing.assert_close(result, wanted[num_tokens], **CLOSE)


@MODES
def test_a_quarter_of_the_weights_is_in_device_memory(mode: str, cuda: torch.device) -> None:
    width, slack = 2048, 128 * 2**20
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model = Stack(NUM_LAYERS, width).eval()
    num_bytes = sum(weight.nbytes for weight in model.layers.parameters())
    offloader = WeightOffloader(model.layers, num_slots=2, device=cuda)
    assert offloader.device_bytes() <= torch.cuda.memory_allocated() - before <= num_bytes / 4 * 1.01
    assert all(weight.is_cuda for weight in model.layers.parameters())
    model.first.to(cuda)
    model.last.to(cuda)
    with managed(model, offloader, mode, width=width) as manager:
        for num_tokens in (3, 8, 9):
            run(manager, rows(num_tokens, width=width))
        # The first and last layer, inputs, results, and the workspaces of matrix products.
        assert torch.cuda.memory_allocated() - before < num_bytes / 4 + slack < num_bytes / 2
        places = {weight.data_ptr() for weight in model.layers.parameters()}
        assert len(places) == 2 * len(list(model.layers[0].parameters()))


def beside_kernels(prof: profile) -> tuple[int, int]:
    """(copies from host memory that ran while a kernel did, all such copies)"""
    copies, kernels = [], []
    for event in prof.events() or ():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        interval = event.time_range.start, event.time_range.end
        if "Memcpy HtoD" in event.name:
            copies.append(interval)
        elif not event.name.startswith(("Memcpy", "Memset")) and not event.is_user_annotation:
            kernels.append(interval)
    overlapping = sum(any(start < end_k and start_k < end for start_k, end_k in kernels) for start, end in copies)
    return overlapping, len(copies)


@pytest.mark.filterwarnings("ignore:.*[Pp]rofiler:UserWarning")
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL"])
def test_copies_run_beside_kernels(mode: str, cuda: torch.device) -> None:
    width, largest = 1024, 2048
    model, _, offloader = offloaded(cuda, width=width)
    x = rows(largest, width=width)
    with managed(model, offloader, mode, largest=largest, width=width) as manager:
        run(manager, x)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as prof:
            run(manager, x)
            torch.cuda.synchronize()
    overlapping, copies = beside_kernels(prof)
    assert copies == NUM_LAYERS  # a forward brings each layer once: home is as it was
    assert overlapping > 0


def begins_without_sync(offloader: WeightOffloader, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    x = torch.ones(4, device="cuda")
    with torch.cuda.graph(graph, stream=stream):
        x.add_(1)
        offloader.onload(0)


def test_a_capture_by_hand_needs_both_calls(cuda: torch.device) -> None:
    model, reference, offloader = offloaded(cuda)
    x = rows(4)
    wanted = expected(reference, x)

    def forward() -> torch.Tensor:
        hidden = model.first(x)
        for index, layer in enumerate(model.layers):
            offloader.onload(index)
            hidden = hidden + layer.down(torch.tanh(layer.up(layer.norm(hidden)))) * layer.scale
        return model.last(hidden)

    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        offloader.sync_prev_onload()
        forward()  # leaves copies in flight
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(OffloadError, match="launched outside"):
            begins_without_sync(offloader, graph, stream)
        offloader.sync_prev_onload()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            result = forward()
            offloader.join_after_forward()
        for _ in range(3):
            offloader.sync_prev_onload()
            graph.replay()
            torch.testing.assert_close(result, wanted, **CLOSE)
        graph.reset()
