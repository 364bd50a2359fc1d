"""The one way to replay: a plan of one graph, or of all replays and eager calls of a callable at one key.

A wrapper has the plan of each of its entries; a compiled callable joins the plans of its regions to one, see
Note [Why a plan] in docs/design. Static inputs are compared by address, see Note [Address rule]; copied inputs by the
way they share memory, see Note [Alias patterns].
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphpass.capture.checks import InputChecks
from graphpass.capture.contextreads import ContextReads
from graphpass.capture.device import Graph
from graphpass.capture.layout import storage_id
from graphpass.capture.outputs import OutputPlan
from graphpass.capture.pool import PoolLease
from graphpass.capture.staging import AliasPattern, Staging, alias_pattern
from graphpass.compat import memory, operators
from graphpass.context import ForwardContext
from graphpass.ledger import Row

__all__ = ["ReplayPlan", "StaticSet", "launch_of", "without_grad"]


@dataclass(frozen=True, slots=True)
class StaticSet:
    """The static inputs baked into the graphs of a plan.

    Attributes:
        positions: positions of the static inputs. A list, as the native comparison requires; never changed.
        addresses: for each argument its address at capture, None if it is not static. A list for the same reason.
        storages: addresses of the storages of the static inputs.
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
        """Whether every static input has its address at capture; one native call."""
        return memory.data_ptrs_equal(leaves, self.addresses, self.positions)

    def moved(self, leaves: Sequence[Any]) -> list[int]:
        """Positions whose address differs from the one at capture."""
        return [p for p in self.positions if leaves[p].data_ptr() != self.addresses[p]]


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Replays of one or more graphs, and the eager calls between them, for one set of static inputs.

    A caller acquires the pool lease, calls :meth:`check` and then :meth:`run`.

    Attributes:
        name: the region or the callable, for errors.
        steps: (region, ``replay`` or ``eager``), in order.
        statics: the static inputs.
        dynamic_positions: positions of the tensors that may be elsewhere in each call.
        pattern: how these tensors share memory.
        reads: the values that the graphs read from the forward context.
        checks: the other checks of the arguments; references static inputs that have no other owner.
        staging: buffers of the arguments that the plan copies before its first replay.
        rows: (the replays of a region at this key, inputs that it copies in each of them).
        pool_storages: addresses of the pool storages that the graphs write outputs to.
        pool_outputs: these outputs, as tensors that do not keep that memory reserved.
        launch: called with the arguments after the copies; runs the replays and returns the outputs.
        ranged: returns ``launch`` with the names of key and regions for a profiler. See Note [Names in profiles].
    """

    name: str
    steps: tuple[tuple[str, str], ...]
    statics: StaticSet
    dynamic_positions: tuple[int, ...]
    pattern: AliasPattern
    reads: ContextReads = field(repr=False)
    checks: InputChecks = field(repr=False)
    staging: Staging
    rows: tuple[tuple[Row, int], ...]
    pool_storages: frozenset[int]
    pool_outputs: tuple[torch.Tensor, ...]
    launch: Callable[[Sequence[Any]], Any]
    ranged: Callable[[], Callable[[Sequence[Any]], Any]]

    def serves(self, args: list[Any]) -> bool:
        """Whether the graphs were captured for these static inputs and this alias pattern."""
        statics = self.statics
        return (
            statics.matches(args)
            and alias_pattern(args, self.dynamic_positions) == self.pattern  # guard: alias_pattern
            and not self._is_inside_static(args)  # guard: staged_inside_static
        )

    def _is_inside_static(self, args: Sequence[Any]) -> bool:
        """Whether a dynamic input shares memory with a static input: a copy would hide that."""
        storages = self.statics.storages
        return bool(storages) and any(storage_id(args[p]) in storages for p in self.dynamic_positions)

    def check(self, args: Sequence[Any], context: ForwardContext) -> None:
        """Refuse arguments and a context that the graphs cannot read as they were captured.

        Raises:
            CaptureError: a number or flag differs from the one baked in.
            ShapeError: a copied input has another shape, dtype or device; a static input another layout.
            StaticInputError: an input in pool memory or a tensor of the context has another address.
        """
        self.staging.check(args)  # first: a size that differs is also a number that differs
        self.checks.check(args)
        self.reads.check(context, self.name)  # guard: context_reads

    def run(self, args: Sequence[Any], lease: PoolLease) -> Any:
        """Copy inputs, count, replay and copy back what the graphs wrote to inputs.

        Returns:
            The outputs of :attr:`launch`. Those in pool memory may be the same tensor objects in every run.

        Raises:
            CaptureError, ShapeError, StaticInputError: a tensor from an eager call does not fit the graph.
        """
        if self.staging:
            with without_grad():
                self.staging.copy_in(args)
        lease.before_replay(self.pool_storages, self.pool_outputs)  # inputs may lie in outputs that this makes stale
        for row, num_copied in self.rows:
            row.n += 1
            row.items += num_copied
        return self.ranged()(args) if operators.is_profiled() else self.launch(args)


def launch_of(graph: Graph, staging: Staging, outputs: OutputPlan) -> Callable[[Sequence[Any]], list[Any]]:
    """The function that replays one graph and returns its flat outputs; it takes the region's arguments."""
    replay = graph.replay
    if staging.mutates or outputs.viewed_positions:

        def launch(leaves: Sequence[Any]) -> list[Any]:
            with without_grad():
                replay()
                staging.copy_back(leaves)  # guard: copy_back
                return outputs.build(leaves)

        return launch
    fixed = outputs.build(())

    def bare(*_: Any) -> list[Any]:  # of any number of arguments, so that stitched code can call it, too
        replay()
        return fixed

    return bare


def without_grad() -> contextlib.AbstractContextManager[object]:
    """``torch.no_grad()`` if grad mode is on; else a context that does nothing, which is cheaper."""
    return torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext()
