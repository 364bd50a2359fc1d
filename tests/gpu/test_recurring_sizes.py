"""Graphs for sizes that recur, on a GPU: times are measured, graphs in flight are kept, driver memory is counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from graphpass import GraphRuntime, precapture
from graphpass.capture.cuda import CudaDevice
from graphpass.dispatch.owngraphs import OwnGraphs

pytestmark = pytest.mark.cuda
WIDTH = 2048
# A slow host captures slowly, and padding has to cost as much as a capture first.
MOST_CALLS = 2000


class Rows(nn.Module):
    """Row-wise and long enough for 9 rows of 64 to be faster than 12."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Counted(Rows):
    """It counts its calls. Not for threads: one would change the count between the runs of another's check."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def compiled_of(model: nn.Module, rt: GraphRuntime, **options: Any) -> Callable[..., Any]:
    given = {"compiler": "eager", "runtime": rt, "dispatch": "auto", **options}
    return torch.compile(model, backend="cgpass", dynamic=True, options=given)


def call(compiled: Callable[..., Any], model: Rows, size: int, times: int = 1) -> None:
    for _ in range(times):
        x = torch.randn(size, 256, WIDTH, device="cuda")
        with torch.no_grad():
            result, expected = compiled(x), Rows.forward(model, x)  # which counts no call
            torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)


def exact(rt: GraphRuntime) -> set[int]:
    """The sizes that have graphs of their own now."""
    uses = rt.counts().items()
    found = [dict(key.extra) for (_, _, key), counts in uses if counts.static_sets]
    return {sizes["x[0]"] for sizes in found if "exact" in sizes}


def graph_bytes() -> int:
    return OwnGraphs.on(torch.device("cuda", torch.cuda.current_device())).num_bytes()


@pytest.mark.alone
def test_a_size_that_recurs_gets_a_graph_and_calls_count_once(tmp_path: Path) -> None:
    saved = tmp_path / "starts"
    # 33 x 256 rows fill four waves of an H100's multiprocessors, 48 x 256 six; 17 and 24 fill as many as each other.
    with GraphRuntime() as rt:
        model = Counted().cuda().eval()
        compiled = compiled_of(model, rt, warm_start=saved)
        for size in (3, 2, 48, 48):
            call(compiled, model, size)
        model.calls.zero_()
        num_calls = 0
        while not exact(rt) and num_calls < MOST_CALLS:
            call(compiled, model, 33, 40)
            num_calls += 40
        assert exact(rt) == {33}
        assert int(model.calls) == num_calls
        (key,) = [key for key in rt.report().to_dict()["replays"]["keys"] if "exact" in key["sizes"]]
        assert key["driver_bytes"] is not None
    assert graph_bytes() == 0
    torch.compiler.reset()
    with GraphRuntime() as rt:  # the next start captures it ahead of the calls
        compiled = compiled_of(model, rt, warm_start=saved)
        with torch.no_grad():
            precapture(compiled, torch.randn(48, 256, WIDTH, device="cuda"))
        assert exact(rt) == {33}
        assert rt.compiled() == 0
        model.calls.zero_()
        call(compiled, model, 33, 40)
        assert int(model.calls) == 40
    assert graph_bytes() == 0


def test_a_graph_in_flight_is_not_reset() -> None:
    device = CudaDevice(torch.device("cuda", torch.cuda.current_device()))
    x = torch.ones(64, device="cuda")
    graph, _ = device.record(lambda: [x.mul_(1)], [])
    torch.cuda._sleep(200_000_000)
    graph.replay()
    resets: list[int] = []

    class Watched:
        def reset(self) -> None:
            resets.append(1)
            graph.reset()

    device.drop(Watched())
    assert not resets
    torch.cuda.synchronize()
    device.reset_dropped()
    assert resets
    device.close()
