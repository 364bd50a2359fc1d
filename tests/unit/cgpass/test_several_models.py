"""Several instances, models and compiles in one process: regional compile, resets, copies.

Every test compares with eager and counts what was compiled, captured and replayed.
"""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import graphpass as gp
from graphpass import BatchDescriptor, GraphRuntime, runtime_of
from graphpass.errors import ContextError
from tests.observed import reached
from tests.unit.cgpass.attended import ATTEND, FULL, Attended, Make, expected_counts
from tests.unit.compiled import BOTH, Compiled, agrees
from tests.unit.models import module

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


@pytest.mark.parametrize("outputs", ["clone", "view"])
def test_blocks_compiled_one_by_one_share_a_callable_and_keep_their_weights(rt: GraphRuntime, outputs: str) -> None:
    fast = OfBlocks(rt, outputs=outputs)
    fast.capture()
    fast.check("NONE", *BOTH, "NONE", *BOTH)
    assert (rt.stats().callables, rt.compiled()) == (1, 2), "one callable, of two regions, for all six"
    counts = {region: c for (region, _, _), c in rt.counts().items()}
    assert sorted(counts) == ["g0.full", "g0.r0", "g0.r2"]
    for region, c in counts.items():
        assert (c.captured, c.static_sets, c.replayed) == (6, 6, 6 * 3), region
        assert c.copied <= c.replayed, "the activation at most, no parameter"
    if outputs == "clone":
        assert counts["g0.full"].copied == 6 * 3


def test_twelve_blocks_at_two_sizes_stage_no_parameter(rt: GraphRuntime) -> None:
    fast = OfBlocks(rt, 12)
    fast.capture(sizes=(4, 2))
    fast.check(sizes=(2, 4))
    assert rt.stats().callables == 1
    assert fast.uses("captured", "static_sets", "replayed") == {(12, 12, 24)}
    assert all(c.copied <= c.replayed for c in rt.counts().values())


def test_blocks_without_a_runtime_share_the_first_ones() -> None:
    fast = OfBlocks(None, dispatch="context", splitting_ops=[])
    x = torch.randn(4, 6)
    agrees(fast(x), fast.model(x).detach())
    (fast.rt,) = {id(runtime_of(block)): runtime_of(block) for block in fast.fast.blocks}.values()
    fast.capture("FULL")
    fast.check("FULL")
    assert fast.uses("captured", "replayed", "static_sets") == {(6, 12, 6)}


def test_blocks_with_runtimes_of_their_own_keep_apart() -> None:
    fast = OfBlocks(None)
    runtimes = [GraphRuntime() for _ in fast.fast.blocks]
    for block, runtime in zip(fast.fast.blocks, runtimes, strict=True):
        block.compile(backend="cgpass", dynamic=True, options={"compiler": "eager", "runtime": runtime})
    x = torch.randn(4, 6)
    with torch.no_grad(), gp.set_forward_context(runtime_mode=FULL, batch_descriptor=BatchDescriptor(4)):
        hidden = x
        for block, runtime in zip(fast.fast.blocks, runtimes, strict=True):
            with runtime.capturing():
                hidden = block(hidden) + hidden
    agrees(hidden, fast.model(x).detach())
    fast.check("FULL", "FULL")
    for runtime in runtimes:
        (counts,) = runtime.counts().values()
        assert (counts.captured, counts.replayed, counts.copied, counts.static_sets) == (1, 3, 3, 1)


def test_a_block_that_dies_takes_its_graph_along(rt: GraphRuntime) -> None:
    fast = OfBlocks(rt, 3, splitting_ops=[])
    fast.capture("FULL")
    del fast.fast.blocks[1], fast.model.blocks[1]
    gc.collect()
    fast.check("FULL")
    assert fast.uses("captured", "static_sets") == {(3, 2)}


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


