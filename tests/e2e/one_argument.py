"""A model through ``torch.compile(model, backend="cgpass")``, beside eager: what differs, what replays, and why not."""

from __future__ import annotations

import logging
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import graphpass as gp
from graphpass.errors import GraphpassError, OptionError
from tests.e2e.stock_encoders import StockEncoder
from tests.observed import calls_with_graph

Batches = Sequence[dict[str, torch.Tensor]]
ATOL, RTOL = 2e-5, 1e-4


@dataclass(frozen=True, slots=True)
class Outcome:
    """What two passes over the same sizes did."""

    problem: str = ""  #: empty; or the first result that differs from eager, or the error that is not of graphpass
    refusal: str = ""  #: empty, or the sentence with which graphpass refused the model
    calls: int = 0  #: calls in one pass
    replays: int = 0  #: calls of the second pass that replayed a graph
    graphs: int = 0  #: captured graphs
    verdicts: frozenset[tuple[str, str]] = frozenset()  #: (dimension of an input, verdict) of the padding table
    #: {reason: calls of the second pass that ran without a graph}
    reasons: Mapping[str, int] = field(default_factory=dict)


def tensors_of(result: Any) -> list[torch.Tensor]:
    """Every tensor of a model's result."""
    values = tuple(result.values()) if isinstance(result, Mapping) else result
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if torch.is_tensor(leaf)]


def compare(model: Any, batches: Callable[[], Batches]) -> Outcome:
    """Run two passes over new batches of the same sizes, each call beside eager."""
    fast = torch.compile(model, backend="cgpass", options={"compiler": "aot_eager"})
    calls = replays = 0
    before: Counter[str] = Counter()
    with torch.no_grad():
        for of_pass in (batches(), batches()):
            calls, replays, before = len(of_pass), 0, without_graph(fast)
            for number, batch in enumerate(of_pass):
                expected, count = tensors_of(model(**batch)), with_graph(fast)
                try:
                    found = tensors_of(fast(**batch))
                except GraphpassError as error:
                    return Outcome(refusal=str(error), calls=calls)
                except Exception as error:
                    return Outcome(problem=f"call {number}: {type(error).__name__}: {error}", calls=calls)
                different = difference(found, expected)
                if different:
                    return Outcome(problem=f"call {number}: {different}", calls=calls)
                replays += with_graph(fast) > count
    runtime = gp.runtime_of(fast)
    without = without_graph(fast)
    return Outcome(
        calls=calls,
        replays=replays,
        graphs=runtime.stats().captured,
        verdicts=frozenset(
            (size.field, verdict)
            for record in runtime.callables()
            for size in record.sizes
            for verdict in (size.verdict, *(cause.verdict for cause in size.causes))
            if verdict is not None
        ),
        reasons=without - before,
    )


def two_passes(encoder: StockEncoder, largest: int, num_calls: int) -> Outcome:
    """:func:`compare` over seeded batch sizes and the encoder's lengths."""
    rng = random.Random(0)
    sizes = [(rng.randint(1, largest), encoder.lengths[call % len(encoder.lengths)]) for call in range(num_calls)]
    model = encoder.build()
    torch._dynamo.reset()
    return compare(model, lambda: [encoder.inputs(*size) for size in sizes])


def for_each(names: Iterable[str], described: Callable[[str], str]) -> None:
    """Print what is said of each model, or the error of the model itself."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for name in names:
        torch.manual_seed(1)
        try:
            text = described(name)
        except Exception as error:
            text = f"{name}: {type(error).__name__}: {error}"
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def with_graph(fast: Any) -> int:
    """Calls of compiled graphs that replayed a CUDA graph."""
    runtime = started(fast)
    return 0 if runtime is None else calls_with_graph(runtime)


def without_graph(fast: Any) -> Counter[str]:
    """{reason: calls that ran without a graph}."""
    runtime, found = started(fast), Counter[str]()
    for calls in () if runtime is None else runtime.ledger.uncaptured.values():
        found[calls.reason.why] += calls.n
    return found


def started(fast: Any) -> gp.GraphRuntime | None:
    """The runtime; None before the first call."""
    try:
        return gp.runtime_of(fast)
    except OptionError:
        return None


def difference(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str:
    """How the results differ; empty if they do not."""
    if len(found) != len(expected):
        return f"{len(found)} tensors instead of {len(expected)}"
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        try:
            torch.testing.assert_close(one, other, atol=ATOL, rtol=RTOL, equal_nan=True)
        except AssertionError as error:
            return f"output {index}: {error}"
    return ""
