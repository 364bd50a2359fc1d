"""Adapter counts of keys and of batches."""

from __future__ import annotations

import pytest

from graphpass import CudagraphDispatcher, DispatchReason, LoraKeys
from graphpass.errors import DispatchError
from graphpass.keys import BatchDescriptor
from graphpass.modes import CUDAGraphMode

PIECEWISE, FULL = CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL


@pytest.mark.parametrize(
    ("lora", "key_counts", "table"),
    [
        (LoraKeys(1), (0, 2), (0, 2, 2)),
        (LoraKeys(4), (0, 5), (0, 5, 5, 5, 5, 5)),
        (LoraKeys(4, without=False), (5,), (5, 5, 5, 5, 5, 5)),
        (LoraKeys(1, per_count=True), (0, 1, 2), (0, 1, 2)),
        (LoraKeys(4, per_count=True), (0, 1, 2, 4, 5), (0, 1, 2, 4, 4, 5)),
        (LoraKeys(5, per_count=True), (0, 1, 2, 4, 6), (0, 1, 2, 4, 4, 6, 6)),
        (LoraKeys(5, per_count=True, without=False), (1, 2, 4, 6), (1, 1, 2, 4, 4, 6, 6)),
    ],
)
def test_counts(lora: LoraKeys, key_counts: tuple[int, ...], table: tuple[int, ...]) -> None:
    assert lora.key_counts() == key_counts
    assert lora.count_table() == table
    dispatcher = CudagraphDispatcher("FULL_AND_PIECEWISE", [4, 8], max_num_reqs=8, lora=lora, lazy=True)
    for mode in (PIECEWISE, FULL):
        assert {(key.num_active_loras, key.has_lora) for key in dispatcher.keys[mode]} == {
            (count, count > 0) for count in key_counts
        }
        assert len(dispatcher.keys[mode]) == 2 * len(key_counts)
    for uniform in (False, True):
        for num_active_loras, count in enumerate(table):
            step = dispatcher.dispatch(3, uniform_decode=uniform, num_active_loras=num_active_loras)
            assert (step.descriptor.num_tokens, step.descriptor.num_active_loras) == (4, count)
            assert step.descriptor in dispatcher.keys[step.mode]


@pytest.mark.parametrize(
    ("lora", "num_active_loras"),
    [(None, 1), (None, -1), (LoraKeys(2), 4), (LoraKeys(2), -1), (LoraKeys(2, per_count=True), 4)],
)
def test_contradicting_counts(lora: LoraKeys | None, num_active_loras: int) -> None:
    dispatcher = CudagraphDispatcher("PIECEWISE", [4], max_num_reqs=4, lora=lora, lazy=True)
    with pytest.raises(DispatchError, match="num_active_loras"):
        dispatcher.dispatch(3, num_active_loras=num_active_loras)


@pytest.mark.parametrize("max_loras", [0, -1])
def test_there_is_an_adapter(max_loras: int) -> None:
    with pytest.raises(DispatchError, match="max_loras"):
        LoraKeys(max_loras)


def test_descriptor_with_adapters_but_no_count_takes_the_largest() -> None:
    dispatcher = CudagraphDispatcher("PIECEWISE", [4], max_num_reqs=4, lora=LoraKeys(2, per_count=True), lazy=True)
    step = dispatcher.dispatch_descriptor(BatchDescriptor(4, has_lora=True))
    assert step.descriptor == BatchDescriptor(4, has_lora=True, num_active_loras=3)
    assert step.reason is DispatchReason.EXACT


@pytest.mark.parametrize(
    ("lora", "descriptor", "match"),
    [
        (None, BatchDescriptor(4, num_active_loras=1), "has_lora"),
        (LoraKeys(2), BatchDescriptor(4, num_active_loras=1), "has_lora"),
        (None, BatchDescriptor(4, has_lora=True), "lora=None"),
    ],
)
def test_descriptor_that_contradicts_itself(lora: LoraKeys | None, descriptor: BatchDescriptor, match: str) -> None:
    dispatcher = CudagraphDispatcher("PIECEWISE", [4], max_num_reqs=4, lora=lora, lazy=True)
    with pytest.raises(DispatchError, match=match):
        dispatcher.dispatch_descriptor(descriptor)
