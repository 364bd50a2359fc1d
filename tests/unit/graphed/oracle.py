"""A graphed model beside the same model run eagerly, call by call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

import graphpass as gp
from tests.observed import Observed

Made = tuple[tuple[Any, ...], dict[str, Any]]


def graphed(model: Callable[..., Any], *args: Any, **options: Any) -> gp.GraphedModel:
    """``graphpass.graphed`` without a compiler: regions run op by op."""
    return gp.graphed(model, *args, **{"compiler": "eager", **options})


def call(*args: Any, **kwargs: Any) -> Made:
    """Arguments of one call."""
    return args, kwargs


def each(make: Callable[[Any], Made], over: Iterable[Any]) -> list[Callable[[], Made]]:
    """What makes the arguments of a call for each item."""
    return [functools.partial(make, item) for item in over]


def rows(*sizes: int, width: int = 4) -> list[Callable[[], Made]]:
    return each(lambda size: call(torch.randn(size, width)), sizes)


def agree(
    make: Callable[[], Callable[..., Any]], calls: Sequence[Callable[[], Made]], *args: Any, **options: Any
) -> gp.GraphedModel:
    """Make the model twice and call one eagerly and the other over graphs; all that a caller sees has to be the same.

    Args:
        make: makes the model; it is called twice, after the same seed.
        calls: each makes the arguments of one call; it is called twice, after the same seed.
        *args: of ``graphed``.
        **options: of ``graphed``.

    Returns:
        The graphed model after the calls.
    """
    models = []
    for _ in range(2):
        torch.default_generator.manual_seed(0)
        models.append(make())
    eager, ours = models
    fast = graphed(ours, *args, **options)
    for number, of_call in enumerate(calls):
        seen = []
        for model, called in ((eager, eager), (ours, fast)):
            torch.default_generator.manual_seed(number)
            given, named = of_call()
            torch.default_generator.manual_seed(number)
            with torch.no_grad():
                result = called(*given, **named)
            state = model if isinstance(model, torch.nn.Module) else None
            seen.append(Observed.of(result=result, args=given, kwargs=named, model=state))
        difference = seen[0].difference(seen[1])
        assert difference is None, f"call {number}: {difference}"
    return fast


def agree_with(function: Callable[..., Any], calls: Sequence[Callable[[], Made]], *args: Any, **options: Any) -> Any:
    """The same of a function, which keeps nothing."""
    return agree(lambda: function, calls, *args, **options)


def full_counts(fast: gp.GraphedModel) -> dict[int, tuple[int, int]]:
    """{padded tokens: (captured, replayed)} of graphs of whole callables."""
    return {
        key.num_tokens: (c.captured, c.replayed)
        for (region, _, key), c in fast.runtime.counts().items()
        if region.endswith(".full")
    }


def replays(fast: gp.GraphedModel) -> int:
    return fast.runtime.stats().replayed
