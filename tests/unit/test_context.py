"""Keys, modes and the forward context."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import pickle
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpass.context import current_context, get_forward_context, is_forward_context_available, set_forward_context
from graphpass.errors import ContextError, OptionError
from graphpass.keys import BatchDescriptor, CUDAGraphMode
from tests.processes import environment

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
KEY = BatchDescriptor(8)


def test_there_is_none_outside() -> None:
    assert not is_forward_context_available()
    assert current_context() is None
    with pytest.raises(ContextError, match="set_forward_context"):
        get_forward_context()


@pytest.mark.parametrize(
    ("inner", "error"),
    [({"batch_descriptor": KEY}, KeyError), ({"batch_descriptor": KEY}, KeyboardInterrupt), ({}, ContextError)],
    ids=["the body raises", "an interrupt", "a refused context"],
)
def test_the_outer_context_comes_back(inner: dict[str, Any], error: type[BaseException]) -> None:
    with set_forward_context() as outer:
        with pytest.raises(error), set_forward_context(runtime_mode=FULL, **inner):
            raise KeyError if error is ContextError else error
        assert get_forward_context() is outer
    assert not is_forward_context_available()


def test_tasks_have_contexts_of_their_own() -> None:
    async def forward(num_tokens: int) -> list[int | None]:
        seen = []
        with set_forward_context(num_tokens=num_tokens):
            for _ in range(3):
                await asyncio.sleep(0)
                seen.append(get_forward_context().num_tokens)
        return seen

    async def serve() -> list[list[int | None]]:
        with set_forward_context(num_tokens=-1):
            answers = await asyncio.gather(*(forward(n) for n in range(4)))
            assert get_forward_context().num_tokens == -1
        return list(answers)

    assert asyncio.run(serve()) == [[n] * 3 for n in range(4)]
    assert not is_forward_context_available()


@pytest.mark.parametrize(
    ("mode", "descriptor", "error", "said"),
    [
        *((mode, KEY, ContextError, "NONE, PIECEWISE or FULL") for mode in ("FULL_DECODE_ONLY", "full_and_piecewise")),
        (CUDAGraphMode.FULL_AND_PIECEWISE, KEY, ContextError, "NONE, PIECEWISE or FULL.*FULL_AND_PIECEWISE"),
        *((mode, KEY, OptionError, "NONE, PIECEWISE, FULL") for mode in ("fulll", 2, None)),
        *((mode, None, ValueError, "batch_descriptor=") for mode in (PIECEWISE, FULL)),
    ],
)
def test_what_names_no_graph_is_refused(
    mode: Any, descriptor: BatchDescriptor | None, error: type[Exception], said: str
) -> None:
    context = {"runtime_mode": mode, "batch_descriptor": descriptor}
    with pytest.raises(error, match=said) as refused, set_forward_context(**context):
        pytest.fail("the body must not run")
    assert error is not ContextError or str(mode).upper() in str(refused.value)


# Batch descriptors as dictionary keys.


DESCRIPTORS = st.builds(
    BatchDescriptor,
    num_tokens=st.integers(0, 3),
    num_reqs=st.none() | st.integers(0, 2),
    uniform=st.booleans(),
    has_lora=st.booleans(),
    num_active_loras=st.integers(0, 2),
    extra=st.lists(st.tuples(st.sampled_from(["seq_len", "frames"]), st.integers(0, 2)), max_size=2).map(tuple),
)


def public_fields(descriptor: BatchDescriptor) -> tuple[object, ...]:
    return tuple(getattr(descriptor, f.name) for f in dataclasses.fields(descriptor) if f.init)


@given(DESCRIPTORS, DESCRIPTORS)
def test_equality_is_by_every_field(one: BatchDescriptor, other: BatchDescriptor) -> None:
    assert (one == other) is (public_fields(one) == public_fields(other))
    assert (one != other) is not (one == other)
    if one == other:
        assert hash(one) == hash(other)
    assert one != public_fields(one)
    assert one != one.num_tokens


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
    seeded = environment(PYTHONHASHSEED="12345")
    written = subprocess.run([sys.executable, "-c", program], env=seeded, capture_output=True, check=True).stdout
    descriptor = pickle.loads(written)
    assert {BatchDescriptor(8, extra=(("name", "text"),)): 1}[descriptor] == 1


def test_unhashable_extra_is_refused_when_made() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        BatchDescriptor(8, extra=(("sizes", [1, 2]),))  # type: ignore[arg-type]


# Runtime modes and pairs, as a table.


DECODE_ONLY, BOTH = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE


@pytest.mark.parametrize(
    ("mode", "decode", "mixed", "largest", "separate", "piecewise", "without_piecewise"),
    [
        (NONE, NONE, NONE, NONE, False, False, NONE),
        (PIECEWISE, PIECEWISE, PIECEWISE, PIECEWISE, False, True, NONE),
        (FULL, FULL, FULL, FULL, False, False, FULL),
        (DECODE_ONLY, FULL, NONE, FULL, True, False, DECODE_ONLY),
        (BOTH, FULL, PIECEWISE, FULL, True, True, DECODE_ONLY),
    ],
)
def test_what_a_mode_means(
    mode: CUDAGraphMode, decode: Any, mixed: Any, largest: Any, separate: bool, piecewise: bool, without_piecewise: Any
) -> None:
    assert mode.decode_mode() is decode
    assert mode.mixed_mode() is mixed
    assert mode.max_cudagraph_mode() is largest
    assert mode.separate_routine() is separate
    assert mode.is_valid_runtime_mode() is not separate
    assert mode.requires_piecewise_compilation() is piecewise
    assert mode.without_piecewise() is without_piecewise
    assert {runtime for runtime in (NONE, PIECEWISE, FULL) if mode.has_mode(runtime)} == {decode, mixed}
