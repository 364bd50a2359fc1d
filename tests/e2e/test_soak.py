"""Many mixed dispatches through one compiled model: counts exact, results right, memory flat."""

from __future__ import annotations

import random
import resource
from collections import Counter
from typing import Any

import pytest
import torch

import cgpass
import graphpass as gp

NUM_CALLS = 100_000
SIZES = [1, 2, 4, 8, 16]


@torch.library.custom_op("graphpass_soak::mix", mutates_args=())
def mix(x: torch.Tensor) -> torch.Tensor:
    return x.flip(-1)


@mix.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.ops.graphpass_soak.mix(self.first(x)).relu())


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.soak
def test_a_hundred_thousand_mixed_dispatches() -> None:
    model = Layers().eval()
    dispatcher = gp.CudagraphDispatcher("FULL_AND_PIECEWISE", SIZES, max_num_reqs=16)
    with gp.GraphRuntime() as runtime, torch.inference_mode():
        compiled = torch.compile(
            model,
            backend="cgpass",
            dynamic=True,
            options=cgpass.options(
                splitting_ops=["graphpass_soak::mix"], capture_sizes=SIZES, compiler="eager", runtime=runtime
            ),
        )
        buffer = torch.zeros(17, 4)
        calls: Counter[tuple[Any, Any]] = Counter()

        def step(mode: gp.CUDAGraphMode, key: gp.BatchDescriptor) -> torch.Tensor:
            calls[mode, key] += 1
            with gp.set_forward_context(runtime_mode=mode, batch_descriptor=key):
                result: torch.Tensor = compiled(buffer[: key.num_tokens])
            return result

        with runtime.capturing():
            for mode, keys in dispatcher.capture_plan():
                for key in keys:
                    step(mode, key)
                    dispatcher.mark_captured(mode, key)
        chosen = random.Random(0)
        peak = 0
        for number in range(NUM_CALLS):
            num_tokens = chosen.randint(1, 16)
            decision = dispatcher.dispatch(num_tokens, uniform_decode=chosen.random() < 0.5)
            checked = number % 100 == 0
            if checked:
                buffer.normal_()
            found = step(decision.mode, decision.descriptor)
            if checked:
                torch.testing.assert_close(found[:num_tokens], model(buffer[:num_tokens]))
            if number == NUM_CALLS // 10:
                peak = peak_kib()
        assert peak_kib() - peak < 16 * 1024, "memory grows with the number of calls"
        replayed: Counter[tuple[Any, Any]] = Counter()
        for (region, mode, key), record in runtime.counts().items():
            if region.endswith((".full", ".r0")):
                replayed[mode, key] += record.replayed
        assert replayed == calls
