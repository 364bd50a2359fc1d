"""Many replays over 32 keys of one compiled model: counts exact, results right, memory flat."""

from __future__ import annotations

import gc
import random
from collections import Counter, deque
from typing import Any

import pytest
import torch

import cgpass
import graphpass as gp

FULL, PIECEWISE = gp.CUDAGraphMode.FULL, gp.CUDAGraphMode.PIECEWISE
Key = tuple[gp.CUDAGraphMode, gp.BatchDescriptor]
SIZES = [1, 2, 4, *range(8, 105, 8)]
WIDTH = 64
LONGEST_KEPT = 100


class Layers(torch.nn.Module):
    """Two captured regions around an op that runs eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(x).flip(-1).relu())


class Soak:
    """One model behind 16 PIECEWISE and 16 FULL keys, and the steps that were asked of each."""

    def __init__(self, device: torch.device, runtime: gp.GraphRuntime) -> None:
        self.model = Layers().to(device).eval()
        self.runtime = runtime
        self.dispatcher = gp.CudagraphDispatcher("FULL_AND_PIECEWISE", SIZES, max_num_reqs=SIZES[-1])
        self.asked: Counter[Key] = Counter()
        self.num_checked = 0
        self._buffer = torch.zeros(SIZES[-1], WIDTH, device=device)
        self._chosen = random.Random(0)
        self._kept: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque()
        self._compiled = torch.compile(
            self.model,
            backend="cgpass",
            dynamic=True,
            options=cgpass.options(
                splitting_ops=["aten::flip"], capture_sizes=SIZES, compiler="eager", runtime=runtime
            ),
        )

    def capture(self) -> None:
        with self.runtime.capturing():
            for mode, keys in self.dispatcher.capture_plan():
                for key in keys:
                    self._step(mode, key)
                    self.dispatcher.mark_captured(mode, key)

    def replay(self, number: int) -> None:
        """One batch of a random size between two captured ones; one result in 100 is kept and compared later."""
        index = self._chosen.randrange(len(SIZES))
        num_tokens = self._chosen.randint(([0, *SIZES][index]) + 1, SIZES[index])
        decision = self.dispatcher.dispatch(num_tokens, uniform_decode=self._chosen.random() < 0.5)
        self._buffer.normal_()
        found = self._step(decision.mode, decision.descriptor)
        if number % 100 == 0:
            expected = self.model(self._buffer[:num_tokens])
            self._kept.append((number + LONGEST_KEPT, found[:num_tokens], expected))
        self.check_kept(number)

    def check_kept(self, until: int) -> None:
        while self._kept and self._kept[0][0] <= until:
            _, found, expected = self._kept.popleft()
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            self.num_checked += 1

    def check_counts(self) -> None:
        assert len(self.asked) == 2 * len(SIZES)
        replayed: dict[str, Counter[Any]] = {"full": Counter(), "r0": Counter(), "r2": Counter()}
        for (region, mode, key), counts in self.runtime.counts().items():
            assert (counts.captured, counts.static_sets) == (1, 1)
            replayed[region.partition(".")[2]][mode, key] += counts.replayed
        for mode, regions in ((FULL, ["full"]), (PIECEWISE, ["r0", "r2"])):
            asked = Counter({key: times for key, times in self.asked.items() if key[0] is mode})
            for region in regions:
                assert replayed[region] == asked

    def _step(self, mode: gp.CUDAGraphMode, key: gp.BatchDescriptor) -> torch.Tensor:
        self.asked[mode, key] += 1
        with gp.set_forward_context(runtime_mode=mode, batch_descriptor=key):
            result: torch.Tensor = self._compiled(self._buffer[: key.num_tokens])
        return result


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """(allocated, reserved) on a GPU, with nothing in flight and no garbage; zeros elsewhere."""
    gc.collect()
    if device.type != "cuda":
        return (0, 0)
    torch.cuda.synchronize(device)
    return (torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))


@pytest.mark.parametrize(
    ("device_type", "num_replays"),
    [pytest.param("cuda", 100_000, marks=[pytest.mark.cuda, pytest.mark.soak]), ("cpu", 1_000)],
)
def test_replays_over_32_keys_are_right_and_leave_memory_flat(device_type: str, num_replays: int) -> None:
    device = torch.device(device_type)
    runtime = gp.GraphRuntime()
    soak = Soak(device, runtime)
    with runtime, torch.inference_mode():
        soak.capture()
        before, pool_before = (0, 0), 0
        for number in range(num_replays):
            if number == num_replays // 10:
                soak.check_kept(num_replays)
                before, pool_before = memory_bytes(device), runtime.pool_bytes()
            soak.replay(number)
        soak.check_kept(num_replays + LONGEST_KEPT)
        assert memory_bytes(device) == before, "memory changes with the number of replays"
        assert runtime.pool_bytes() == pool_before
        assert soak.num_checked == num_replays // 100
        soak.check_counts()
