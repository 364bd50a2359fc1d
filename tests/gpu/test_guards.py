"""What a failed capture gives back on a GPU, and profiles."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import cgpass
import graphpass as gp
from graphpass.compat import operators
from tests.gpu.shared import COMPILERS, FULL, PIECEWISE, call, capture, fresh_op

pytestmark = pytest.mark.cuda

MODES = pytest.mark.parametrize("mode", [FULL, PIECEWISE], ids=str)


@fresh_op("graphpass_gpu_guards::split")
def split(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0)


@fresh_op("graphpass_gpu_guards::fails")
def fails(x: torch.Tensor) -> torch.Tensor:
    if TROUBLE:
        TROUBLE[-1](x)
    return x.clone()


TROUBLE: list[Callable[[torch.Tensor], Any]] = []


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(fails(split(self.first(x)) + 1)).relu()


def compiled(model: nn.Module, runtime: gp.GraphRuntime, compiler: str, **options: Any) -> Any:
    given = cgpass.options(compiler=compiler, splitting_ops=["graphpass_gpu_guards::split"], runtime=runtime, **options)
    return torch.compile(model, backend="cgpass", options=given)


def out_of_memory(x: torch.Tensor) -> None:
    torch.empty(1 << 44, dtype=torch.uint8, device=x.device)


def interrupt(_x: torch.Tensor) -> None:
    raise KeyboardInterrupt


is_recording = torch.cuda.is_current_stream_capturing
FAILURES: dict[str, tuple[Callable[[torch.Tensor], Any], Any, str]] = {
    "out of memory": (out_of_memory, gp.errors.CaptureError, "OutOfMemoryError"),
    "exception": (lambda x: 1 / 0, gp.errors.CaptureError, "ZeroDivisionError"),
    "interrupt": (interrupt, KeyboardInterrupt, ""),
    "host read": (lambda x: is_recording() and x.sum().item(), gp.errors.CaptureError, ""),
    "synchronize": (lambda x: is_recording() and torch.cuda.synchronize(), gp.errors.CaptureError, ""),
}


@COMPILERS
@MODES
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_capture_gives_everything_back(cuda: torch.device, failure: str, mode: Any, compiler: str) -> None:
    trouble, kind, text = FAILURES[failure]
    model, x = Model().to(cuda), torch.randn(8, 16, device=cuda)
    with gp.GraphRuntime() as runtime:
        fast = compiled(model, runtime, compiler)
        with torch.no_grad():
            want = fast(x)
        capture(runtime, fast, 8, x, mode=mode)
        runtime.close()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        allocated, buffers = torch.cuda.memory_allocated(), runtime.buffer_bytes()
        TROUBLE.append(trouble)
        try:
            with pytest.raises(kind) as raised:
                capture(runtime, fast, 8, x, mode=mode)
        finally:
            TROUBLE.clear()
        if kind is gp.errors.CaptureError:
            for part in ("g0.", str(mode), "8 tokens", "graphpass_gpu_guards.fails", "test_guards.py:", "pool ", text):
                assert part in str(raised.value)
        del raised
        assert not torch.cuda.is_current_stream_capturing()
        torch._C._cuda_clearCublasWorkspaces()  # torch's own, of the stream that was warmed up on
        if mode is FULL:  # regions before the one that failed keep their graphs
            assert torch.cuda.memory_allocated() == allocated
            assert runtime.buffer_bytes() == buffers
        with torch.no_grad():
            torch.testing.assert_close(fast(x), want)
        capture(runtime, fast, 8, x, mode=mode)
        torch.testing.assert_close(call(fast, 8, x, mode=mode), want)


# Names of replays in a profile of the GPU.


def test_the_launch_of_a_graph_lies_in_the_range_of_its_key(cuda: torch.device, tmp_path: Path) -> None:
    fast = gp.graphed(torch.nn.Linear(8, 8).to(cuda), [4], {"input": 0})
    x = torch.randn(4, 8, device=cuda)
    fast.capture(x)
    fast(x)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        fast(x)
        torch.cuda.synchronize()
    seen.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    (named,) = [
        e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("g0.full FULL 4 tokens")
    ]
    (launch,) = [e for e in events if "cudaGraphLaunch" in e.get("name", "") and e.get("ph") == "X"]
    assert named["ts"] <= launch["ts"] <= named["ts"] + named["dur"]
    fast.close()


def test_nvtx_ranges_come_from_the_same_check(cuda: torch.device) -> None:
    assert not operators.is_profiled()
    with torch.autograd.profiler.emit_nvtx():
        assert operators.is_profiled()
    assert not operators.is_profiled()
