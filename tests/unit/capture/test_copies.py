"""Inputs are copied into buffers in few launches: those of a dtype that lie densely go together."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch

from graphpass.capture.staging import copy_each
from graphpass.compat import memory

F32, I64, I32 = torch.float32, torch.int64, torch.int32


def filled(dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    return [torch.full((3, 4), index + 1, dtype=dtype) for index, dtype in enumerate(dtypes)]


@pytest.mark.parametrize(
    ("dtypes", "num_launches"),
    [([], 0), ([F32], 1), ([I64] * 5, 1), ([I64, I32, I64, I32, I32], 2), ([F32, I64, I32, torch.bool], 4)],
)
def test_one_launch_for_each_dtype(dtypes: Sequence[torch.dtype], num_launches: int) -> None:
    sources = filled(dtypes)
    targets = [torch.zeros_like(source) for source in sources]
    with patch.object(memory, "foreach_copy_", wraps=memory.foreach_copy_) as fused:
        copy_each(targets, sources)
    assert fused.call_count == num_launches
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))


@pytest.mark.parametrize("is_cut", ["target", "source"])
def test_what_lies_with_gaps_goes_by_itself(is_cut: str) -> None:
    """A cut of a wider buffer would send everybody else the slow way."""
    sources = filled([F32] * 3)
    targets = [torch.zeros_like(source) for source in sources]
    wide = torch.zeros(3, 9)
    if is_cut == "target":
        targets[1] = wide[:, :4]
    else:
        wide[:, :4] = sources[1]
        sources[1] = wide[:, :4]
    with patch.object(memory, "foreach_copy_", wraps=memory.foreach_copy_) as fused:
        copy_each(targets, sources)
    assert sorted(len(call.args[0]) for call in fused.call_args_list) == [1, 2]
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))
