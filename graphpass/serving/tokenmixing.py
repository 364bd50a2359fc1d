"""The proof that tokens stay apart in a model that runs uncompiled: by a trace, a fraction of a start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import sympy
import torch

from graphpass.capture.modelstate import modules_of, restoring_python_state
from graphpass.compat import symbolic
from graphpass.compile import traced_regions
from graphpass.padding import AtenGraph, ignores_numbers
from graphpass.regions.partitionproof import mixing_of
from graphpass.regions.split import partition
from graphpass.serving.buffers import PaddedInputs

_log = logging.getLogger("graphpass")


ProvedUncompiled: TypeAlias = Callable[[Any, int], bool]
"""Whether the proof is about a batch of so many tokens through the model as it is now: (model, number of tokens)."""


def proved_uncompiled(model: Any, inputs: PaddedInputs, declared: Collection[Any]) -> ProvedUncompiled | None:
    """Prove by a trace that only ops in ``declared`` combine tokens; None if that fails.

    None, too, if the model writes: what is copied back is learned from compiled graphs.
    """
    if not isinstance(model, torch.nn.Module):
        return None
    modules = modules_of(model)
    dims = {name: [dim for dim, of in dims.items() if of == "num_tokens"] for name, dims in inputs.dims.items()}
    try:
        with restoring_python_state(modules):  # guard: uncompiled_state
            graph, symbol, fake_mode = symbolic.aten_graph_of(model, inputs.arguments, dims)
        parts = partition(graph, declared)
        traces = traced_regions(parts.regions, AtenGraph.of, ignores_numbers)
        findings = mixing_of(parts, traces, {symbol: "num_tokens"}, declared)
    except Exception as error:
        _log.debug("the model is compiled for all sizes: %s", error)
        return None
    if findings or parts.mutated_inputs:  # guard: uncompiled_proof, uncompiled_writes
        return None
    facts = symbolic.facts_of(fake_mode.shape_env)  # about the number of tokens, which is at least 2

    def serves(model: Any, num_tokens: int) -> bool:
        size = {symbol: sympy.Integer(num_tokens)}
        return (
            num_tokens > 1
            and all(fact.xreplace(size) == sympy.true for fact in facts)  # guard: uncompiled_facts
            and list(map(id, modules_of(model))) == list(map(id, modules))  # guard: uncompiled_modules
        )

    return serves
