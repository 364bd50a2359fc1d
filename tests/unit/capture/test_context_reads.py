"""What an op inside a graph reads from the forward context is baked in: another value later is refused by name."""

from __future__ import annotations

import dataclasses
import functools
from collections import namedtuple
from typing import Any

import pytest
import torch

import graphpass as gp
from graphpass.errors import CaptureError, StaticInputError

X = torch.arange(8.0)


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
    "by layer": (lambda max_len, s: {"layer.0": Metadata(max_len, s)}, lambda m, x: m["layer.0"].taken(x)),
    "tuple": (lambda max_len, s: (max_len, s), lambda m, x: x[m[1]] * m[0]),
    "list": (lambda max_len, s: [max_len, s], lambda m, x: x[m[1]] * m[0]),
    "named tuple": (lambda max_len, s: Pair(max_len, s), lambda m, x: x[m.slots] * m.max_len),
}
BY_NAME = pytest.mark.parametrize("reader", READERS)


def region_reading(read: Any) -> Any:
    return lambda x: read(gp.get_forward_context().attn_metadata, x)


def at(metadata: Any, **others: Any) -> dict[str, Any]:
    return {"at_context": {"attn_metadata": metadata, **others}}


@BY_NAME
def test_the_same_values_replay(rig: Any, reader: str) -> None:
    make, read = READERS[reader]
    s = slots()
    wrapper = rig.wrap(region_reading(read))
    rig.capture(wrapper, X, **at(make(4, s)))
    s.copy_(torch.arange(8))  # refilled in place
    assert torch.equal(rig.call(wrapper, X + 1, **at(make(4, s))), (X + 1) * 4)


@BY_NAME
def test_another_number_is_refused_by_name(rig: Any, reader: str) -> None:
    make, read = READERS[reader]
    s = slots()
    wrapper = rig.wrap(region_reading(read))
    rig.capture(wrapper, X, **at(make(4, s)))
    with pytest.raises(CaptureError, match=r"(?s)^attn_metadata.*baked into.*expected 4; found 6.*extra="):
        rig.call(wrapper, X, **at(make(6, s)))
    assert torch.equal(rig.call(wrapper, X, **at(make(4, s))), X.flip(0) * 4)


@BY_NAME
def test_a_tensor_elsewhere_is_refused_by_name(rig: Any, reader: str) -> None:
    make, read = READERS[reader]
    s = slots()
    wrapper = rig.wrap(region_reading(read))
    rig.capture(wrapper, X, **at(make(4, s)))
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
    wrapper = rig.wrap(region_reading(lambda m, x: x * m.max_len))
    rig.capture(wrapper, X, **at(Metadata(4, s, unread=1)))
    assert torch.equal(rig.call(wrapper, X, **at(Metadata(4, s.clone(), unread=2))), X * 4)


def test_the_address_of_a_captured_tensor_is_not_reused(rig: Any) -> None:
    wrapper = rig.wrap(region_reading(lambda m, x: x[m.slots]))
    rig.capture(wrapper, X, **at(Metadata(4, slots())))
    for _ in range(8):  # what was captured is held, so none of these lies at its address
        with pytest.raises(StaticInputError):
            rig.call(wrapper, X, **at(Metadata(4, torch.arange(8))))


def test_writes_reach_the_caller(rig: Any) -> None:
    metadata = Metadata(4, slots())
    seen: list[int] = []

    def read(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.unread = 7
        seen.append(m.max_len)
        assert isinstance(m, Metadata)
        return x * m.max_len

    rig.capture(rig.wrap(region_reading(read)), X, **at(metadata))
    assert metadata.unread == 7
    assert seen == [4, 4]


def test_the_count_inside_a_graph_is_the_key_s(rig: Any) -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        count = gp.get_forward_context().num_tokens
        assert count is not None
        return x[:count] + 1

    wrapper = rig.wrap(region)
    rig.capture(wrapper, X, at_context={"num_tokens": 5})
    for real in (3, 8):
        assert torch.equal(rig.call(wrapper, X, at_context={"num_tokens": real}), X + 1)


def test_debug_reads_the_context_of_each_call(rig: Any) -> None:
    wrapper = rig.wrap(region_reading(lambda m, x: x * m.max_len), debug=True)
    rig.capture(wrapper, X, **at(Metadata(4, slots())))
    assert torch.equal(rig.call(wrapper, X, **at(Metadata(6, slots()))), X * 6)


def test_objects_that_take_no_subclass_are_passed_on(rig: Any) -> None:
    metadata = memoryview(b"\x04")
    wrapper = rig.wrap(region_reading(lambda m, x: x * m[0]))
    rig.capture(wrapper, X, **at(metadata))
    assert torch.equal(rig.call(wrapper, X, **at(metadata)), X * 4)
