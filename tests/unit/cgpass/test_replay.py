"""Which keys of which callables are captured and replayed, and how often; results are compared to eager."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import graphpass as gp
from graphpass import BatchDescriptor, CUDAGraphMode, GraphRuntime
from graphpass.errors import CaptureError, ContextError, StaticInputError
from tests.observed import reported_regions
from tests.unit.cgpass.attended import Run, compiled_with


class Block(nn.Module):
    """Two captured regions around one splitting op; ``scale`` has Python inside the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.ops.cgpasstest.scale(self.first(x))
        return self.second(torch.ops.cgpasstest.attend(x))


def compiled_block(rt: GraphRuntime, model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = (model or Block()).eval()
    return model, compiled_with(rt, model, **options)


def test_full_is_captured_once_and_replays_without_python(
    rt: GraphRuntime, at_key: Run, tally: Run, python_calls: list[str]
) -> None:
    model, compiled = compiled_block(rt)
    example = torch.randn(4, 6)
    got = at_key(compiled, "FULL", 4, example, capture=rt)
    torch.testing.assert_close(got, model(example).detach())
    assert tally(rt, "FULL") == {("g0.full", 4): (1, 1)}
    python_calls.clear()
    for _ in range(3):
        x = torch.randn(4, 6)
        got = at_key(compiled, "FULL", 4, x)
        assert python_calls == [], "neither the region's Python nor the splitting op's runs in a FULL replay"
        torch.testing.assert_close(got, model(x).detach())
        python_calls.clear()
    assert tally(rt, "FULL") == {("g0.full", 4): (1, 4)}
    assert tally(rt, "PIECEWISE") == {}, "under FULL no inner wrapper captures"
    ((counts),) = rt.counts().values()
    assert (counts.copied, counts.static_sets) == (4, 1), "one staged input a replay"


def test_piecewise_replays_regions_and_runs_the_splitting_op(
    rt: GraphRuntime, at_key: Run, tally: Run, python_calls: list[str]
) -> None:
    model, compiled = compiled_block(rt)
    at_key(compiled, "PIECEWISE", 4, torch.randn(4, 6), capture=rt)
    assert tally(rt, "PIECEWISE") == {("g0.r0", 4): (1, 1), ("g0.r2", 4): (1, 1)}
    for _ in range(3):
        x = torch.randn(4, 6)
        python_calls.clear()
        got = at_key(compiled, "PIECEWISE", 4, x)
        assert python_calls == ["attend"], "only the eager region runs Python"
        torch.testing.assert_close(got, model(x).detach())
    assert tally(rt, "PIECEWISE") == {("g0.r0", 4): (1, 4), ("g0.r2", 4): (1, 4)}
    assert tally(rt, "FULL") == {}


def test_both_modes_of_a_pair_live_side_by_side(rt: GraphRuntime, at_key: Run, tally: Run) -> None:
    model, compiled = compiled_block(rt)
    with rt.capturing():
        for size in (4, 2):
            for mode in ("PIECEWISE", "FULL"):
                at_key(compiled, mode, size, torch.randn(size, 6))
    for size, mode in ((2, "FULL"), (4, "PIECEWISE"), (2, "PIECEWISE"), (4, "FULL"), (2, "FULL")):
        x = torch.randn(size, 6)
        torch.testing.assert_close(at_key(compiled, mode, size, x), model(x).detach())
    assert tally(rt, "FULL") == {("g0.full", 4): (1, 2), ("g0.full", 2): (1, 3)}
    assert set(tally(rt, "PIECEWISE").values()) == {(1, 2)}


def test_an_inner_context_of_another_mode_passes_through(rt: GraphRuntime, at_key: Run, tally: Run) -> None:
    model, compiled = compiled_block(rt)
    x = torch.randn(4, 6)
    at_key(compiled, "FULL", 4, x, capture=rt)
    with gp.set_forward_context(runtime_mode=CUDAGraphMode.FULL, batch_descriptor=BatchDescriptor(4)):
        with torch.no_grad(), gp.set_forward_context(runtime_mode=CUDAGraphMode.NONE):
            torch.testing.assert_close(compiled(x), model(x).detach())
        assert tally(rt, "FULL") == {("g0.full", 4): (1, 1)}
        with torch.no_grad():
            compiled(x)
    assert tally(rt, "FULL") == {("g0.full", 4): (1, 2)}


def test_a_full_wrapper_around_the_callable_wins(rt: GraphRuntime, at_key: Run, tally: Run) -> None:
    model, compiled = compiled_block(rt, compiler="eager")
    x = torch.randn(4, 6)
    at_key(compiled, "FULL", 4, x, capture=rt)
    inner = tally(rt, "FULL")
    with pytest.raises(CaptureError, match=r"torch\.compile'd callable"):
        # The tape cannot see through Dynamo; on CUDA the outer one captures.
        at_key(gp.CUDAGraphWrapper(compiled, "FULL", runtime=rt, name="outer"), "FULL", 4, x, capture=rt)
    assert tally(rt, "FULL") == inner
    torch.testing.assert_close(at_key(compiled, "FULL", 4, x), model(x).detach())


@pytest.mark.parametrize(
    ("built", "asked"), [("PIECEWISE", "FULL"), ("FULL", "PIECEWISE"), ("FULL_DECODE_ONLY", "PIECEWISE")]
)
def test_a_mode_it_was_not_built_for_is_refused(rt: GraphRuntime, at_key: Run, built: str, asked: str) -> None:
    _, compiled = compiled_block(rt, mode=built)
    with pytest.raises(ContextError, match=f"not built for runtime mode {asked}") as raised:
        at_key(compiled, asked, 4, torch.randn(4, 6), capture=rt)
    assert raised.value.found == asked
    assert built.removesuffix("_DECODE_ONLY") in raised.value.expected
    assert rt.counts() == {}


def test_mode_none_never_captures(rt: GraphRuntime, at_key: Run) -> None:
    _, compiled = compiled_block(rt, mode="NONE")
    with pytest.raises(ContextError) as raised:
        at_key(compiled, "FULL", 4, torch.randn(4, 6), capture=rt)
    assert raised.value.expected == "NONE"


def test_without_context_it_is_the_compiler_alone_and_says_once_how_to_get_graphs(
    rt: GraphRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    model, compiled = compiled_block(rt)
    with torch.no_grad(), caplog.at_level(logging.INFO, "graphpass"):
        for _ in range(20):
            x = torch.randn(4, 6)
            assert torch.equal(compiled(x), model(x))
    advice = [r for r in caplog.records if r.name == "graphpass" and "without a forward context" in r.message]
    assert [r.levelname for r in advice] == ["WARNING"]
    assert "capturing()" in advice[0].message
    assert "dispatch='auto'" in advice[0].message
    assert rt.counts() == {}


def test_context_none_is_silent(rt: GraphRuntime, caplog: pytest.LogCaptureFixture) -> None:
    model, compiled = compiled_block(rt)
    with torch.no_grad(), caplog.at_level(logging.INFO, "graphpass"):
        for _ in range(20):
            x = torch.randn(4, 6)
            with gp.set_forward_context(num_tokens=4):
                assert torch.equal(compiled(x), model(x))
    assert not [r for r in caplog.records if r.name == "graphpass"]


def test_sizes_seen_without_context_are_suggested(rt: GraphRuntime) -> None:
    _, compiled = compiled_block(rt)
    with torch.no_grad():
        for size in (3, 5, 5, 9):
            compiled(torch.randn(size, 6))
    assert rt.stats().histograms == {"num_tokens": {3: 1, 5: 2, 9: 1}}
    assert rt.suggested_sizes() == {"num_tokens": [3, 5, 9]}
    assert rt.suggested_sizes(2) == {"num_tokens": [5, 9]}
    assert "capture_sizes=[3, 5, 9]" in str(rt.report())


@pytest.mark.parametrize("other", [torch.randn(4, 6).double(), torch.randn(1, 6)], ids=["second dtype", "size 1"])
def test_a_recompile_is_another_callable(rt: GraphRuntime, at_key: Run, tally: Run, other: torch.Tensor) -> None:
    class Shift(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.cgpasstest.attend(x * 2) + 1

    model, compiled = compiled_block(rt, Shift())
    with rt.capturing():
        at_key(compiled, "FULL", 4, torch.randn(4, 6))
        got = at_key(compiled, "FULL", len(other), other)
    torch.testing.assert_close(got, model(other))
    assert tally(rt, "FULL") == {("g0.full", 4): (1, 1), ("g1.full", len(other)): (1, 1)}
    assert rt.compiled() == 4, "two captured regions in each of the two graphs"


def test_a_graph_break_gives_each_graph_its_own_full(rt: GraphRuntime, at_key: Run, tally: Run) -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 2 + 1
            torch._dynamo.graph_break()
            return x.relu() - 1

    model, compiled = compiled_block(rt, Broken())
    with rt.capturing():
        at_key(compiled, "FULL", 4, torch.randn(4, 6))
    x = torch.randn(4, 6)
    torch.testing.assert_close(at_key(compiled, "FULL", 4, x), model(x))
    assert tally(rt, "FULL") == {("g0.full", 4): (1, 2), ("g1.full", 4): (1, 2)}
    (reason,) = [row[-1] for row in reported_regions(rt) if row[0] == "g0.end"]
    line = Broken.forward.__code__.co_firstlineno + 2
    assert "graph_break()" in reason
    assert f"test_replay.py:{line}" in reason


def test_two_instances_share_a_callable_and_keep_their_weights(rt: GraphRuntime, at_key: Run) -> None:
    one, two = Block().eval(), Block().eval()
    compiled = [compiled_with(rt, model) for model in (one, two)]
    with rt.capturing():
        for mode in ("FULL", "PIECEWISE"):
            for model in compiled:
                at_key(model, mode, 4, torch.randn(4, 6))
    for mode in ("FULL", "PIECEWISE", "FULL"):
        for model, fast in ((one, compiled[0]), (two, compiled[1]), (one, compiled[0])):
            x = torch.randn(4, 6)
            torch.testing.assert_close(at_key(fast, mode, 4, x), model(x).detach())
    assert rt.stats().callables == 1
    assert {(region, c.captured, c.static_sets) for (region, _, _), c in rt.counts().items()} == {
        ("g0.full", 2, 2), ("g0.r0", 2, 2), ("g0.r2", 2, 2)
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_weights_with_new_memory_are_seen(rt: GraphRuntime, at_key: Run, mode: str) -> None:
    model, compiled = compiled_block(rt, lazy_capture=True)
    x = torch.randn(4, 6)
    before = at_key(compiled, mode, 4, x, capture=rt)
    kept = model.first.weight.data
    model.first.weight.data = kept + 1
    after = at_key(compiled, mode, 4, x)
    torch.testing.assert_close(after, model(x).detach())
    assert not torch.equal(before, after)
    model.first.weight.data = kept
    torch.testing.assert_close(at_key(compiled, mode, 4, x), before)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_parameter_that_is_replaced_is_seen(rt: GraphRuntime, at_key: Run, mode: str) -> None:
    model, compiled = compiled_block(rt)
    x = torch.randn(4, 6)
    at_key(compiled, mode, 4, x, capture=rt)
    model.second.weight = nn.Parameter(torch.randn(6, 6))
    with rt.capturing():
        torch.testing.assert_close(at_key(compiled, mode, 4, x), model(x).detach())
    torch.testing.assert_close(at_key(compiled, mode, 4, x + 1), model(x + 1).detach())


def test_weights_written_in_place_need_no_capture(rt: GraphRuntime, at_key: Run, tally: Run) -> None:
    model, compiled = compiled_block(rt)
    x = torch.randn(4, 6)
    at_key(compiled, "FULL", 4, x, capture=rt)
    model.load_state_dict({name: t * 2 for name, t in model.state_dict().items()})
    torch.testing.assert_close(at_key(compiled, "FULL", 4, x), model(x).detach())
    assert tally(rt, "FULL") == {("g0.full", 4): (1, 2)}


def test_moved_weights_can_be_refused_by_name(rt: GraphRuntime, at_key: Run) -> None:
    model, compiled = compiled_block(rt, on_moved_input="error")
    at_key(compiled, "FULL", 4, torch.randn(4, 6), capture=rt)
    kept = model.first.weight.data
    model.first.weight.data = kept.clone()
    with pytest.raises(StaticInputError, match="weight") as raised:
        at_key(compiled, "FULL", 4, torch.randn(4, 6))
    assert "on_moved_input='copy'" in raised.value.remedy


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_weights_with_new_memory_are_refused_where_capture_is_closed(rt: GraphRuntime, at_key: Run, mode: str) -> None:
    model, compiled = compiled_block(rt)
    x = torch.randn(4, 6)
    at_key(compiled, mode, 4, x, capture=rt)
    model.first.weight.data = model.first.weight.data + 1
    captured = rt.stats().captured
    with pytest.raises(StaticInputError, match="weight"):
        at_key(compiled, mode, 4, x)
    assert rt.stats().captured == captured
    torch.testing.assert_close(at_key(compiled, mode, 4, x, capture=rt), model(x).detach())
    torch.testing.assert_close(at_key(compiled, mode, 4, x + 1), model(x + 1).detach())


def test_a_fifth_set_of_weights_is_copied(rt: GraphRuntime, at_key: Run) -> None:
    model, compiled = compiled_block(rt, lazy_capture=True)
    x = torch.randn(4, 6)
    at_key(compiled, "FULL", 4, x, capture=rt)
    kept = [model.first.weight.data]
    for _ in range(7):
        kept.append(torch.randn(6, 6))
        model.first.weight.data = kept[-1]
        torch.testing.assert_close(at_key(compiled, "FULL", 4, x), model(x).detach())
    (counts,) = rt.counts().values()
    assert counts.captured <= 6, "what keeps moving is staged in the end, not captured for ever"
    assert any("copied from now on" in note for note in rt.notes)


def test_lazy_capture_captures_at_first_use_with_a_warning(
    rt: GraphRuntime, at_key: Run, tally: Run, caplog: pytest.LogCaptureFixture
) -> None:
    model, compiled = compiled_block(rt, lazy_capture=True)
    with caplog.at_level(logging.WARNING, "graphpass"):
        for _ in range(2):
            x = torch.randn(4, 6)
            torch.testing.assert_close(at_key(compiled, "PIECEWISE", 4, x), model(x).detach())
            torch.testing.assert_close(at_key(compiled, "FULL", 4, x), model(x).detach())
    (warned,) = [record.message for record in caplog.records if record.name == "graphpass"]
    assert "`with runtime.capturing():`" in warned
    (noted,) = [problem for problem in rt.report().problems if "captured while serving" in problem.what]
    places = sorted(place.split()[0] for place in noted.places)
    assert places == ["g0.full", *sorted(name for name, _ in tally(rt, "PIECEWISE"))], "one a region and key"
    assert tally(rt, "FULL") == {("g0.full", 4): (1, 2)}
    assert set(tally(rt, "PIECEWISE").values()) == {(1, 2)}


def test_close_drops_graphs_and_capturing_again_works(rt: GraphRuntime, at_key: Run, tally: Run) -> None:
    model, compiled = compiled_block(rt)
    x = torch.randn(4, 6)
    for mode in ("FULL", "PIECEWISE"):
        at_key(compiled, mode, 4, x, capture=rt)
        at_key(compiled, mode, 4, x)
    rt.close()
    assert rt.buffer_bytes() == 0
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
    for mode in ("FULL", "PIECEWISE"):
        with pytest.raises(CaptureError, match="has no graph"):
            at_key(compiled, mode, 4, x)
        at_key(compiled, mode, 4, x, capture=rt)
        torch.testing.assert_close(at_key(compiled, mode, 4, x + 1), model(x + 1).detach())
    assert tally(rt, "FULL") == {("g0.full", 4): (2, 4)}


def test_compiler_reset_lets_the_callable_go(rt: GraphRuntime, at_key: Run, tally: Run) -> None:
    model, compiled = compiled_block(rt)
    x = torch.randn(4, 6)
    at_key(compiled, "FULL", 4, x, capture=rt)
    torch.compiler.reset()
    assert rt.counts() == {}, "the entries went with the callable"
    at_key(compiled, "FULL", 4, x, capture=rt)
    torch.testing.assert_close(at_key(compiled, "FULL", 4, x), model(x).detach())
    assert tally(rt, "FULL") == {("g1.full", 4): (1, 2)}


def test_a_batch_without_elements_runs_eagerly(rt: GraphRuntime, at_key: Run) -> None:
    model, compiled = compiled_block(rt)
    at_key(compiled, "FULL", 4, torch.randn(4, 6), capture=rt)
    replayed = rt.stats().replayed
    empty = torch.randn(0, 6)
    assert at_key(compiled, "FULL", 4, empty).shape == model(empty).shape
    assert rt.stats().replayed == replayed


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_every_compiler_gives_the_same_graphs(rt: GraphRuntime, at_key: Run, tally: Run, compiler: str) -> None:
    model, compiled = compiled_block(rt, compiler=compiler)
    with rt.capturing():
        for mode in ("PIECEWISE", "FULL"):
            at_key(compiled, mode, 4, torch.randn(4, 6))
    for mode in ("PIECEWISE", "FULL"):
        x = torch.randn(4, 6)
        torch.testing.assert_close(at_key(compiled, mode, 4, x), model(x).detach())
    assert {**tally(rt, "FULL"), **tally(rt, "PIECEWISE")} == {
        ("g0.full", 4): (1, 2), ("g0.r0", 4): (1, 2), ("g0.r2", 4): (1, 2)
    }  # fmt: skip
