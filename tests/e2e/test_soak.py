"""Many mixed dispatches over the graphs of two instances: counts exact, results right, memory flat."""

from __future__ import annotations

import gc
import random
import resource
from collections import Counter, deque

import pytest
import torch

import cgpass
import graphpass as gp

FULL, PIECEWISE, NONE = gp.CUDAGraphMode.FULL, gp.CUDAGraphMode.PIECEWISE, gp.CUDAGraphMode.NONE
Key = tuple[gp.CUDAGraphMode, gp.BatchDescriptor]
SIZES = [1, 2, 4, 8, 16]
LARGEST = 20  # sizes above 16 have no graph
MOST_GROWTH_KIB = 16 * 1024
MOST_NEW_OBJECTS = 500
LONGEST_KEPT = 200


class Layers(torch.nn.Module):
    """Two captured regions around an op that runs eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).flip(-1).relu())


class Engine:
    """Two instances of one class, driven as an engine's author drives them; it counts what it asks for."""

    def __init__(self) -> None:
        self.runtime = gp.GraphRuntime()
        self.dispatcher = gp.CudagraphDispatcher("FULL_AND_PIECEWISE", SIZES, max_num_reqs=SIZES[-1])
        self.models = [Layers().eval() for _ in range(2)]
        self.asked: Counter[Key] = Counter()
        options = cgpass.options(
            splitting_ops=["aten::flip"], capture_sizes=SIZES, compiler="eager", runtime=self.runtime
        )
        self._compiled = [torch.compile(m, backend="cgpass", dynamic=True, options=options) for m in self.models]

    def step(
        self, instance: int, x: torch.Tensor, mode: gp.CUDAGraphMode, key: gp.BatchDescriptor | None
    ) -> torch.Tensor:
        self.asked[mode, key] += 1  # type: ignore[index]
        with gp.set_forward_context(runtime_mode=mode, batch_descriptor=key):
            result: torch.Tensor = self._compiled[instance](x)
        return result

    def capture(self, buffer: torch.Tensor) -> None:
        with self.runtime.capturing():
            for mode, keys in self.dispatcher.capture_plan():
                for key in keys:
                    for instance in range(len(self.models)):
                        self.step(instance, buffer[: key.num_tokens], mode, key)
                    self.dispatcher.mark_captured(mode, key)

    def check_counts(self) -> None:
        """Each region was captured once for each instance, and replayed as often as was asked."""
        regions: dict[str, Counter[Key]] = {"full": Counter(), "r0": Counter(), "r2": Counter()}
        for (region, mode, key), counts in self.runtime.counts().items():
            regions[region.partition(".")[2]][mode, key] += counts.replayed
            assert counts.captured == counts.static_sets == len(self.models), (region, mode, key)
        by_mode = {m: Counter({k: n for k, n in self.asked.items() if k[0] is m}) for m in (FULL, PIECEWISE)}
        assert regions["full"] == by_mode[FULL]
        assert regions["r0"] == regions["r2"] == by_mode[PIECEWISE]
        assert any(mode is NONE for mode, _ in self.asked)


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def num_objects() -> int:
    gc.collect()
    return len(gc.get_objects())


class Soak:
    """One stream of calls of random sizes and modes; a few results are kept, and compared when they are let go."""

    def __init__(self, seed: int) -> None:
        self.engine, self.num_checked = Engine(), 0
        self._chosen = random.Random(seed)
        self._buffer = torch.randn(LARGEST, 4)
        self._kept: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque()
        self.engine.capture(self._buffer)

    def call(self, number: int) -> None:
        chosen, engine = self._chosen, self.engine
        num_tokens = chosen.randint(1, 16) if chosen.random() < 0.98 else chosen.randint(17, LARGEST)
        source = self._buffer
        if chosen.random() < 0.1:
            with torch.inference_mode(False):  # Dynamo would compile anew for an inference tensor
                source = torch.randn(LARGEST, 4)
        decision = engine.dispatcher.dispatch(num_tokens, uniform_decode=chosen.random() < 0.5)
        instance = chosen.randrange(2)
        x = source[: decision.descriptor.num_tokens]
        found = engine.step(instance, x, decision.mode, decision.descriptor)
        if number % 50 == 0:
            expected = engine.models[instance](x)
            self._kept.append((number + LONGEST_KEPT, found[:num_tokens], expected[:num_tokens]))
            self._buffer.normal_()
        while self._kept and self._kept[0][0] <= number:
            _, found, expected = self._kept.popleft()
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
            self.num_checked += 1


@pytest.mark.parametrize("num_calls", [2_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
def test_mixed_dispatches_are_counted_right_and_leave_memory_flat(num_calls: int) -> None:
    with torch.inference_mode():
        soak = Soak(seed=0)
        peak = objects = 0
        for number in range(num_calls):
            soak.call(number)
            if number == num_calls // 10:
                peak = peak_kib()
            if number == num_calls // 5:
                objects = num_objects()
        assert num_objects() - objects < MOST_NEW_OBJECTS, "objects are left behind"
        assert peak_kib() - peak < MOST_GROWTH_KIB, "memory grows with the number of calls"
        soak.engine.check_counts()
        assert soak.num_checked >= (num_calls - LONGEST_KEPT) // 50
    soak.engine.runtime.close()
