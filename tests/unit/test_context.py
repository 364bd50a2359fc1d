"""The forward context: nesting, threads, tasks, exceptions and refusals."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from graphpass.context import current_context, get_forward_context, is_forward_context_available, set_forward_context
from graphpass.errors import ContextError, OptionError
from graphpass.keys import BatchDescriptor
from graphpass.modes import CUDAGraphMode

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
KEY = BatchDescriptor(8)


def test_there_is_none_outside() -> None:
    assert not is_forward_context_available()
    assert current_context() is None
    with pytest.raises(ContextError, match="set_forward_context"):
        get_forward_context()


def test_defaults() -> None:
    with set_forward_context() as context:
        assert get_forward_context() is context is current_context()
        assert is_forward_context_available()
        assert context.runtime_mode is NONE
        for name in context.__slots__:
            if name != "runtime_mode":
                assert getattr(context, name) is None
    assert not is_forward_context_available()


def test_a_context_has_every_argument() -> None:
    given = {name: object() for name in ("num_tokens_across_dp", "slot_mapping", "is_padding", "extra")}
    metadata = object()
    with set_forward_context(metadata, runtime_mode=FULL, batch_descriptor=KEY, num_tokens=5, **given) as context:
        assert context.attn_metadata is metadata
        assert (context.runtime_mode, context.batch_descriptor, context.num_tokens) == (FULL, KEY, 5)
        for name, value in given.items():
            assert getattr(context, name) is value


def test_a_context_is_frozen() -> None:
    with set_forward_context() as context, pytest.raises(AttributeError):
        context.num_tokens = 3  # type: ignore[misc]


def test_contexts_nest() -> None:
    with set_forward_context(runtime_mode=FULL, batch_descriptor=KEY) as outer:
        with set_forward_context() as inner:
            assert get_forward_context() is inner
            with set_forward_context(runtime_mode=PIECEWISE, batch_descriptor=KEY) as innermost:
                assert get_forward_context() is innermost
            assert get_forward_context() is inner
        assert get_forward_context() is outer
    assert not is_forward_context_available()


def test_the_outer_context_comes_back_when_the_body_raises() -> None:
    with set_forward_context() as outer:
        with pytest.raises(KeyError), set_forward_context(runtime_mode=FULL, batch_descriptor=KEY):
            raise KeyError
        assert get_forward_context() is outer
    with pytest.raises(KeyboardInterrupt), set_forward_context():
        raise KeyboardInterrupt
    assert not is_forward_context_available()


def test_a_refused_context_leaves_the_outer_one() -> None:
    with set_forward_context() as outer:
        with pytest.raises(ContextError), set_forward_context(runtime_mode=FULL):
            pytest.fail("the body must not run")
        assert get_forward_context() is outer


def test_threads_have_contexts_of_their_own() -> None:
    num_threads = 4
    together = threading.Barrier(num_threads)

    def forward(num_tokens: int) -> tuple[bool, int | None]:
        before = is_forward_context_available()
        with set_forward_context(num_tokens=num_tokens):
            together.wait(timeout=30)
            seen = get_forward_context().num_tokens
            together.wait(timeout=30)
        return before, seen

    with set_forward_context(num_tokens=-1), ThreadPoolExecutor(num_threads) as pool:
        assert list(pool.map(forward, range(num_threads))) == [(False, n) for n in range(num_threads)]
        assert get_forward_context().num_tokens == -1


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
    "mode", [CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE, "full_and_piecewise"]
)
def test_only_runtime_modes(mode: CUDAGraphMode | str) -> None:
    with (
        pytest.raises(ContextError, match="NONE, PIECEWISE or FULL") as refused,
        set_forward_context(runtime_mode=mode, batch_descriptor=KEY),
    ):
        pytest.fail("the body must not run")
    assert str(mode).upper() in str(refused.value)


@pytest.mark.parametrize("mode", ["fulll", 2, None])
def test_no_mode_and_no_name_of_one(mode: Any) -> None:
    with pytest.raises(OptionError, match="NONE, PIECEWISE, FULL"):
        set_forward_context(runtime_mode=mode, batch_descriptor=KEY)


@pytest.mark.parametrize("name", ["FULL", "full", "Piecewise", "none"])
def test_a_mode_by_its_name(name: str) -> None:
    with set_forward_context(runtime_mode=name, batch_descriptor=KEY) as context:
        assert context.runtime_mode is CUDAGraphMode[name.upper()]


@pytest.mark.parametrize("mode", [PIECEWISE, FULL])
def test_a_replay_needs_a_descriptor(mode: CUDAGraphMode) -> None:
    with pytest.raises(ValueError, match="batch_descriptor="), set_forward_context(runtime_mode=mode):
        pytest.fail("the body must not run")
