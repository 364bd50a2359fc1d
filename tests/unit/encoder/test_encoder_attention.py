"""Attention over packed images: each sequence as if it were alone, whatever lies behind the last one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import graphpass as gp
from graphpass.encoder import attention as att

HEADS, HEAD_DIM, SCALE = 2, 4, 0.3


def tensors(num_tokens: int) -> list[torch.Tensor]:
    seeded = torch.Generator().manual_seed(num_tokens)
    return [torch.randn(num_tokens, HEADS, HEAD_DIM, generator=seeded) for _ in range(3)]


def alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """One sequence."""
    batched = [tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value)]
    return F.scaled_dot_product_attention(*batched, scale=SCALE)[0].transpose(0, 1)


@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    unused=st.integers(0, 3),
    padding=st.integers(0, 5),
    poison=st.sampled_from([float("nan"), float("inf"), 0.0, 1e30]),
)
def test_sequences_do_not_see_each_other(lengths: list[int], unused: int, padding: int, poison: float) -> None:
    """Empty sequences among them, unused entries behind them, and rows of padding with anything in them."""
    real = sum(lengths)
    if real + padding == 0:
        return
    packed = tensors(real + padding)
    for tensor in packed:
        tensor[real:] = poison
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist(), *[real] * unused], dtype=torch.int32)
    found = att.packed_attention(*packed, ends, max(real, 1), scale=SCALE)
    assert not found[real:].any()
    for start, length in zip(ends.tolist(), lengths, strict=False):
        own = [tensor[start : start + length] for tensor in packed]
        torch.testing.assert_close(found[start : start + length], alone(*own))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_equal_sequences(count: int) -> None:
    packed = tensors(count * 6)
    found = att.equal_attention(*packed, 6, scale=SCALE)
    assert found.is_contiguous()
    for part in range(count):
        own = [tensor[6 * part : 6 * part + 6] for tensor in packed]
        torch.testing.assert_close(found[6 * part : 6 * part + 6], alone(*own))


def test_only_halves_on_a_gpu_go_to_the_kernel() -> None:
    assert not att.serves_varlen(torch.device("cpu"), torch.bfloat16, 64)
    assert not att.serves_varlen(torch.device("cuda"), torch.float32, 64)
    assert not att.serves_varlen(torch.device("cuda"), torch.bfloat16, 264)


class Layer(torch.nn.Module):
    """What transformers hands to an attention function."""

    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"graphpass_sequence_length": 3, "graphpass_is_varlen": False})()


@pytest.mark.parametrize("name", [att.PACKED_ATTENTION, att.EQUAL_ATTENTION])
@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        ({"attention_mask": torch.ones(1)}, gp.OptionError, "attention_mask"),
        ({"dropout": 0.1}, gp.OptionError, "dropout"),
        ({"is_causal": True}, gp.OptionError, "is_causal"),
        ({"rows": 2}, gp.ShapeError, "2 rows"),
    ],
)
def test_what_it_does_not_do(name: str, asked: dict[str, object], error: type[Exception], text: str) -> None:
    interface = pytest.importorskip("transformers").AttentionInterface
    att.register_with_hugging_face()
    named = {
        "rows": 1,
        "attention_mask": None,
        "cu_seq_lens_q": torch.tensor([0, 6], dtype=torch.int32),
        "max_length_q": 6,
    }
    rows, *_ = (named | asked).values()
    given = {name: value for name, value in (named | asked).items() if name != "rows"}
    row = torch.ones(rows, HEADS, 6, HEAD_DIM)
    with pytest.raises(error, match=text):
        interface()[name](Layer(), row, row, row, **given)


def test_packed_attention_asks_for_bounds() -> None:
    interface = pytest.importorskip("transformers").AttentionInterface
    att.register_with_hugging_face()
    row = torch.ones(1, HEADS, 6, HEAD_DIM)
    with pytest.raises(gp.OptionError, match="cu_seq_lens_q"):
        interface()[att.PACKED_ATTENTION](Layer(), row, row, row, None)
