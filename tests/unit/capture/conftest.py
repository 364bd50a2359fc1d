"""A wrapper on the CPU tape, its captures and its replays, with the runs of its Python counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from graphpass import CUDAGraphWrapper, GraphRuntime
from graphpass.capture import CapturePolicy, Counts
from graphpass.context import set_forward_context
from graphpass.keys import BatchDescriptor, CUDAGraphMode


class Counted:
    """A region that counts how often its Python runs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.function(*args, **kwargs)


class Rig:
    """One runtime, the wrappers made in it, and calls of them under a context."""

    def __init__(self, runtime: GraphRuntime) -> None:
        self.runtime = runtime

    def wrap(
        self,
        function: Callable[..., Any],
        mode: str = "FULL",
        *,
        name: str = "region",
        outputs: str = "clone",
        on_moved_input: str = "copy",
        lazy: bool = False,
        compare: bool = False,
        **roles: Any,
    ) -> CUDAGraphWrapper:
        policy = CapturePolicy(outputs, on_moved_input, lazy, compare)  # type: ignore[arg-type]
        return CUDAGraphWrapper(Counted(function), mode, runtime=self.runtime, name=name, policy=policy, **roles)

    def call(
        self,
        wrapper: Callable[..., Any],
        *args: Any,
        at_mode: str = "FULL",
        at_key: int = 8,
        at_context: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """One forward."""
        mode = CUDAGraphMode.parse(at_mode)
        with set_forward_context(runtime_mode=mode, batch_descriptor=BatchDescriptor(at_key), **(at_context or {})):
            return wrapper(*args, **kwargs)

    def capture(self, wrapper: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One forward that may capture."""
        with self.runtime.capturing():
            return self.call(wrapper, *args, **kwargs)

    def captured(self, wrapper: CUDAGraphWrapper, *args: Any, **kwargs: Any) -> CUDAGraphWrapper:
        """The wrapper after one forward that may capture."""
        self.capture(wrapper, *args, **kwargs)
        return wrapper

    def counts(self, wrapper: CUDAGraphWrapper, key: int = 8) -> Counts:
        return self.runtime.counts()[wrapper.name, wrapper.mode, BatchDescriptor(key)]

    def notes(self) -> str:
        return "\n".join(f"{times} {note}" for note, times in self.runtime.notes.items())


@pytest.fixture
def rig() -> Iterator[Rig]:
    with GraphRuntime() as runtime:
        yield Rig(runtime)