def test_runtime_of_works_again_after_a_reset(keyed: Make) -> None:
    fast = keyed(Attended(), splitting_ops=[])
    fast.fast = torch.compile(fast.model, backend="cgpass", options={"compiler": "eager"})
    runtimes = []
    for _ in range(2):
        torch.compiler.reset()
        fast(torch.randn(4, 6))
        runtimes.append(runtime_of(fast.fast))
    assert runtimes[0] is runtimes[1], "the runtime belongs to the torch.compile, not to the code it made"
    fast.rt = runtimes[1]
    fast.capture("FULL")
    fast.check("FULL")
    assert fast.uses() == {(1, 2)}


# -- several compiled models


@pytest.mark.parametrize("shared", [True, False], ids=["one runtime", "two runtimes"])
def test_one_class_with_different_options(rt: GraphRuntime, shared: bool) -> None:
    with GraphRuntime() as other:
        whole = Compiled(rt, Attended().eval(), mode="FULL", splitting_ops=[ATTEND])
        second = rt if shared else other
        parts = Compiled(second, Attended().eval(), mode="PIECEWISE", outputs="view", splitting_ops=[ATTEND])
        whole.capture("FULL")
        parts.capture("PIECEWISE")
        for _ in range(3):
            x = torch.randn(4, 6)
            held = whole.at("FULL", 4, x)
            parts.check("PIECEWISE")
            agrees(held, whole.model(x).detach())
        assert whole.tally("FULL") == {("g0.full", 4): (1, 4)}
        graph = "g1" if shared else "g0"
        assert parts.tally("PIECEWISE") == expected_counts("PIECEWISE", 4, (1, 4), graph=graph)
        assert (rt.stats().callables, second.stats().callables) == ((2, 2) if shared else (1, 1))
        with pytest.raises(ContextError, match="not built for runtime mode"):
            whole.check("PIECEWISE")


def test_different_classes_feed_each_other_from_one_pool(keyed: Make) -> None:
    one = Attended().eval()
    conv = nn.Conv1d(1, 2, 3, padding=1)
    two = module(lambda self, x: self.conv(x[:, None]).tanh().sum(1), conv=conv).eval()
    first, second = (keyed(model, outputs="view") for model in (one, two))

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = first.fast(x)
        return hidden, second.fast(hidden)

    chain = keyed(lambda x: (one(x), two(one(x))))
    chain.fast = both
    chain.capture("FULL")
    chain.check(*["FULL"] * 3)
    assert chain.tally("FULL") == {("g0.full", 4): (1, 4), ("g1.full", 4): (1, 4)}


def test_a_deep_copy_compiled_too_has_its_own_weights_in_the_shared_callable(keyed: Make) -> None:
    fast = keyed(Attended().eval())
    twin = keyed(copy.deepcopy(fast.model))
    for mode, each in itertools.product(BOTH, (fast, twin)):
        each.capture(mode)
    with torch.no_grad():
        twin.model.second.weight.mul_(-1)
    for mode, each in itertools.product(BOTH * 2, (fast, twin)):
        each.check(mode)
    assert fast.rt.stats().callables == 1
    assert fast.uses("captured", "static_sets", "replayed") == {(2, 2, 6)}


def test_a_deep_copy_of_a_compiled_model_captures_in_a_runtime_of_its_own(keyed: Make) -> None:
    fast = keyed(Attended().eval())
    fast.capture("FULL")
    copied = copy.deepcopy(fast.fast)
    with torch.no_grad():
        copied.first.weight.mul_(-1)
        copied(torch.randn(4, 6))
    other = keyed(copied._orig_mod)
    other.fast, other.rt = copied, runtime_of(copied)
    assert other.rt is not fast.rt
    other.capture("FULL")
    other.check("FULL")
    fast.check("FULL")
    assert (fast.captured, other.captured) == (1, 1)


def test_one_model_compiled_twice_with_different_options(keyed: Make) -> None:
    model = Attended().eval()
    both = keyed(model), keyed(model, splitting_ops=[])
    for fast in both:
        fast.capture("PIECEWISE")
    for fast in both * 2:
        fast.check("PIECEWISE")
    assert both[0].tally("PIECEWISE") == {(region, 4): (1, 3) for region in ("g0.r0", "g0.r2", "g1.r0")}
