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
from tests.unit.cgpass.attended import ATTEND, BOTH, FULL, Attended, Run, agrees, compiled_with, expected_counts

# -- regional compile


class Blocks(nn.Module):
    def __init__(self, number: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attended() for _ in range(number)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) + x
        return x


def compile_blocks(model: Blocks, **options: Any) -> Blocks:
    for block in model.blocks:
        block.compile(backend="cgpass", dynamic=True, options={"compiler": "eager", **options})
    return model


@pytest.fixture
def six_blocks() -> tuple[Blocks, Blocks]:
    """A model to compile, and its eager twin."""
    torch.manual_seed(0)
    eager = Blocks().eval()
    return copy.deepcopy(eager), eager


@pytest.mark.parametrize("outputs", ["clone", "view"])
def test_blocks_compiled_one_by_one_share_a_callable_and_keep_their_weights(
    rt: GraphRuntime, at_key: Run, six_blocks: tuple[Blocks, Blocks], outputs: str
) -> None:
    model, eager = six_blocks
    compile_blocks(model, runtime=rt, splitting_ops=[ATTEND], outputs=outputs)
    with rt.capturing():
        for mode in BOTH:
            at_key(model, mode, 4, torch.randn(4, 6))
    for mode in ("NONE", *BOTH, "NONE", *BOTH):
        x = torch.randn(4, 6)
        agrees(at_key(model, mode, 4, x), eager(x).detach())
    assert (rt.stats().callables, rt.compiled()) == (1, 2), "one callable, of two regions, for all six"
    counts = {region: c for (region, _, _), c in rt.counts().items()}
    assert sorted(counts) == ["g0.full", "g0.r0", "g0.r2"]
    for region, c in counts.items():
        assert (c.captured, c.static_sets, c.replayed) == (6, 6, 6 * 3), region
        assert c.copied <= c.replayed, "the activation at most, no parameter"
    if outputs == "clone":
        assert counts["g0.full"].copied == 6 * 3


def test_twelve_blocks_at_two_sizes_stage_no_parameter(rt: GraphRuntime, at_key: Run) -> None:
    torch.manual_seed(0)
    eager = Blocks(12).eval()
    model = compile_blocks(copy.deepcopy(eager), runtime=rt, splitting_ops=[ATTEND])
    with rt.capturing():
        for mode, size in itertools.product(BOTH, (4, 2)):
            at_key(model, mode, size, torch.randn(size, 6))
    for mode, size in itertools.product(BOTH, (2, 4)):
        x = torch.randn(size, 6)
        agrees(at_key(model, mode, size, x), eager(x).detach())
    assert rt.stats().callables == 1
    for (region, _, key), c in rt.counts().items():
        assert (c.captured, c.static_sets, c.replayed) == (12, 12, 24), (region, key)
        assert c.copied <= c.replayed, (region, key)


def test_blocks_without_a_runtime_share_the_first_ones(at_key: Run, six_blocks: tuple[Blocks, Blocks]) -> None:
    model, eager = six_blocks
    compile_blocks(model, dispatch="context")
    x = torch.randn(4, 6)
    with torch.no_grad():
        agrees(model(x), eager(x))
    runtimes = {id(runtime_of(block)): runtime_of(block) for block in model.blocks}
    (runtime,) = runtimes.values()
    at_key(model, "FULL", 4, x, capture=runtime)
    agrees(at_key(model, "FULL", 4, x + 1), eager(x + 1).detach())
    (counts,) = runtime.counts().values()
    assert (counts.captured, counts.replayed, counts.static_sets) == (6, 12, 6)


