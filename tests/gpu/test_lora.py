"""LoRA adapters over real graphs: a mix, memory, half precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from graphpass import BatchDescriptor, LoraKeys, set_forward_context
from graphpass.text import LoraAdapters
from tests.unit.models import module
from tests.unit.text.adapted import Adapted

pytestmark = pytest.mark.cuda

# Single precision on CUDA may multiply in another order at another number of rows.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def exact_products() -> Any:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def test_a_mix_is_the_merged_model() -> None:
    adapted = Adapted("FULL", LoraKeys(3), device="cuda")
    adapted.check(["a", None, "c"], **CLOSE)
    adapted.manager.close()


@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("num_tokens", [1, 64, 500])
def test_the_op_in_half_precision(num_tokens: int, count: int) -> None:
    torch.manual_seed(0)
    new = {"device": "cuda", "dtype": torch.bfloat16}
    x, out = torch.randn(1, num_tokens, 256, **new), torch.randn(1, num_tokens, 384, **new)
    down, up = torch.randn(4, 16, 256, **new) / 16, torch.randn(4, 16, 384, **new) / 4
    slots = torch.randint(-1, count, (num_tokens,), device="cuda")
    expected = out[0].float()
    for slot in range(count):
        added = x[0].float() @ down[slot].float().t() @ up[slot].float()
        expected += added * (slots == slot).unsqueeze(1)
    with set_forward_context(batch_descriptor=BatchDescriptor(num_tokens, has_lora=True, num_active_loras=count)):
        torch.ops.graphpass.add_lora(x, out, down, up, slots, torch.arange(4, device="cuda"))
    torch.testing.assert_close(out[0].float(), expected, rtol=2e-2, atol=6e-2)


def test_a_prefill_gathers_no_weights_by_token() -> None:
    """A copy of its adapter for every token would be 2048 * 16 * 1024 numbers; all temporaries stay below a tenth."""
    model = module(lambda self, x: self.up(x), up=nn.Linear(1024, 1024, bias=False)).to("cuda")
    adapters = LoraAdapters(model, ("up",), max_loras=4, max_rank=16)
    for name in "abcd":
        adapters.load(name, {"up": (torch.ones(16, 1024, device="cuda"), torch.ones(1024, 16, device="cuda"))})
    layer = adapters.layers["up"]
    x, out = torch.randn(2048, 1024, device="cuda"), torch.randn(2048, 1024, device="cuda")
    inputs = adapters.of_rows(["a", "b", "c", None] * 512).inputs
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with set_forward_context(batch_descriptor=BatchDescriptor(2048, has_lora=True, num_active_loras=3)):
        torch.ops.graphpass.add_lora(x, out, layer.lora_a, layer.lora_b, inputs["lora_slots"], inputs["lora_order"])
    # Products may allocate a workspace once, which is no part of this.
    workspace = 64 * 2**20
    assert torch.cuda.max_memory_allocated() - before - workspace < 2048 * 16 * 1024 * 4 // 10
