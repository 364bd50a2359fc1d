"""Sizes that recur get graphs of their own on the tape, where rows stand for times."""

from __future__ import annotations

import functools
import gc
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import graphpass as gp
from cgpass.exactgraphs import _with_launches
from graphpass import GraphRuntime
from graphpass.capture.cuda import PROCESS_MEMORY
from graphpass.dispatch.recurring import CALLS_BETWEEN, OwnGraphs, RecurringSize, Times
from tests.threads import in_threads

# A size of 17 pads to 24: 7 rows a call, and a capture counts as 16 * 17 rows.
SIZE, KEY, CALLS = 17, 24, -(-16 * 17 // 7)
MODES = pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE"])


class Rows(nn.Module):
    """Row-wise, so that its batch is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu() * 3).tanh()


class Summing(nn.Module):
    """Written state of every size, whose sum tells whether each call counted once."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x.relu() * 2


def compiled_of(model: Callable[..., Any], rt: GraphRuntime, mode: str = "FULL_AND_PIECEWISE", **options: Any) -> Any:
    splits = ["aten::relu"] if mode == "PIECEWISE" else []
    given = {"compiler": "eager", "runtime": rt, "dispatch": "auto", "mode": mode, "splitting_ops": splits, **options}
    compiled = torch.compile(model, backend="cgpass", dynamic=True, options=given)
    call(compiled, 3)
    call(compiled, 2)
    return compiled


def call(compiled: Callable[..., Any], size: int, times: int = 1, model: Callable[..., Any] | None = None) -> None:
    for _ in range(times):
        x = torch.randn(size, 6)
        with torch.no_grad():
            result = compiled(x)
            if model is not None:
                torch.testing.assert_close(result, model(x))


def exact(rt: GraphRuntime) -> dict[int, int]:
    """{size: replays} of the sizes that have graphs of their own now."""
    found: dict[int, int] = {}
    for (_, _, key), counts in rt.counts().items():
        sizes = dict(key.extra)
        if "exact" in sizes and counts.static_sets:
            size = sizes.get("x[0]", key.num_tokens)
            found[size] = max(found.get(size, 0), counts.replayed)
    return found


@MODES
def test_a_size_gets_a_graph_once_its_padding_has_cost_one(mode: str, rt: GraphRuntime) -> None:
    model = Rows().eval()
    compiled = compiled_of(model, rt, mode)
    call(compiled, KEY, 2)
    call(compiled, SIZE, CALLS, model)
    assert exact(rt) == {}
    call(compiled, SIZE, 1, model)
    assert exact(rt) == {SIZE: 1}
    call(compiled, SIZE, 5, model)
    assert exact(rt) == {SIZE: 6}


def test_results_are_equal_before_and_after(rt: GraphRuntime) -> None:
    """Entry by entry, so that no size rounds in another way: all bits are eager's."""
    compiled = compiled_of(lambda x: (x * 3).sin() + 1, rt)
    call(compiled, KEY, 2)
    for _ in range(2 * CALLS):
        x = torch.randn(SIZE, 6)
        with torch.no_grad():
            assert torch.equal(compiled(x), (x * 3).sin() + 1)
    assert exact(rt)[SIZE] > 1


def test_state_is_written_once_a_call(rt: GraphRuntime) -> None:
    model = Summing().eval()
    compiled = compiled_of(model, rt)
    model.calls.zero_()
    call(compiled, SIZE, 2 * CALLS)
    assert exact(rt)[SIZE] > 1
    assert int(model.calls) == 2 * CALLS


def test_zero_bytes_mean_none(rt: GraphRuntime) -> None:
    compiled = compiled_of(Rows().eval(), rt, graph_bytes=0)
    call(compiled, SIZE, 3 * CALLS)
    assert exact(rt) == {}


def test_beside_declared_sizes_only_with_bytes_of_the_user() -> None:
    declared: dict[str, Any] = {"capture_sizes": {"rows": [8, KEY]}, "compiler": "eager"}
    for options, expected in ((declared, False), ({**declared, "graph_bytes": 1 << 20}, True)):
        graphed = gp.graphed(Rows().eval(), dynamic_dims={"x": {0: "rows"}}, **options)
        call(graphed, KEY, 3)
        call(graphed, SIZE, 2 * CALLS)
        assert bool(exact(graphed.runtime)) is expected
        graphed.close()


def test_a_scope_never_sees_one(rt: GraphRuntime) -> None:
    compiled = compiled_of(Rows().eval(), rt)
    call(compiled, SIZE, CALLS + 3)
    replayed = exact(rt)[SIZE]
    with rt.capturing():
        call(compiled, SIZE, 3)
    assert exact(rt)[SIZE] == replayed
    call(compiled, SIZE)
    assert exact(rt)[SIZE] == replayed + 1


def test_they_do_not_count_towards_max_graphs(rt: GraphRuntime) -> None:
    compiled = compiled_of(Rows().eval(), rt, max_graphs=2)
    call(compiled, KEY, 2)
    call(compiled, SIZE, CALLS + 2)
    assert list(exact(rt)) == [SIZE]
    call(compiled, 12, 3)
    call(compiled, 8, 3)
    assert {key.num_tokens for _, _, key in rt.counts()} == {SIZE, KEY, 12}


@MODES
def test_at_the_bound_another_size_makes_room(mode: str, rt: GraphRuntime) -> None:
    model = Rows().eval()
    compiled = compiled_of(model, rt, mode, graph_bytes=5_000)  # few tapes of this model
    call(compiled, KEY, 2)
    call(compiled, SIZE, CALLS + 2, model)
    first = exact(rt)
    assert list(first) == [SIZE]
    for _ in range(40):
        call(compiled, 18, 10, model)
        call(compiled, 19, 10, model)
    assert SIZE not in exact(rt)
    assert set(exact(rt)) <= {18, 19}
    assert shared_bytes() <= 5_000
    call(compiled, SIZE, 3, model)  # padded again


def shared_bytes() -> int:
    return PROCESS_MEMORY.shared(OwnGraphs, torch.device("cpu")).num_bytes()


def test_a_graph_of_another_runtime_makes_room(rt: GraphRuntime) -> None:
    idle, busy = Rows().eval(), Rows().eval()
    with GraphRuntime() as other:
        first = compiled_of(idle, other, graph_bytes=6_000)
        call(first, SIZE, CALLS + 2, idle)
        assert list(exact(other)) == [SIZE]
        torch.compiler.reset()
        second = compiled_of(busy, rt, graph_bytes=6_000)
        call(second, SIZE, 20 * CALLS, busy)
        assert (list(exact(other)), list(exact(rt))) == ([], [SIZE])
        call(first, SIZE, 3, idle)  # padded again


def test_what_the_bound_leaves_out_is_in_the_report(rt: GraphRuntime) -> None:
    compiled = compiled_of(Rows().eval(), rt, graph_bytes=1)
    call(compiled, SIZE, 2 * CALLS)
    assert exact(rt) == {}
    problems = [problem for problem in rt.report().problems if "graph_bytes" in problem.remedy]
    assert len(problems) == 1
    assert problems[0].places


def test_a_dead_model_leaves_no_bytes() -> None:
    with GraphRuntime() as rt:
        model = Rows().eval()
        compiled = compiled_of(model, rt)
        call(compiled, SIZE, CALLS + 2)
        assert shared_bytes() > 0
        torch.compiler.reset()
        del compiled, model
    gc.collect()
    assert shared_bytes() == 0


def test_new_weights_are_used(rt: GraphRuntime) -> None:
    model = Rows().eval()
    compiled = compiled_of(model, rt)
    call(compiled, SIZE, CALLS + 3, model)
    assert exact(rt)
    model.first.weight = nn.Parameter(torch.randn(12, 6))
    gc.collect()
    call(compiled, SIZE, 4, model)
    assert exact(rt) == {}, "the padded key comes first again"
    call(compiled, SIZE, 2 * CALLS, model)
    assert exact(rt)


def test_weights_that_moved_without_dying_fall_back_to_padding(rt: GraphRuntime) -> None:
    model = Rows().eval()
    compiled = compiled_of(model, rt)
    call(compiled, SIZE, CALLS + 3, model)
    kept = model.first.weight
    model.first.weight = nn.Parameter(torch.randn(12, 6))
    call(compiled, SIZE, 1, model)
    assert exact(rt) == {}
    call(compiled, SIZE, 2 * CALLS, model)
    assert exact(rt) == {}, "two sets of weights have the padded key, so padding keeps the size"
    assert kept is not None


def test_instances_that_share_a_graph_stay_padded(rt: GraphRuntime) -> None:
    """A capture for one would serve no other, so that each would be captured in turn."""
    instances = [Rows().eval(), Rows().eval()]
    for instance in instances:
        options = {"compiler": "eager", "runtime": rt, "dispatch": "auto"}
        instance.compile(backend="cgpass", dynamic=True, options=options)
    for _ in range(2 * CALLS):
        for instance in instances:
            x = torch.randn(SIZE, 6)
            with torch.no_grad():
                torch.testing.assert_close(instance(x), instance.forward(x))
    assert rt.compiled() == 1
    assert not any("exact" in dict(key.extra) for _, _, key in rt.counts())


@pytest.mark.parametrize("num_calls", [300, pytest.param(2000, marks=pytest.mark.soak)])
@MODES
def test_threads_captures_replacements_and_new_weights(mode: str, num_calls: int, rt: GraphRuntime) -> None:
    model = Rows().eval()
    compiled = compiled_of(model, rt, mode, graph_bytes=12_000)
    changes, seen = [0], set[int]()

    def change(number: int) -> None:
        changes[0] += 1  # odd while the weight changes
        if number % 2:
            model.first.weight = nn.Parameter(model.first.weight.detach() * 1.01)
        else:
            model.first.weight.data.mul_(1.01)
        changes[0] += 1

    def run(number: int) -> None:
        rng, contents = random.Random(number), torch.Generator().manual_seed(number)
        for count in range(num_calls):
            if number == 0 and count % 100 == 99:
                change(count // 100)
            x = torch.randn(rng.choice((17, 18, 19, 25, 26, 9)), 6, generator=contents)
            before = changes[0]
            with torch.no_grad():
                result, expected = compiled(x), model(x)
            if before == changes[0] and not before % 2:
                torch.testing.assert_close(result, expected)
            seen.update(exact(rt))

    in_threads(run, 6)
    assert seen, "some size had a graph of its own"
    assert shared_bytes() <= 12_000
    call(compiled, SIZE, 5, model)
    rt.close()
    assert shared_bytes() == 0


def test_at_most_one_in_twenty_calls(rt: GraphRuntime) -> None:
    compiled = compiled_of(Rows().eval(), rt)
    rng, known, captured_at = random.Random(0), 0, []
    for number in range(1500):
        call(compiled, rng.choice((17, 18, 19, 20, 25, 26)))
        if len(exact(rt)) > known:
            known = len(exact(rt))
            captured_at.append(number)
    assert known >= 4
    apart = [later - earlier for earlier, later in itertools.pairwise(captured_at)]
    assert min(apart) >= CALLS_BETWEEN


@pytest.mark.parametrize(("replay", "run", "expected"), [(8e-6, 2e-6, False), (20e-3, 12e-3, True)])
def test_a_run_without_a_graph_counts_its_launches(replay: float, run: float, expected: bool) -> None:
    """On the device alone, a few small kernels may be faster than a graph of them."""
    replayed, without = Times(is_proportional=True), Times(is_proportional=False)
    replayed.add(8, lambda: replay)
    without.add(8, functools.partial(_with_launches, lambda: run))
    assert RecurringSize(5, 8, replayed, without, asks_at=3).is_faster_without() == expected
