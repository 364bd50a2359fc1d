"""Captures of users around and beside those of graphpass, each in a process of its own, which has to end with 0."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.gpu.captures import TIMEOUT_S
from tests.processes import ROOT

pytestmark = pytest.mark.cuda

AROUND = """
import sys
import torch
import graphpass

def model(x):
    return (x * 2 + torch.rand_like(x) * 0).relu()

x = torch.randn(4, 8, device="cuda")
fast = torch.compile(model, backend="cgpass", options={"compiler": "eager"})
with torch.no_grad():
    for _ in range(int(sys.argv[1])):
        fast(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fast(x)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(y, model(x))
        assert torch.equal(fast(x), model(x))
"""

INSIDE = """
import sys
import torch
import graphpass as gp

def call(opens, size=4):
    key = gp.BatchDescriptor(size)
    with torch.no_grad(), gp.set_forward_context(runtime_mode="FULL", batch_descriptor=key):
        if not opens:
            return wrapper(x)
        with runtime.capturing():
            return wrapper(x)

is_captured, is_same_stream, opens = (given == "True" for given in sys.argv[1:])
stream, x = torch.cuda.Stream(), torch.randn(4, 8, device="cuda")
runtime = gp.GraphRuntime()
wrapper = gp.CUDAGraphWrapper(lambda x: x.relu() + torch.rand_like(x) * 0, "FULL", runtime=runtime, name="f")
torch.cuda.synchronize()
if is_captured:
    with torch.cuda.stream(stream if is_same_stream else torch.cuda.Stream()):
        call(True)
torch.cuda.synchronize()
graph, refused = torch.cuda.CUDAGraph(), ""
with torch.cuda.graph(graph, stream=stream):
    y = x * 2
    try:
        call(opens, 5)
    except gp.errors.CaptureError as error:
        refused = str(error)
    y = y + 1
assert "another capture" in refused or not opens, refused
assert refused
graph.replay()
assert torch.equal(y, x * 2 + 1)
assert torch.equal(call(True), x.relu())
"""


def ends_with_0(*given: str) -> None:
    command = [sys.executable, *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("calls", range(6))
def test_a_users_capture_after_any_number_of_calls(cuda: torch.device, calls: int) -> None:
    ends_with_0("-c", AROUND, str(calls))


@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize("is_same_stream", [True, False])
@pytest.mark.parametrize("is_captured", [True, False])
def test_what_a_context_asks_for_inside_a_capture_is_refused(
    cuda: torch.device, is_captured: bool, is_same_stream: bool, opens: bool
) -> None:
    ends_with_0("-c", INSIDE, str(is_captured), str(is_same_stream), str(opens))


@pytest.mark.parametrize("first", [9000, 9012])
def test_programs_of_captures(cuda: torch.device, first: int) -> None:
    ends_with_0("-m", "tests.gpu.captures", str(first), str(first + 12))


def test_tensors_on_the_cpu_beside_those_of_a_gpu(cuda: torch.device) -> None:
    """A graph break leaves a graph of the timestep alone, on the CPU, before or after the first capture on the GPU."""
    program = """
import torch

def model(x, t):
    scale = t.float() * 2 + 1
    torch._dynamo.graph_break()
    return x * scale + 1

with torch.no_grad():
    fast = torch.compile(model, backend="cgpass", options={"compiler": "eager"})
    for step in range(8):
        x, t = torch.randn(4, 8, device="cuda"), torch.tensor(step)
        torch.testing.assert_close(fast(x, t), model(x, t))
import graphpass
stats = graphpass.runtime_of(fast).stats()
assert stats.replayed > 0, stats
"""
    ends_with_0("-c", program)
