"""Which keys of which callables are captured and replayed, and how often; results are compared to eager."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import graphpass as gp
from graphpass import BatchDescriptor
from graphpass.errors import CaptureError, ContextError, StaticInputError
from tests.unit.cgpass.attended import FULL, MODES, Make, expected_counts
from tests.unit.compiled import BOTH, agrees
from tests.unit.models import module


def through_both(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.second(torch.ops.cgpasstest.attend(torch.ops.cgpasstest.scale(self.first(x))))


def block() -> Any:
    """Two captured regions around one splitting op; ``scale`` has Python inside the first."""
    return module(through_both, first=nn.Linear(6, 6), second=nn.Linear(6, 6)).eval()


@pytest.mark.parametrize(
    ("mode", "runs"),
    [("FULL", []), ("PIECEWISE", ["attend"])],
    ids=["neither the region's Python nor the splitting op's", "only the eager region's Python"],
)
def test_a_replay_runs_only_the_python_of_eager_regions(
    keyed: Make, mode: str, runs: list[str], python_calls: Any
) -> None:
    fast = keyed(block())
    fast.check(mode, capture=True)
    assert fast.tally(mode) == expected_counts(mode, 4, (1, 1))
    for _ in range(3):
        x = torch.randn(4, 6)
        python_calls.clear()
        got = fast.at(mode, 4, x)
        assert python_calls == runs
        agrees(got, fast.model(x).detach())
    assert fast.tally(mode) == expected_counts(mode, 4, (1, 4))
    assert fast.tally("PIECEWISE" if mode == "FULL" else "FULL") == {}, "under FULL no inner wrapper captures"
    if mode == "FULL":
        assert fast.uses("copied", "static_sets") == {(4, 1)}, "one staged input a replay"


def test_both_modes_of_a_pair_live_side_by_side(keyed: Make) -> None:
    fast = keyed(block(), dynamic=True)
    fast.capture(sizes=(4, 2))
    for size, mode in ((2, "FULL"), (4, "PIECEWISE"), (2, "PIECEWISE"), (4, "FULL"), (2, "FULL")):
        fast.check(mode, sizes=[size])
    assert fast.tally("FULL") == {("g0.full", 4): (1, 2), ("g0.full", 2): (1, 3)}
    assert set(fast.tally("PIECEWISE").values()) == {(1, 2)}


def test_an_inner_context_of_another_mode_passes_through(keyed: Make) -> None:
    fast, x = keyed(block()), torch.randn(4, 6)
    fast.capture("FULL")
    with gp.set_forward_context(runtime_mode=FULL, batch_descriptor=BatchDescriptor(4)):
        with gp.set_forward_context(runtime_mode="NONE"):
            agrees(fast(x), fast.model(x).detach())
        assert fast.tally("FULL") == {("g0.full", 4): (1, 1)}
        fast(x)
    assert fast.tally("FULL") == {("g0.full", 4): (1, 2)}


def test_a_full_wrapper_around_the_callable_wins(keyed: Make) -> None:
    fast = keyed(block())
    fast.capture("FULL")
    inner, compiled = fast.tally("FULL"), fast.fast
    fast.fast = gp.CUDAGraphWrapper(compiled, "FULL", runtime=fast.rt, name="outer")
    with pytest.raises(CaptureError, match=r"torch\.compile'd callable"):
        fast.capture("FULL")  # the tape cannot see through Dynamo; on CUDA the outer one captures
    fast.fast = compiled
    assert fast.tally("FULL") == inner
    fast.check("FULL")


@pytest.mark.parametrize(
    ("built", "asked", "expected"),
    [
        ("PIECEWISE", "FULL", "PIECEWISE"),
        ("FULL", "PIECEWISE", "FULL"),
        ("FULL_DECODE_ONLY", "PIECEWISE", "FULL"),
        ("NONE", "FULL", "NONE"),
    ],
)
def test_a_mode_it_was_not_built_for_is_refused(keyed: Make, built: str, asked: str, expected: str) -> None:
    fast = keyed(block(), mode=built)
    with pytest.raises(ContextError, match=f"not built for runtime mode {asked}") as raised:
        fast.capture(asked)
    assert raised.value.found == asked
    assert expected in raised.value.expected
    assert (raised.value.expected == expected) or built != "NONE"
    assert fast.rt.counts() == {}


@pytest.mark.parametrize("context", [None, "NONE"])
def test_without_a_graph_it_is_the_compiler_alone_and_without_context_says_once_how_to_get_graphs(
    keyed: Make, caplog: pytest.LogCaptureFixture, context: str | None
) -> None:
    fast = keyed(block())
    with caplog.at_level(logging.INFO, "graphpass"):
        for _ in range(20):
            x = torch.randn(4, 6)
            if context is None:
                got = fast(x)
            else:
                with gp.set_forward_context(num_tokens=4):
                    got = fast(x)
            assert torch.equal(got, fast.model(x))
    said = [r for r in caplog.records if r.name == "graphpass"]
    advice = [r for r in said if "without a forward context" in r.message]
    if context is None:
        assert [r.levelname for r in advice] == ["WARNING"]
        assert "capturing()" in advice[0].message
        assert "dispatch='auto'" in advice[0].message
    else:
        assert not said
    assert fast.rt.counts() == {}


def test_sizes_seen_without_context_are_suggested(keyed: Make) -> None:
    fast = keyed(block(), dynamic=True)
    fast.serve((3, 5, 5, 9))
    rt = fast.rt
    assert rt.stats().histograms == {"num_tokens": {3: 1, 5: 2, 9: 1}}
    assert rt.suggested_sizes() == {"num_tokens": [3, 5, 9]}
    assert rt.suggested_sizes(2) == {"num_tokens": [5, 9]}
    assert "capture_sizes=[3, 5, 9]" in str(rt.report())


@pytest.mark.parametrize("other", [torch.randn(4, 6).double(), torch.randn(1, 6)], ids=["second dtype", "size 1"])
def test_a_recompile_is_another_callable(keyed: Make, other: torch.Tensor) -> None:
    fast = keyed(lambda x: torch.ops.cgpasstest.attend(x * 2) + 1)
    fast.capture("FULL")
    agrees(fast.at("FULL", len(other), other, capture=True), fast.model(other))
    assert fast.tally("FULL") == {("g0.full", 4): (1, 1), ("g1.full", len(other)): (1, 1)}
    assert fast.rt.compiled() == 4, "two captured regions in each of the two graphs"


def test_two_instances_share_a_callable_and_keep_their_weights(keyed: Make) -> None:
    one, two = keyed(block()), keyed(block())
    for mode in BOTH:
        for fast in (one, two):
            fast.capture(mode)
    for mode in ("FULL", "PIECEWISE", "FULL"):
        for fast in (one, two, one):
            fast.check(mode)
    assert one.rt.stats().callables == 1
    assert {(region, c.captured, c.static_sets) for (region, _, _), c in one.rt.counts().items()} == {
        (f"g0.{region}", 2, 2) for region in ("full", "r0", "r2")
    }


# -- weights


def moved(model: Any) -> None:
    model.first.weight.data = model.first.weight.data + 1


@MODES
def test_weights_with_new_memory_are_seen(keyed: Make, mode: str) -> None:
    fast, x = keyed(block(), lazy_capture=True), torch.randn(4, 6)
    before = fast.at(mode, 4, x, capture=True)
    first = fast.model.first
    kept = first.weight.data
    moved(fast.model)
    after = fast.at(mode, 4, x)
    agrees(after, fast.model(x).detach())
    assert not torch.equal(before, after)
    first.weight.data = kept
    agrees(fast.at(mode, 4, x), before)


@MODES
def test_a_parameter_that_is_replaced_is_seen(keyed: Make, mode: str) -> None:
    fast = keyed(block())
    fast.capture(mode)
    fast.model.second.weight = nn.Parameter(torch.randn(6, 6))
    fast.check(mode, capture=True)
    fast.check(mode)


def test_weights_written_in_place_need_no_capture(keyed: Make) -> None:
    fast = keyed(block())
    fast.capture("FULL")
    fast.model.load_state_dict({name: t * 2 for name, t in fast.model.state_dict().items()})
    fast.check("FULL")
    assert fast.tally("FULL") == {("g0.full", 4): (1, 2)}


def test_moved_weights_can_be_refused_by_name(keyed: Make) -> None:
    fast = keyed(block(), on_moved_input="error")
    fast.capture("FULL")
    moved(fast.model)
    with pytest.raises(StaticInputError, match="weight") as raised:
        fast.check("FULL")
    assert "on_moved_input='copy'" in raised.value.remedy


@MODES
def test_weights_with_new_memory_are_refused_where_capture_is_closed(keyed: Make, mode: str) -> None:
    fast = keyed(block())
    fast.capture(mode)
    captured = fast.captured
    moved(fast.model)
    with pytest.raises(StaticInputError, match="weight"):
        fast.check(mode)
    assert fast.captured == captured
    fast.check(mode, capture=True)
    fast.check(mode)


def test_a_fifth_set_of_weights_is_copied(keyed: Make) -> None:
    fast = keyed(block(), lazy_capture=True)
    fast.capture("FULL")
    kept = [fast.model.first.weight.data]
    for _ in range(7):
        kept.append(torch.randn(6, 6))
        fast.model.first.weight.data = kept[-1]
        fast.check("FULL")
    assert fast.captured <= 6, "what keeps moving is staged in the end, not captured for ever"
    assert any("copied from now on" in note for note in fast.rt.notes)


# -- captures that nobody directed, and the end of a runtime


def test_lazy_capture_captures_at_first_use_with_a_warning(keyed: Make, caplog: pytest.LogCaptureFixture) -> None:
    fast = keyed(block(), lazy_capture=True)
    with caplog.at_level(logging.WARNING, "graphpass"):
        fast.check(*BOTH * 2)
    (warned,) = [record.message for record in caplog.records if record.name == "graphpass"]
    assert "`with runtime.capturing():`" in warned
    places = sorted(place.split()[0] for place in fast.problem("captured while serving").places)
    assert places == ["g0.full", "g0.r0", "g0.r2"], "one a region and key"
    for mode in BOTH:
        assert fast.tally(mode) == expected_counts(mode, 4, (1, 2))


def test_close_drops_graphs_and_capturing_again_works(keyed: Make) -> None:
    fast, x = keyed(block()), torch.randn(4, 6)
    fast.capture()
    fast.check()
    fast.rt.close()
    assert fast.rt.buffer_bytes() == 0
    assert torch.equal(fast(x), fast.model(x))
    for mode in BOTH:
        with pytest.raises(CaptureError, match="has no graph"):
            fast.check(mode)
        fast.capture(mode)
        fast.check(mode)
    assert fast.tally("FULL") == {("g0.full", 4): (2, 4)}


def test_compiler_reset_lets_the_callable_go(keyed: Make) -> None:
    fast = keyed(block())
    fast.capture("FULL")
    torch.compiler.reset()
    assert fast.rt.counts() == {}, "the entries went with the callable"
    fast.capture("FULL")
    fast.check("FULL")
    assert fast.tally("FULL") == {("g1.full", 4): (1, 2)}


def test_a_batch_without_elements_runs_eagerly(keyed: Make) -> None:
    fast, empty = keyed(block()), torch.randn(0, 6)
    fast.capture("FULL")
    replayed = fast.rt.stats().replayed
    assert fast.at("FULL", 4, empty).shape == fast.model(empty).shape
    assert fast.rt.stats().replayed == replayed


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_every_compiler_gives_the_same_graphs(keyed: Make, compiler: str) -> None:
    fast = keyed(block(), compiler=compiler)
    fast.capture()
    fast.check()
    for mode in BOTH:
        assert fast.tally(mode) == expected_counts(mode, 4, (1, 2))
