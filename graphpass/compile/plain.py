"""A region compiled once more without what makes its padding neutral, for graphs of sizes that are not padded."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from graphpass.compat import configuration
from graphpass.compile.structure import symbols_of
from graphpass.compile.tuning import SizedArtifact


class PlainRegion:
    """The artifact of one region structure that contains no insertions. It must never run at a padded size.

    It runs inside :func:`chosen` alone, and only in that thread. A saved one is None: its graph is not kept.

    Args:
        examples: the inputs of the first region of the structure, as traced.
        compile_within: (bounds of symbols, is_plain) -> the artifact; None if the inputs cannot be reproduced.
    """

    def __init__(self, examples: Sequence[Any], compile_within: Callable[..., SizedArtifact | None]) -> None:
        self._symbols = symbols_of(examples)
        self._compile_within, self._configured = compile_within, configuration.saved_configuration()
        self._artifact: SizedArtifact | None = None
        self.thread: int | None = None  #: in which the artifact runs at present

    def __reduce__(self) -> Any:
        return type(None), ()

    def compile(self) -> bool:
        """Compile the artifact, unless there is one; returns whether there is one now."""
        if self._artifact is None:
            with self._configured():
                self._artifact = self._compile_within(dict.fromkeys(self._symbols, (None, None)), is_plain=True)
        return self._artifact is not None

    def function_for(self, args: Sequence[Any]) -> Callable[..., Any] | None:
        """The artifact for these arguments; None where it is not chosen or not valid."""
        if self.thread != threading.get_ident() or self._artifact is None:  # guard: plain_in_its_thread
            return None
        return self._artifact.function if self._artifact.serves(args) else None


@contextlib.contextmanager
def chosen(regions: Iterable[PlainRegion]) -> Iterator[None]:
    """Run the plain artifacts in the body, in this thread. Only one thread captures at a time."""
    regions = tuple(regions)
    for region in regions:
        region.thread = threading.get_ident()
    try:
        yield
    finally:
        for region in regions:
            region.thread = None
