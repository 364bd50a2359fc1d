"""torch.compile as users use it: graph breaks, dynamic shapes, regional compile, resets, several models.

Every test compares with eager and counts what was compiled, captured and replayed.
"""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported

import graphpass as gp
from graphpass import BatchDescriptor, CaptureError, CUDAGraphMode, GraphRuntime, runtime_of

ATTEND = "cgpasstest::attend"
FULL = CUDAGraphMode.FULL
Run = Callable[..., Any]
BOTH = ("PIECEWISE", "FULL")


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """``capturing()`` collects garbage at its end; here it need not look at what torch.compile imported."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def compiled_with(rt: GraphRuntime, model: Callable[..., Any], *, options: Any = None, **how: Any) -> Any:
    """``torch.compile`` of ``model`` for ``rt``; dynamic unless said otherwise."""
    given = {"compiler": "eager", "splitting_ops": [ATTEND], "runtime": rt, **(options or {})}
    return torch.compile(model, backend="cgpass", options=given, **{"dynamic": True, **how})


def endings(rt: GraphRuntime) -> dict[str, str]:
    """{callable: why Dynamo ended its graph} for those that a graph break ended."""
    return {row[0].removesuffix(".end"): row[-1] for row in rt.report()["Regions"].rows if row[0].endswith(".end")}


def agrees(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want)


def expected_counts(mode: str, size: int, counts: tuple[int, int], graph: str = "g0") -> dict[Any, tuple[int, int]]:
    """The tally of one graph with a splitting op in its middle: the whole, or the regions before and after it."""
    regions = ["full"] if mode == "FULL" else ["r0", "r2"]
    return {(f"{graph}.{region}", size): counts for region in regions}


class Attended(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.ops.cgpasstest.attend(self.first(x))).relu()


# -- fullgraph and graph breaks


def test_fullgraph_is_one_callable(rt: GraphRuntime, at_key: Run, tally: Run) -> None:
    model = Attended()
    compiled = compiled_with(rt, model, fullgraph=True)
    with rt.capturing():
        for mode in BOTH:
            at_key(compiled, mode, 4, torch.randn(4, 6))
    for mode in BOTH * 2:
        x = torch.randn(4, 6)
        agrees(at_key(compiled, mode, 4, x), model(x).detach())
    assert rt.stats().callables == 1
    assert endings(rt) == {}
    for mode in BOTH:
        assert tally(rt, mode) == expected_counts(mode, 4, (1, 3))


def breaks_explicitly(x: torch.Tensor) -> torch.Tensor:
    x = x * 2 + 1
    torch._dynamo.graph_break()
    return x.relu() - 1


def breaks_at_print(x: torch.Tensor) -> torch.Tensor:
    x = x * 2 + 1
    print("rows", x.shape[1])  # noqa: T201 - what users leave in their models
    return x.relu() - 1


@torch.compiler.disable
def not_compiled(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0)


def breaks_at_disabled(x: torch.Tensor) -> torch.Tensor:
    x = x * 2 + 1
    x = not_compiled(x)
    return x.relu() - 1


def breaks_at_a_branch(x: torch.Tensor) -> torch.Tensor:
    x = x * 2 + 1
    if x.sum() > 0:
        return x.relu() - 1
    return x.cos() + 2


BREAKS = [
    (breaks_explicitly, "graph_break"),
    (breaks_at_print, "builtin operator"),
    (breaks_at_disabled, "disable"),
    (breaks_at_a_branch, "jump"),
]


@pytest.mark.parametrize(("model", "why"), BREAKS, ids=[why for _, why in BREAKS])
def test_each_side_of_a_graph_break_has_its_own_full(
    rt: GraphRuntime, at_key: Run, tally: Run, capsys: pytest.CaptureFixture[str], model: Callable[..., Any], why: str
) -> None:
    compiled = compiled_with(rt, model)
    with rt.capturing():
        for size in (8, 4):
            at_key(compiled, "FULL", size, torch.rand(size, 6))
    for size in (4, 8, 4):
        x = torch.rand(size, 6)
        agrees(at_key(compiled, "FULL", size, x), model(x))
    assert tally(rt, "FULL") == {
        ("g0.full", 8): (1, 2), ("g1.full", 8): (1, 2), ("g0.full", 4): (1, 3), ("g1.full", 4): (1, 3)
    }  # fmt: skip
    ((name, reason),) = endings(rt).items()
    assert name == "g0"
    assert why in reason.lower()
    assert f"test_torch_compile_usage.py:{model.__code__.co_firstlineno + 2}" in reason
    assert capsys.readouterr().out.count("rows 6") == (2 + 3 + 3 if model is breaks_at_print else 0)


@pytest.mark.parametrize(("model", "why"), BREAKS[2:], ids=[why for _, why in BREAKS[2:]])
def test_fullgraph_refuses_graph_breaks_before_the_backend(
    rt: GraphRuntime, model: Callable[..., Any], why: str
) -> None:
    with pytest.raises(Unsupported):
        compiled_with(rt, model, fullgraph=True)(torch.rand(4, 6))
    assert rt.callables() == ()


def test_both_branches_are_graphs_of_their_own(rt: GraphRuntime, at_key: Run, tally: Run) -> None:
    compiled = compiled_with(rt, breaks_at_a_branch)
    above, below = torch.rand(4, 6), -torch.rand(4, 6) - 1
    with rt.capturing():
        for mode, x in itertools.product(BOTH, (above, below)):
            agrees(at_key(compiled, mode, 4, x), breaks_at_a_branch(x))
    for mode, x in itertools.product(BOTH, (below * 2, above * 2, below * 3)):
        agrees(at_key(compiled, mode, 4, x), breaks_at_a_branch(x))
    for mode, region in (("FULL", "full"), ("PIECEWISE", "r0")):
        assert tally(rt, mode) == {
            (f"g0.{region}", 4): (1, 5), (f"g1.{region}", 4): (1, 2), (f"g2.{region}", 4): (1, 3)
        }  # fmt: skip


def test_a_branch_that_was_not_captured_is_refused_not_run_eagerly(rt: GraphRuntime, at_key: Run) -> None:
    compiled = compiled_with(rt, breaks_at_a_branch)
    at_key(compiled, "FULL", 4, torch.rand(4, 6), capture=rt)
    below = -torch.rand(4, 6) - 1
    with pytest.raises(CaptureError, match=r"g2\.full has no graph"):
        at_key(compiled, "FULL", 4, below)
    with rt.capturing():
        agrees(at_key(compiled, "FULL", 4, below), breaks_at_a_branch(below))


def test_a_break_in_every_layer_is_two_callables(rt: GraphRuntime, at_key: Run) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            torch._dynamo.graph_break()
            return x.relu()

    model = nn.Sequential(*[Layer() for _ in range(3)])
    compiled = compiled_with(rt, model)
    at_key(compiled, "FULL", 4, torch.randn(4, 6), capture=rt)
    for _ in range(2):
        x = torch.randn(4, 6)
        agrees(at_key(compiled, "FULL", 4, x), model(x).detach())
    assert {region: (c.captured, c.static_sets, c.replayed) for (region, _, _), c in rt.counts().items()} == {
        "g0.full": (3, 3, 9), "g1.full": (1, 1, 9)
    }, "the half with weights once a layer, the other once"  # fmt: skip


# -- dynamic shapes


@pytest.mark.parametrize(
    ("dynamic", "callables"),
    [(True, 2), (False, 4), (None, 3)],
    ids=["True: and size 1", "False: each size", "None: static, dynamic, size 1"],
)
def test_dynamic_true_false_and_none(rt: GraphRuntime, at_key: Run, dynamic: bool | None, callables: int) -> None:
    model = Attended()
    compiled = compiled_with(rt, model, dynamic=dynamic)
    with rt.capturing():
        for size, mode in itertools.product((8, 4, 6, 1), BOTH):
            x = torch.randn(size, 6)
            agrees(at_key(compiled, mode, size, x), model(x).detach())
    assert rt.stats().callables == callables
    captured = rt.stats().captured
    assert captured == 4 * 3, "each key once, whichever code serves it"
    for size, mode in itertools.product((1, 6, 4, 8, 4), BOTH):
        x = torch.randn(size, 6)
        agrees(at_key(compiled, mode, size, x), model(x).detach())
    assert rt.stats().callables == callables
    # Dynamo's newest code that fits serves: with None, size 8 moves from the static graph to the dynamic one.
    moved = 3 if dynamic is None else 0
    assert rt.stats().captured == captured + moved
    again = [what for _, what in rt.report()["Notes"].rows if "captured once more" in what]
    assert len(again) == moved


@pytest.mark.parametrize("mark", [torch._dynamo.mark_dynamic, torch._dynamo.maybe_mark_dynamic])
def test_a_marked_dimension_is_dynamic_from_the_first_call(
    rt: GraphRuntime, at_key: Run, mark: Callable[..., None]
) -> None:
    model = Attended()
    compiled = compiled_with(rt, model, dynamic=None)
    with rt.capturing():
        for size, mode in itertools.product((8, 4, 2), BOTH):
            x = torch.randn(size, 6)
            mark(x, 0)
            agrees(at_key(compiled, mode, size, x), model(x).detach())
    assert (rt.stats().callables, rt.compiled()) == (1, 2)
    for size, mode in itertools.product((2, 8, 4), BOTH):
        x = torch.randn(size, 6)
        agrees(at_key(compiled, mode, size, x), model(x).detach())
    assert rt.stats().callables == 1, "unmarked inputs of these sizes use the same code"
    assert rt.stats().captured == 3 * 3


def test_a_marked_dimension_names_no_other_size(rt: GraphRuntime, at_key: Run) -> None:
    compiled = compiled_with(rt, Attended(), dynamic=None)
    x = torch.randn(8, 6)
    torch._dynamo.mark_dynamic(x, 0)
    at_key(compiled, "FULL", 8, x, capture=rt)
    with pytest.raises((CaptureError, gp.ShapeError)):
        at_key(compiled, "FULL", 8, torch.randn(5, 6))
    assert rt.stats().replayed == 1


def test_maybe_mark_dynamic_yields_to_a_model_that_fixes_the_size(rt: GraphRuntime, at_key: Run, tally: Run) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x.relu() * {4: 2, 8: 3}[x.shape[0]]

    compiled = compiled_with(rt, model, dynamic=None)
    with rt.capturing():
        for size in (8, 4):
            x = torch.randn(size, 6)
            torch._dynamo.maybe_mark_dynamic(x, 0)
            agrees(at_key(compiled, "FULL", size, x), model(x))
    for size in (4, 8):
        x = torch.randn(size, 6)
        agrees(at_key(compiled, "FULL", size, x), model(x))
    assert tally(rt, "FULL") == {("g0.full", 8): (1, 2), ("g1.full", 4): (1, 2)}


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
    compile_blocks(model)
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
            gone += [weakref.ref(reached[0]) for reached in scope.reached]
        scope.reached.clear()
        scope.plans.clear()
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


def test_after_a_reset_a_runtime_of_its_own_is_found_again(at_key: Run) -> None:
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
        whole = compiled_with(first, one, options={"mode": "FULL", "outputs": "clone"})
        parts = compiled_with(second, two, options={"mode": "PIECEWISE", "outputs": "view"})
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
        with pytest.raises(gp.ContextError, match="not built for runtime mode"):
            at_key(whole, "PIECEWISE", 4, x)


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x[:, None]).tanh().sum(1)


def test_different_classes_feed_each_other_from_one_pool(rt: GraphRuntime, at_key: Run, tally: Run) -> None:
    one, two = Attended().eval(), Convolved().eval()
    first, second = (compiled_with(rt, model, options={"outputs": "view"}) for model in (one, two))

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
    whole = compiled_with(rt, model, options={"splitting_ops": []})
    with rt.capturing():
        for compiled in (split, whole):
            at_key(compiled, "PIECEWISE", 4, torch.randn(4, 6))
    for _ in range(2):
        x = torch.randn(4, 6)
        for compiled in (split, whole):
            agrees(at_key(compiled, "PIECEWISE", 4, x), model(x).detach())
    regions = {region: (c.captured, c.replayed) for (region, _, _), c in rt.counts().items()}
    assert regions == {"g0.r0": (1, 3), "g0.r2": (1, 3), "g1.r0": (1, 3)}


# -- advice


def test_nothing_is_logged_twice_for_one_compile(
    rt: GraphRuntime, at_key: Run, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = compiled_with(rt, Attended(), dynamic=None)
    with caplog.at_level(logging.INFO, "graphpass"), rt.capturing():
        for size in (8, 4, 6, 8, 4, 6):
            at_key(compiled, "FULL", size, torch.randn(size, 6))
    said = [record.message for record in caplog.records if record.name == "graphpass"]
    assert len(said) == len(set(said))