def test_blocks_with_runtimes_of_their_own_keep_apart(at_key: Run, six_blocks: tuple[Blocks, Blocks]) -> None:
    model, eager = six_blocks
    runtimes = [GraphRuntime() for _ in model.blocks]
    for block, runtime in zip(model.blocks, runtimes, strict=True):
        block.compile(backend="cgpass", dynamic=True, options={"compiler": "eager", "runtime": runtime})
    x = torch.randn(4, 6)
    with torch.no_grad(), gp.set_forward_context(runtime_mode=FULL, batch_descriptor=BatchDescriptor(4)):
        hidden = x
        for block, runtime in zip(model.blocks, runtimes, strict=True):
            with runtime.capturing():
                hidden = block(hidden) + hidden
    agrees(hidden, eager(x).detach())
    for _ in range(2):
        x = torch.randn(4, 6)
        agrees(at_key(model, "FULL", 4, x), eager(x).detach())
    for runtime in runtimes:
        (counts,) = runtime.counts().values()
        assert (counts.captured, counts.replayed, counts.copied, counts.static_sets) == (1, 3, 3, 1)


def test_a_block_that_dies_takes_its_graph_along(rt: GraphRuntime, at_key: Run) -> None:
    torch.manual_seed(0)
    eager = Blocks(3).eval()
    model = compile_blocks(copy.deepcopy(eager), runtime=rt)
    at_key(model, "FULL", 4, torch.randn(4, 6), capture=rt)
    del model.blocks[1], eager.blocks[1]
    gc.collect()
    x = torch.randn(4, 6)
    agrees(at_key(model, "FULL", 4, x), eager(x).detach())
    (counts,) = rt.counts().values()
    assert (counts.captured, counts.static_sets) == (3, 2)


# -- reset


def test_after_a_reset_the_old_callables_go_and_the_runtime_captures_again(
    rt: GraphRuntime, at_key: Run, tally: Run
) -> None:
    model = Attended()
    compiled = compiled_with(rt, model)
    gone: list[weakref.ref[Any]] = []
    for round_ in range(2):
        with rt.capturing() as scope:
            for mode in BOTH:
                at_key(compiled, mode, 4, torch.randn(4, 6))
            gone += [weakref.ref(reached.callable) for reached in scope.reached]
        scope.reached.clear()
        del scope
        for mode in BOTH:
            x = torch.randn(4, 6)
            agrees(at_key(compiled, mode, 4, x), model(x).detach())
            assert tally(rt, mode) == expected_counts(mode, 4, (1, 2), graph=f"g{round_}")
        torch.compiler.reset()
        gc.collect()
        assert [reference() for reference in gone] == [None] * 2 * (round_ + 1)
        assert rt.counts() == {}
        assert rt.buffer_bytes() == 0
    assert rt.stats().callables == 2


def test_runtime_of_works_again_after_a_reset(at_key: Run) -> None:
    model = Attended()
    compiled = torch.compile(model, backend="cgpass", options={"compiler": "eager"})
    with torch.no_grad():
        compiled(torch.randn(4, 6))
    before = runtime_of(compiled)
    torch.compiler.reset()
    with torch.no_grad():
        compiled(torch.randn(4, 6))
    runtime = runtime_of(compiled)
    assert runtime is before, "the runtime belongs to the torch.compile, not to the code it made"
    at_key(compiled, "FULL", 4, torch.randn(4, 6), capture=runtime)
    x = torch.randn(4, 6)
    agrees(at_key(compiled, "FULL", 4, x), model(x).detach())
    assert [(c.captured, c.replayed) for c in runtime.counts().values()] == [(1, 2)]


# -- several compiled models


@pytest.mark.parametrize("shared", [True, False], ids=["one runtime", "two runtimes"])
def test_one_class_with_different_options(at_key: Run, shared: bool) -> None:
    one, two = Attended().eval(), Attended().eval()
    with GraphRuntime() as first, GraphRuntime() as other:
        second = first if shared else other
        whole = compiled_with(first, one, mode="FULL", outputs="clone")
        parts = compiled_with(second, two, mode="PIECEWISE", outputs="view")
        at_key(whole, "FULL", 4, torch.randn(4, 6), capture=first)
        at_key(parts, "PIECEWISE", 4, torch.randn(4, 6), capture=second)
        for _ in range(3):
            x, y = torch.randn(4, 6), torch.randn(4, 6)
            held = at_key(whole, "FULL", 4, x)
            agrees(at_key(parts, "PIECEWISE", 4, y), two(y).detach())
            agrees(held, one(x).detach())
        name = "g1" if shared else "g0"
        assert [(region, c.captured, c.replayed) for (region, _, _), c in first.counts().items()][:1] == [
            ("g0.full", 1, 4)
        ]
        assert [(region, c.captured, c.replayed) for (region, _, _), c in second.counts().items()][-2:] == [
            (f"{name}.r0", 1, 4), (f"{name}.r2", 1, 4)
        ]  # fmt: skip
        assert (first.stats().callables, second.stats().callables) == ((2, 2) if shared else (1, 1))
        with pytest.raises(gp.errors.ContextError, match="not built for runtime mode"):
            at_key(whole, "PIECEWISE", 4, x)


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x[:, None]).tanh().sum(1)


