"""Calls of regions inside an outer region that is being warmed up, recorded or compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpass.compat import trees
from graphpass.context import current_context

__all__ = ["CompiledWithin", "Observed", "RegionCalls", "call_compiled"]


@dataclass(frozen=True, slots=True)
class Observed:
    """A copy of one tensor that an inner region returned.

    Attributes:
        region: the inner region's name.
        index: the tensor's index in the region's flat outputs.
        tensor: a clone, because later code may write to the original.
    """

    region: str
    index: int
    tensor: torch.Tensor


@dataclass(slots=True)
class RegionCalls:
    """``ForwardContext.capture`` while an outer region is captured or compared.

    Inner wrappers call :meth:`call` instead of capturing, so only the outermost region is captured.

    Attributes:
        run: calls ``runnable(*args, **kwargs)``; during a capture this is :meth:`GraphDevice.call`.
        observed: collects copies of the inner regions' outputs, in call order; None collects nothing.
        before: called with (region, runnable, arguments) before each call. If it returns a function, that function is
            called with the region's result.
        failed: name and runnable of the innermost region that raised.
    """

    run: Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
    observed: list[Observed] | None = None
    before: Callable[[str, Any, Sequence[Any]], Callable[[Any], None] | None] | None = None
    failed: tuple[str, Any] | None = None

    def call(self, region: str, runnable: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call an inner region and return its result; errors pass through, after ``failed`` is set."""
        after = None if self.before is None else self.before(region, runnable, args)
        try:
            result = self.run(runnable, args, kwargs)
        except BaseException:
            self.failed = self.failed or (region, runnable)
            raise
        if self.observed is not None:
            leaves = trees.flatten(result)[0]
            self.observed += [
                Observed(region, index, leaf.clone())
                for index, leaf in enumerate(leaves)
                if isinstance(leaf, torch.Tensor)
            ]
        if after is not None:
            after(result)
        return result


@dataclass(frozen=True, slots=True)
class CompiledWithin:
    """Marks ``runnable`` as code that the cgpass backend compiled, for :meth:`GraphDevice.call`.

    The CPU tape records under a dispatch mode, in which Dynamo skips compiled code; it recognises this class.
    """

    runnable: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """Call ``runnable``."""
        return self.runnable(*args)


def call_compiled(runnable: Callable[..., Any], *args: Any) -> Any:
    """Call code that the cgpass backend compiled; during an outer capture, the call goes through its RegionCalls."""
    context = current_context()
    if context is None or context.capture is None:
        return runnable(*args)
    return context.capture.call("compiled", CompiledWithin(runnable), args, {})
