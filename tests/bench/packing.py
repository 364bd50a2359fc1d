"""Milliseconds that packing takes by the number of items: thousands should take less than one replay of a large tower.

``python -m tests.bench.packing [items ...]``; needs no GPU. One thread works; the fastest round counts, the one that
nothing else has disturbed. *tokens* is ``pack_items``; *planner* is what a manager does in ``execute`` for a request
whose sizes it has not seen, with every limit that keys have: tokens, patches, items and frames; *and an axis* adds
bounds on the largest image.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console

from graphpass import EncoderOptions
from graphpass.encoder import EncoderAxis, EncoderCudaGraphConfig, EncoderItemSpec, PackingCosts, pack_items
from graphpass.encoder.costs import EncoderCosts, eager_curve
from graphpass.encoder.options import keys_of
from graphpass.encoder.planner import BatchPlanner
from tests.bench.timing import table_of

ITEMS = (200, 2000, 4000)
ROUNDS = 25
MIN_TOKENS, MAX_TOKENS, MAX_ITEMS = 16, 4096, 32
PATCHES_PER_TOKEN = 4
GREATEST = ("greatest", (1024, 4096, 16384))
"""An axis that rounds up: bounds on the patches of the largest image."""
REPLAY_MS, REPLAY_MS_A_TOKEN, EAGER_MS, EAGER_MS_A_TOKEN = 0.5, 0.0045, 16.0, 0.0055


def mixed(count: int) -> list[int]:
    """Output tokens: half of the items small, half anything that a budget holds."""
    random = np.random.default_rng(0)
    small, wide = (random.integers(MIN_TOKENS, most, count) for most in (600, MAX_TOKENS))
    tokens: list[int] = np.where(random.random(count) < 0.5, small, wide).tolist()
    return tokens


def by_tokens(num_budgets: int, tokens: list[int], *, has_costs: bool) -> Callable[[], object]:
    """``pack_items`` over a ladder of that many budgets."""
    budgets = [
        key.tokens for key in keys_of(EncoderOptions(max_graphs=num_budgets), config(), (MIN_TOKENS, MAX_TOKENS))
    ]
    replay = {budget: REPLAY_MS + REPLAY_MS_A_TOKEN * budget for budget in budgets}
    cost = PackingCosts(replay, lambda count: EAGER_MS + EAGER_MS_A_TOKEN * count)
    return lambda: pack_items(tokens, budgets, MAX_ITEMS, cost=cost if has_costs else None)


def config(axes: tuple[EncoderAxis, ...] = ()) -> EncoderCudaGraphConfig:
    """An encoder that counts frames."""
    return EncoderCudaGraphConfig(
        ("image",), ("pixels",), 8, patches_per_token=PATCHES_PER_TOKEN, max_frames=32, max_items=MAX_ITEMS, axes=axes
    )


def by_planner(tokens: list[int], *, has_axis: bool) -> Callable[[], object]:
    """A manager's plan over 48 budgets, a planner of its own each time: it remembers what it has planned."""
    axes = (EncoderAxis(*GREATEST, rounds_up=True),) if has_axis else ()
    keys = keys_of(
        EncoderOptions(max_graphs=48 * (len(GREATEST[1]) if has_axis else 1)), config(axes), (MIN_TOKENS, MAX_TOKENS)
    )
    replay = {
        key: REPLAY_MS + REPLAY_MS_A_TOKEN * key.tokens + sum(1e-5 * value for _, value in key.axes)  # type: ignore[operator]
        for key in keys
    }
    sizes = (MIN_TOKENS, 1024, MAX_TOKENS)
    curve = eager_curve(sizes, tuple(EAGER_MS + EAGER_MS_A_TOKEN * size for size in sizes))
    specs = [
        EncoderItemSpec(
            PATCHES_PER_TOKEN * count, count, axes=((GREATEST[0], PATCHES_PER_TOKEN * count),) if has_axis else ()
        )
        for count in tokens
    ]
    planners = iter(
        [BatchPlanner(config(axes), keys, EncoderCosts(replay, {("",): curve}), MAX_TOKENS) for _ in range(ROUNDS)]
    )
    return lambda: next(planners).plan(specs)


def fastest_ms(run: Callable[[], object]) -> float:
    """The fastest of the rounds."""
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return 1e3 * min(found)


def main(items: tuple[int, ...] = ITEMS) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    rows = []
    for count in items:
        tokens = mixed(count)
        runs = [by_tokens(budgets, tokens, has_costs=costs) for budgets, costs in ((48, False), (7, True), (48, True))]
        runs += [by_planner(tokens, has_axis=has_axis) for has_axis in (False, True)]
        rows.append((count, *(f"{fastest_ms(run):.2f}" for run in runs)))
    columns = "items | greedy | 7 budgets | 48 budgets | planner | and an axis"
    Console(width=120).print(table_of(f"ms, the fastest of {ROUNDS}", columns, rows))


if __name__ == "__main__":
    main(tuple(map(int, sys.argv[1:])) or ITEMS)
