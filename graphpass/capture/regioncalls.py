"""What region calls go through while the code around them is warmed up, recorded or compared."""

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
    """One tensor that a region inside the capture returned, as it was then.

    Attributes:
        region: the region's name.
        index: the tensor's place among the region's flat outputs.
        tensor: a copy; code that runs later may write to what the region returned.
    """

    region: str
    index: int
    tensor: torch.Tensor


@dataclass(slots=True)
class RegionCalls:
    """Stands in the forward context: a wrapper that finds it there passes its call through, so the outermost captures.

    Attributes:
        run: how a region's runnable is called: :meth:`GraphDevice.call`, or plainly.
        observed: outputs of the regions inside, in order; None where nobody asks for them.
        before: told (region, runnable, arguments) of every call, and what it returns is told the result.
        failed: the innermost region that raised, and its runnable.
    """

    run: Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
    observed: list[Observed] | None = None
    before: Callable[[str, Any, Sequence[Any]], Callable[[Any], None] | None] | None = None
    failed: tuple[str, Any] | None = None

    def call(self, region: str, runnable: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a region that lies inside."""
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
    """What the cgpass backend compiled, announced to a capture: its graph is what is captured.

    A device that records under a mode, where Dynamo would skip what it has compiled, tells it by its class.
    """

    runnable: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """Call it."""
        return self.runnable(*args)


def call_compiled(runnable: Callable[..., Any], *args: Any) -> Any:
    """Call what the cgpass backend compiled, also where something around it is being captured."""
    context = current_context()
    if context is None or context.capture is None:
        return runnable(*args)
    return context.capture.call("compiled", CompiledWithin(runnable), args, {})
