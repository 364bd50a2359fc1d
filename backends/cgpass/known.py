"""Calls of known sizes and weights: they replay the FULL graph that served the last such call, with nothing to look up.

Such a call fills the padded buffers, compares the static inputs with those of the graph, replays, and copies the
results. Every other call goes through the wrappers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cgpass.outputs import OutputCuts, TensorCut
from graphpass.capture.pool import PoolLease
from graphpass.capture.replay import GraphEntry
from graphpass.paddedinputs import PaddedArguments


@dataclass(frozen=True, slots=True)
class KnownReplay:
    """One graph, and how calls of one size fill its inputs and cut its outputs."""

    entry: GraphEntry
    generation: int  #: of the pool lease when the entry was found: after a graph is dropped, it is looked up again
    inputs: PaddedArguments
    cuts: OutputCuts | None  #: None if nothing is padded
    clones_outputs: bool  #: whether results that are not cut are copied out of the pool
    #: (cut, view of the real part) of the outputs that are cut and share no storage
    apart: tuple[tuple[TensorCut, torch.Tensor], ...]
    is_direct: bool  #: False if the graph writes to inputs, returns views of them or reads the context

    @classmethod
    def of(
        cls,
        entry: GraphEntry,
        generation: int,
        inputs: PaddedArguments,
        cuts: OutputCuts | None,
        *,
        clones_outputs: bool,
    ) -> KnownReplay:
        """The replay of ``entry``, which a lease of ``generation`` has."""
        plan, outputs = entry.plan, entry.outputs
        reads = plan.reads.numbers or plan.reads.paths or plan.inputs.pool_inputs
        writes = plan.inputs.mutates or any(padded.is_written for padded in inputs.all)
        returns_views = outputs.viewed_positions or (cuts is not None and cuts.views)
        is_direct = not (reads or writes or returns_views)
        apart = tuple(cuts.apart(outputs.build(()))) if cuts is not None and is_direct else ()
        return cls(entry, generation, inputs, cuts, clones_outputs, apart, is_direct)

    def run(self, args: Sequence[Any], leaves: list[Any], lease: PoolLease, who: str) -> Any:
        """What the graph returns, cut; None, with nothing done, if it does not serve these static inputs any more.

        ``leaves`` are the graph's arguments for the call's ``args``: the padded buffers, and the other arguments.
        """
        entry, plan = self.entry, self.entry.plan
        lease.acquire_for_one_replay(who)
        try:
            # guard: known_replay_is_current
            if self.generation != lease.generation or not plan.serves(leaves):
                return None
            plan.inputs.check(leaves)
            self.inputs.fill(args)
            outputs = plan.run(leaves, lease)
            if self.cuts is None:
                outputs = entry.outputs.for_caller(outputs, clone=self.clones_outputs)
            else:
                outputs = self.cuts.apply(outputs, args, lease.forward_storages, self.apart)
        finally:
            lease.release()
        return entry.build_result(outputs)
