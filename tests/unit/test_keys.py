"""Batch descriptors as dictionary keys."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpass.keys import BatchDescriptor

DESCRIPTORS = st.builds(
    BatchDescriptor,
    num_tokens=st.integers(0, 3),
    num_reqs=st.none() | st.integers(0, 2),
    uniform=st.booleans(),
    has_lora=st.booleans(),
    num_active_loras=st.integers(0, 2),
    extra=st.lists(st.tuples(st.sampled_from(["seq_len", "frames"]), st.integers(0, 2)), max_size=2).map(tuple),
)


class CountingValue:
    """A hashable value that counts how often it was hashed."""

    def __init__(self) -> None:
        self.num_hashes = 0

    def __hash__(self) -> int:
        self.num_hashes += 1
        return 7

    def __eq__(self, other: object) -> bool:
        return self is other


def public_fields(descriptor: BatchDescriptor) -> tuple[object, ...]:
    return tuple(getattr(descriptor, f.name) for f in dataclasses.fields(descriptor) if f.init)


def test_defaults() -> None:
    assert public_fields(BatchDescriptor(8)) == (8, None, False, False, 0, ())


def test_hash_is_computed_once() -> None:
    value = CountingValue()
    descriptor = BatchDescriptor(8, extra=(("width", value),))
    graphs = {descriptor: "graph"}
    for _ in range(100):
        assert graphs[descriptor] == "graph"
    assert value.num_hashes == 1


@given(DESCRIPTORS, DESCRIPTORS)
def test_equality_is_by_every_field(one: BatchDescriptor, other: BatchDescriptor) -> None:
    assert (one == other) is (public_fields(one) == public_fields(other))
    assert (one != other) is not (one == other)
    if one == other:
        assert hash(one) == hash(other)


def test_equal_to_nothing_else() -> None:
    assert BatchDescriptor(8) != (8, None, False, False, 0, ())
    assert BatchDescriptor(8) != 8


@pytest.mark.parametrize("field", ["num_tokens", "num_reqs", "extra", "unknown"])
def test_frozen(field: str) -> None:
    with pytest.raises((AttributeError, TypeError)):
        setattr(BatchDescriptor(8), field, 1)


@given(DESCRIPTORS)
def test_copies_and_pickles_are_the_same_key(descriptor: BatchDescriptor) -> None:
    copies = [copy.copy(descriptor), copy.deepcopy(descriptor), dataclasses.replace(descriptor)]
    copies += [pickle.loads(pickle.dumps(descriptor, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for twin in copies:
        assert twin == descriptor
        assert {descriptor: 1}[twin] == 1


def test_a_pickle_of_another_process_is_the_same_key() -> None:
    program = (
        "import pickle, sys; from graphpass.keys import BatchDescriptor;"
        "sys.stdout.buffer.write(pickle.dumps(BatchDescriptor(8, extra=(('name', 'text'),))))"
    )
    root = Path(sys.modules["graphpass"].__path__[0]).parent
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": str(root)}
    written = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True).stdout
    descriptor = pickle.loads(written)
    assert {BatchDescriptor(8, extra=(("name", "text"),)): 1}[descriptor] == 1


def test_replacing_a_field_makes_another_key() -> None:
    descriptor = BatchDescriptor(8, num_reqs=2)
    assert dataclasses.replace(descriptor, num_reqs=3) == BatchDescriptor(8, num_reqs=3)
    assert hash(dataclasses.replace(descriptor, num_reqs=3)) == hash(BatchDescriptor(8, num_reqs=3))


@pytest.mark.parametrize(
    ("descriptor", "text"),
    [
        (BatchDescriptor(8), "8 tokens"),
        (BatchDescriptor(8, 4, uniform=True), "8 tokens num_reqs=4 uniform=True"),
        (BatchDescriptor(8, extra=(("seq_len", 64),)), "8 tokens seq_len=64"),
    ],
)
def test_short_text(descriptor: BatchDescriptor, text: str) -> None:
    assert str(descriptor) == text


def test_unhashable_extra_is_refused_when_made() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        BatchDescriptor(8, extra=(("sizes", [1, 2]),))  # type: ignore[arg-type]
