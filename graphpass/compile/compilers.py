"""The compilers a region can go through, under one signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import fx

from graphpass import compat
from graphpass.errors import OptionError

__all__ = ["COMPILERS", "CompiledRegion", "compile_region", "compile_training"]

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class CompiledRegion:
    """A region as one callable: flat arguments in, a flat tuple out.

    Attributes:
        function: what runs.
        opaque: whether its kernels bypass torch's dispatcher, so that a recorder has to treat a call as one op.
    """

    function: Callable[..., Any]
    opaque: bool

    def __call__(self, *args: Any) -> Any:
        """Run the region."""
        return self.function(*args)


def _as_it_is(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    return graph_module.forward


_COMPILERS: Mapping[str, tuple[Compiler, bool]] = MappingProxyType(
    {
        "inductor": (compat.inductor, True),
        "aot_eager": (compat.aot_eager, False),
        "eager": (_as_it_is, False),
    }
)
COMPILERS = tuple(_COMPILERS)
"""Names of the compilers a region can go through."""


def compile_region(graph_module: fx.GraphModule, example_inputs: Sequence[Any], compiler: str) -> CompiledRegion:
    """Compile one region for inference.

    Args:
        graph_module: the region; its output is a flat tuple. Ownership goes to the compiler.
        example_inputs: fake tensors and symbolic sizes, one a placeholder.
        compiler: one of :data:`COMPILERS`. Inductor's own CUDA graphs are off whatever the user set: the wrapper
            around the region is the one that captures.

    Raises:
        OptionError: no such compiler.
    """
    if compiler not in _COMPILERS:
        raise OptionError(
            "unknown compiler", expected=f"one of {', '.join(COMPILERS)}", found=repr(compiler), remedy="leave it out"
        )
    function, opaque = _COMPILERS[compiler]
    return CompiledRegion(function(graph_module, example_inputs), opaque)


def compile_training(graph_module: fx.GraphModule, example_inputs: Sequence[Any], compiler: str) -> Callable[..., Any]:
    """Compile a whole graph that autograd runs through: the compiler's ordinary work, never captured."""
    return compile_region(graph_module, example_inputs, compiler).function
