"""What a call leaves behind: mutated inputs, random number generators; and what a graph takes for constant."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphpass.capture import Counts
from graphpass.errors import CaptureError

X = torch.arange(8.0)


# -- mutated inputs ----------------------------------------------------------------------------------------------------


def accumulate(x: Any, state: Any) -> Any:
    leaves = [state] if isinstance(state, torch.Tensor) else [state["sum"], state["pair"][1]]
    for leaf in leaves:
        leaf.add_(x)
        leaf[0] = leaf[1] * 2
    return leaves[0] * 1


def nested(make: Any) -> Any:
    return {"sum": make(), "pair": (torch.zeros(8), make())}


STATES = {
    "tensor": (lambda: torch.ones(8), [0, 1]),
    "strided": (lambda: torch.ones(8, 3)[:, 1], [0, 1]),
    "nested": (lambda: nested(lambda: torch.ones(8)), [0, 1]),
}


@pytest.mark.parametrize("static", [False, True], ids=["staged", "static"])
@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
@pytest.mark.parametrize("kind", STATES)
def test_mutated_inputs_end_as_eager_leaves_them(rig: Any, kind: str, keyword: bool, static: bool) -> None:
    which = "state" if keyword else 1
    wrapper = rig.wrap(accumulate, mutated_inputs=[which], static_inputs=[which] if static else [])
    state, eager_state = STATES[kind][0](), STATES[kind][0]()
    for step in range(4):
        call = rig.capture if step == 0 else rig.call
        x = X + step
        got = call(wrapper, x, state=state) if keyword else call(wrapper, x, state)
        assert torch.equal(got, accumulate(x, eager_state))
        torch.testing.assert_close(state, eager_state, rtol=0, atol=0)
    assert (rig.counts(wrapper).captured, rig.counts(wrapper).replayed) == (1, 4)


def test_the_memory_around_a_mutated_view_is_left_alone(rig: Any) -> None:
    memory = torch.zeros(8, 3)
    wrapper = rig.wrap(accumulate, mutated_inputs=[1])
    rig.capture(wrapper, X, memory[:, 1])
    memory[:, 0] = 5  # between replays, beside the view
    rig.call(wrapper, X, memory[:, 1])
    assert torch.equal(memory[:, 0], torch.full((8,), 5.0))
    assert torch.equal(memory[:, 2], torch.zeros(8))


def test_a_mutated_expanded_input(rig: Any) -> None:
    def region(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        row[0].add_(x)
        return row.sum(0)

    wrapper = rig.wrap(region, mutated_inputs=[1])
    row, eager_row = torch.zeros(8), torch.zeros(8)
    for step in range(3):
        got = (rig.capture if step == 0 else rig.call)(wrapper, X, row.expand(3, 8))
        assert torch.equal(got, region(X, eager_row.expand(3, 8)))
        assert torch.equal(row, eager_row)


@pytest.mark.parametrize(
    "write",
    [lambda x, y: y.add_(1), lambda x, y: y.__setitem__(0, x[0]), lambda x, y: torch.add(x, x, out=y)],
    ids=["in-place op", "setitem", "out="],
)
@pytest.mark.parametrize("keyword", [False, True])
def test_an_undeclared_mutation_is_refused_by_name(rig: Any, write: Any, keyword: bool) -> None:
    def region(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        write(x, y)
        return x + y

    wrapper = rig.wrap(region, name="g0.r1", input_names=("hidden", "residual"))
    y = torch.zeros(8)
    name = "y" if keyword else "residual"
    with pytest.raises(CaptureError, match=rf"g0.r1 writes to its input '{name}'.*mutated_inputs=\[\]"):
        rig.capture(wrapper, X, y=y) if keyword else rig.capture(wrapper, X, y)
    assert torch.equal(y, torch.zeros(8))
    assert wrapper.captured() == []
    told = rig.wrap(region, mutated_inputs=["y" if keyword else 1])
    rig.capture(told, X, y=y) if keyword else rig.capture(told, X, y)
    eager_y = torch.zeros(8)
    region(X, eager_y)
    assert torch.equal(y, eager_y)


def test_an_input_that_shares_memory_with_a_mutated_one_is_no_mutation_of_its_own(rig: Any) -> None:
    def region(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 1

    memory = torch.zeros(4)
    assert torch.equal(rig.capture(rig.wrap(region, mutated_inputs=[0]), memory, memory[1:]), torch.ones(3))
    assert torch.equal(memory, torch.ones(4))


# -- random numbers ----------------------------------------------------------------------------------------------------


def noisy(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.dropout(x, 0.5, True), torch.rand(8), torch.randn_like(x), x.clone().uniform_(), torch.randperm(8)


def test_replays_draw_what_eager_draws(rig: Any) -> None:
    torch.manual_seed(11)
    want = [noisy(X) for _ in range(5)]
    state = torch.get_rng_state()
    wrapper = rig.wrap(noisy)
    torch.manual_seed(11)
    got = [rig.capture(wrapper, X)] + [rig.call(wrapper, X) for _ in range(4)]
    for theirs, ours in zip(want, got, strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert torch.equal(torch.get_rng_state(), state)
    assert wrapper.unwrap().calls == 2


def test_reseeding_reproduces(rig: Any) -> None:
    wrapper = rig.wrap(noisy)
    rig.capture(wrapper, X)
    torch.manual_seed(4)
    first, second = rig.call(wrapper, X), rig.call(wrapper, X)
    torch.manual_seed(4)
    again = rig.call(wrapper, X)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[1], second[1])


def test_an_explicit_generator(rig: Any) -> None:
    def region(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return x + torch.rand(8, generator=generator)

    generator, twin = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    default = torch.get_rng_state()
    wrapper = rig.wrap(region)
    got = [rig.capture(wrapper, X, generator)] + [rig.call(wrapper, X, generator) for _ in range(3)]
    for ours in got:
        assert torch.equal(ours, region(X, twin))
    assert torch.equal(generator.get_state(), twin.get_state())
    assert torch.equal(torch.get_rng_state(), default)
    generator.manual_seed(3)
    assert torch.equal(rig.call(wrapper, X, generator), got[0])
    with pytest.raises(CaptureError, match="argument 1 of region is baked"):
        rig.call(wrapper, X, twin)


# -- constants ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("captured", "other"), [(3, 4), (1, True), (2, 2.0), (0.5, 0.25), ("relu", "gelu"), (True, False), (None, 3)]
)
def test_a_baked_value_is_refused_when_it_changes(rig: Any, captured: Any, other: Any) -> None:
    wrapper = rig.wrap(lambda x, max_seq_len: x + 1, input_names=("x", "max_seq_len"))
    rig.capture(wrapper, X, captured)
    refusal = rf"argument max_seq_len of region is baked.*8 tokens.*{captured!r}.*{other!r}.*extra="
    for call in (rig.call, rig.capture):
        with pytest.raises(CaptureError, match=refusal):
            call(wrapper, X, other)
    assert torch.equal(rig.call(wrapper, X, captured), X + 1)


def test_a_baked_keyword_is_refused_by_name(rig: Any) -> None:
    wrapper = rig.wrap(lambda x, *, scale: x * scale)
    rig.capture(wrapper, X, scale=3)
    assert torch.equal(rig.call(wrapper, X, scale=3), X * 3)
    with pytest.raises(CaptureError, match="argument scale of region is baked"):
        rig.call(wrapper, X, scale=4)


# -- grad and inference mode -------------------------------------------------------------------------------------------

MODES = {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad, "grad": torch.enable_grad}


@pytest.mark.parametrize("outputs", ["clone", "view"])
@pytest.mark.parametrize("capture_under", MODES)
@pytest.mark.parametrize("replay_under", MODES)
def test_callers_in_inference_mode_and_not(rig: Any, capture_under: str, replay_under: str, outputs: str) -> None:
    def region(x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state.add_(x)
        return state * 2, x[1:]

    wrapper = rig.wrap(region, outputs=outputs, mutated_inputs=[1])
    with MODES[capture_under]():
        rig.capture(wrapper, X * 1, torch.zeros(8))
    for _ in range(2):
        with MODES[replay_under]():
            x, state = X * 3, torch.ones(8)
            doubled, tail = rig.call(wrapper, x, state)
            assert torch.equal(doubled, (X * 3 + 1) * 2)
            assert torch.equal(state, X * 3 + 1)
            assert tail.data_ptr() == x[1:].data_ptr()
            assert not doubled.requires_grad
            if outputs == "clone":
                doubled.add_(1)  # the caller's own, to write where it was asked for
    assert rig.counts(wrapper) == Counts(1, 1, 3, 6, 1)


def test_a_parameter_replays_without_grad(rig: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(8))
    wrapper = rig.wrap(lambda x, w: x * w, name="g0.full")
    with torch.no_grad():
        rig.capture(wrapper, X, weight)
    for call in (rig.call, rig.capture):
        with pytest.raises(CaptureError, match=r"g0.full cannot replay under autograd.*inference_mode"):
            call(wrapper, X, weight)
    with torch.inference_mode():
        assert torch.equal(rig.call(wrapper, X, weight), X)
    assert rig.counts(wrapper).replayed == 2
    eager = wrapper(X, weight)
    assert eager.requires_grad
