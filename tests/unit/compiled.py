"""A model compiled with cgpass beside the model itself: one call at a key, comparisons, and what its runtime says."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

import graphpass as gp
from graphpass import BatchDescriptor, CUDAGraphMode, GraphRuntime
from tests.observed import calls_with_graph

BOTH = ("PIECEWISE", "FULL")


def agrees(got: Any, want: Any, **how: Any) -> None:
    torch.testing.assert_close(got, want, **how)


def rows(size: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(size, 6),)


class Compiled:
    """Calls are made without autograd; ``make`` makes the arguments of a size, ``key`` its descriptor.

    A test of sizes or numbers as symbols asks for ``dynamic=True``, which takes longer to trace.
    """

    def __init__(
        self,
        rt: GraphRuntime,
        model: Callable[..., Any],
        *,
        make: Callable[[Any], tuple[Any, ...]] = rows,
        key: Callable[[Any], BatchDescriptor] = BatchDescriptor,
        dynamic: bool | None = False,
        fullgraph: bool = False,
        **options: Any,
    ) -> None:
        self.rt, self.model, self.make, self.key = rt, model, make, key
        given = {"compiler": "eager", "runtime": rt, **options}
        self.fast: Any = torch.compile(model, backend="cgpass", dynamic=dynamic, fullgraph=fullgraph, options=given)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self.fast(*args, **kwargs)

    def at(self, mode: str, size: Any, *args: Any, capture: bool = False, **kwargs: Any) -> Any:
        """One call at the key of a size; ``capture`` opens the runtime for it."""
        descriptor = size if isinstance(size, BatchDescriptor) else self.key(size)
        context = gp.set_forward_context(runtime_mode=CUDAGraphMode.parse(mode), batch_descriptor=descriptor)
        with torch.no_grad(), context:
            if not capture:
                return self.fast(*args, **kwargs)
            with self.rt.capturing():
                return self.fast(*args, **kwargs)

    def capture(self, *modes: str, sizes: Sequence[Any] = (4,)) -> None:
        """Each size in each mode, in one scope."""
        with self.rt.capturing():
            for mode, size in itertools.product(modes or BOTH, sizes):
                self.at(mode, size, *self.make(size))

    def check(self, *modes: str, sizes: Sequence[Any] = (4,), capture: bool = False) -> None:
        """A call of each size in each mode returns what the model returns."""
        for mode, size in itertools.product(modes or BOTH, sizes):
            args = self.make(size)
            with torch.no_grad():
                want = self.model(*args)
            agrees(self.at(mode, size, *args, capture=capture), want)

    def serve(self, calls: Iterable[Any], *, passes: int = 1, model: Callable[..., Any] | None = None) -> int:
        """Calls without a context, by size or by arguments, beside the model; how many of the last pass replayed."""
        given = [self.make(each) if isinstance(each, int) else each for each in calls]
        for _ in range(passes):
            before = calls_with_graph(self.rt)
            for args in given:
                with torch.no_grad():
                    want = (model or self.model)(*args)
                agrees(self(*args), want)
        return calls_with_graph(self.rt) - before

    def tally(self, mode: str) -> dict[tuple[str, int], tuple[int, int]]:
        """{(region, tokens): (captured, replayed)} of the keys of one mode."""
        return {
            (region, key.num_tokens): (c.captured, c.replayed)
            for (region, at, key), c in self.rt.counts().items()
            if at is CUDAGraphMode.parse(mode)
        }

    def uses(self, *names: str) -> set[Any]:
        """The counts of these names that keys have, as tuples."""
        found = self.rt.counts().values()
        return {tuple(getattr(c, name) for name in names or ("captured", "replayed")) for c in found}

    @property
    def captured(self) -> int:
        return self.rt.stats().captured

    @property
    def problems(self) -> tuple[Any, ...]:
        return self.rt.report().problems

    def problem(self, text: str) -> Any:
        """The one problem of the report that says so."""
        (found,) = [problem for problem in self.problems if text in problem.what]
        return found

    @property
    def padded_sizes(self) -> dict[str, bool]:
        """{size: whether it is padded} of the one callable."""
        (record,) = self.rt.callables()
        return {size.field: size.is_padded for size in record.sizes}

    @property
    def is_padded(self) -> bool:
        """Whether some call replayed a larger graph."""
        return any(key.padding for key in self.rt.report().figures.keys)
