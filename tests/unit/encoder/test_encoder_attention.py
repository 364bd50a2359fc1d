"""Attention over packed images: each sequence as if it were alone, whatever lies behind the last one."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import graphpass as gp
from graphpass.compat.operators import PackedSequences
from graphpass.encoder import attention as att
from graphpass.encoder.attention import PIECE_LENGTH, Pieces, most_pieces, pieces_of

HEADS, HEAD_DIM, SCALE = 2, 4, 0.3


def tensors(num_tokens: int) -> list[torch.Tensor]:
    seeded = torch.Generator().manual_seed(num_tokens)
    return [torch.randn(num_tokens, HEADS, HEAD_DIM, generator=seeded) for _ in range(3)]


def alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """One sequence."""
    batched = [tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value)]
    return F.scaled_dot_product_attention(*batched, scale=SCALE)[0].transpose(0, 1)


def padded_pieces(lengths: list[int], unused: int) -> Pieces[torch.Tensor]:
    """As a graph's buffers hold them, with unused entries behind them."""
    ends, starts, of = pieces_of(np.array(lengths))
    filled = (
        np.append(ends, [ends[-1]] * unused),
        np.append(starts, [starts[-1]] * unused),
        np.append(of, [0] * unused),
    )
    return Pieces(*(torch.from_numpy(part.astype(np.int32)) for part in filled))


@given(
    lengths=st.lists(st.integers(0, 7) | st.integers(120, 300), min_size=1, max_size=6),
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
    found = att.packed_attention(*packed, padded_pieces(lengths, unused), scale=SCALE)
    assert not found[real:].any()
    for start, length in zip(itertools.accumulate([0, *lengths]), lengths, strict=False):
        own = [tensor[start : start + length] for tensor in packed]
        torch.testing.assert_close(found[start : start + length], alone(*own))


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "capability", "reason"),
    [
        ("cpu", torch.bfloat16, 64, (9, 0), "there is none for cpu"),
        ("cuda", torch.float32, 64, (9, 0), "it takes float16 and bfloat16, not float32"),
        ("cuda", torch.bfloat16, 264, (9, 0), "it takes heads of width 256 or less, not 264"),
        ("cuda", torch.bfloat16, 64, (7, 5), "it needs compute capability 8.0, not 7.5"),
        ("cuda", torch.float16, 256, (8, 0), None),
    ],
)
@pytest.mark.parametrize("fault", [None, "a fault"])
def test_what_the_kernel_does_not_serve(
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    capability: tuple[int, int],
    reason: str | None,
    fault: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(att, "_fault_of_kernel", lambda *_: fault)
    assert att.why_not_flash(torch.device(device), dtype, head_dim) == (reason or fault)


def by_the_table(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: PackedSequences, *, scale: float
) -> torch.Tensor:
    """What the kernel does, a piece at a time."""
    ends, starts, lengths, longest, _ = sequences
    found = torch.full_like(query, torch.nan)
    for begin, end, start, length in zip(*(part.tolist() for part in (ends, ends[1:], starts, lengths)), strict=False):
        assert end - begin <= longest
        tensors = (query[begin:end], key[start : start + length], value[start : start + length])
        batched = [tensor.float().transpose(0, 1).unsqueeze(0) for tensor in tensors]
        found[begin:end] = F.scaled_dot_product_attention(*batched, scale=scale)[0].transpose(0, 1).to(query.dtype)
    return found


def to_own_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: PackedSequences, *, scale: float
) -> torch.Tensor:
    """A kernel for which keys of a sequence end where those of the next begin."""
    lengths = torch.diff(sequences.key_starts)
    return by_the_table(query, key, value, sequences._replace(key_lengths=lengths), scale=scale)


def refuses(*_: object, **__: object) -> torch.Tensor:
    raise RuntimeError("seqused_k is not supported")


def runs_out(*_: object, **__: object) -> torch.Tensor:
    raise torch.OutOfMemoryError("for now")


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        (by_the_table, None),
        (to_own_rows, "with heads of width 20 it attends to wrong keys"),
        (refuses, "seqused_k is not supported"),
    ],
)
def test_the_kernel_is_tried(kernel: object, fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of pieces overlap, which torch does not promise to serve; where it does not, a mask does."""
    monkeypatch.setattr(att.operators, "flash_attention", kernel)
    assert att._fault_of_kernel.__wrapped__(torch.device("cpu"), torch.bfloat16, 20) == fault


def test_too_little_memory_says_nothing_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(att.operators, "flash_attention", runs_out)
    with pytest.raises(torch.OutOfMemoryError):
        att._fault_of_kernel.__wrapped__(torch.device("cpu"), torch.bfloat16, 20)


@pytest.mark.parametrize(
    ("lengths", "longest"), [([129, 1, 1], 131), ([128], 128), ([1, 1], 2), ([257, 255], 512), ([128, 128], 128)]
)
def test_graphs_have_room_for_no_more_pieces_than_there_may_be(lengths: list[int], longest: int) -> None:
    """As many as the worst of so many sequences in so many rows has, and the unused one."""
    num_rows, used = sum(lengths), len(pieces_of(np.array(lengths)).key_lengths) - 1
    assert used + 1 <= most_pieces(len(lengths), num_rows, longest) <= used + 1 + (num_rows % PIECE_LENGTH == 0)


@pytest.mark.parametrize("lengths", [[[1, 2]], [1.5], [-1], ["a"], []])
def test_what_are_no_lengths(lengths: object) -> None:
    with pytest.raises(gp.errors.ShapeError, match=r"integers, none below 0"):
        att.pieces_on(lengths, torch.device("cpu"))  # type: ignore[arg-type]


def packed() -> Any:
    """The function as transformers finds it, over a module as transformers hands it to an attention function."""
    interface = pytest.importorskip("transformers").AttentionInterface
    layer = torch.nn.Linear(1, 1)
    layer.config = type("Config", (), {"hidden_size": 8, "num_attention_heads": 2})()
    att.use_packed_attention(layer)
    return lambda *args, **named: interface()[att.PACKED_ATTENTION](layer, *args, **named)


PIECES = ("query_bounds", "cu_seq_lens_q", "key_lengths")


@pytest.mark.parametrize(
    ("asked", "rows", "error", "text"),
    [
        ({"attention_mask": torch.ones(1)}, 1, gp.errors.OptionError, "attention_mask"),
        ({"dropout": 0.1}, 1, gp.errors.OptionError, "dropout"),
        ({"is_causal": True}, 1, gp.errors.OptionError, "is_causal"),
        ({}, 2, gp.errors.ShapeError, "2 rows"),
        *(({name: None}, 1, gp.errors.OptionError, name) for name in PIECES),
    ],
)
def test_what_it_does_not_do(asked: dict[str, object], rows: int, error: type[Exception], text: str) -> None:
    """It asks for pieces, and of what else attention may be asked for it has nothing."""
    given = {"attention_mask": None, **dict(zip(PIECES, att.pieces_on([6], torch.device("cpu")), strict=True))}
    one, row = torch.ones(1, HEADS, 6, HEAD_DIM), torch.ones(rows, HEADS, 6, HEAD_DIM)
    packed()(one, one, one, **given)
    with pytest.raises(error, match=text):
        packed()(row, row, row, **{**given, **asked})
