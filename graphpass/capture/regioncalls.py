"""Calls of the regions inside one that is captured or compared: the outermost is captured, and sees the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpass.compat import trees


@dataclass(frozen=True, slots=True)
class Observed:
    """A copy of one tensor that an inner region returned."""

    region: str  #: the inner region's name
    index: int  #: the tensor's index in the region's flat outputs
    tensor: torch.Tensor  #: a clone, because later code may write to the original


@dataclass(slots=True)
class RegionCalls:
    """``ForwardContext.capture`` while an outer region is captured or compared.

    Inner wrappers call :meth:`call` instead of capturing, so only the outermost region is captured.
    """

    #: calls ``runnable(*args, **kwargs)``; during a capture this is the device's ``call``
    run: Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
    observed: list[Observed] | None = None  #: copies of the inner regions' outputs, in call order; None collects none
    #: called with (region, runnable, arguments) before each call; if it returns a function, that is called with the
    #: region's result
    before: Callable[[str, Any, Sequence[Any]], Callable[[Any], None] | None] | None = None
    failed: tuple[str, Any] | None = None  #: name and runnable of the innermost region that raised

    def call(self, region: str, runnable: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call an inner region and return its result; errors pass through, after ``failed`` is set."""
        after = None if self.before is None else self.before(region, runnable, args)
        try:
            result = self.run(runnable, args, kwargs)
        except BaseException:
            self.failed = self.failed or (region, runnable)
            raise
        if self.observed is not None:
            leaves = enumerate(trees.flatten(result)[0])
            self.observed += [Observed(region, i, t.clone()) for i, t in leaves if isinstance(t, torch.Tensor)]
        if after is not None:
            after(result)
        return result
