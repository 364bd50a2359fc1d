"""Attention masks that hide nothing, left out of a graph.

A Transformers model that is called without a mask makes one of its own under a trace, ``arange(length) >= 0`` along the
queries, which it leaves out when it runs eagerly. No fused kernel of a GPU takes it, because its rows are not
contiguous, so attention would run in its parts, in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphpass.regions.names import names_of

_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_SAME_ENTRIES = frozenset({"aten::expand", "aten::unsqueeze", "aten::reshape", "operator.getitem"})


def without_open_masks(graph: fx.Graph) -> None:
    """Give no mask to each attention whose mask is True at every entry."""
    for node in graph.find_nodes(op="call_function", target=_ATTENTION):
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        if not isinstance(mask, fx.Node) or not _is_true(mask):  # guard: open_masks
            continue
        if len(node.args) > 3:
            node.update_arg(3, None)
        else:
            node.update_kwarg("attn_mask", None)
        while mask is not None and not mask.users and mask.op != "placeholder":
            parts = mask.all_input_nodes
            graph.erase_node(mask)
            mask = parts[0] if parts else None


def _is_true(mask: fx.Node) -> bool:
    names = names_of(mask)
    if not names.isdisjoint(_SAME_ENTRIES):
        return _is_true(mask.all_input_nodes[0])
    least = _least(mask.args[0]) if "aten::ge" in names else None
    return least is not None and isinstance(mask.args[1], int) and least >= mask.args[1]


def _least(value: Any) -> int | None:
    """What no entry of a tensor of indices is below; None if that is not known."""
    names = names_of(value) if isinstance(value, fx.Node) else frozenset[str]()
    if "aten::arange" in names:
        return 0 if len(value.args) == 1 else None
    if not names.isdisjoint(_SAME_ENTRIES):
        return _least(value.args[0])
    if "aten::add" in names and isinstance(value.args[1], int) and not value.kwargs:
        of = _least(value.args[0])
        return None if of is None else of + value.args[1]
    return None
