"""Models that are cut at an op with a Python body, and the dropping of parts of the structural key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import cgpass
import graphpass as gp
from graphpass.capture import recorder
from graphpass.compat import configuration
from graphpass.compile import once, tuning
from graphpass.compile.compilers import Compiler
from graphpass.compile.structure import Structure, structure_of
from tests.unit.compile.tuned import Bench


@torch.library.custom_op("compiletest::cut", mutates_args=())
def cut(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


cut.register_fake(torch.empty_like)


@torch.library.custom_op("compiletest::gain", mutates_args=())
def gain(x: torch.Tensor, name: str) -> torch.Tensor:
    """Looks its factor up by a layer's name, as attention looks up its cache."""
    return x * {"layers.0": 2.0, "layers.1": 3.0}[name]


gain.register_fake(lambda x, *_: torch.empty_like(x))


@torch.library.custom_op("compiletest::fill", mutates_args=("out",))
def fill(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x)


@fill.register_fake
def _(x: torch.Tensor, out: torch.Tensor) -> None:
    """Writes contents only."""


@pytest.fixture
def compiled_at_cuts(rt: gp.GraphRuntime) -> Callable[..., Any]:
    """``compiled_at_cuts(model, compiler, dynamic=..., **options)``: the model, split at ``compiletest::cut``."""

    def compile_model(model: Any, compiler: str = "aot_eager", *, dynamic: bool | None = None, **options: Any) -> Any:
        given = cgpass.options(splitting_ops=["compiletest::cut"], compiler=compiler, runtime=rt, **options)
        return torch.compile(model, backend="cgpass", dynamic=dynamic, options=given)

    return compile_model


_PARTS_OF_A_KEY = ("compiler", "ops", "inputs", "outputs", "sharing", "symbols")


@pytest.fixture
def drop_from_key(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``drop_from_key(*parts)``: regions that differ in these parts alone are taken for one."""

    def drop(*parts: str) -> None:
        def incomplete(*args: Any, **kwargs: Any) -> Structure:
            structure = structure_of(*args, **kwargs)
            kept = zip(_PARTS_OF_A_KEY, structure.key, strict=True)
            return replace(structure, key=tuple(() if name in parts else part for name, part in kept))

        monkeypatch.setattr(once, "structure_of", incomplete)

    return drop


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    bench = Bench()
    monkeypatch.setattr(once, "compiler_named", lambda name: Compiler(bench.compile, False, False))
    monkeypatch.setattr(recorder, "measurement_on", lambda device: bench)
    monkeypatch.setattr(tuning, "_NUM_REPLAYS", 30)
    monkeypatch.setattr(configuration, "settings_that_are_off", list)
    return bench
