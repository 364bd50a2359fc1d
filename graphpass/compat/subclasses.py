"""Tensors that wrap tensors (``__tensor_flatten__``): their parts, and what makes a wrapper of its parts again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from graphpass.compat import trees

Path = tuple[str, ...]
"""Names of attributes, from a wrapper to a plain tensor in it."""


def is_wrapper(value: Any) -> bool:
    """Whether a value is a tensor that wraps others and that compilers see through. Nested tensors are none."""
    return is_made_of_tensors(value) and not value.is_nested


def is_opaque(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class dispatches operators itself and is no wrapper, a nested tensor for example."""
    from torch._subclasses.fake_tensor import FakeTensor

    dispatches = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return dispatches and not isinstance(tensor, FakeTensor) and not is_wrapper(tensor)


def holds_state(wrapper: Any) -> bool:
    """Whether a DTensor holds more than its parts: which rows of a sharded embedding are another rank's."""
    return any(hasattr(placement, "mask_buffer") for placement in getattr(wrapper, "placements", ()))


def views_wrapper(value: Any) -> bool:
    """Whether a value is a plain tensor, but a view of a tensor that consists of others."""
    base = value._base if isinstance(value, torch.Tensor) else None
    return is_made_of_tensors(base) and not is_made_of_tensors(value)


is_made_of_tensors: Callable[[Any], bool] = is_traceable_wrapper_subclass
"""Whether a value is a tensor that consists of others: a wrapper or a nested tensor."""


def parts_of(wrapper: Any) -> list[tuple[str, Any]]:
    """The attributes of which a wrapper consists: tensors, and objects of opaque types (a mesh, from torch 2.13)."""
    found = ((name, getattr(wrapper, name)) for name in wrapper.__tensor_flatten__()[0])
    return [(name, part) for name, part in found if part is not None]


def plain_tensors(value: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """(path, tensor) of all plain tensors in a wrapper or a nested tensor; of a plain tensor, itself."""
    if is_made_of_tensors(value):
        for name, part in parts_of(value):
            yield from plain_tensors(part, (*path, name))
    elif isinstance(value, torch.Tensor):
        yield path, value


def plain_state(module: torch.nn.Module, *, recurse: bool = True) -> dict[str, torch.Tensor]:
    """{path: plain tensor} of the parameters of a module, ``weight.qdata`` of those that wrap others."""
    named = module.named_parameters(recurse=recurse)
    return {".".join((name, *path)): part for name, tensor in named for path, part in plain_tensors(tensor)}


@dataclass(frozen=True, slots=True, eq=False)
class Rebuild:
    """Makes a wrapper from the plain tensors in it and the sizes that differ from call to call."""

    kind: Any  #: the wrapper's class
    parts: tuple[tuple[str, Any], ...]  #: each attribute with what makes it; None for a tensor that is given
    metadata: Any  #: (the class's own metadata, size, strides), with ``...`` for sizes that differ from call to call
    num_sizes: int  #: how many sizes are given, after the tensors of all parts

    @property
    def __name__(self) -> str:
        return f"rebuild_{self.kind.__name__}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rebuild) or (self.kind, self.num_sizes) != (other.kind, other.num_sizes):
            return False
        (own, *layout), (others, *other_layout) = self.metadata, other.metadata
        # As Dynamo compares it: its sizes may be symbols of a trace that is over.
        equal = getattr(self.kind, "__metadata_guard__", operator.eq)  # guard: wrapper_own_comparison
        are_parts_equal = (self.parts, layout) == (other.parts, other_layout)
        return are_parts_equal and bool(equal(own, others))  # guard: wrapper_metadata

    def __hash__(self) -> int:
        return hash((self.kind, self.num_sizes, tuple(name for name, _ in self.parts)))

    def kinds(self) -> Iterator[Any]:
        """The classes of the wrapper and of those in it."""
        yield self.kind
        for _, how in self.parts:
            yield from how.kinds() if isinstance(how, Rebuild) else ()

    def __call__(self, *given: Any) -> Any:
        """The wrapper; it shares the memory of the tensors."""
        return self._from(iter(given))

    def _from(self, given: Iterator[Any]) -> Any:
        made = {}
        for name, how in self.parts:
            made[name] = next(given) if how is None else how._from(given) if isinstance(how, Rebuild) else how
        metadata = self.metadata
        if self.num_sizes:
            metadata = trees.map_only(EllipsisType, lambda _: next(given), metadata)
        return self.kind.__tensor_unflatten__(made, *metadata)


def rebuild_of(wrapper: Any, given: list[Any]) -> Rebuild:
    """What makes this wrapper again; adds the plain tensors in it and its symbolic sizes to ``given``, in order."""
    parts: list[tuple[str, Any]] = []
    for name, part in parts_of(wrapper):
        how = getattr(part, "real_obj", part)  # of an object that stands for another in a trace
        if is_wrapper(part):
            how = rebuild_of(part, given)
        elif isinstance(part, torch.Tensor):
            how = given.append(part)  # type: ignore[func-returns-value]
        parts.append((name, how))
    num_before = len(given)

    def varying(size: torch.SymInt) -> EllipsisType:
        given.append(size)
        return ...

    metadata = (wrapper.__tensor_flatten__()[1], tuple(wrapper.size()), tuple(wrapper.stride()))
    metadata = trees.map_only(torch.SymInt, varying, metadata)
    return Rebuild(type(wrapper), tuple(parts), metadata, len(given) - num_before)
