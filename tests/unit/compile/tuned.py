"""A fake compiler and a fake device for tuning, a model to tune, and what tuning has said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import graphpass as gp
from graphpass.report.records import TunedRange
from tests.unit.models import linear, module

PDL, DESCENT, COMBO, AUTOTUNE = "triton.enable_pdl", "coordinate_descent_tuning", "combo_kernels", "max_autotune"
Variant = tuple[str, ...]


@dataclass
class Bench:
    """A compiler whose variants compute the same but for the faults in here, and a device with a clock of its own."""

    replay_s: dict[Variant, float] = field(default_factory=dict)  #: 1 s where nothing is said
    compile_s: float = 1.0
    scaled: dict[Variant, float] = field(default_factory=dict)  #: variant -> factor of its results
    unsteady: set[Variant] = field(default_factory=set)  #: variants of which one replay in ten differs
    fails: dict[Variant, BaseException] = field(default_factory=dict)
    clock: float = 0.0
    compiled: list[tuple[Variant, list[Any]]] = field(default_factory=list)
    ran: list[Variant] = field(default_factory=list)
    is_closed: bool = True
    open_runs: int = 0

    def compile(self, graph: Any, examples: Any, show: Any = None, settings: Any = ()) -> Callable[..., Any]:
        variant = tuple(settings)
        if settings != ():
            self.compiled.append((variant, [e for e in examples if isinstance(e, (int, torch.SymInt))]))
            self.clock += self.compile_s
        if variant in self.fails:
            raise self.fails[variant]

        def run(*args: Any) -> Any:
            self.ran.append(variant)
            factor = self.scaled.get(variant, 1.0)
            if variant in self.unsteady and self.ran.count(variant) % 10 == 0:
                factor += 1e-7
            results = graph(*args)
            return results if factor == 1 else tuple(result * factor for result in results)

        return run

    def now(self) -> float:
        return self.clock

    def capture(self, name: str, body: Callable[[], Sequence[torch.Tensor]]) -> Any:
        self.open_runs, self.is_closed = self.open_runs + 1, False
        return Captured(self, name, body)

    def seconds(self, runs: Sequence[Any]) -> list[float]:
        return [0.0 if run.variant is None else self.replay_s.get(run.variant, 1.0) for run in runs]

    def close(self) -> None:
        self.is_closed = True

    def tried(self) -> list[Variant]:
        return [variant for variant, _ in self.compiled]


class Captured:
    def __init__(self, bench: Bench, name: str, body: Callable[[], Sequence[torch.Tensor]]) -> None:
        self.bench, self.name, self.body = bench, name, body
        num_ran = len(bench.ran)
        self.results = body()
        self.variant = bench.ran[-1] if len(bench.ran) > num_ran else None

    def replay(self) -> None:
        self.results = self.body()

    def close(self) -> None:
        self.bench.open_runs -= 1


def layer() -> Any:
    return module(lambda self, x: torch.relu(self.linear(x)), linear=linear(4))


def captured(model: Any, rt: gp.GraphRuntime, **options: Any) -> Any:
    """``model``, compiled for any size and captured at 16."""
    given = {"capture_sizes": [16], "dynamic_dims": {"x": 0}, "tune": "measure", "runtime": rt, **options}
    graphed = gp.graphed(model.eval(), **given)
    graphed.capture(torch.randn(16, 4))
    return graphed


def tuned(rt: gp.GraphRuntime) -> tuple[TunedRange, ...]:
    return rt.report().figures.costs.tuned


def notes(rt: gp.GraphRuntime) -> str:
    return "\n".join(rt.notes)
