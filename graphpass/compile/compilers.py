"""The compilers for regions, with a common signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import fx

from graphpass.checks import one_of
from graphpass.compat import dynamo

__all__ = ["COMPILERS", "compile_training", "compiler_named"]


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler for regions.

    Attributes:
        compile: takes a graph with a flat tuple as output, which it may change, and a fake tensor or symbolic size for
            each placeholder. Inductor's CUDA graphs are always off, because the wrapper around the region captures. A
            compiler that functionalizes takes a third argument, a function that it calls with the aten graph.
        opaque: its kernels bypass torch's dispatcher, so a recorder must treat a call as one op.
        functionalizes: it rewrites writes to inputs, and its artifacts depend on which inputs share memory.
    """

    compile: Callable[..., Callable[..., Any]]
    opaque: bool
    functionalizes: bool


def _as_it_is(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    return graph_module.forward


_COMPILERS: Mapping[str, Compiler] = MappingProxyType(
    {
        "inductor": Compiler(dynamo.inductor, opaque=True, functionalizes=True),
        "aot_eager": Compiler(dynamo.aot_eager, opaque=False, functionalizes=True),
        "eager": Compiler(_as_it_is, opaque=False, functionalizes=False),
    }
)
COMPILERS = tuple(_COMPILERS)
"""The names of the compilers."""


def compiler_named(name: str) -> Compiler:
    """The compiler with this name.

    Raises:
        OptionError: no such compiler.
    """
    one_of(name, COMPILERS, "unknown compiler", remedy="leave it out")
    return _COMPILERS[name]


def compile_training(graph_module: fx.GraphModule, example_inputs: Sequence[Any], compiler: str) -> Callable[..., Any]:
    """Compile a whole graph for training with autograd; it is never captured."""
    return compiler_named(compiler).compile(graph_module, example_inputs)
