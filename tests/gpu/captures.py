"""Programs in which captures of a user, captures of graphpass, failures and closes alternate.

``python -m tests.gpu.captures FIRST END`` runs the programs of these seeds; its status is 0 if every result was right,
and the process came to its end.
"""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import graphpass as gp

SIZES = (2, 3, 4, 6, 8)
WIDTH = 8
TROUBLE: list[Callable[[torch.Tensor], Any]] = []
TIMEOUT_S = 540


@torch.library.custom_op("graphpass_gpu_captures::troubled", mutates_args=())
def troubled(x: torch.Tensor) -> torch.Tensor:
    """A copy, unless a step of a program makes it fail where it is captured."""
    if TROUBLE and TROUBLE[-1](x) is None:
        return x * 2
    return x.clone()


troubled.register_fake(torch.empty_like)


in_capture = torch.cuda.is_current_stream_capturing


def reads(x: torch.Tensor) -> Any:
    return x.sum().item() if in_capture() else x


def raises(x: torch.Tensor) -> Any:
    if in_capture():
        raise ValueError("a bug of the model")
    return x


def exhausts(x: torch.Tensor) -> Any:
    return torch.empty(1 << 50, device=x.device) if in_capture() else x


class Model(torch.nn.Module):
    """A row at a time; some draw random numbers, too."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.draws, self.inner = draws, torch.nn.Linear(WIDTH, WIDTH, device="cuda")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.graphpass_gpu_captures.troubled(self.inner(x).relu()) + 1
        return y + torch.rand_like(y) if self.draws else y


@dataclass
class Program:
    """One model, plain and over graphs, and the steps that its seed chooses."""

    seed: int
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.chosen = random.Random(self.seed)
        self.mode = self.chosen.choice(("FULL", "PIECEWISE"))
        splits = self.chosen.choice(((), ("graphpass_gpu_captures::troubled",)))
        torch.manual_seed(self.seed)
        self.model = Model(self.chosen.random() < 0.3).eval()
        self.runtime = gp.GraphRuntime()
        options = {"compiler": "eager", "on_fallback": "silent", "mode": self.mode, "splitting_ops": list(splits)}
        options |= {"runtime": self.runtime, "dispatch": "auto"}
        self.fast: Any = torch.compile(self.model, backend="cgpass", dynamic=True, options=options)
        self.kept: list[tuple[Any, torch.Tensor, torch.Tensor]] = []  # (graph, its input, its output) of users
        self.steps = (self.call, self.call, self.exact, self.scoped, self.users, self.users, self.inside, self.again)
        self.steps += (self.fails, self.fails_in_scope, self.draw, self.close)

    def run(self) -> None:
        for _ in range(self.chosen.randrange(6, 20)):
            step = self.chosen.choice(self.steps)
            step()
            self.done[step.__name__] += 1
        for graph, *_ in self.kept:
            graph.reset()
        if self.chosen.random() < 0.7:  # the others leave their graphs to the end of the process
            self.runtime.close()

    def rows(self, size: int | None = None) -> torch.Tensor:
        return torch.randn(size or self.chosen.choice(SIZES), WIDTH, device="cuda")

    def check(self, got: torch.Tensor, x: torch.Tensor) -> None:
        """Numbers that were drawn lie between 0 and 1; the rest is that of the model."""
        want = torch.nn.functional.linear(x, self.model.inner.weight, self.model.inner.bias).relu() + 1
        difference = got - want
        least, most = (-1e-4, 1 + 1e-4) if self.model.draws else (-1e-4, 1e-4)
        assert bool(((difference >= least) & (difference <= most)).all()), f"program {self.seed}: a wrong result"

    def call(self) -> None:
        x = self.rows()
        self.check(self.fast(x), x)

    def exact(self) -> None:
        """One size until it has a graph of its own."""
        x = self.rows()
        for _ in range(5):
            self.check(self.fast(x), x)

    def scoped(self) -> None:
        x = self.rows()
        key = gp.BatchDescriptor(len(x))
        with self.runtime.capturing(), gp.set_forward_context(runtime_mode=self.mode, batch_descriptor=key):
            self.check(self.fast(x), x)

    def users(self) -> None:
        """A user's own capture of the compiled function, whatever has been called before."""
        x = self.rows()
        if self.chosen.random() < 0.5:  # torch's manual has warm-ups; a first call under capture would compile there
            self.fast(x)
        elif not self.runtime.callables():
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = self.fast(x)
        graph.replay()
        self.check(got, x)
        self.kept.append((graph, x, got))

    def inside(self) -> None:
        """A capture that is asked for inside a user's is refused, and theirs goes on."""
        x = self.rows()
        if not self.runtime.callables():
            return
        graph, refused = torch.cuda.CUDAGraph(), False
        key = gp.BatchDescriptor(len(x), extra=(("program", self.chosen.random()),))
        with torch.cuda.graph(graph):
            doubled = x * 2
            with gp.set_forward_context(runtime_mode=self.mode, batch_descriptor=key):
                try:
                    with self.runtime.capturing():
                        self.fast(x)
                except gp.errors.CaptureError:
                    refused = True
            doubled = doubled + 1
        graph.replay()
        assert refused, f"program {self.seed}: a capture inside another one"
        assert torch.equal(doubled, x * 2 + 1), f"program {self.seed}: the user's capture was broken"
        graph.reset()

    def again(self) -> None:
        """Graphs of users replay whatever has happened since."""
        for graph, x, got in self.kept:
            x.copy_(self.rows(len(x)))
            graph.replay()
            self.check(got, x)

    @contextlib.contextmanager
    def trouble(self) -> Iterator[None]:
        TROUBLE.append(self.chosen.choice((reads, raises, exhausts)))
        try:
            yield
        finally:
            TROUBLE.pop()

    def fails(self) -> None:
        """Captures that nobody asked for fail, and their calls run without a graph."""
        x = self.rows()
        with self.trouble():
            for _ in range(3):
                self.check(self.fast(x), x)

    def fails_in_scope(self) -> None:
        x = self.rows()
        key = gp.BatchDescriptor(len(x), extra=(("program", self.chosen.random()),))
        context = gp.set_forward_context(runtime_mode=self.mode, batch_descriptor=key)
        expected = contextlib.suppress(gp.errors.CaptureError, ValueError, RuntimeError)
        with self.trouble(), expected, self.runtime.capturing(), context:
            self.fast(x)

    def draw(self) -> None:
        """A failed capture leaves random numbers to eager calls."""
        assert bool((torch.rand(64, device="cuda") < 1).all())

    def close(self) -> None:
        self.runtime.close()


def work(seeds: Sequence[int]) -> None:
    """Run programs in this process; prints how many and how often each step ran."""
    warnings.simplefilter("ignore")
    done: Counter[str] = Counter()
    with torch.no_grad():
        for seed in seeds:
            program = Program(seed)
            program.run()
            done += program.done
            done["programs"] += 1
            done["captured"] += program.runtime.stats().captured
            if seed % 4 == 0:
                torch._dynamo.reset()
    print(" ".join(f"{name}={count}" for name, count in sorted(done.items())), flush=True)


if __name__ == "__main__":
    work(range(*map(int, sys.argv[1:])))
