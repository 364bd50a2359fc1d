"""What a call leaves behind, and what a graph takes for constant: also what it reads of the forward context."""

from __future__ import annotations

import dataclasses
import functools
from collections import namedtuple
from typing import Any

import pytest
import torch

import graphpass as gp
from graphpass.capture import Counts
from graphpass.errors import CaptureError, StaticInputError

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
    wrapper = rig.captured(rig.wrap(accumulate, mutated_inputs=[1]), X, memory[:, 1])
    memory[:, 0] = 5  # between replays, beside the view
    rig.call(wrapper, X, memory[:, 1])
    assert torch.equal(memory[:, 0], torch.full((8,), 5.0))
    assert torch.equal(memory[:, 2], torch.zeros(8))


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
    wrapper = rig.captured(rig.wrap(noisy), X)
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
    wrapper = rig.captured(rig.wrap(lambda x, max_seq_len: x + 1, input_names=("x", "max_seq_len")), X, captured)
    refusal = rf"argument max_seq_len of region is baked.*8 tokens.*{captured!r}.*{other!r}.*extra="
    for call in (rig.call, rig.capture):
        with pytest.raises(CaptureError, match=refusal):
            call(wrapper, X, other)
    assert torch.equal(rig.call(wrapper, X, captured), X + 1)


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


# What an op inside a graph reads from the forward context is baked in: another value later is refused by name.


@dataclasses.dataclass
class Metadata:
    max_len: int
    slots: torch.Tensor
    unread: int = 0

    @property
    def doubled(self) -> int:
        return self.max_len * 2

    @functools.cached_property
    def halved(self) -> int:
        return self.max_len // 2

    def taken(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.slots] * self.max_len


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    max_len: int
    slots: torch.Tensor


Pair = namedtuple("Pair", ["max_len", "slots"])


def slots() -> torch.Tensor:
    return torch.arange(8).flip(0)


READERS: dict[str, Any] = {
    "attribute": (lambda max_len, s: Metadata(max_len, s), lambda m, x: x[m.slots] * m.max_len),
    "property": (lambda max_len, s: Metadata(max_len, s), lambda m, x: x[m.slots] * m.doubled / 2),
    "cached property": (lambda max_len, s: Metadata(max_len, s), lambda m, x: x[m.slots] * m.halved * 2),
    "method": (lambda max_len, s: Metadata(max_len, s), lambda m, x: m.taken(x)),
    "frozen with slots": (lambda max_len, s: Frozen(max_len, s), lambda m, x: x[m.slots] * m.max_len),
    "vars": (lambda max_len, s: Metadata(max_len, s), lambda m, x: x[vars(m)["slots"]] * vars(m)["max_len"]),
    "dict": (lambda max_len, s: {"max_len": max_len, "slots": s}, lambda m, x: x[m["slots"]] * m.get("max_len")),
    "unpacked dict": (lambda max_len, s: {"max_len": max_len, "slots": s}, lambda m, x: Metadata(**m).taken(x)),
    "copied dict": (
        lambda max_len, s: {"max_len": max_len, "slots": s},
        lambda m, x: x[dict(m)["slots"]] * m["max_len"],
    ),
    "values of a dict": (
        lambda max_len, s: {"max_len": max_len, "slots": s},
        lambda m, x: Metadata(*m.values()).taken(x) + m.get("none", 0),
    ),
    "items of a dict": (
        lambda max_len, s: {"max_len": max_len, "slots": s},
        lambda m, x: Metadata(*(value for _, value in m.items())).taken(x),
    ),
    "by layer": (lambda max_len, s: {"layer.0": Metadata(max_len, s)}, lambda m, x: m["layer.0"].taken(x)),
    "tuple": (lambda max_len, s: (max_len, s), lambda m, x: x[m[1]] * m[0]),
    "list": (lambda max_len, s: [max_len, s], lambda m, x: x[m[1]] * m[0]),
    "named tuple": (lambda max_len, s: Pair(max_len, s), lambda m, x: x[m.slots] * m.max_len),
}


def region_reading(read: Any) -> Any:
    return lambda x: read(gp.get_forward_context().attn_metadata, x)


def at(metadata: Any, **others: Any) -> dict[str, Any]:
    return {"at_context": {"attn_metadata": metadata, **others}}


@pytest.fixture(params=READERS)
def captured_at_4(rig: Any, request: pytest.FixtureRequest) -> Any:
    """(what makes the metadata of a number, the slots, a wrapper that was captured at the number 4)"""
    make, read = READERS[request.param]
    s = slots()
    return make, s, rig.captured(rig.wrap(region_reading(read)), X, **at(make(4, s)))


def test_another_number_is_refused_by_name(rig: Any, captured_at_4: Any) -> None:
    make, s, wrapper = captured_at_4
    with pytest.raises(CaptureError, match=r"(?s)^attn_metadata.*baked into.*expected 4; found 6.*extra="):
        rig.call(wrapper, X, **at(make(6, s)))
    s.copy_(torch.arange(8))  # refilled in place
    assert torch.equal(rig.call(wrapper, X, **at(make(4, s))), X * 4)


def test_a_tensor_elsewhere_is_refused_by_name(rig: Any, captured_at_4: Any) -> None:
    make, s, wrapper = captured_at_4
    with pytest.raises(StaticInputError, match=r"(?s)^attn_metadata.*read by the graph.*refill it in place"):
        rig.call(wrapper, X, **at(make(4, s.clone())))
    with pytest.raises((StaticInputError, CaptureError), match="found None"):
        rig.call(wrapper, X)


@pytest.mark.parametrize("field", ["slot_mapping", "is_padding", "extra"])
def test_every_field_counts(rig: Any, field: str) -> None:
    wrapper = rig.wrap(lambda x: x[getattr(gp.get_forward_context(), field)])
    s = slots()
    rig.capture(wrapper, X, at_context={field: s})
    assert torch.equal(rig.call(wrapper, X, at_context={field: s}), X.flip(0))
    with pytest.raises(StaticInputError, match=f"^{field} of the forward context"):
        rig.call(wrapper, X, at_context={field: s.clone()})


def test_what_is_not_read_may_change(rig: Any) -> None:
    s = slots()
    wrapper = rig.captured(rig.wrap(region_reading(lambda m, x: x * m.max_len)), X, **at(Metadata(4, s, unread=1)))
    assert torch.equal(rig.call(wrapper, X, **at(Metadata(4, s.clone(), unread=2))), X * 4)


def test_the_address_of_a_captured_tensor_is_not_reused(rig: Any) -> None:
    wrapper = rig.captured(rig.wrap(region_reading(lambda m, x: x[m.slots])), X, **at(Metadata(4, slots())))
    for _ in range(8):  # what was captured is held, so none of these lies at its address
        with pytest.raises(StaticInputError):
            rig.call(wrapper, X, **at(Metadata(4, torch.arange(8))))


def test_the_count_inside_a_graph_is_the_key_s(rig: Any) -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        count = gp.get_forward_context().num_tokens
        assert count is not None
        return x[:count] + 1

    wrapper = rig.captured(rig.wrap(region), X, at_context={"num_tokens": 5})
    for real in (3, 8):
        assert torch.equal(rig.call(wrapper, X, at_context={"num_tokens": real}), X + 1)


def test_objects_that_take_no_subclass_are_passed_on(rig: Any) -> None:
    metadata = memoryview(b"\x04")
    wrapper = rig.captured(rig.wrap(region_reading(lambda m, x: x * m[0])), X, **at(metadata))
    assert torch.equal(rig.call(wrapper, X, **at(metadata)), X * 4)
