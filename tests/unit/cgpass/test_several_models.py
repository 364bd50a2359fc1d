"""Several instances, models and compiles in one process: regional compile, resets, copies.

Every test compares with eager and counts what was compiled, captured and replayed.
"""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import torch
from torch import nn

from graphpass import GraphRuntime
from tests.observed import reached
from tests.unit.cgpass.attended import ATTEND, Attended, Make, expected_counts
from tests.unit.compiled import BOTH, Compiled

# -- regional compile


class Blocks(nn.Module):
    def __init__(self, number: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Attended() for _ in range(number)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) + x
        return x


class OfBlocks(Compiled):
    """A model whose blocks are compiled one by one, and its eager twin."""

    def __init__(self, rt: GraphRuntime | None, number: int = 6, **options: Any) -> None:
        given = {"splitting_ops": [ATTEND], "compiler": "eager", **options, **({"runtime": rt} if rt else {})}
        super().__init__(rt or GraphRuntime(), Blocks(number).eval())
        self.fast: Any = copy.deepcopy(self.model)
        for block in self.fast.blocks:
            block.compile(backend="cgpass", dynamic=True, options=given)


def test_blocks_compiled_one_by_one_share_a_callable_and_keep_their_weights(rt: GraphRuntime) -> None:
    fast = OfBlocks(rt)
    fast.capture()
    fast.check("NONE", *BOTH, "NONE", *BOTH)
    assert (rt.stats().callables, rt.compiled()) == (1, 2), "one callable, of two regions, for all six"
    counts = {region: c for (region, _, _), c in rt.counts().items()}
    assert sorted(counts) == ["g0.full", "g0.r0", "g0.r2"]
    for region, c in counts.items():
        assert (c.captured, c.static_sets, c.replayed) == (6, 6, 6 * 3), region
        assert c.copied <= c.replayed, "the activation at most, no parameter"
    assert counts["g0.full"].copied == 6 * 3


# -- reset


def test_after_a_reset_the_old_callables_go_and_the_runtime_captures_again(keyed: Make) -> None:
    fast = keyed(Attended())
    gone: list[weakref.ref[Any]] = []
    for round_ in range(2):
        with torch.no_grad(), fast.rt.capturing():
            for mode in BOTH:
                calls = reached(
                    fast.rt, lambda: fast.fast(torch.randn(4, 6)), runtime_mode=mode, batch_descriptor=fast.key(4)
                )
                gone += [weakref.ref(call.callable) for call in calls]
        del calls
        fast.check()
        for mode in BOTH:
            assert fast.tally(mode) == expected_counts(mode, 4, (1, 2), graph=f"g{round_}")
        torch.compiler.reset()
        gc.collect()
        assert [reference() for reference in gone] == [None] * 2 * (round_ + 1)
        assert fast.rt.counts() == {}
        assert fast.rt.buffer_bytes() == 0
    assert fast.rt.stats().callables == 2
