"""One capture, from the caller's arguments to a finished entry."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphpass import compat
from graphpass.capture.arguments import Call
from graphpass.capture.checks import InputChecks
from graphpass.capture.entry import GraphEntry, StaticSet
from graphpass.capture.layout import storage_id
from graphpass.capture.outputs import OutputPlan
from graphpass.capture.runtime import GraphRuntime
from graphpass.capture.snapshot import state_kept
from graphpass.capture.staging import BufferArena, Staging
from graphpass.capture.tally import Tally
from graphpass.context import ForwardContext, entered
from graphpass.errors import CaptureError, DeviceError
from graphpass.modes import CUDAGraphMode

__all__ = ["Recorder"]


@dataclass(frozen=True, slots=True)
class _Sources:
    """Where the graph reads each argument: baked in place, from the pool, from a buffer, or as a constant."""

    static: tuple[int, ...]
    pool: tuple[tuple[int, int], ...]
    staged: tuple[int, ...]
    constants: tuple[tuple[int, Any], ...]


@dataclass(frozen=True, slots=True)
class Recorder:
    """Captures one region for one call.

    Attributes:
        baked: flat positions whose address the graph may bake in; a subset of ``call.static``.
    """

    name: str
    mode: CUDAGraphMode
    runnable: Callable[..., Any]
    runtime: GraphRuntime
    arena: BufferArena
    call: Call
    baked: frozenset[int]

    def record(self, context: ForwardContext, tally: Tally) -> tuple[GraphEntry, Sequence[Any]]:
        """Stage, save, warm up, restore, record, restore: what the region mutates is as it was before.

        Returns the entry, and the flat outputs of the recording, which own their pool memory; the entry does not.

        Raises:
            CaptureError: the region writes to an input that was not declared.
            DeviceError: an argument lies on another device.
        """
        device = self.runtime.device_for(self.call.leaves)
        sources = self._sources(device.device)
        leaves, mutated_positions = self.call.leaves, self.call.mutated
        staging = Staging.for_inputs(
            leaves, sources.staged, mutated=mutated_positions, names=self.call.names, arena=self.arena
        )
        graph_inputs = list(leaves)
        for position, buffer in zip(staging.positions, staging.buffers, strict=True):
            graph_inputs[position] = buffer
        runs: list[tuple[list[Any], Any]] = []

        def body() -> list[Any]:
            args, kwargs = compat.tree_unflatten(graph_inputs, self.call.spec)
            runs.append(compat.tree_flatten(device.call(self.runnable, args, kwargs)))
            return runs[-1][0]

        generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
        mutated = [graph_inputs[position] for position in sorted(mutated_positions)]
        metadata = None if self.mode is CUDAGraphMode.PIECEWISE else context.attn_metadata
        inside = replace(context, attn_metadata=metadata, capture=device)
        with self.runtime.quiet_capture(), entered(inside), torch.no_grad(), _no_cached_casts():
            staging.copy_in(leaves)
            versions = _versions(graph_inputs)
            with state_kept(mutated, generators, device.device):
                device.warm_up(body)
                tally.warmed += 1
                self._refuse_undeclared_mutation(versions, _versions(graph_inputs))
            with state_kept(mutated, generators, device.device):
                graph, outputs = device.record(body, generators)
            # Warm-up and recording allocate apart, so what both returned at one address was there before.
            elsewhere = _storages(runs[0][0]) & _storages(outputs)
            plan = OutputPlan.of(outputs, graph_inputs, device.without_ownership, elsewhere)
        device.make_stale(plan.pool_outputs)
        tally.captured += 1
        entry = GraphEntry(
            name=self.name,
            spec=self.call.spec,
            build_result=compat.builder_of(runs[-1][1]),
            graph=graph,
            statics=StaticSet.of(leaves, sources.static),
            checks=InputChecks(
                name=self.name,
                key=context.batch_descriptor,
                names=dict(enumerate(self.call.names)),
                constants=sources.constants,
                layouts=tuple((p, leaves[p].detach()) for p in sources.static if p not in self.call.module_owned),
                viewed_strides=tuple((p, leaves[p].stride()) for p in sources.staged if p in plan.viewed_positions),
                pool_inputs=sources.pool,
            ),
            staging=staging,
            outputs=plan,
            tally=tally,
            owner_ids=self.call.owner_ids(),
        )
        return entry, outputs

    def _sources(self, device: torch.device) -> _Sources:
        leaves = self.call.leaves
        baked_storages = {storage_id(leaves[p]) for p in self.baked} - {0}
        pool_storages = self.runtime.forward_pool_storages()
        static, pool, staged, constants = set(self.baked), [], [], []
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                # The copies lie as the inputs did at capture, whatever a later call says of its own.
                if position not in self.call.layout:
                    constants.append((position, leaf))
                continue
            if leaf.device != device:
                raise DeviceError(
                    f"argument {self.call.names[position]} of {self.name} lies on another device",
                    expected=f"every tensor on {device}",
                    found=f"{tuple(leaf.shape)} on {leaf.device}",
                    remedy="move it there first, or keep it out of the captured region",
                )
            if position in static:
                continue
            if storage_id(leaf) in baked_storages:
                # It lies inside a static input: a copy would hide that the two share memory.
                static.add(position)
            elif storage_id(leaf) in pool_storages:
                pool.append((position, leaf.data_ptr()))
            else:
                staged.append(position)
        return _Sources(tuple(sorted(static)), tuple(pool), tuple(staged), tuple(constants))

    def _refuse_undeclared_mutation(self, before: Sequence[int | None], after: Sequence[int | None]) -> None:
        leaves, mutated = self.call.leaves, self.call.mutated
        declared = {storage_id(leaves[p]) for p in mutated}
        for position, (old, new) in enumerate(zip(before, after, strict=True)):
            if old != new and storage_id(leaves[position]) not in declared:
                raise CaptureError(
                    f"{self.name} writes to its input {self.call.names[position]!r}",
                    expected="every input that the region writes to, listed in mutated_inputs",
                    found=f"mutated_inputs={[self.call.names[p] for p in sorted(mutated)]}",
                    remedy=f"add {self.call.names[position]!r} to mutated_inputs",
                )


@contextlib.contextmanager
def _no_cached_casts() -> Iterator[None]:
    """Autocast keeps the weights it has cast for the rest of its block: a graph would read those, not the weights."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


def _storages(values: Sequence[Any]) -> set[int]:
    """Addresses of the storages that the tensors among ``values`` lie in."""
    return {storage_id(value) for value in values if isinstance(value, torch.Tensor)} - {0}


def _versions(leaves: Sequence[Any]) -> list[int | None]:
    return [compat.version_of(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
