"""Attention masks that hide nothing, left out of a graph.

Under a trace a Transformers model without a mask makes one, ``arange(length) >= 0`` along the queries, which it leaves
out when it runs eagerly. No fused kernel of a GPU takes it, as its rows are not contiguous.
"""

from __future__ import annotations

import torch
from torch import fx

from graphpass.regions.names import names_of

_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_SAME_ENTRIES = frozenset({"aten::expand", "aten::unsqueeze", "aten::reshape", "operator.getitem"})
_OF_INDICES = _SAME_ENTRIES | {"aten::arange", "aten::add", "aten::ge"}


def without_open_masks(graph: fx.Graph) -> None:
    """Give no mask to each attention whose mask is True at every entry and read by nothing but attention."""
    for node in graph.find_nodes(op="call_function", target=_ATTENTION):
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        if not isinstance(mask, fx.Node) or not _is_true(mask):  # guard: open_masks
            continue
        if len(node.args) > 3:
            node.update_arg(3, None)
        else:
            node.update_kwarg("attn_mask", None)
        while not mask.users and not names_of(mask).isdisjoint(_OF_INDICES):
            parts = mask.all_input_nodes
            graph.erase_node(mask)
            mask = parts[0] if parts else node


def _is_true(mask: fx.Node) -> bool:
    if any(user.target is not _ATTENTION for user in mask.users):
        return False
    while not names_of(mask).isdisjoint(_SAME_ENTRIES):
        mask = mask.all_input_nodes[0]
        if len(mask.users) > 1:  # guard: open_masks_unwritten
            return False
    if "aten::ge" not in names_of(mask) or len(mask.args) != 2 or mask.kwargs:
        return False
    least, bound = _least(mask.args[0]), mask.args[1]
    return least is not None and isinstance(bound, int) and least >= bound


def _least(value: object) -> int | None:
    """What no entry of a tensor of indices is below; None if that is not known, or another reader may write to it."""
    if not isinstance(value, fx.Node) or len(value.users) > 1:  # guard: open_masks_of_unwritten_indices
        return None
    names = names_of(value)
    if "aten::arange" in names:
        return 0 if len(value.args) == 1 and value.kwargs.keys() <= {"device"} else None
    if not names.isdisjoint(_SAME_ENTRIES):
        return _least(value.all_input_nodes[0])
    if "aten::add" in names and len(value.args) == 2 and not value.kwargs:
        least, added = _least(value.args[0]), value.args[1]
        return least + added if least is not None and isinstance(added, int) else None
    return None
