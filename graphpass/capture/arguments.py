"""The arguments of a call as a flat list of leaves, and the role of each leaf."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpass.capture.layout import storage_id
from graphpass.compat import memory, trees
from graphpass.errors import DeviceError

__all__ = ["Call", "InputRoles", "device_of"]


@dataclass(frozen=True, slots=True)
class InputRoles:
    """The roles that a wrapper's creator declared; each argument is a position or a keyword's name.

    Attributes:
        static: arguments whose address a graph may bake in.
        mutated: arguments that the region writes to.
        module_owned: static arguments that a module owns; graphs do not keep their memory.
        layout: numbers that describe the memory layout of tensors.
        names: a name for each positional argument, for errors.
    """

    static: frozenset[int | str]
    mutated: frozenset[int | str]
    module_owned: frozenset[int | str]
    layout: frozenset[int | str]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call as flat leaves, and the flat positions of each role.

    Attributes:
        leaves: all values in the arguments, in order.
        spec: the structure that turns leaves back into ``(args, kwargs)``.
        names: a readable name for each leaf.
        static: positions whose address a graph may bake in.
        mutated: positions that the region writes to.
        module_owned: static positions of tensors that a module owns; graphs do not keep their memory.
        layout: positions of numbers that describe the memory layout of tensors.
    """

    leaves: Sequence[Any]
    spec: Any
    names: tuple[str, ...]
    static: frozenset[int]
    mutated: frozenset[int]
    module_owned: frozenset[int]
    layout: frozenset[int]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any], roles: InputRoles, *, spec: Any) -> Call:
        """The call with ``args`` and ``kwargs``, whose structure is ``spec``.

        Later calls compare their structure with this ``spec`` object by identity first.
        """
        leaves, _ = trees.flatten((tuple(args), dict(kwargs)))
        tensors = {p for p, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        parameters = {p for p in tensors if isinstance(leaves[p], torch.nn.Parameter)}
        marked = {p for p in tensors if memory.has_static_address(leaves[p])}
        owned = (_positions(args, kwargs, roles.module_owned) & tensors) | parameters
        return cls(
            leaves=leaves,
            spec=spec,
            names=tuple(_names(args, kwargs, roles.names)),
            static=frozenset((_positions(args, kwargs, roles.static) & tensors) | owned | marked),
            mutated=frozenset(_positions(args, kwargs, roles.mutated) & tensors),
            module_owned=frozenset(owned),
            layout=frozenset(_positions(args, kwargs, roles.layout)),
        )

    def in_modules(self) -> frozenset[int]:
        """Positions of all tensors in the memory of module-owned tensors, their views included."""
        storages = {storage_id(self.leaves[position]) for position in self.module_owned} - {0}
        tensors = ((position, leaf) for position, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor))
        return self.module_owned | {position for position, leaf in tensors if storage_id(leaf) in storages}

    def inside_static(self) -> frozenset[int]:
        """Positions of non-static tensors that share a storage with a static tensor."""
        storages = {storage_id(self.leaves[position]) for position in self.static} - {0}
        return frozenset(
            position
            for position, leaf in enumerate(self.leaves)
            if position not in self.static and isinstance(leaf, torch.Tensor) and storage_id(leaf) in storages
        )

    def owner_ids(self) -> tuple[int, ...]:
        """Ids of the module-owned tensors; they tell module instances apart, also after a weight got new memory."""
        return tuple(id(self.leaves[position]) for position in sorted(self.module_owned))


def _positions(args: Sequence[Any], kwargs: Mapping[str, Any], selected: Collection[int | str]) -> set[int]:
    """Flat positions of all leaves of the ``selected`` arguments."""
    positions: set[int] = set()
    if not selected:
        return positions
    offset = 0
    for name, value in [*enumerate(args), *kwargs.items()]:
        num_leaves = len(trees.flatten(value)[0])
        if name in selected:
            positions.update(range(offset, offset + num_leaves))
        offset += num_leaves
    return positions


def _names(args: Sequence[Any], kwargs: Mapping[str, Any], input_names: Sequence[str]) -> list[str]:
    """A name for each leaf: the declared name, the keyword, or the position; with an index in a nested argument."""
    names: list[str] = []
    for argument, value in [*enumerate(args), *kwargs.items()]:
        stem = input_names[argument] if isinstance(argument, int) and argument < len(input_names) else str(argument)
        num_leaves = len(trees.flatten(value)[0])
        names += [stem] if num_leaves == 1 else [f"{stem}[{index}]" for index in range(num_leaves)]
    return names


def device_of(leaves: Sequence[Any]) -> torch.device:
    """The GPU of the tensors among ``leaves``; the CPU if there are none on a GPU.

    Raises:
        DeviceError: they are on several GPUs.
    """
    devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}
    accelerators = sorted((d for d in devices if d.type != "cpu"), key=str)
    if len(accelerators) > 1:
        raise DeviceError(
            "one callable serves one device",
            expected="tensors on one device",
            found=", ".join(map(str, accelerators)),
            remedy="put each device's part of the model in a separate callable",
        )
    return accelerators[0] if accelerators else torch.device("cpu")
