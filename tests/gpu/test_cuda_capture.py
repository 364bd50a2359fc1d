"""What only a GPU can show: real captures, the pool, streams, and what is left behind."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import graphpass as gp
from graphpass.capture.staging import copy_each
from tests.gpu.shared import call, capture, free_memory_stays, graph_of, wrap

pytestmark = pytest.mark.cuda

WORKSPACE_CACHE = "TORCH_CUBLAS_WORKSPACE_CACHE"


def test_an_explicit_generator_is_advanced_by_replays(cuda: torch.device) -> None:
    def draw(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return x + torch.rand(x.shape, device=x.device, generator=generator)

    x = torch.zeros(100, device=cuda)
    eager = torch.Generator(cuda).manual_seed(3)
    expected = [draw(x, eager) for _ in range(3)]
    with gp.GraphRuntime() as runtime:
        wrapper = wrap(draw, runtime)
        generator = torch.Generator(cuda).manual_seed(3)
        found = [capture(runtime, wrapper, 1, x, generator)]
        found += [call(wrapper, 1, x, generator) for _ in range(2)]
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


def test_a_region_without_kernels_is_captured_without_a_warning(cuda: torch.device) -> None:
    """With warnings as errors, torch's would come out of the end of a capture that went well."""
    x = torch.ones(4, device=cuda)
    with gp.GraphRuntime() as runtime:
        wrapper = wrap(lambda x: x, runtime)
        for value in (1.0, 2.0):
            x.fill_(value)
            assert torch.equal(capture(runtime, wrapper, 4, x), x)


@pytest.mark.parametrize("draws", ["nothing", "by default", "by its own generator"])
def test_a_failed_capture_leaves_random_numbers_to_eager_calls(cuda: torch.device, draws: str) -> None:
    """And to graphs that were captured before it."""
    own = torch.Generator(cuda)
    given = own if draws == "by its own generator" else None

    def body(x: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        x = x + 1 if draws == "nothing" else x + torch.rand(x.shape, device=x.device, generator=generator)
        return x * float(x.sum().item()) if x.shape[0] == 8 else x

    def seeded() -> None:
        torch.manual_seed(7)
        own.manual_seed(5)

    four, eight = torch.ones(4, device=cuda), torch.ones(8, device=cuda)
    seeded()
    expected = [body(four, given), body(four, given)]
    expected += [torch.rand(3, device=cuda), torch.rand(3, device=cuda, generator=own)]
    seeded()
    with gp.GraphRuntime() as runtime:
        wrapper = wrap(body, runtime)
        found = [capture(runtime, wrapper, 4, four, given)]
        with pytest.raises(gp.errors.CaptureError):
            capture(runtime, wrapper, 8, eight, given)
        found.append(call(wrapper, 4, four, given))
        found += [torch.rand(3, device=cuda), torch.rand(3, device=cuda, generator=own)]
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


def assert_workspaces_as_set(device: torch.device) -> None:
    """With ``TORCH_CUBLAS_WORKSPACE_CACHE=1`` torch keeps a stream's workspace after a product, as it always did."""
    if os.environ.get(WORKSPACE_CACHE) != "1":
        return
    a, stream = torch.ones(64, 64, device=device), torch.cuda.Stream(device)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device)
    with torch.cuda.stream(stream):
        a @ a
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated(device) > before, "no workspace is cached: the test would prove nothing"


@pytest.mark.parametrize(
    "test", ["test_nobody_takes_a_graphs_workspace_away", "test_the_workspace_of_somebody_elses_graph_stays"]
)
def test_workspaces_that_torch_caches(cuda: torch.device, test: str) -> None:
    """In a process of its own, since torch reads the setting once: 2.15 caches workspaces only where it is set."""
    plugins_off = [option for name in ("cacheprovider", "xdist", "benchmark") for option in ("-p", f"no:{name}")]
    command = [sys.executable, "-m", "pytest", "-q", *plugins_off, f"{__file__}::{test}"]
    ran = subprocess.run(
        command, env={**os.environ, WORKSPACE_CACHE: "1"}, capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def long_product(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two matrices and their product, which is split along its long dimension: a workspace is where parts are added."""
    assert_workspaces_as_set(device)
    left = torch.randn(64, 65536, device=device, dtype=torch.bfloat16)
    right = torch.randn(65536, 64, device=device, dtype=torch.bfloat16)
    return left, right, left @ right


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("by", ["another graph is reset", "inductor records graphs", "cleared"])
def test_nobody_takes_a_graphs_workspace_away(cuda: torch.device, by: str) -> None:
    left, right, expected = long_product(cuda)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):  # torch's capture stream has a workspace from now on
        left @ right
    with gp.GraphRuntime() as runtime:
        wrapper = wrap(torch.matmul, runtime, static_inputs=(0, 1))
        capture(runtime, wrapper, 64, left, right)
        if by == "another graph is reset":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                left @ right
            graph.reset()
        if by == "inductor records graphs":
            other = torch.compile(lambda a, b: a @ b, mode="reduce-overhead")
            with torch.no_grad():
                for _ in range(3):
                    other(left, right)
        else:
            torch._C._cuda_clearCublasWorkspaces()  # at a reset, torch does it for that stream since 2.12
        with free_memory_stays("the"):
            for _ in range(3):
                torch.testing.assert_close(call(wrapper, 64, left, right), expected, rtol=2e-2, atol=2.0)


def test_the_workspace_of_somebody_elses_graph_stays(cuda: torch.device) -> None:
    """Captured by hand after a warm-up outside of any pool."""
    left, right, expected = long_product(cuda)
    with graph_of(lambda: left @ right) as (graph, theirs):
        for _ in range(2):
            with gp.GraphRuntime() as runtime:
                capture(runtime, wrap(torch.matmul, runtime, static_inputs=(0, 1)), 64, left, right)
            with free_memory_stays("their"):
                for _ in range(3):
                    graph.replay()
                torch.testing.assert_close(theirs, expected, rtol=2e-2, atol=2.0)
    torch._C._cuda_clearCublasWorkspaces()  # the runtimes have left theirs to torch


@pytest.mark.filterwarnings("ignore:.*[Pp]rofiler:UserWarning")
def test_copies_are_few_launches(cuda: torch.device) -> None:
    """Whatever torch takes one by one, such as a list of two dtypes, is sorted out before."""
    dtypes = [torch.int64, torch.int32, torch.int64, torch.bfloat16, torch.int32, torch.int64]
    sources = [torch.full((3, 4), index, dtype=dtype, device=cuda) for index, dtype in enumerate(dtypes, 1)]
    targets = [torch.zeros_like(source) for source in sources]
    copy_each(targets, sources)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        copy_each(targets, sources)
        torch.cuda.synchronize()
    launched = [event for event in prof.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(launched) == 3
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))