def test_different_classes_feed_each_other_from_one_pool(rt: GraphRuntime, at_key: Run, tally: Run) -> None:
    one, two = Attended().eval(), Convolved().eval()
    first, second = (compiled_with(rt, model, outputs="view") for model in (one, two))

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = first(x)
        return hidden, second(hidden)

    at_key(both, "FULL", 4, torch.randn(4, 6), capture=rt)
    for _ in range(3):
        x = torch.randn(4, 6)
        hidden, out = at_key(both, "FULL", 4, x)
        agrees(hidden, one(x).detach())
        agrees(out, two(one(x)).detach())
    assert tally(rt, "FULL") == {("g0.full", 4): (1, 4), ("g1.full", 4): (1, 4)}


def test_a_deep_copy_compiled_too_has_its_own_weights_in_the_shared_callable(rt: GraphRuntime, at_key: Run) -> None:
    model = Attended().eval()
    twin = copy.deepcopy(model)
    compiled, compiled_twin = compiled_with(rt, model), compiled_with(rt, twin)
    with rt.capturing():
        for mode, fast in itertools.product(BOTH, (compiled, compiled_twin)):
            at_key(fast, mode, 4, torch.randn(4, 6))
    with torch.no_grad():
        twin.second.weight.mul_(-1)
    for mode in BOTH * 2:
        x = torch.randn(4, 6)
        agrees(at_key(compiled, mode, 4, x), model(x).detach())
        agrees(at_key(compiled_twin, mode, 4, x), twin(x).detach())
    assert rt.stats().callables == 1
    assert {(c.captured, c.static_sets, c.replayed) for c in rt.counts().values()} == {(2, 2, 6)}


def test_a_deep_copy_of_a_compiled_model_captures_in_a_runtime_of_its_own(rt: GraphRuntime, at_key: Run) -> None:
    compiled = compiled_with(rt, Attended().eval())
    at_key(compiled, "FULL", 4, torch.randn(4, 6), capture=rt)
    copied = copy.deepcopy(compiled)
    with torch.no_grad():
        copied.first.weight.mul_(-1)
        copied(torch.randn(4, 6))
    other = runtime_of(copied)
    assert other is not rt
    at_key(copied, "FULL", 4, torch.randn(4, 6), capture=other)
    x = torch.randn(4, 6)
    agrees(at_key(copied, "FULL", 4, x), copied._orig_mod(x).detach())
    agrees(at_key(compiled, "FULL", 4, x), compiled._orig_mod(x).detach())
    assert (rt.stats().captured, other.stats().captured) == (1, 1)


def test_one_model_compiled_twice_with_different_options(at_key: Run, rt: GraphRuntime) -> None:
    model = Attended().eval()
    split = compiled_with(rt, model)
    whole = compiled_with(rt, model, splitting_ops=[])
    with rt.capturing():
        for compiled in (split, whole):
            at_key(compiled, "PIECEWISE", 4, torch.randn(4, 6))
    for _ in range(2):
        x = torch.randn(4, 6)
        for compiled in (split, whole):
            agrees(at_key(compiled, "PIECEWISE", 4, x), model(x).detach())
    regions = {region: (c.captured, c.replayed) for (region, _, _), c in rt.counts().items()}
    assert regions == {"g0.r0": (1, 3), "g0.r2": (1, 3), "g1.r0": (1, 3)}
