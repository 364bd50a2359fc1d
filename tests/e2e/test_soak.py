"""Many mixed dispatches over the graphs of several models: counts exact, results right, memory flat."""

from __future__ import annotations

import gc
import random
import resource
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

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
    """Two captured regions around an op that runs eagerly; ``scale`` is static by declaration, ``x`` is copied."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(width, width), torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).flip(-1).relu()) * scale


class Engine:
    """Instances of one class that share a callable, driven as an engine's author drives them; counts what it asks for.

    Each static tensor has a graph of its own in each instance at each key: ``static_sets`` counts them.
    """

    def __init__(
        self, num_instances: int, num_scales: int, sizes: Sequence[int] = SIZES, width: int = 4, device: str = "cpu"
    ) -> None:
        self.runtime = gp.GraphRuntime()
        self.dispatcher = gp.CudagraphDispatcher("FULL_AND_PIECEWISE", sizes, max_num_reqs=sizes[-1])
        self.models = [Layers(width).to(device).eval() for _ in range(num_instances)]
        self.scales = [torch.randn(width, device=device) for _ in range(num_scales)]
        for scale in self.scales:
            torch._dynamo.mark_static_address(scale, guard=False)
        self.asked: Counter[Key] = Counter()
        options = cgpass.options(
            splitting_ops=["aten::flip"], capture_sizes=sizes, compiler="eager", runtime=self.runtime
        )
        self._compiled = [torch.compile(m, backend="cgpass", dynamic=True, options=options) for m in self.models]

    def step(self, instance: int, x: torch.Tensor, scale: int, mode: gp.CUDAGraphMode, key: Any) -> torch.Tensor:
        self.asked[mode, key] += 1
        with gp.set_forward_context(runtime_mode=mode, batch_descriptor=key):
            result: torch.Tensor = self._compiled[instance](x, self.scales[scale])
        return result

    def expected(self, instance: int, x: torch.Tensor, scale: int) -> torch.Tensor:
        result: torch.Tensor = self.models[instance](x, self.scales[scale])
        return result

    def capture(self, buffer: torch.Tensor) -> None:
        """Every key with each static tensor, inside capture scopes."""
        with self.runtime.capturing():
            for mode, key in self._plan():
                self._step_all(mode, key, buffer, scale=0)
                self.dispatcher.mark_captured(mode, key)
        with self.runtime.capturing():
            for mode, key in self._plan():
                for scale in range(1, len(self.scales)):
                    self._step_all(mode, key, buffer, scale)

    def check_counts(self) -> None:
        """Each region was captured once for each instance and static tensor, and replayed as often as was asked."""
        num_sets = len(self.models) * len(self.scales)
        regions: dict[str, Counter[Key]] = {"full": Counter(), "r0": Counter(), "r2": Counter()}
        for (region, mode, key), counts in self.runtime.counts().items():
            name = region.partition(".")[2]
            regions[name][mode, key] += counts.replayed
            captured = num_sets if name != "r0" else len(self.models)  # the first region does not read the scale
            assert (counts.captured, counts.static_sets) == (captured, captured), (region, mode, key)
        by_mode = {m: Counter({k: n for k, n in self.asked.items() if k[0] is m}) for m in (FULL, PIECEWISE)}
        assert regions["full"] == by_mode[FULL]
        assert regions["r0"] == regions["r2"] == by_mode[PIECEWISE]

    def _plan(self) -> Iterator[Key]:
        return ((mode, key) for mode, keys in self.dispatcher.capture_plan() for key in keys)

    def _step_all(self, mode: gp.CUDAGraphMode, key: gp.BatchDescriptor, buffer: torch.Tensor, scale: int) -> None:
        for instance in range(len(self.models)):
            self.step(instance, buffer[: key.num_tokens], scale, mode, key)


class Kept:
    """Results that the caller holds for a while; each is compared with eager's when it is let go."""

    def __init__(self, **close: float) -> None:
        self._held: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque()
        self._close = close
        self.num_checked = 0

    def keep(self, until: int, found: torch.Tensor, expected: torch.Tensor) -> None:
        self._held.append((until, found, expected))

    def check_due(self, now: int) -> None:
        while self._held and self._held[0][0] <= now:
            _, found, expected = self._held.popleft()
            torch.testing.assert_close(found, expected, **self._close)
            self.num_checked += 1


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def num_objects() -> int:
    gc.collect()
    return len(gc.get_objects())


