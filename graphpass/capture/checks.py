"""Checks of a graph's arguments, apart from static addresses and the shapes of staged inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from graphpass.compat import memory, operators
from graphpass.errors import CaptureError, ShapeError, StaticInputError

__all__ = ["InputChecks", "refuse_transforms"]


class _Verified:
    """A native check of layouts, made from arguments that have passed the slow one.

    Attributes:
        has_layouts: the check; None before the first call.
    """

    __slots__ = ("has_layouts",)

    def __init__(self) -> None:
        self.has_layouts: Callable[..., bool] | None = None


@dataclass(frozen=True, slots=True)
class InputChecks:
    """Refuses arguments that a graph cannot read as it was captured.

    Attributes:
        name: the region.
        key: the key's padded shape, as errors show it.
        names: a name for each argument.
        constants: (position, value) of arguments that are no tensors.
        layouts: (position, alias) of static inputs whose layout nobody else checks. The alias has the layout at
            capture. It keeps the memory alive if no module owns the input; otherwise it has no memory.
        viewed_strides: (position, strides in elements) of staged inputs that an output is a view of.
        pool_inputs: (position, address) of inputs in pool memory, written earlier in the same forward.
    """

    name: str
    key: object
    names: Mapping[int, str] = field(default_factory=dict)
    constants: tuple[tuple[int, Any], ...] = ()
    layouts: tuple[tuple[int, torch.Tensor], ...] = ()
    viewed_strides: tuple[tuple[int, tuple[int, ...]], ...] = ()
    pool_inputs: tuple[tuple[int, int], ...] = ()
    verified: _Verified = field(default_factory=_Verified, compare=False, repr=False)

    def __bool__(self) -> bool:
        return bool(self.constants or self.layouts or self.viewed_strides or self.pool_inputs)

    def without(self, positions: Collection[int]) -> InputChecks:
        """The checks of all other arguments."""
        return self._at(lambda position: None if position in positions else position, self.names)

    def at(self, places: Mapping[int, int]) -> InputChecks:
        """Only the checks of arguments in ``places`` ({old position: new position}), at their new positions."""
        names = {place: self.names[position] for position, place in places.items()}
        return self._at(places.get, names)

    def joined(self, others: Iterable[InputChecks]) -> InputChecks:
        """These checks and others of the same arguments, without duplicates; the others have no ``pool_inputs``."""
        every = (self, *others)
        layouts = {(p, t.shape, t.stride(), t.dtype): (p, t) for checks in every for p, t in checks.layouts}
        return replace(
            self,
            names={p: name for checks in every for p, name in checks.names.items()},
            constants=tuple({(p, id(v)): (p, v) for checks in every for p, v in checks.constants}.values()),
            layouts=tuple(layouts.values()),
            viewed_strides=tuple(dict.fromkeys(pair for checks in every for pair in checks.viewed_strides)),
            verified=_Verified(),
        )

    def _at(self, place: Callable[[int], int | None], names: Mapping[int, str]) -> InputChecks:
        def moved(pairs: Iterable[tuple[int, Any]]) -> tuple[tuple[int, Any], ...]:
            return tuple((at, what) for position, what in pairs if (at := place(position)) is not None)

        return replace(
            self,
            names=names,
            constants=moved(self.constants),
            layouts=moved(self.layouts),
            viewed_strides=moved(self.viewed_strides),
            pool_inputs=moved(self.pool_inputs),
            verified=_Verified(),
        )

    def check(self, leaves: Sequence[Any]) -> None:
        """Compare ``leaves`` with the capture.

        Raises:
            CaptureError: a number or flag differs from the one baked in.
            ShapeError: a static input, or one that an output is a view of, has another layout.
            StaticInputError: an input in pool memory has another address.
        """
        for position, value in self.constants:
            found = leaves[position]
            # guard: constant_types, constants
            if found is not value and (type(found) is not type(value) or found != value):
                raise CaptureError(
                    f"argument {self.names[position]} of {self.name} is baked into the graph of {self.key}",
                    expected=repr(value),
                    found=repr(found),
                    remedy="put it into the key: BatchDescriptor(..., extra=((name, value),))",
                )
        if self.layouts:
            self._check_layouts(leaves)
        for position, strides in self.viewed_strides:
            if leaves[position].stride() != strides:  # guard: viewed_strides
                raise ShapeError(
                    f"input {self.names[position]} of {self.name} has other strides than at capture",
                    expected=str(strides),
                    found=str(leaves[position].stride()),
                    remedy="pass it in the same layout: an output is a view of it",
                )
        for position, address in self.pool_inputs:
            if leaves[position].data_ptr() != address:  # guard: pool_input_address
                raise StaticInputError(
                    f"input {self.names[position]} of {self.name} has another address than at capture",
                    expected=f"pool memory at {address:#x}, written earlier in the forward",
                    found=f"memory at {leaves[position].data_ptr():#x}",
                    remedy="run the forward in the order it was captured in, or capture again after runtime.close()",
                )

    def _check_layouts(self, leaves: Sequence[Any]) -> None:
        tensors = [leaves[position] for position, _ in self.layouts]
        if self.verified.has_layouts is not None and self.verified.has_layouts(*tensors):
            return
        for (position, static), found in zip(self.layouts, tensors, strict=True):
            # guard: static_layout
            if found.shape != static.shape or found.stride() != static.stride() or found.dtype != static.dtype:
                raise ShapeError(
                    f"static input {self.names[position]} of {self.name} has another layout than at capture",
                    expected=f"{tuple(static.shape)} {static.dtype} with strides {static.stride()}",
                    found=f"{tuple(found.shape)} {found.dtype} with strides {found.stride()}",
                    remedy="pass the same view of it, or dispatch to the key of its size; assign a contiguous copy to "
                    "a weight (w.data = new.contiguous())",
                )
        self.verified.has_layouts = memory.layouts_of(tensors)


def refuse_transforms(name: str, values: Iterable[Any]) -> None:
    """Refuse a replay if a ``torch.func`` transform is active on one of its arguments.

    A graph reads only the memory of a tensor, not its batch or tangent.

    Raises:
        CaptureError: one of ``values`` is batched by ``torch.func.vmap``, or carries a tangent or a gradient.
    """
    transform = operators.transform_over(values)
    if transform is not None:
        raise CaptureError(
            f"{name} cannot replay under {transform}",
            expected="arguments that are plain tensors",
            found=f"{transform} over an argument",
            remedy="call it outside of the transform, or with runtime mode NONE, which runs without graphs",
        )
