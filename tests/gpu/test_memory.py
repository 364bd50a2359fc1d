"""What captures take of a GPU's memory: estimates against the device's word, limits kept, nothing left."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import graphpass as gp
from graphpass import CudagraphDispatcher, CudaGraphManager, CUDAGraphMode, InputSpec
from graphpass.text import CausalLM
from tests.gpu.shared import private_segments

pytestmark = [pytest.mark.cuda, pytest.mark.alone]

MIB = 1 << 20
TOLERANCE_BYTES = 32 * MIB
SIZES = [1, 2, 4, *range(8, 129, 8), *range(160, 513, 32)]
"""Behind it, so that a test can make the ladder another one."""
ONE_MORE = 144


class Stack(nn.Module):
    """A stack of wide layers; activations of several MiB at the largest size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + x


class Pictures(nn.Module):
    """A small convolutional encoder, one picture a token: its convolutions take workspaces."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU()) for width in (4, 8, 16, 32)),
            nn.AdaptiveAvgPool2d(1),
        )

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.convolutions(pictures).flatten(1)


def stack(mode: str = "FULL_AND_PIECEWISE", compiler: str = "eager") -> CudaGraphManager:
    model = Stack().eval().cuda().half()
    inputs = [InputSpec("x", (512, 2048), torch.float16)]
    return CudaGraphManager(model, CudagraphDispatcher(mode, SIZES, max_num_reqs=512), inputs, compiler=compiler)


def inductor_stack() -> CudaGraphManager:
    return stack(compiler="inductor")


def pictures() -> CudaGraphManager:
    inputs = [InputSpec("pictures", (512, 4, 32, 32), torch.float32)]
    dispatcher = CudagraphDispatcher("FULL", SIZES, max_num_reqs=512)
    return CudaGraphManager(Pictures().eval().cuda(), dispatcher, inputs, compiler="eager")


def llama() -> CudaGraphManager:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "vocab_size": 8000}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).half().cuda().eval()
    lm = CausalLM(model, max_num_reqs=128, max_num_tokens=512, max_seq_len=512, capture_sizes=SIZES, compiler="eager")
    return lm.manager


MODELS = pytest.mark.parametrize("make", [stack, inductor_stack, llama, pictures])


@pytest.fixture
def no_segment_left(cuda: torch.device) -> Iterator[None]:
    """No pool of the test is left, before anything is collected."""
    before = private_segments()
    yield
    assert private_segments() - before == set()


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def warmed_up(manager: CudaGraphManager) -> CudaGraphManager:
    """Compiled, its kernels loaded, and with a ladder that it has not been asked about."""
    manager.estimate()
    mode = manager.dispatcher.mode.mixed_mode()
    largest = max(manager.dispatcher.keys[mode], key=lambda key: key.num_tokens)
    num_reqs = None if mode is CUDAGraphMode.PIECEWISE else ONE_MORE
    manager.dispatcher.add_key(mode, gp.BatchDescriptor(ONE_MORE, num_reqs, extra=largest.extra))
    return manager


@MODELS
def test_an_estimate_is_near_what_the_device_says(make: Callable[[], CudaGraphManager], no_segment_left: None) -> None:
    manager = warmed_up(make())
    pools = private_segments()
    estimate = manager.estimate()
    assert private_segments() == pools, "the throwaway pools are gone"
    sampled: dict[CUDAGraphMode, int] = {}
    for group in estimate.groups:
        mode = CUDAGraphMode.parse(group.name.split()[1])
        sampled[mode] = sampled.get(mode, 0) + len(group.sampled)
    assert sampled
    assert max(sampled.values()) <= 3
    free = free_bytes()
    manager.capture()
    taken = free - free_bytes()
    assert abs(estimate.total_bytes - taken) <= max(taken / 10, TOLERANCE_BYTES)
    pool_bytes = manager.runtime.pool_bytes()
    assert abs(estimate.pool_bytes - pool_bytes) <= max(pool_bytes / 10, TOLERANCE_BYTES)
    groups = manager.stats().groups
    assert sum(group.memory.pool_bytes for group in groups) == pool_bytes
    manager.close()
    assert private_segments() == pools
    assert manager.runtime.pool_bytes() == 0


@MODELS
def test_an_estimate_leaves_graphs_alone_and_the_pool_obeys_a_limit(
    make: Callable[[], CudaGraphManager], no_segment_left: None
) -> None:
    manager = make()
    manager.capture()
    counts, whole, pools = manager.runtime.counts(), manager.runtime.pool_bytes(), private_segments()
    num_keys = len(manager.stats().keys)
    manager.estimate()
    assert manager.runtime.counts() == counts
    assert manager.runtime.pool_bytes() == whole
    assert private_segments() == pools
    for share in (0.0, 0.3, 0.7, 0.95, 1.0):
        max_bytes = int(whole * share)
        manager.recapture(max_bytes=max_bytes)
        stats = manager.stats()
        assert manager.runtime.pool_bytes() == stats.pool_bytes <= max_bytes
        assert len(stats.keys) + len(stats.left_out) == num_keys
        assert bool(stats.left_out) == (stats.pool_bytes == 0 or len(stats.keys) < num_keys)
    manager.close()
    assert manager.runtime.pool_bytes() == 0