class Soak:
    """One stream of calls: an engine with two instances, and a graphed model with a runtime of its own beside it."""

    def __init__(self, seed: int) -> None:
        self.engine = Engine(num_instances=2, num_scales=2)
        self.other = Layers().eval()
        options = {"splitting_ops": ["aten::flip"], "compiler": "eager", "on_fallback": "silent"}
        self.graphed = gp.graphed(self.other, SIZES, {"x": 0}, mode="FULL_AND_PIECEWISE", **options)
        self.kept = Kept(rtol=1e-5, atol=1e-6)
        self.graphed_replays = 0
        self._chosen = random.Random(seed)
        self._buffer = torch.randn(LARGEST, 4)
        self._lasting = torch.randn(LARGEST, 4)

    def capture(self) -> None:
        self.engine.capture(self._buffer)
        self.graphed.capture(self._lasting[:8], self.engine.scales[0])
        self.captured_by_graphed = sum(c.replayed for c in self._graphed_counts())

    def _graphed_counts(self) -> list[gp.capture.Counts]:
        return [c for (region, *_), c in self.graphed.runtime.counts().items() if region.endswith((".full", ".r0"))]

    def call(self, number: int) -> None:
        """One dispatch of random size and mode; a few results are kept for later."""
        chosen, engine = self._chosen, self.engine
        is_kept = number % 50 == 0
        if is_kept:
            self._buffer.normal_()
        num_tokens = chosen.randint(1, 16) if chosen.random() < 0.98 else chosen.randint(17, LARGEST)
        scale = chosen.random() < 0.3
        source = self._source(chosen.random())
        if chosen.random() < 0.1:
            x = source[:num_tokens]
            found, model = self.graphed(x, engine.scales[scale]), self.other
            self.graphed_replays += num_tokens <= 16
        else:
            decision = engine.dispatcher.dispatch(num_tokens, uniform_decode=chosen.random() < 0.5)
            instance = chosen.random() < 0.3
            x = source[: decision.descriptor.num_tokens]
            found, model = engine.step(instance, x, scale, decision.mode, decision.descriptor), engine.models[instance]
        if is_kept:
            expected = model(x[:num_tokens], engine.scales[scale])
            self.kept.keep(number + LONGEST_KEPT, found[:num_tokens], expected)
        self.kept.check_due(number)

    def _source(self, share: float) -> torch.Tensor:
        """Mostly the same buffer; now and then another tensor that lasts, or a fresh one."""
        if share < 0.9:
            return self._buffer
        if share < 0.95:
            return self._lasting
        with torch.inference_mode(False):  # Dynamo would compile anew for an inference tensor
            return torch.randn(LARGEST, 4)

    def check_counts(self) -> None:
        self.engine.check_counts()
        assert any(mode is NONE for mode, _ in self.engine.asked)
        replayed = sum(c.replayed for c in self._graphed_counts())
        assert replayed - self.captured_by_graphed == self.graphed_replays
        most = len(self.engine.scales)  # a graph for each static tensor
        assert all(1 <= c.captured == c.static_sets <= most for c in self._graphed_counts())


@pytest.mark.parametrize("num_calls", [2_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
def test_mixed_dispatches_are_counted_right_and_leave_memory_flat(num_calls: int) -> None:
    soak = Soak(seed=0)
    with torch.inference_mode():
        soak.capture()
        peak = objects = 0
        for number in range(num_calls):
            soak.call(number)
            if number == num_calls // 10:
                peak = peak_kib()
            if number == num_calls // 5:
                objects = num_objects()
        assert num_objects() - objects < MOST_NEW_OBJECTS, "objects are left behind"
        assert peak_kib() - peak < MOST_GROWTH_KIB, "memory grows with the number of calls"
        soak.check_counts()
        assert soak.kept.num_checked >= (num_calls - LONGEST_KEPT) // 50
    soak.graphed.close()
    soak.engine.runtime.close()
