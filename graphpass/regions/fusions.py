"""Fusions that a cut costs. Inductor compiles each region by itself, so that no kernel reaches across a cut."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from graphpass.compat import symbolic
from graphpass.compat.nnmodules import where_of
from graphpass.compat.operators import adds_computed_sums_in_products
from graphpass.ledger import Reason
from graphpass.regions.assign import Region
from graphpass.regions.execute import argument_storages, storages_of, value_of
from graphpass.regions.names import display_name, names_of, traits_of
from graphpass.regions.split import Partition

_PRODUCTS = frozenset({"aten::linear", "aten::mm", "aten::matmul"})
# Operators that have no tag, because they are made of others: Inductor's code of the first begins with a pointwise one.
_BEGIN_POINTWISE = frozenset({"aten::to", "aten::rms_norm"})
_REDUCE = frozenset({"aten::rms_norm", "aten::layer_norm", "aten::softmax", "aten::log_softmax"})
_ALONE = "where FULL graphs serve all calls, compile for them alone: mode='FULL', without splitting_ops"


def lost_fusions(parts: Partition, *, serves_full: bool) -> Iterator[tuple[str, Reason]]:
    """What regions compiled by Inductor need kernels for and the whole graph would not: (region, reason) for each.

    Only cuts at ``splitting_ops`` count: a graph can hold them. A value that crosses a cut of another kind does not
    count, nor one that the model returns. A value that crosses a cut costs a fusion in two cases.

    **A sum with a matrix product.** On an accelerator Inductor makes ``mm + residual`` one ``addmm`` unless all users
    of the sum are pointwise; the output of a region is a user that is not. The ``addmm`` needs a copy of the residual,
    and no reader of the sum is fused with it. The criterion is Inductor's, applied to the whole graph: the product has
    two dimensions (with three, a view lies between product and sum), no bias and no other user; the residual has the
    sum's shape and dtype (a row, as a bias, is not copied); and all users of the sum are pointwise, through views.
    Where one is not, as ``layer_norm``, a product or the splitting op itself, the whole graph has the ``addmm``, too.
    From torch 2.15 on it also has it where the graph computes the residual, as in a decoder.

    **Two pointwise operators or reductions**, of which the second is the first reader of the first one's result, with
    the same shape or as a reduction. Nothing in between can depend on the result, so one kernel could do both. It must
    save a kernel. Either the splitting op is one of the two, as the reader with no other computed operand. Or both are
    captured, all readers of the result are in later captured regions, and no other kernel of its region could compute
    it: of its operands, back to those that are neither pointwise nor reductions nor views, none has a second reader
    that could be fused.

    Args:
        parts: the partition; the walk is linear.
        serves_full: whether the graph may be captured as a whole, for the remedy.
    """
    uses = _Uses(parts)
    for region in parts.regions:
        for node in uses.crossing(region):
            lost = uses.lost(node)
            listed = [] if lost is None else [reason for reason in lost[0].reasons if reason.kind == "splitting op"]
            if lost is not None and listed:
                _, op, why, move = lost
                remedy = f"{_ALONE}; or {move}" if serves_full else move
                why = f"the cut at {listed[0].detail} costs a fusion: {why}"
                yield uses.region(op).name, Reason(why, remedy, where_of(op.meta.get("stack_trace")))


_Lost = tuple[Region, fx.Node, str, str]
"""The eager region, the operator that loses the fusion, what it loses, and how to move the cut."""


class _Uses:
    """The users of values across regions."""

    def __init__(self, parts: Partition) -> None:
        self._regions = parts.regions
        self._at = {region.graph_module.graph: position for position, region in enumerate(parts.regions)}
        self._returned = {name for name, _ in parts.output_values}
        self._names: dict[fx.Node, str] = {}
        self._readers: dict[str, list[fx.Node]] = {}
        self._segments: list[int] = []  # equal for regions without a cut of another kind between them
        segment = 0
        for region in parts.regions:
            graph = region.graph_module.graph
            self._names.update(zip(graph.output_node().all_input_nodes, region.outputs, strict=True))
            for name, placeholder in zip(region.inputs, graph.find_nodes(op="placeholder"), strict=True):
                self._readers.setdefault(name, []).extend(placeholder.users)
            is_listed = all(reason.captures_whole for reason in region.reasons)
            segment += 0 if is_listed else 2
            self._segments.append(segment if is_listed else segment - 1)
        self._made = frozenset(self._names.values())

    def region(self, node: fx.Node) -> Region:
        return self._regions[self._at[node.graph]]

    def crossing(self, region: Region) -> Iterator[fx.Node]:
        """The tensors that other regions read, not the caller, with no cut between that is none of a splitting op."""
        for node in region.graph_module.graph.output_node().all_input_nodes:
            name, segment = self._names[node], self._segments[self._at[region.graph_module.graph]]
            segments = {self._segments[self._at[reader.graph]] for reader in self._readers.get(name, ())}
            if segments == {segment} and name not in self._returned and isinstance(value_of(node), torch.Tensor):
                yield node

    def lost(self, node: fx.Node) -> _Lost | None:
        """The fusion that the cut costs which a crossing value passes; None if it costs none."""
        at, reader = self._at[node.graph], self._readers[self._names[node]][0]
        op, before, after = display_name(node), self.region(node), self.region(reader)
        cut = before if before.kind == "eager" else self._regions[at + 1]
        residual = _added_to_product(node)
        if before.kind == "captured" and residual is not None:
            copies = is_accelerator(value_of(node).device) and _shape(residual) == _shape(node)
            if not copies or not all(map(self._is_pointwise_use, self._users(node))):
                return None
            if adds_computed_sums_in_products() and self._is_computed(residual):
                return None
            why = f"the result of {op} leaves its region, so that Inductor adds inside the matrix product and fuses "
            return cut, node, f"{why}nothing that reads it", "split where no such sum passes by"
        if not _could_be_one(node, reader):
            return None
        own = self._users(node)[0] is not reader
        why, move = f"{op} and {display_name(reader)} would be one kernel", "leave the op out of splitting_ops"
        if before.kind == after.kind:
            apart = before.kind == "captured" and not own and all(self._is_captured(u) for u in self._users(node))
            return (cut, node, why, f"call {op} after the cut") if apart and _is_alone(node) else None
        if before.kind == "captured":
            return (after, node, why, move) if self._reads_only(reader) else None
        return None if own else (before, reader, why, move)

    def _users(self, node: fx.Node) -> list[fx.Node]:
        """All users of a value, in order: the output node only if the caller reads the value."""
        name = self._names.get(node, "")
        is_returned = name in self._returned
        own = [user for user in node.users if user.op != "output" or is_returned]
        return [*own, *self._readers.get(name, ())]

    def _is_captured(self, node: fx.Node) -> bool:
        return self.region(node).kind == "captured"

    def _is_pointwise_use(self, node: fx.Node) -> bool:
        if _is_view(node):
            return all(map(self._is_pointwise_use, self._users(node)))
        if adds_computed_sums_in_products() and _added_to_product(node) is not None:
            return False
        return _has_tag(node, "pointwise") or not names_of(node).isdisjoint(_BEGIN_POINTWISE)

    def _reads_only(self, node: fx.Node) -> bool:
        """Whether an op in an eager region reads one tensor that the graph computes, and otherwise inputs of it."""
        return sum(isinstance(value_of(a), torch.Tensor) and self._is_computed(a) for a in node.all_input_nodes) == 1

    def _is_computed(self, node: fx.Node) -> bool:
        """Whether the whole graph computes a value: it is none of its inputs and constants."""
        if node.op != "placeholder":
            return node.op != "get_attr"
        names = zip(node.graph.find_nodes(op="placeholder"), self.region(node).inputs, strict=True)
        return dict(names)[node] in self._made


def is_accelerator(device: torch.device) -> bool:
    """Whether Inductor keeps a sum out of a matrix product for the readers that it can be fused with."""
    return device.type not in ("cpu", "meta")


def _added_to_product(node: fx.Node) -> fx.Node | None:
    """What a node adds to a product of matrices, if Inductor may do both at once; else None."""
    terms = [term for term in node.args if isinstance(term, fx.Node) and isinstance(value_of(term), torch.Tensor)]
    if "aten::add" not in names_of(node) or len(terms) != 2 or node.kwargs or _shares(node):
        return None
    is_one_dtype = all(value_of(term).dtype == value_of(node).dtype for term in terms)
    return next((a for a, b in (terms, terms[::-1]) if _is_product(b)), None) if is_one_dtype else None


def _is_product(node: fx.Node) -> bool:
    factors = [value_of(factor) for factor in node.all_input_nodes]
    matrices = len(factors) == 2 and all(isinstance(f, torch.Tensor) and f.dim() == 2 for f in factors)
    return matrices and len(node.users) == 1 and not names_of(node).isdisjoint(_PRODUCTS)


def _could_be_one(node: fx.Node, reader: fx.Node) -> bool:
    """Whether one kernel could do both: pointwise operators or reductions, over the same elements."""
    if not _is_fusible(node) or not _is_fusible(reader) or _shares(node):
        return False
    return _reduces(reader) or _shape(node) == _shape(reader)


def _is_alone(node: fx.Node) -> bool:
    """Whether nothing in its region that could be fused reads what a kernel of this result alone reads or computes."""
    for operand in node.all_input_nodes:
        others = [user for user in operand.users if user is not node]
        part = operand.op.startswith("call") and (_is_fusible(operand) or _is_view(operand))
        if others and (part or any(user.op != "output" and _is_fusible(user) for user in others)):
            return False
        if part and not _is_alone(operand):
            return False
    return True


def _shape(node: fx.Node) -> list[object]:
    """The sizes of a tensor as expressions: a comparison of symbolic ones would be a guard."""
    value = value_of(node)
    return list(map(symbolic.expression_of, value.shape)) if isinstance(value, torch.Tensor) else []


def _shares(node: fx.Node) -> bool:
    return bool(storages_of(value_of(node)) & argument_storages(node))


def _is_view(node: fx.Node) -> bool:
    return _shares(node) and not _has_tag(node, "pointwise")  # which writes in place


def _is_fusible(node: fx.Node) -> bool:
    return _has_tag(node, "pointwise") or _reduces(node) or "aten::to" in names_of(node)


def _reduces(node: fx.Node) -> bool:
    return _has_tag(node, "reduction") or not names_of(node).isdisjoint(_REDUCE)


def _has_tag(node: fx.Node, name: str) -> bool:
    tag = getattr(torch.Tag, name, None)
    if node.op == "call_module" or tag is None:
        return False
    return any(tag in traits.tags for traits in traits_of(node, out=False))
