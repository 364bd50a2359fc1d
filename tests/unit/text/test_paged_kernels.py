"""Which attention kernel serves which steps, and the reasons that the report gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphpass.text.paged.kernels import AttentionKernels, Scores, masked_attention
from graphpass.text.paged.layers import LayerMask, PagedLayer

PLAIN = PagedLayer(2, 64)
MASKED, PACKED, PAGES = (
    "scaled_dot_product_attention over gathered keys",
    "varlen_attn over packed keys",
    "varlen_attn over pages (block_table)",
)


def chosen(layer: PagedLayer = PLAIN, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Any:
    """The choice for two layers, the second one plain."""
    cache: Any = SimpleNamespace(device=torch.device(device), dtype=dtype, layers=(layer, None, PLAIN))
    return AttentionKernels.choose(cache, (LayerMask(), layer.mask))


def varlen_with_everything(q: Any, *, scale: Any, window_size: Any, enable_gqa: Any, block_table: Any) -> None:
    raise AssertionError


def varlen_without_windows(q: Any, *, scale: Any, is_causal: Any) -> None:
    raise AssertionError


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU, and a torch whose ``varlen_attn`` has every argument."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_with_everything)
    return monkeypatch


def test_plain_layers_in_half_precision_on_cuda_use_varlen() -> None:
    choice = chosen()
    assert choice.varlen is not None
    assert [row[:2] for row in choice.table().rows] == [
        (PAGES, "none"),
        (PACKED, "prompts and mixed steps"),
        (MASKED, "steps with the same number of tokens in every request"),
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "on cpu"),
        ({"dtype": torch.float32}, "torch.float32"),
        ({"layer": PagedLayer(2, 64, mask=LayerMask(chunk=8))}, "chunked"),
        ({"layer": PagedLayer(2, 64, is_plain=False)}, "soft cap"),
        ({"layer": PagedLayer(2, 64, value_dim=32)}, "64 and 32"),
        ({"layer": PagedLayer(2, 264)}, "264"),
        ({"layer": PagedLayer(2, 20)}, "20"),
    ],
)
def test_other_caches_use_masked_attention_and_the_table_says_why(changes: dict[str, Any], reason: str) -> None:
    choice = chosen(**changes)
    assert choice.varlen is None
    _, packed, masked = choice.table().rows
    assert (packed[1], masked[1]) == ("none", "all steps")
    assert reason in packed[2]


def test_the_gpu_and_this_torch_are_asked(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))
    assert "7.5" in chosen().table().rows[1][2]
    gpu.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    gpu.setattr("torch.nn.attention.varlen.varlen_attn", varlen_without_windows)
    windowed = chosen(PagedLayer(2, 64, mask=LayerMask(window=8)))
    assert windowed.varlen is None
    assert "windows" in windowed.table().rows[1][2]
    assert chosen().varlen is not None
    assert "has none" in chosen().table().rows[0][2]


def test_scores_of_either_kind_agree_with_scaled_dot_product_attention() -> None:
    """A cap far above the scores and sinks far below them change nothing; the kernels are different ones."""
    seeded = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(shape, generator=seeded) for shape in ((3, 2, 8, 16), (3, 2, 9, 16), (3, 2, 9, 5))
    )
    bias = torch.zeros(3, 1, 8, 9).masked_fill_(torch.rand(3, 1, 8, 9, generator=seeded) < 0.3, -torch.inf)
    bias[..., 0] = 0.0
    plain = masked_attention(query, keys, values, bias, Scores(0.25, 0.0, None))
    for scores in (Scores(0.25, 1e4, None), Scores(0.25, 0.0, torch.full((8,), -100.0))):
        torch.testing.assert_close(masked_attention(query, keys, values, bias, scores), plain, rtol=1e-4, atol=1e-5)
