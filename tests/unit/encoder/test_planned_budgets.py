"""Budgets planned from what a manager has run."""

from __future__ import annotations

import pickle

import torch

from graphpass import EncoderCudaGraphManager, EncoderOptions, plan_sizes
from graphpass.encoder import EncoderStats
from tests.unit.encoder import toy

REQUESTS = ([6], [10], [6, 6], [6], [22], [10], [0], [6], [70])
"""Patches, two a token, of requests that are one batch each; the last item is above the largest budget."""


def stats_over(budgets: list[int]) -> EncoderStats:
    """What a manager with these budgets counts over :data:`REQUESTS`, one of them before the capture."""
    options = EncoderOptions(token_budgets=budgets, costs=None)
    manager = EncoderCudaGraphManager(toy.ToyEncoder(), options=options, device="cpu", dtype=torch.float32)
    manager.execute(toy.images([8]))
    manager.capture()
    for sizes in REQUESTS:
        manager.execute(toy.images(sizes))
    return manager.get_cumulative_stats()


def test_planned_budgets_fit_what_came() -> None:
    before = stats_over([4, 8, 16, 32])
    assert before.histogram == {3: 3, 5: 2, 6: 1, 11: 1}
    assert list(before.histogram) == sorted(before.histogram)
    assert pickle.loads(pickle.dumps(before)).histogram == before.histogram

    plan = plan_sizes({32: 0, **before.histogram}, 4)
    after = stats_over(list(plan.sizes))
    assert plan.sizes == (3, 6, 11, 32)
    assert (after.histogram, after.misses) == (before.histogram, before.misses)
    computed = {
        name: [b.replays * b.captured.descriptor.num_tokens for b in s.budgets]
        for name, s in (("a", after), ("b", before))
    }
    assert sum(computed["a"]) < sum(computed["b"])


def test_the_snapshot_is_the_callers() -> None:
    options = EncoderOptions(token_budgets=[4], costs=None)
    manager = EncoderCudaGraphManager(toy.ToyEncoder(), options=options, device="cpu", dtype=torch.float32)
    manager.capture()
    empty = manager.get_cumulative_stats()
    manager.execute(toy.images([6]))
    assert (empty.histogram, manager.get_cumulative_stats().histogram) == ({}, {3: 1})
