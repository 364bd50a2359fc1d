"""Whether an encoder's weights are where its graphs read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphpass.capture.ambient import training_of
from graphpass.capture.dictslots import DictSlots
from graphpass.compat import memory

__all__ = ["EncoderWeights", "SharesWeights"]

_DEPTH = 4
"""How far from an encoder its modules may be: attributes of attributes, items of containers."""


class SharesWeights:
    """Base of what an encoder has for its own use: modules over weights that are watched elsewhere."""


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """Every parameter, buffer and submodule of an encoder at capture, and where it was.

    The weights are held, so that memory that a graph reads is never given away. Found are the modules that the encoder
    is, that it has as attributes, and that are within other objects and containers that it has.
    """

    _places: DictSlots
    _children: tuple[dict[str, Any], ...]
    _num_children: int
    _tensors: list[Any]
    _addresses: list[int | None]
    _positions: list[int]
    _layouts: _Layouts
    modules: tuple[torch.nn.Module, ...]

    @classmethod
    def of(cls, model: object) -> EncoderWeights:
        """The weights as of now."""
        roots = _roots_within(model, _DEPTH, set())
        modules = tuple({id(module): module for root in roots for module in root.modules()}.values())
        places = [
            (owner, name, kept)
            for module in modules
            for owner in (module._parameters, module._buffers, module._modules)
            for name, kept in owner.items()
        ]
        children = tuple(module._modules for module in modules)
        tensors = list({id(kept): kept for _, _, kept in places if isinstance(kept, torch.Tensor)}.values())
        return cls(
            DictSlots.of(places),
            children,
            sum(map(len, children)),
            tensors,
            [tensor.data_ptr() for tensor in tensors],
            list(range(len(tensors))),
            _Layouts(tensors),
            modules,
        )

    def in_place(self) -> bool:
        """Whether all of it is what it was, at the address and in the layout that it had."""
        return (
            self._places.in_place()
            and sum(map(len, self._children)) == self._num_children
            and memory.data_ptrs_equal(self._tensors, self._addresses, self._positions)
            and self._layouts.hold()
        )

    def training(self) -> tuple[bool, ...]:
        """Whether each of the modules is in training mode now."""
        return training_of(self.modules)


class _Layouts:
    """Shapes and strides of tensors, and whether they hold still."""

    def __init__(self, tensors: list[Any]) -> None:
        self._tensors, self._expected = tensors, _layouts_of(tensors)
        self._is_known = memory.layout_check(tensors) if tensors else None

    def hold(self) -> bool:
        """One native call, as long as autocast, and whatever else it looks at, is what it was in the last one."""
        if self._is_known is None or self._is_known():
            return True
        if _layouts_of(self._tensors) != self._expected:
            return False
        self._is_known = memory.layout_check(self._tensors)
        return True


def _layouts_of(tensors: list[Any]) -> list[tuple[Any, Any]]:
    return [(tensor.shape, tensor.stride()) for tensor in tensors]


def _roots_within(value: object, depth: int, seen: set[int]) -> Iterator[torch.nn.Module]:
    """The outermost modules of an object."""
    if id(value) in seen or isinstance(value, SharesWeights):
        return
    seen.add(id(value))
    if isinstance(value, torch.nn.Module):
        yield value
    if depth:
        if isinstance(value, Mapping):
            parts = list(value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            parts = list(value)
        else:
            parts = list(getattr(value, "__dict__", {}).values())
        for part in parts:
            yield from _roots_within(part, depth - 1, seen)
