"""Attention over packed images: each sequence as if it were alone, whatever lies behind the last one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import graphpass as gp
from graphpass.encoder import attention as att
from graphpass.encoder.pieces import PIECE_LENGTH, Pieces, most_pieces, pieces_of

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
    filled = (np.append(ends, [ends[-1]] * unused), np.append(starts, [0] * unused), np.append(of, [0] * unused))
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


@pytest.mark.parametrize("count", [1, 2, 5])
def test_equal_sequences(count: int) -> None:
    packed = tensors(count * 6)
    found = att.equal_attention(*packed, 6, scale=SCALE)
    assert found.is_contiguous()
    for part in range(count):
        own = [tensor[6 * part : 6 * part + 6] for tensor in packed]
        torch.testing.assert_close(found[6 * part : 6 * part + 6], alone(*own))


def test_only_halves_on_a_gpu_go_to_the_kernel() -> None:
    assert not att.serves_flash(torch.device("cpu"), torch.bfloat16, 64)
    assert not att.serves_flash(torch.device("cuda"), torch.float32, 64)
    assert not att.serves_flash(torch.device("cuda"), torch.bfloat16, 264)


@pytest.mark.parametrize("is_right", [True, False])
def test_a_gpu_serves_what_its_kernel_answers_rightly(is_right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(att, "_attends_in_pieces", lambda *_: is_right)
    assert att.serves_flash(torch.device("cuda"), torch.bfloat16, 64) == is_right


def by_the_table(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    longest: int,
    *,
    scale: float,
) -> torch.Tensor:
    """What the kernel does, a piece at a time."""
    found = torch.full_like(query, torch.nan)
    for begin, end, start, length in zip(*(part.tolist() for part in (ends, ends[1:], starts, lengths)), strict=False):
        assert end - begin <= longest
        tensors = (query[begin:end], key[start : start + length], value[start : start + length])
        batched = [tensor.float().transpose(0, 1).unsqueeze(0) for tensor in tensors]
        found[begin:end] = F.scaled_dot_product_attention(*batched, scale=scale)[0].transpose(0, 1).to(query.dtype)
    return found


def to_own_rows(*tensors: torch.Tensor, **options: object) -> torch.Tensor:
    """A kernel for which keys of a sequence end where those of the next begin."""
    query, key, value, ends, starts, _, longest = tensors
    return by_the_table(query, key, value, ends, starts, torch.diff(starts), longest, **options)  # type: ignore[arg-type]


def refuses(*_: object, **__: object) -> torch.Tensor:
    raise RuntimeError("seqused_k is not supported")


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (by_the_table, None),
        (to_own_rows, "does not attend to the keys that it is given"),
        (refuses, "seqused_k is not supported"),
    ],
)
def test_the_kernel_is_tried(
    kernel: object, reason: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys of pieces overlap, which torch does not promise to serve; where it does not, a mask does."""
    monkeypatch.setattr(att.compat, "flash_attention", kernel)
    cpu = torch.device("cpu")
    with caplog.at_level("WARNING", "graphpass"):
        assert att._attends_in_pieces.__wrapped__(cpu, torch.bfloat16, 20) == (reason is None)
    assert (reason or "") in caplog.text
    assert bool(caplog.records) == (reason is not None)


@given(lengths=st.lists(st.integers(0, 700), min_size=1, max_size=8))
def test_pieces(lengths: list[int]) -> None:
    """Together they are every row once; each knows its sequence; none is longer than the kernel is told."""
    found = [part.tolist() for part in pieces_of(np.array(lengths))]
    begins = list(itertools.accumulate([0, *lengths]))
    assert (found[0][0], found[0][-1]) == (0, sum(lengths))
    assert len(found[0]) == len(found[1]) == len(found[2]) + 1 > 1
    *pieces, unused = zip(found[0], found[0][1:], found[1], found[2], strict=False)
    assert unused[0] == unused[1] == sum(lengths)
    for begin, end, start, length in pieces:
        assert 0 < end - begin <= PIECE_LENGTH
        assert (start, length) in zip(begins, lengths, strict=False)
        assert start <= begin < end <= start + length
    for longest in (max(lengths), 1000):
        assert len(found[2]) <= most_pieces(len(lengths), sum(lengths), longest)


class Layer(torch.nn.Module):
    """What transformers hands to an attention function."""

    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"graphpass_sequence_length": 3, "graphpass_is_flash": False})()


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
        "key_starts": torch.tensor([0, 6], dtype=torch.int32),
        "key_lengths": torch.tensor([6], dtype=torch.int32),
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
