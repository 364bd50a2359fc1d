"""Names of replays in a profile of the GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import graphpass
from graphpass.compat import operators

pytestmark = pytest.mark.cuda


def test_the_launch_of_a_graph_lies_in_the_range_of_its_key(cuda: torch.device, tmp_path: Path) -> None:
    fast = graphpass.graphed(torch.nn.Linear(8, 8).to(cuda), [4], {"input": 0})
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
