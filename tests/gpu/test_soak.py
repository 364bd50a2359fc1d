"""Many replays over 32 keys of one compiled model: counts exact, results right, memory flat."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from tests.e2e.test_soak import Engine, Kept

SIZES = [1, 2, 4, *range(8, 105, 8)]
WIDTH = 64
LONGEST_KEPT = 100


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """(allocated, reserved) on a GPU, with nothing in flight and no garbage; zeros elsewhere."""
    gc.collect()
    if device.type != "cuda":
        return (0, 0)
    torch.cuda.synchronize(device)
    return (torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))


def replay(engine: Engine, chosen: random.Random, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch of a random size between two captured ones: its result, and the rows of it that are real."""
    index = chosen.randrange(len(SIZES))
    num_tokens = chosen.randint(([0, *SIZES][index]) + 1, SIZES[index])
    decision = engine.dispatcher.dispatch(num_tokens, uniform_decode=chosen.random() < 0.5)
    buffer.normal_()
    x = buffer[: decision.descriptor.num_tokens]
    return engine.step(0, x, 0, decision.mode, decision.descriptor)[:num_tokens], buffer[:num_tokens]


@pytest.mark.parametrize(
    ("device_type", "num_replays"),
    [pytest.param("cuda", 100_000, marks=[pytest.mark.cuda, pytest.mark.soak]), ("cpu", 1_000)],
)
def test_replays_over_32_keys_are_right_and_leave_memory_flat(device_type: str, num_replays: int) -> None:
    """One result in 100 is kept and compared later."""
    device = torch.device(device_type)
    engine, chosen = Engine(1, 1, SIZES, WIDTH, device_type), random.Random(0)
    kept, buffer = Kept(rtol=1e-4, atol=1e-5), torch.zeros(SIZES[-1], WIDTH, device=device)
    with engine.runtime as runtime, torch.inference_mode():
        engine.capture(buffer)
        before, pool_before = (0, 0), 0
        for number in range(num_replays):
            if number == num_replays // 10:
                kept.check_due(num_replays)
                before, pool_before = memory_bytes(device), runtime.pool_bytes()
            found, real = replay(engine, chosen, buffer)
            if number % 100 == 0:
                kept.keep(number + LONGEST_KEPT, found, engine.expected(0, real, 0))
            del found, real  # their size is that of this call
            kept.check_due(number)
        kept.check_due(num_replays + LONGEST_KEPT)
        assert memory_bytes(device) == before, "memory changes with the number of replays"
        assert runtime.pool_bytes() == pool_before
        assert kept.num_checked == num_replays // 100
        assert len(engine.asked) == 2 * len(SIZES)
        engine.check_counts()
