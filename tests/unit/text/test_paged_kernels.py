"""Which attention kernel serves which steps, and the reasons that the report gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphpass.text import LayerMask, PagedLayer
from graphpass.text.paged import kernels
from graphpass.text.paged.kernels import AttentionKernels, Scores, masked_attention

PLAIN = PagedLayer(2, 64)
TABLES, IN_PLACE, PACKED, MASKED = (
    "varlen_attn over pages (block_table)",
    "flash attention over pages of whole sequences",
    "flash attention over packed keys",
    "scaled_dot_product_attention over gathered keys",
)


def chosen(
    layer: PagedLayer = PLAIN, dtype: torch.dtype = torch.bfloat16, device: str = "cuda", page_size: int = 16
) -> AttentionKernels:
    """The choice for two layers, the second one plain."""
    cache: Any = SimpleNamespace(
        device=torch.device(device), dtype=dtype, layers=(layer, None, PLAIN), page_size=page_size
    )
    return AttentionKernels.choose(cache, 64)


def served(choice: AttentionKernels) -> dict[str, str]:
    return {use.kernel: use.serves for use in choice.uses}


def why(choice: AttentionKernels, kernel: str) -> str:
    return next(use.why for use in choice.uses if use.kernel == kernel)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU whose flash attention passes its trial."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "fault_in_place", lambda *_: None)
    return monkeypatch


def test_pages_of_whole_sequences_are_read_in_place() -> None:
    choice = chosen(page_size=64)
    assert served(choice) == {TABLES: "none", IN_PLACE: "all steps", PACKED: "none", MASKED: "none"}
    assert choice.has_flash
    assert choice.in_place


def test_keys_of_small_pages_are_packed_or_gathered() -> None:
    choice = chosen()
    assert not choice.in_place
    assert served(choice) == {
        TABLES: "none",
        IN_PLACE: "none",
        PACKED: "prompts and mixed steps",
        MASKED: "steps with the same number of tokens in every request",
    }
    assert why(choice, IN_PLACE) == "a page has 16 positions, a sequence up to 64: its keys are apart"


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "none for cpu"),
        ({"dtype": torch.float32}, "not float32"),
        ({"layer": PagedLayer(2, 64, mask=LayerMask(chunk=8))}, "chunked"),
        ({"layer": PagedLayer(2, 64, is_plain=False)}, "soft cap"),
        ({"layer": PagedLayer(2, 64, value_dim=32)}, "64 and 32"),
        ({"layer": PagedLayer(2, 264)}, "264"),
        ({"layer": PagedLayer(2, 20)}, "20"),
    ],
)
def test_other_caches_use_masked_attention_and_the_table_says_why(
    changes: dict[str, Any], reason: str, page_size: int
) -> None:
    choice = chosen(**changes, page_size=page_size)
    assert served(choice) == {TABLES: "none", IN_PLACE: "none", PACKED: "none", MASKED: "all steps"}
    assert reason in why(choice, PACKED)
    assert reason in why(choice, IN_PLACE)


def test_a_chunk_that_no_sequence_reaches_is_none() -> None:
    assert chosen(PagedLayer(2, 64, mask=LayerMask(chunk=64))).has_flash


def test_the_gpu_and_this_torch_are_asked(gpu: pytest.MonkeyPatch) -> None:
    def with_tables(q: Any, *, block_table: Any) -> None:
        raise AssertionError

    def without_tables(q: Any) -> None:
        raise AssertionError

    gpu.setattr("torch.nn.attention.varlen.varlen_attn", with_tables)
    assert "last owner" in why(chosen(), TABLES)
    gpu.setattr("torch.nn.attention.varlen.varlen_attn", without_tables)
    assert "has none" in why(chosen(), TABLES)
    gpu.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))
    assert "7.5" in why(chosen(), PACKED)
    gpu.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    gpu.setattr(kernels, "fault_in_place", lambda *_: "it attends to wrong keys")
    choice = chosen(page_size=64)
    assert (choice.has_flash, choice.in_place) == (True, False)
    assert why(choice, IN_PLACE) == "it attends to wrong keys"


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
