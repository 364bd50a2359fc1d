"""Packed keys, which torch attends to on CUDA: here with a plain stand-in of the same meaning in torch's place."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphpass import AttentionSupport, BatchDescriptor
from graphpass.text.paged import kernels
from graphpass.text.paged.kernels import torch_varlen
from graphpass.text.paged.keys import BatchedKeys, PackedKeys
from tests.unit.text.paged_reference import Heads, Paged, reference
from tests.unit.text.test_paged_attention import PLAIN_HEADS, STEPS, assert_right, run


def plain_varlen(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, scale: float, window: int
) -> torch.Tensor:
    out = torch.full_like(query, torch.nan)
    heads = Heads(query.shape[1], key.shape[1], query.shape[2], max(window, 0))
    bounds = zip(itertools.pairwise(cu_seq_q.tolist()), itertools.pairwise(cu_seq_k.tolist()), strict=True)
    for (q0, q1), (k0, k1) in bounds:
        assert q1 - q0 <= max_q
        assert k1 - k0 <= max_k
        if q1 > q0:
            scaled = query[q0:q1] * (scale / heads.scale)
            out[q0:q1] = reference(scaled, key[k0:k1], value[k0:k1], heads).to(query.dtype)
    return out


def varlen_of_windows(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *, scale: Any = None,
    window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    assert enable_gqa
    assert window_size[1] == 0
    window = -1 if window_size[0] < 0 else window_size[0] + 1
    return plain_varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window)


def varlen_of_is_causal(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, is_causal: bool = False,
    scale: Any = None,
) -> torch.Tensor:  # fmt: skip
    assert is_causal
    return plain_varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, -1)


def varlen_without_scale(query: Any, key: Any, value: Any, is_causal: bool = False) -> None:
    raise AssertionError


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    def install(function: Any) -> None:
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", function)
        monkeypatch.setattr(kernels, "_varlen_obstacle", lambda cache, masks: None)

    return install


@pytest.mark.parametrize("heads", PLAIN_HEADS, ids=str)
@pytest.mark.parametrize("function", [varlen_of_windows, varlen_of_is_causal])
def test_packed_keys(heads: Heads, function: Any, stand_in: Callable[[Any], None]) -> None:
    stand_in(function)
    paged = Paged(heads, support=AttentionSupport.ALWAYS)
    requests = [paged.begin() for _ in range(3)]
    key = BatchDescriptor(20, num_reqs=6)
    is_packed = function is varlen_of_windows or not heads.window
    for query_lens in STEPS:
        step, tensors = paged.grow(requests, query_lens)
        eager, full = paged.attention.build(step, None), paged.attention.build(step, key)
        is_uniform = len(set(query_lens)) == 1
        assert isinstance(eager.keys, PackedKeys if is_packed and not is_uniform else BatchedKeys)
        assert isinstance(full.keys, PackedKeys if is_packed else BatchedKeys)
        for metadata, num_rows in ((eager, 20), (full, 20)):
            assert_right(run(paged, tensors, metadata, num_rows), tensors)


def test_varlen_attention_without_scale_is_not_used(stand_in: Callable[[Any], None]) -> None:
    stand_in(varlen_without_scale)
    assert torch_varlen(has_windows=False) is None


def test_this_torchs_signature_is_known() -> None:
    assert torch_varlen(has_windows=True) is not None
