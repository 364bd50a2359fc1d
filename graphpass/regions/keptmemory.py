"""Memory that outlives a call in another tensor than before it: exchanged, or inside a nested result.

See Note [Exchanged memory].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphpass.compat import nnmodules
from graphpass.compat.nnmodules import where_of
from graphpass.regions.execute import argument_storages, execute, storages_of, value_of
from graphpass.regions.opnames import display_name

__all__ = ["KeptMemory", "kept_memory"]


@dataclass(frozen=True, slots=True)
class KeptMemory:
    """Memory that must not be a graph's own: a later replay would overwrite it.

    Attributes:
        kind: kind of the reason to run its nodes eagerly.
        detail: what keeps it.
        where: the line of the user's code that keeps it; empty if unknown.
        remedy: what to write instead.
    """

    kind: str
    detail: str
    where: str
    remedy: str

    @classmethod
    def by_exchange(cls, node: fx.Node) -> KeptMemory:
        """The memory that a node gives to a tensor, or takes from it."""
        return cls(
            kind="exchanged memory",
            detail=f"{display_name(node)} gives a tensor other memory, as `tensor.data = new` does",
            where=where_of(node.meta.get("stack_trace")),
            remedy="write into the tensor instead, `tensor.copy_(new)` under torch.no_grad()",
        )


def kept_memory(graph: fx.Graph, exchanged: Mapping[int, KeptMemory], fake_mode: Any) -> dict[int, KeptMemory]:
    """Storage -> what keeps it, with the earlier memory of exchanged tensors as far as views of it are read.

    Args:
        graph: a graph with metadata.
        exchanged: the storages that a tensor loses or gets.
        fake_mode: the mode of the metadata.
    """
    kept = {**_nested_results(graph), **exchanged}
    views: dict[fx.Node, bool] = {}
    grows = bool(exchanged)
    while grows:
        grows = False
        for node in graph.nodes:
            held, own = argument_storages(node) & kept.keys(), storages_of(value_of(node)) - kept.keys()
            if held and own and views.setdefault(node, _is_view(node, fake_mode)):
                kept.update(dict.fromkeys(own, kept[min(held)]))
                grows = True
    return kept


def _is_view(node: fx.Node, fake_mode: Any) -> bool:
    """Whether a result shares memory with an argument, by what the node does now: metadata may be older."""
    if not node.op.startswith("call"):
        return False
    try:
        shared = storages_of(execute(node, value_of, fake_mode).value)
    except Exception:
        return True
    return bool(shared & argument_storages(node))


def _nested_results(graph: fx.Graph) -> dict[int, KeptMemory]:
    """The memory of results that consist of several tensors, which a caller keeps."""
    outputs: Any = next(node for node in reversed(graph.nodes) if node.op == "output")
    results = [value_of(node) for node in outputs.all_input_nodes]
    wrappers = [value for value in results if isinstance(value, torch.Tensor) and nnmodules.inner_tensors(value)]
    nested = KeptMemory(
        kind="nested tensor",
        detail="a result consists of several tensors",
        where="",
        remedy="return its parts instead, values() and offsets()",
    )
    return dict.fromkeys(storages_of(wrappers), nested)
