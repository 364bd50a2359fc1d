"""The compilers a region can go through, under one signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import fx

from graphpass.compat import compilers
from graphpass.errors import OptionError

__all__ = ["COMPILERS", "compile_training", "compiler_named"]


@dataclass(frozen=True, slots=True)
class Compiler:
    """One compiler.

    Attributes:
        compile: takes a graph whose output is a flat tuple, which it may change, and fake tensors and symbolic sizes,
            one a placeholder. Inductor's own CUDA graphs are off whatever the user set: the wrapper around the region
            captures. A compiler that functionalizes also takes a function, which it calls with the aten graph.
        opaque: its kernels bypass torch's dispatcher, so that a recorder has to treat a call as one op.
        functionalizes: it rewrites what a region writes to its inputs, and relies on which of them share memory.
    """

    compile: Callable[..., Callable[..., Any]]
    opaque: bool
    functionalizes: bool


def _as_it_is(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    return graph_module.forward


_COMPILERS: Mapping[str, Compiler] = MappingProxyType(
    {
        "inductor": Compiler(compilers.inductor, opaque=True, functionalizes=True),
        "aot_eager": Compiler(compilers.aot_eager, opaque=False, functionalizes=True),
        "eager": Compiler(_as_it_is, opaque=False, functionalizes=False),
    }
)
COMPILERS = tuple(_COMPILERS)
"""Names of the compilers a region can go through."""


def compiler_named(name: str) -> Compiler:
    """The compiler of that name.

    Raises:
        OptionError: no such compiler.
    """
    if name not in _COMPILERS:
        raise OptionError(
            "unknown compiler", expected=f"one of {', '.join(COMPILERS)}", found=repr(name), remedy="leave it out"
        )
    return _COMPILERS[name]


def compile_training(graph_module: fx.GraphModule, example_inputs: Sequence[Any], compiler: str) -> Callable[..., Any]:
    """Compile a whole graph that autograd runs through: the compiler's ordinary work, never captured."""
    return compiler_named(compiler).compile(graph_module, example_inputs)
