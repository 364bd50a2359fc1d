"""Guards on a GPU, and profiles."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import cgpass
import graphpass as gp
from graphpass.compat import operators
from tests.gpu.shared import COMPILERS, FULL, PIECEWISE, call, capture, fresh_op, wrap
from tests.unit.serving.models import Attends

pytestmark = pytest.mark.cuda

MODES = pytest.mark.parametrize("mode", [FULL, PIECEWISE], ids=str)


@fresh_op("graphpass_gpu_guards::scaled")
def scaled(x: torch.Tensor) -> torch.Tensor:
    """Reads Python state that a graph freezes."""
    return x * SCALE[0]


@fresh_op("graphpass_gpu_guards::split")
def split(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0)


@fresh_op("graphpass_gpu_guards::fails")
def fails(x: torch.Tensor) -> torch.Tensor:
    if TROUBLE:
        TROUBLE[-1](x)
    return x.clone()


SCALE: list[float] = [1.0]
TROUBLE: list[Callable[[torch.Tensor], Any]] = []


class Model(nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.op(split(self.first(x)) + 1)).relu()


def compiled(model: nn.Module, runtime: gp.GraphRuntime, compiler: str, **options: Any) -> Any:
    given = cgpass.options(compiler=compiler, splitting_ops=["graphpass_gpu_guards::split"], runtime=runtime, **options)
    return torch.compile(model, backend="cgpass", options=given)


@COMPILERS
@MODES
def test_compare_names_the_region(cuda: torch.device, compiler: str, mode: Any) -> None:
    model, x = Model(scaled).to(cuda), torch.randn(8, 16, device=cuda)
    with gp.GraphRuntime() as runtime:
        SCALE[0] = 1.0
        fast = compiled(model, runtime, compiler, compare=True)
        capture(runtime, fast, 8, x, mode=mode)
        for _ in range(3):
            x = torch.randn(8, 16, device=cuda)
            with torch.no_grad():
                torch.testing.assert_close(call(fast, 8, x, mode=mode), model(x), atol=1e-4, rtol=1e-4)
        SCALE[0] = 3.0
        with pytest.raises(gp.errors.MismatchError, match=r"output 0 of g\d+\.r2 differs in a replay.*row 0"):
            call(fast, 8, x, mode=mode)


def test_a_view_that_is_alive_is_reported_and_overwritten(cuda: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    with gp.GraphRuntime() as runtime, caplog.at_level(logging.WARNING, "graphpass"):
        wrapper = wrap(lambda x: x + 1, runtime, outputs="view", compare=True)
        x = torch.zeros(8, device=cuda)
        capture(runtime, wrapper, 8, x)
        kept = call(wrapper, 8, x)
        for _ in range(3):
            call(wrapper, 8, x + 5)
        assert "output 0 of f: a view is still held after a later replay overwrote it" in caplog.text
        assert torch.equal(kept, torch.full((8,), 6.0, device=cuda))


def test_what_the_context_hands_over_is_checked(cuda: torch.device) -> None:
    with gp.GraphRuntime() as runtime:
        wrapper = wrap(lambda x: x[gp.get_forward_context().slot_mapping] * gp.get_forward_context().extra, runtime)
        x, slots = torch.randn(8, device=cuda), torch.arange(8, device=cuda)
        capture(runtime, wrapper, 8, x, slot_mapping=slots, extra=2)
        slots.copy_(slots.flip(0))
        assert torch.equal(call(wrapper, 8, x, slot_mapping=slots, extra=2), x.flip(0) * 2)
        with pytest.raises(gp.errors.StaticInputError, match="slot_mapping"):
            call(wrapper, 8, x, slot_mapping=slots.clone(), extra=2)
        with pytest.raises(gp.errors.CaptureError, match=r"extra of the forward context.*expected 2; found 3"):
            call(wrapper, 8, x, slot_mapping=slots, extra=3)


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
    model, x = Model(fails).to(cuda), torch.randn(8, 16, device=cuda)
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


@COMPILERS
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_padding_is_proved(cuda: torch.device, mode: str, compiler: str) -> None:
    leaky = gp.graphed(lambda x: x - x.mean(0), [4, 8], {"x": 0}, mode=mode, compiler=compiler)
    for size in (5, 3, 5, 3, 5):  # captured as they are
        x = torch.randn(size, 16, device=cuda)
        torch.testing.assert_close(leaky(x), x - x.mean(0), atol=1e-4, rtol=1e-4)
    assert leaky.runtime.stats().replayed >= 2
    leaky.close()
    dims = {name: {0: "num_reqs", 1: "seq_len"} for name in ("x", "mask")}
    fast = gp.graphed(
        Attends(True), {"num_reqs": [2, 4], "seq_len": [4, 8]}, dims,
        padding={"mask": False}, mode=mode, compiler=compiler,
    )  # fmt: skip
    for reqs, tokens in ((3, 5), (2, 3), (4, 8)) * 3:
        x = torch.randn(reqs, tokens, 16, device=cuda)
        got = fast(x, torch.ones(reqs, tokens, dtype=torch.bool, device=cuda))
        torch.testing.assert_close(got, F.scaled_dot_product_attention(x, x, x), atol=1e-3, rtol=1e-3)
    fast.close()


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
