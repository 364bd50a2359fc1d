"""What tests on a GPU share: wrappers under a context, managers over rows, graphs by hand, memory that others own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import graphpass as gp
from graphpass.capture import CapturePolicy

FULL, PIECEWISE = gp.CUDAGraphMode.FULL, gp.CUDAGraphMode.PIECEWISE
COMPILERS = pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
ROWS, WIDTH = 10, 64
"""Of the largest batch of :func:`managed`."""


def fresh_op(name: str) -> Callable[[Callable[..., Any]], Any]:
    """A custom op that returns a fresh tensor like its argument."""

    def made(body: Callable[..., Any]) -> Any:
        op = torch.library.custom_op(name, body, mutates_args=())
        op.register_fake(torch.empty_like)
        return op

    return made


def wrap(runnable: Callable[..., Any], runtime: gp.GraphRuntime, **given: Any) -> gp.CUDAGraphWrapper:
    """A wrapper named ``f``; ``given`` are roles of its arguments and fields of its policy."""
    roles = {name: given.pop(name) for name in ("static_inputs", "mutated_inputs") if name in given}
    return gp.CUDAGraphWrapper(runnable, FULL, runtime=runtime, name="f", policy=CapturePolicy(**given), **roles)


def call(wrapper: Any, num_tokens: int, *args: Any, mode: gp.CUDAGraphMode = FULL, **context: Any) -> Any:
    """A call at the key of so many tokens."""
    key = gp.BatchDescriptor(num_tokens)
    with torch.no_grad(), gp.set_forward_context(runtime_mode=mode, batch_descriptor=key, **context):
        return wrapper(*args)


def capture(runtime: gp.GraphRuntime, wrapper: Any, num_tokens: int, *args: Any, **context: Any) -> Any:
    """The same in a capture scope."""
    with runtime.capturing():
        return call(wrapper, num_tokens, *args, **context)


@contextlib.contextmanager
def managed(
    model: Any,
    mode: str = "FULL",
    sizes: Sequence[int] = (2, 4, 8),
    *,
    rows: int = ROWS,
    width: int = WIDTH,
    **given: Any,
) -> Iterator[gp.CudaGraphManager]:
    """A manager over rows ``x``, closed at the end: nothing of its pool is left."""
    dispatcher = gp.CudagraphDispatcher(mode, sizes, max_num_reqs=rows)
    inputs = [gp.InputSpec("x", (rows, width), torch.float32)]
    manager = gp.CudaGraphManager(
        model, dispatcher, **{"compiler": "eager", "on_fallback": "silent", "inputs": inputs, **given}
    )
    try:
        yield manager
    finally:
        manager.close()


def rows_of(num_tokens: int, width: int = WIDTH) -> torch.Tensor:
    """Seeded by their number."""
    return torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(num_tokens)).cuda()


@contextlib.contextmanager
def graph_of(
    body: Callable[[], Any], stream: torch.cuda.Stream | None = None
) -> Iterator[tuple[torch.cuda.CUDAGraph, Any]]:
    """A graph of ``body`` by hand, warmed up on its stream as the manual of torch has it, and what it returned."""
    stream, graph = stream or torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
    with torch.cuda.graph(graph, stream=stream):
        results = body()
    torch.cuda.current_stream().wait_stream(stream)
    yield graph, results
    graph.reset()


@contextlib.contextmanager
def free_memory_stays(whose: str) -> Iterator[None]:
    """All memory that is free is claimed, and the body writes to none of it."""
    torch.cuda.empty_cache()
    claimed = [torch.full((1 << 20,), 7, dtype=torch.uint8, device="cuda") for _ in range(256)]
    yield
    assert all(bool((block == 7).all()) for block in claimed), f"{whose} replay wrote to memory of others"


def private_segments() -> set[tuple[tuple[int, int], int]]:
    """(pool, address) of every segment that the caching allocator holds for a private pool."""
    return {
        (tuple(segment["segment_pool_id"]), segment["address"])
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) != (0, 0)
    }
