"""One captured graph with everything a replay needs: made when its capture has succeeded, never filled in later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphpass import compat
from graphpass.capture.device import Graph
from graphpass.capture.layout import storage_id
from graphpass.capture.outputs import OutputPlan
from graphpass.capture.staging import Staging, alias_pattern
from graphpass.capture.tally import Tally
from graphpass.errors import CaptureError, ShapeError, StaticInputError

__all__ = ["GraphEntry", "StaticSet"]


@dataclass(frozen=True, slots=True)
class StaticSet:
    """The static inputs a graph has baked in: their positions, and the address each had at capture.

    Positions and addresses are lists because the native comparison takes nothing else; nobody changes them.
    """

    positions: list[int]
    addresses: list[int | None]
    storages: frozenset[int]

    @classmethod
    def of(cls, leaves: Sequence[Any], positions: Sequence[int]) -> StaticSet:
        """The set formed by ``leaves`` at ``positions``."""
        addresses: list[int | None] = [None] * len(leaves)
        for position in positions:
            addresses[position] = leaves[position].data_ptr()
        return cls(list(positions), addresses, frozenset(storage_id(leaves[p]) for p in positions))

    def matches(self, leaves: list[Any]) -> bool:
        """Whether every static input lies where it lay at capture: one native call."""
        return compat.data_ptrs_equal(leaves, self.addresses, self.positions)

    def moved(self, leaves: Sequence[Any]) -> list[int]:
        """Positions whose address differs from the one at capture."""
        return [p for p in self.positions if leaves[p].data_ptr() != self.addresses[p]]


@dataclass(frozen=True, slots=True)
class GraphEntry:
    """One captured graph of one wrapper at one key, static-input set and alias pattern.

    Attributes:
        key: (runtime mode name, descriptor), as shown in errors.
        spec: structure of the arguments at capture.
        build_result: makes the flat outputs into the structure that the region returns.
        statics: the static inputs that were baked in.
        pool_inputs: (position, address) of inputs in pool memory, written earlier in the same forward.
        constants: (position, value) of arguments that are no tensors.
        staging: buffers of all other inputs.
        outputs: how to build results.
        owner_ids: :meth:`Call.owner_ids <graphpass.capture.arguments.Call.owner_ids>` at capture; the entry goes when
            one of these tensors dies, so that no other comes by its id.
        held: (position, memory) of static inputs that nothing else keeps alive, in the layout they had at capture.
    """

    name: str
    key: tuple[str, object]
    spec: Any
    build_result: Callable[[list[Any]], Any]
    graph: Graph
    statics: StaticSet
    pool_inputs: tuple[tuple[int, int], ...]
    constants: tuple[tuple[int, Any], ...]
    staging: Staging
    outputs: OutputPlan
    tally: Tally
    names: tuple[str, ...]
    owner_ids: tuple[int, ...]
    held: tuple[tuple[int, torch.Tensor], ...] = field(repr=False)
    viewed_strides: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def serves(self, leaves: list[Any], spec: Any) -> bool:
        """Whether this entry was captured for these static inputs and this alias pattern."""
        return (
            (spec is self.spec or spec == self.spec)
            and self.statics.matches(leaves)
            and alias_pattern(leaves, self.staging.positions) == self.staging.pattern
            and not self._staged_input_is_static(leaves)
        )

    def _staged_input_is_static(self, leaves: Sequence[Any]) -> bool:
        """Whether an input that is copied now lies inside a static input: a copy would hide the sharing."""
        storages = self.statics.storages
        return bool(storages) and any(storage_id(leaves[p]) in storages for p in self.staging.positions)

    def reads_pool_at(self, leaves: Sequence[Any]) -> bool:
        """Whether the inputs that come from the pool lie where they lay at capture."""
        return all(leaves[position].data_ptr() == address for position, address in self.pool_inputs)

    def check(self, leaves: Sequence[Any]) -> None:
        """Refuse arguments that the graph cannot read as it was captured.

        Raises:
            CaptureError: a number or flag differs from the one baked in.
            ShapeError: a staged input has another shape, dtype or device; a static input another layout.
            StaticInputError: an input from the pool lies elsewhere.
        """
        for position, value in self.constants:
            found = leaves[position]
            if found is not value and (type(found) is not type(value) or found != value):
                raise CaptureError(
                    f"argument {self.names[position]} of {self.name} is baked into the graph of {self.key[1]}",
                    expected=repr(value),
                    found=repr(found),
                    remedy="put it into the key: BatchDescriptor(..., extra=((name, value),))",
                )
        self.staging.check(leaves)
        for position, static in self.held:
            found = leaves[position]
            if found.shape != static.shape or found.stride() != static.stride() or found.dtype != static.dtype:
                raise ShapeError(
                    f"static input {self.names[position]} of {self.name} has another layout than at capture",
                    expected=f"{tuple(static.shape)} {static.dtype} with strides {static.stride()}",
                    found=f"{tuple(found.shape)} {found.dtype} with strides {found.stride()}",
                    remedy="pass the same view of it, or dispatch to the key of its size",
                )
        for position, strides in self.viewed_strides:
            if leaves[position].stride() != strides:
                raise ShapeError(
                    f"input {self.names[position]} of {self.name} has other strides than at capture",
                    expected=str(strides),
                    found=str(leaves[position].stride()),
                    remedy="pass it in the same layout: an output is a view of it",
                )
        for position, address in self.pool_inputs:
            if leaves[position].data_ptr() != address:
                raise StaticInputError(
                    f"input {self.names[position]} of {self.name} comes from another place than at capture",
                    expected=f"pool memory at {address:#x}, written earlier in the forward",
                    found=f"memory at {leaves[position].data_ptr():#x}",
                    remedy="run the forward in the order it was captured in, or capture again after runtime.close()",
                )

    def run(self, leaves: Sequence[Any], *, clone: bool, before_replay: Any) -> list[Any]:
        """Copy in, replay, copy back; the flat outputs. ``before_replay`` runs once the inputs are read."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.run(leaves, clone=clone, before_replay=before_replay)
        self.staging.copy_in(leaves)
        before_replay(self)
        self.graph.replay()
        self.staging.copy_back(leaves)
        self.tally.replayed += 1
        self.tally.copied += len(self.staging.positions)
        return self.outputs.build(leaves, clone=clone)
