"""A replay plan: one key of a whole callable as a flat sequence of replays and eager calls.

See Note [Why a plan] in docs/design.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch

from graphpass.capture.checks import InputChecks
from graphpass.capture.contextreads import ContextReads, joined
from graphpass.capture.entry import GraphEntry, StaticSet
from graphpass.capture.layout import storage_id
from graphpass.capture.pool import PoolLease
from graphpass.capture.records import RunningCounts
from graphpass.capture.staging import AliasPattern, Staging, alias_pattern
from graphpass.context import ForwardContext
from graphpass.keys import BatchDescriptor

__all__ = ["PlannedReplay", "ReplayPlan"]


@dataclass(frozen=True, slots=True)
class PlannedReplay:
    """One captured region of a plan.

    Attributes:
        entry: its graph.
        arguments: position of a region input -> position of the callable's argument that it is, unchanged.
        replayed: positions of region inputs that are outputs of earlier replays of the same plan.
    """

    entry: GraphEntry
    arguments: Mapping[int, int]
    replayed: Collection[int]

    def callee(self, *, reuses_outputs: bool) -> Callable[..., Any]:
        """The function that the stitched code calls: checks and copies the inputs that the plan did not, and replays.

        Args:
            reuses_outputs: return the same tensor objects in every step; callers must not reshape them in place.
        """
        entry = self.entry
        # A replay may return a view of an input, in the caller's memory: such an output still has to be staged.
        settled = {*self.arguments, *set(self.replayed).difference(entry.staging.positions)}
        staged = [position for position in entry.staging.positions if position not in settled]
        rest = replace(
            entry,
            checks=entry.checks.without(settled),
            staging=entry.staging.at({position: position for position in staged}),
        )
        if staged or rest.checks or entry.outputs.viewed_positions or not reuses_outputs:
            return _checked(rest)
        replay, outputs = entry.graph.replay, entry.outputs.build((), clone=False)

        def bare(*_: Any) -> list[Any]:
            replay()
            return outputs

        return bare


def _checked(entry: GraphEntry) -> Callable[..., Any]:
    def replay(*leaves: Any) -> list[Any]:
        entry.check(leaves)
        return entry.replay(leaves)

    return replay


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """The replays and eager calls of one key, valid for one set of static inputs.

    Attributes:
        name: the callable, ``g0``.
        descriptor: the key's padded shape.
        steps: (region, ``replay`` or ``eager``), in order.
        generation: the runtime's generation that the entries belong to.
    """

    name: str
    descriptor: BatchDescriptor
    steps: tuple[tuple[str, str], ...]
    generation: int
    _function: Callable[..., Any]
    _tallies: tuple[tuple[RunningCounts, int], ...]
    _pool_storages: frozenset[int]
    _pool_outputs: tuple[torch.Tensor, ...]
    _statics: StaticSet
    _dynamic_positions: tuple[int, ...]
    _pattern: AliasPattern
    _reads: ContextReads
    _checks: InputChecks | None
    _staging: Staging | None

    @classmethod
    def of(
        cls,
        name: str,
        descriptor: BatchDescriptor,
        steps: Sequence[tuple[str, str]],
        bind: Callable[[Mapping[str, Callable[..., Any]]], Callable[..., Any]],
        replays: Mapping[str, PlannedReplay],
        *,
        args: Sequence[Any],
        static: Collection[int],
        generation: int,
        reuses_outputs: bool,
    ) -> ReplayPlan:
        """The plan for calls like ``args``.

        Args:
            name: the callable.
            descriptor: the key's padded shape.
            steps: (region, ``replay`` or ``eager``), in order.
            bind: builds the stitched code from region name -> callee, for the captured regions.
            replays: the captured regions by name. ``arguments`` may name only arguments that no region writes to.
            args: flat arguments of the call that was captured.
            static: positions of the arguments declared static, whether a graph baked them in or not.
            generation: the runtime's generation that the entries belong to.
            reuses_outputs: see :meth:`PlannedReplay.callee`.
        """
        static = frozenset(static)
        entries = [planned.entry for planned in replays.values()]
        baked = {storage for entry in entries for storage in entry.statics.storages}
        tensors = [position for position, value in enumerate(args) if isinstance(value, torch.Tensor)]
        fixed = [position for position in tensors if position in static or storage_id(args[position]) in baked]
        dynamic = tuple(position for position in tensors if position not in set(fixed))
        pattern = alias_pattern(args, dynamic)
        if pattern:  # inputs that share memory are copied together, region by region
            replays = {region: replace(planned, arguments={}) for region, planned in replays.items()}
        checks = [planned.entry.checks.at(planned.arguments) for planned in replays.values()]
        staging = [planned.entry.staging.at(planned.arguments) for planned in replays.values()]
        return cls(
            name=name,
            descriptor=descriptor,
            steps=tuple(steps),
            generation=generation,
            _function=bind({n: planned.callee(reuses_outputs=reuses_outputs) for n, planned in replays.items()}),
            _tallies=tuple((entry.tally, len(entry.staging.positions)) for entry in entries),
            _pool_storages=frozenset[int]().union(*(entry.outputs.pool_storages for entry in entries)),
            _pool_outputs=tuple(output for entry in entries for output in entry.outputs.pool_outputs),
            _statics=StaticSet.of(args, fixed),
            _dynamic_positions=dynamic,
            _pattern=pattern,
            _reads=joined([entry.reads for entry in entries]),
            _checks=checks[0].joined(checks[1:]) if checks else None,
            _staging=reduce(Staging.joined, staging) if staging else None,
        )

    def serves(self, args: Sequence[Any], generation: int) -> bool:
        """Whether the plan is valid for ``args``: same static addresses, same alias pattern, same generation."""
        statics = self._statics
        return (
            generation == self.generation
            and statics.matches(list(args))
            and alias_pattern(args, self._dynamic_positions) == self._pattern
            and not any(storage_id(args[p]) in statics.storages for p in self._dynamic_positions)
        )

    def run(self, args: Sequence[Any], lease: PoolLease, context: ForwardContext) -> Any:
        """Run one step and return the callable's outputs, which are in pool memory; ``lease`` must be acquired.

        Raises:
            CaptureError: a number or flag differs from the one baked in.
            ShapeError: an argument does not fit its buffer.
            StaticInputError: a tensor from an eager region or the context is not at the address that a graph reads.
        """
        self._reads.check(context, self.name)
        if self._checks:
            self._checks.check(args)
        if self._staging:
            self._staging.check(args)
            with torch.no_grad():
                self._staging.copy_in(args)
        lease.before_plan(self._pool_storages, self._pool_outputs)
        for tally, num_copied in self._tallies:
            tally.replayed += 1
            tally.copied += num_copied
        return self._function(*args)
