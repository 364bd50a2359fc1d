"""Recognises operators that a compiler decomposed, where padding can be proved for the whole operator only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from graphpass.regions.padding.nodes import AtenNode, Ref, TensorShape
from graphpass.regions.padding.rules.indexing import FROM_START

__all__ = ["recognised"]


def recognised(node: AtenNode, inputs: Sequence[Any], nodes: Sequence[AtenNode]) -> tuple[AtenNode, ...]:
    """The nodes to record for ``node``: itself, or the operator whose decomposition it completes, after helper nodes.

    Args:
        node: the last node of a graph so far.
        inputs: the shapes of the graph's inputs.
        nodes: the nodes before ``node``.
    """
    earlier = _Earlier(inputs, nodes)
    for pattern in (_softmax, _log_softmax, _cut_padding, _from_start):
        match = pattern(node, earlier)
        if match is not None:
            op, arguments = match
            return (replace(node, op=op, arguments=arguments),)
    return _comparison(node, earlier) or (node,)


class _Earlier:
    """The values that exist before a node."""

    def __init__(self, inputs: Sequence[Any], nodes: Sequence[AtenNode]) -> None:
        self._inputs = inputs
        self._nodes = nodes

    def node(self, argument: Any, op: str) -> dict[str, Any] | None:
        """The arguments of the node that computed ``argument``; None if its operator is not ``op``."""
        at = argument.index - len(self._inputs) if isinstance(argument, Ref) else -1
        return dict(self._nodes[at].arguments) if at >= 0 and self._nodes[at].op == op else None

    @property
    def count(self) -> int:
        """The number of earlier values."""
        return len(self._inputs) + len(self._nodes)

    def shape(self, argument: Any) -> TensorShape | None:
        """The shape of an earlier value; None if it is no tensor."""
        if not isinstance(argument, Ref):
            return None
        at = argument.index - len(self._inputs)
        shape = self._nodes[at].result if at >= 0 else self._inputs[argument.index]
        return shape if isinstance(shape, TensorShape) else None


_Match = tuple[str, tuple[tuple[str, Any], ...]] | None


def _exponentials(total: Any, earlier: _Earlier) -> tuple[Any, Any, Any] | None:
    """(scores, dim, scores - maximum) if ``total`` is ``exp(scores - scores.amax(dim)).sum(dim)``, else None."""
    summed = earlier.node(total, "aten::sum.dim_IntList")
    powers = earlier.node(summed["self"], "aten::exp") if summed is not None else None
    shifted = earlier.node(powers["self"], "aten::sub.Tensor") if powers is not None else None
    greatest = earlier.node(shifted["other"], "aten::amax") if shifted is not None else None
    if summed is None or powers is None or shifted is None or greatest is None:
        return None
    same = greatest["self"] == shifted["self"] and shifted["alpha"] == 1 and greatest["dim"] == summed["dim"]
    if not same or len(summed["dim"]) != 1 or not (greatest["keepdim"] is summed["keepdim"] is True):
        return None
    return shifted["self"], summed["dim"][0], powers["self"]


def _softmax(node: AtenNode, earlier: _Earlier) -> _Match:
    arguments = dict(node.arguments)
    if node.op != "aten::div.Tensor":
        return None
    summed = earlier.node(arguments["other"], "aten::sum.dim_IntList")
    parts = _exponentials(arguments["other"], earlier)
    if summed is None or parts is None or summed["self"] != arguments["self"]:
        return None
    return "aten::_softmax", (("self", parts[0]), ("dim", parts[1]), ("half_to_float", False))


def _log_softmax(node: AtenNode, earlier: _Earlier) -> _Match:
    arguments = dict(node.arguments)
    if node.op != "aten::sub.Tensor" or arguments["alpha"] != 1:
        return None
    logarithm = earlier.node(arguments["other"], "aten::log")
    parts = _exponentials(logarithm["self"], earlier) if logarithm is not None else None
    if parts is None or parts[2] != arguments["self"]:
        return None
    return "aten::_log_softmax", (("self", parts[0]), ("dim", parts[1]), ("half_to_float", False))


def _cut_padding(node: AtenNode, earlier: _Earlier) -> _Match:
    """A tensor extended at its end and cut to its old size, as for the alignment of an attention mask, is unchanged."""
    if node.op != "aten::slice.Tensor" or not isinstance(node.result, TensorShape):
        return None
    arguments = dict(node.arguments)
    extended = earlier.node(arguments["self"], "aten::constant_pad_nd")
    before = earlier.shape(extended["self"]) if extended is not None else None
    if extended is None or before is None or arguments["start"] not in (0, None) or arguments["step"] != 1:
        return None
    at_front = extended["pad"][::2]
    if any(amount != 0 for amount in at_front) or before.sizes != node.result.sizes:
        return None
    dim = arguments["dim"] % len(before.sizes)
    others = (right for turn, right in enumerate(extended["pad"][1::2]) if len(before.sizes) - 1 - turn != dim)
    return ("aten::alias", (("self", extended["self"]),)) if all(right == 0 for right in others) else None


def _from_start(node: AtenNode, earlier: _Earlier) -> _Match:
    """``where(i < 0, i + n, i)`` counts a negative index from the start of a dimension of size n."""
    if node.op != "aten::where.self":
        return None
    arguments = dict(node.arguments)
    index = arguments["other"]
    negative = earlier.node(arguments["condition"], "aten::lt.Scalar")
    counted = earlier.node(arguments["self"], "aten::add.Tensor")
    if negative is None or counted is None or negative["self"] != index or negative["other"] != 0:
        return None
    if counted["self"] != index or counted["alpha"] != 1 or earlier.shape(counted["other"]) is None:
        return None
    return f"graphpass::{FROM_START}", (("self", index), ("length", counted["other"]))


def _comparison(node: AtenNode, earlier: _Earlier) -> tuple[AtenNode, ...] | None:
    """``i - j <= k`` over integers becomes ``i <= j + k``: a comparison of indices, as in a decomposed triangle."""
    if node.op not in _COMPARISONS:
        return None
    arguments = dict(node.arguments)
    difference, number = earlier.node(arguments["self"], "aten::sub.Tensor"), arguments["other"]
    if difference is None or difference["alpha"] != 1 or type(number) is not int:
        return None
    sides = earlier.shape(difference["self"]), earlier.shape(difference["other"])
    if any(side is None or side.dtype not in (torch.int32, torch.int64) for side in sides):
        return None
    raised = AtenNode(
        "aten::add.Tensor", (("self", difference["other"]), ("other", number), ("alpha", 1)), sides[1], node.where
    )
    compared = (("self", difference["self"]), ("other", Ref(earlier.count)))
    return raised, replace(node, op=node.op.replace("Scalar", "Tensor"), arguments=compared)


_COMPARISONS = frozenset(f"aten::{name}.Scalar" for name in ("eq", "ne", "lt", "le", "gt", "ge"))
