"""Addresses: what a graph may bake in, what is staged, and what happens when a static input moves or dies."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from graphpass import CUDAGraphWrapper, GraphRuntime
from graphpass.capture import CapturePolicy, Counts
from graphpass.context import set_forward_context
from graphpass.errors import CaptureError, StaticInputError
from graphpass.keys import BatchDescriptor, CUDAGraphMode

X = torch.arange(8.0)


# -- staged inputs -----------------------------------------------------------------------------------------------------


def test_positional_keyword_and_nested_inputs_are_staged(rig: Any) -> None:
    def region(x: Any, pair: Any, *, table: Any, scale: Any = None) -> Any:
        return {"sum": x + pair[0] * pair[1][0], "table": [table["a"] - table["b"], scale * 2]}

    def arguments(step: float) -> tuple[tuple[Any, ...], dict[str, Any]]:
        make = lambda k: torch.full((4,), step + k)  # noqa: E731
        return (make(0), (make(1), [make(2)])), {"table": {"a": make(3), "b": make(4) * 2}, "scale": make(5)}

    wrapper = rig.wrap(region)
    args, kwargs = arguments(0.0)
    rig.capture(wrapper, *args, **kwargs)
    for step in (1.0, 2.0):
        args, kwargs = arguments(step)
        got = rig.call(wrapper, *args, **kwargs)
        want = region(*args, **kwargs)
        assert torch.equal(got["sum"], want["sum"])
        assert all(map(torch.equal, got["table"], want["table"]))
    assert rig.counts(wrapper) == Counts(1, 1, 3, 18, 1)


def test_another_structure_is_another_graph(rig: Any) -> None:
    wrapper = rig.captured(rig.wrap(lambda pair: pair[0] + pair[1]), (X, X * 2))
    with pytest.raises(CaptureError, match="this key with other arguments"):
        rig.call(wrapper, [X, X * 2])
    rig.capture(wrapper, [X, X * 2])
    assert torch.equal(rig.call(wrapper, (X, X * 3)), X * 4)
    assert rig.counts(wrapper).captured == 2


def test_the_callers_tensor_may_move_and_die(rig: Any) -> None:
    wrapper = rig.captured(rig.wrap(lambda x: x * 2), torch.ones(1000))
    kept = []
    for step in range(20):
        kept.append(torch.full((1000,), float(step)))
        assert torch.equal(rig.call(wrapper, torch.full((1000,), float(step))), kept[-1] * 2)


def test_inputs_that_share_storage_share_one_buffer(rig: Any) -> None:
    def region(whole: Any, head: Any, tail: Any) -> Any:
        head.add_(100)
        tail.mul_(2)
        return whole * 1

    def views(base: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return base[2:12], base[2:6], base[5:12:3]

    wrapper = rig.wrap(region, mutated_inputs=[1, 2])
    for step in range(3):
        memory, eager_memory = torch.arange(16.0) * (step + 1), torch.arange(16.0) * (step + 1)
        got = rig.capture(wrapper, *views(memory)) if step == 0 else rig.call(wrapper, *views(memory))
        assert torch.equal(got, region(*views(eager_memory)))
        assert torch.equal(memory, eager_memory)
    assert rig.counts(wrapper) == Counts(1, 1, 3, 9, 1)
    assert rig.runtime.buffer_bytes() == 256  # one buffer of ten floats, rounded up, not three


def test_another_alias_pattern_is_another_graph(rig: Any) -> None:
    def region(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 1

    wrapper = rig.wrap(region, mutated_inputs=[0])
    apart, other = torch.zeros(4), torch.zeros(4)
    assert torch.equal(rig.capture(wrapper, apart, other), torch.zeros(4))
    memory = torch.zeros(4)
    with pytest.raises(CaptureError, match="share memory in another way"):
        rig.call(wrapper, memory, memory)
    assert torch.equal(memory, torch.zeros(4))
    assert torch.equal(rig.capture(wrapper, memory, memory), torch.ones(4))
    long = torch.zeros(6)
    assert torch.equal(rig.capture(wrapper, long[:4], long[2:]), torch.tensor([1.0, 1.0, 0.0, 0.0]))
    assert rig.counts(wrapper) == Counts(warmed=3, captured=3, replayed=3, copied=6, static_sets=1)


# -- static inputs -----------------------------------------------------------------------------------------------------


def test_each_set_of_static_inputs_has_its_graph(rig: Any) -> None:
    wrapper = rig.wrap(lambda x, weight: x * weight, static_inputs=[1], input_names=("x", "weight"), lazy=True)
    weights = [torch.full((8,), float(n)) for n in range(4)]
    rig.capture(wrapper, X, weights[0])
    for weight in weights[1:]:
        assert torch.equal(rig.call(wrapper, X, weight), X * weight)
    assert rig.counts(wrapper) == Counts(warmed=4, captured=4, replayed=4, copied=4, static_sets=4)
    for weight in weights:
        weight.add_(10)
        assert torch.equal(rig.call(wrapper, X, weight), X * weight)
    assert rig.counts(wrapper) == Counts(warmed=4, captured=4, replayed=8, copied=8, static_sets=4)
    (noted,) = [times for text, times in rig.runtime.notes.items() if "static inputs moved" in text]
    assert noted == 3, "one for each further set"


def test_what_keeps_moving_is_staged(rig: Any) -> None:
    wrapper = rig.wrap(lambda x, w, v: x * w + v, static_inputs=[1, 2], input_names=("x", "w", "v"), lazy=True)
    steady = torch.ones(8)
    weights = [torch.full((8,), float(n)) for n in range(12)]
    rig.capture(wrapper, X, weights[0], steady)
    for weight in weights[1:]:
        assert torch.equal(rig.call(wrapper, X, weight, steady), X * weight + 1)
    # Four sets, then one graph that copies `w` and still reads `v` in place.
    assert rig.counts(wrapper) == Counts(warmed=5, captured=5, replayed=12, copied=4 + 8 * 2, static_sets=5)
    assert "8 tokens (w): static inputs keep moving, and are copied from now on" in rig.notes()
    steady.fill_(7)
    assert torch.equal(rig.call(wrapper, X, weights[1], steady), X + 7)
    assert torch.equal(rig.call(wrapper, X, weights[9], steady), X * 9 + 7)
    assert rig.counts(wrapper).captured == 5


def test_a_moved_input_is_refused_by_name_under_on_moved_input_error(rig: Any) -> None:
    wrapper = rig.wrap(
        lambda x, w: x * w, static_inputs=[1], input_names=("x", "positions"), on_moved_input="error", name="g0.full"
    )
    weight, other = torch.ones(8), torch.full((8,), 3.0)
    rig.capture(wrapper, X, weight)
    with pytest.raises(StaticInputError) as refused:
        rig.call(wrapper, X, other)
    for text in ("'positions'", "g0.full", hex(weight.data_ptr()), hex(other.data_ptr()), "on_moved_input='copy'"):
        assert text in str(refused.value)
    assert rig.counts(wrapper) == Counts(1, 1, 1, 1, 1)
    assert torch.equal(rig.call(wrapper, X, weight), X)
    assert torch.equal(rig.capture(wrapper, X, other), X * 3)  # a capture was asked for


def test_one_view_of_static_memory_is_not_another(rig: Any) -> None:
    """Same address, other shape or strides: the graph would read what it read at capture."""
    buffer = torch.arange(16.0)
    wrapper = rig.wrap(lambda x, weight: x * weight.sum(), static_inputs=[1], input_names=("x", "weight"))
    rig.capture(wrapper, X, buffer[:8])
    for other in (buffer[:4], buffer[::2], buffer[:8].view(2, 4), buffer[:8].view(torch.int32)):
        with pytest.raises(ValueError, match="static input weight of region has another layout"):
            rig.call(wrapper, X, other)
    assert torch.equal(rig.call(wrapper, X, buffer[:8]), X * 28)


# -- lifetimes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_when_a_parameter_dies_its_graph_goes(rig: Any, kind: str, opaque: bool) -> None:
    wrapper = rig.wrap(lambda x, w: x * w, module_inputs=[1] if kind == "buffer" else [])
    wrapper.unwrap().opaque = opaque
    make = torch.nn.Parameter if kind == "parameter" else torch.Tensor.clone
    first, second, third = (make(torch.full((8,), value)) for value in (2.0, 3.0, 1.0))
    with torch.no_grad():
        rig.capture(wrapper, X, first)
        rig.capture(wrapper, X, second)
        assert rig.counts(wrapper).static_sets == 2
        generation = rig.runtime.lease.generation
        del first
        gc.collect()
        assert rig.counts(wrapper).static_sets == 1
        assert rig.runtime.lease.generation == generation + 1
        assert "a parameter died, its graph was dropped" in rig.notes()
        assert torch.equal(rig.call(wrapper, X, second), X * 3)
        del second
        gc.collect()
    assert wrapper.captured() == []
    with pytest.raises(CaptureError, match="captured at FULL: nothing"), torch.no_grad():
        rig.call(wrapper, X, third)


# -- inputs that lie inside a static input -----------------------------------------------------------------------------


def test_an_input_inside_a_static_input_is_read_in_place(rig: Any) -> None:
    def region(cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        rows.add_(1)
        return cache.sum() + rows

    cache, eager_cache = torch.zeros(4, 3), torch.zeros(4, 3)
    wrapper = rig.wrap(region, static_inputs=[0], mutated_inputs=[1])
    for step in range(3):
        got = (rig.capture if step == 0 else rig.call)(wrapper, cache, cache[1:3])
        assert torch.equal(got, region(eager_cache, eager_cache[1:3]))
        assert torch.equal(cache, eager_cache)
    assert rig.counts(wrapper) == Counts(1, 1, 3, 0, 1)

    with pytest.raises(CaptureError, match="share memory in another way"):
        rig.call(wrapper, cache, torch.zeros(2, 3))
    apart = torch.zeros(2, 3)
    assert torch.equal(rig.capture(wrapper, cache, apart), region(eager_cache, torch.zeros(2, 3)))
    assert torch.equal(apart, torch.ones(2, 3))


def test_an_input_that_now_lies_inside_a_static_input_is_noticed(rig: Any) -> None:
    def region(cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        rows.add_(1)
        return cache.sum() + rows

    cache = torch.zeros(4, 3)
    wrapper = rig.captured(rig.wrap(region, static_inputs=[0], mutated_inputs=[1]), cache, torch.zeros(2, 3))
    with pytest.raises(CaptureError, match="share memory in another way"):
        rig.call(wrapper, cache, cache[1:3])
    assert torch.equal(cache, torch.zeros(4, 3))
    assert rig.counts(wrapper).replayed == 1


def test_a_region_follows_an_earlier_one_that_was_captured_again() -> None:
    """The earlier region's output moved within the pool, so the later one is captured once more, not refused."""
    policy = CapturePolicy(outputs="view", lazy_capture=True)
    with GraphRuntime() as runtime:
        first = CUDAGraphWrapper(torch.add, "PIECEWISE", runtime=runtime, name="first", policy=policy)
        second = CUDAGraphWrapper(lambda z: z * 2, "PIECEWISE", runtime=runtime, name="second", policy=policy)
        a, b = torch.rand(4), torch.rand(4)
        for left, right in ((a, b), (a, a), (a, b), (a, a)):
            context = set_forward_context(
                runtime_mode=CUDAGraphMode.PIECEWISE, batch_descriptor=BatchDescriptor(num_tokens=4)
            )
            with torch.no_grad(), context:
                assert torch.equal(second(first(left, right)), (left + right) * 2)
        counts = {name: record for (name, _, _), record in runtime.counts().items()}
        assert (counts["first"].captured, counts["second"].captured) == (2, 2)
        assert counts["second"].replayed == 4
        assert counts["second"].copied == 0
