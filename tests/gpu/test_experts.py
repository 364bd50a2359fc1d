"""Experts on a GPU: captured with the kernel in bfloat16 and in blocks elsewhere, and replayed over other tokens."""

from __future__ import annotations

import pytest
import torch

from graphpass.text import experts as experts_op
from graphpass.text.experts import expert_linear
from tests.gpu.shared import graph_of
from tests.unit.text.test_experts import by_definition

pytestmark = pytest.mark.cuda

CLOSE = {torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}, torch.float16: {"rtol": 4e-3, "atol": 4e-3}}


@pytest.mark.parametrize("width", [64, 60], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("tokens", [1, 7, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@torch.no_grad()
def test_a_graph_computes_the_experts_of_other_tokens(
    dtype: torch.dtype, tokens: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels: list[torch.dtype] = []
    by_kernel = experts_op.products_by_kernel
    monkeypatch.setattr(experts_op, "products_by_kernel", lambda *a: kernels.append(dtype) or by_kernel(*a))
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    seeded = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=seeded, device="cuda").to(dtype) / 8

    weight, bias = drawn(16, 96, width), drawn(16, 96)
    x, experts = drawn(tokens, width), torch.zeros(tokens, 4, dtype=torch.int64, device="cuda")
    with graph_of(lambda: expert_linear(x, experts, weight, bias, False)) as (graph, found):
        for _ in range(3):
            x.copy_(drawn(tokens, width))
            experts.random_(16, generator=seeded)
            graph.replay()
            expected = by_definition(x.float(), experts, weight.float(), bias.float(), False)
            torch.testing.assert_close(found.float(), expected, **CLOSE.get(dtype, {"rtol": 1e-4, "atol": 1e-4}))
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    assert bool(kernels) == (is_hopper and dtype is torch.bfloat16 and width == 64)
