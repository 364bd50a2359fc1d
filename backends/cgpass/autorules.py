"""Builds the :class:`AutoRules` of a graph: its key fields, which sizes may be padded, or why it is never captured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import sympy

from cgpass.calls import AutoRules
from cgpass.graphsizes import GraphSizes, sizes_of, symbols_in
from graphpass.compat import symbolic
from graphpass.compile import RegionTrace
from graphpass.dispatch.recurring import KeyField, RecurringKeys
from graphpass.errors import CaptureError
from graphpass.ledger import Reason
from graphpass.modes import CUDAGraphMode
from graphpass.options import Settings
from graphpass.regions.padding import PaddingProof, Verdict
from graphpass.regions.padding.calls import CHECK_IF_DECLARED
from graphpass.regions.padding.compose import prove_partition
from graphpass.regions.split import Partition

__all__ = ["dispatched"]

_EXACT = "no padding suits this operation: keep the sizes few, or leave the operation out of the compiled model"


class _KeyNames:
    """The key field of each symbolic size of a graph, and the user's declarations about it.

    Args:
        parts: the partitioned graph.
        graph: its sizes.
        settings: the backend's options.

    Attributes:
        fields: symbol -> key field: its name in ``dynamic_dims``, else the input and dimension where it is read.
        declared: the key fields of the symbols that ``dynamic_dims`` or ``padding`` name.
        candidates: {symbol: key field} of the sizes that could be padded: those that only call arguments have, no
            parameter or buffer.
        fixed: {key field: size} of the declared sizes that the graph has specialized to a constant.
        constants: {position: constant} of the inputs whose padding the user declared; None where a function pads.
    """

    def __init__(self, parts: Partition, graph: GraphSizes, settings: Settings) -> None:
        tensors = [(p, parts.inputs[p], layout) for p, layout in graph.layouts.items()]
        declared = {
            layout.shape[dim]: field
            for _, graph_input, layout in tensors
            for dim, field in settings.dynamic_dims.get(graph_input.source_name or "", {}).items()
            if dim < len(layout.shape) and isinstance(layout.shape[dim], sympy.Symbol)
        }
        # With dynamic_dims, only those dimensions are declared. Else a padding rule declares all sizes of its input.
        in_padded = [
            layout.shape
            for _, graph_input, layout in tensors
            if graph_input.source_name in settings.padding and not settings.dynamic_dims
        ]
        declared_symbols = frozenset(declared) | symbols_in(size for shape in in_padded for size in shape)
        self.fixed = {
            field: layout.shape[dim]
            for _, graph_input, layout in tensors
            for dim, field in settings.dynamic_dims.get(graph_input.source_name or "", {}).items()
            if dim < len(layout.shape) and isinstance(layout.shape[dim], int)
        }
        self.fields: dict[sympy.Symbol, str] = {}
        found = {
            (home[1], graph.hints[symbol]): field
            for symbol, field in declared.items()
            if (home := _home_of(symbol, parts, graph)) is not None
        }
        for symbol, place in zip(graph.symbols, graph.places, strict=True):
            name = declared.get(symbol)
            home = _home_of(symbol, parts, graph)
            if name is None and home is not None:
                # Dynamo may give the batch of each input a symbol of its own. Sizes of one dimension that were equal in
                # the traced call share a key field; calls in which they differ are not padded.
                position, dim = home
                name = found.setdefault((dim, graph.hints[symbol]), f"{parts.inputs[position].shown}[{dim}]")
            self.fields[symbol] = name or parts.inputs[place[0]].shown
        self.declared = frozenset(self.fields[symbol] for symbol in declared_symbols if symbol in self.fields)
        of_static = symbols_in(
            size for _, graph_input, layout in tensors if graph_input.is_static for size in layout.shape
        )
        of_dynamic = symbols_in(
            size for _, graph_input, layout in tensors if not graph_input.is_static for size in layout.shape
        )
        self.candidates = {
            symbol: field
            for symbol, field in self.fields.items()
            if symbol in of_dynamic - of_static and not symbolic.is_unbacked(symbol)
        }
        self.constants = {
            position: rule if isinstance(rule, (bool, int, float)) else None
            for position, graph_input, _ in tensors
            if (rule := settings.padding.get(graph_input.source_name or "", "repeat")) != "repeat"
        }
        self._declarations = {
            f"{source}[{dim}]": f"dynamic_dims={{{source!r}: {dim}}}"
            for _, graph_input, layout in tensors
            if (source := graph_input.source_name) is not None
            for dim in range(len(layout.shape))
        }

    def with_data(self, graph: GraphSizes) -> dict[str, int]:
        """{key field: index of an output whose size depends on it and on data}: that output could not be cut."""
        return {self.fields[s]: at for at, own in graph.by_data.items() for s in own if s in self.fields}

    def declaration(self, field: str) -> str:
        """How a user declares the dimension of a key field that is named after an input."""
        by_position = "dynamic_dims of graphpass.graphed, which knows the arguments by name"
        return self._declarations.get(field, by_position)


def dispatched(
    name: str, parts: Partition, traces: Mapping[str, RegionTrace], settings: Settings
) -> tuple[tuple[GraphSizes, AutoRules], PaddingProof]:
    """The sizes of a compiled graph, the rules of its dispatcher, and the padding proof that they rely on.

    Args:
        name: the callable.
        parts: the partitioned graph. Its regions are already compiled, so its guards hold
            the assumptions of the compiler.
        traces: region name -> its aten graph.
        settings: the backend's options.

    Raises:
        CaptureError: ``padding_check`` is ``strict`` and a declared size is not proved.
    """
    graph = sizes_of(parts)
    names = _KeyNames(parts, graph, settings)
    proof = prove_partition(parts, traces, names.candidates, names.constants)
    return (graph, _rules_of(name, parts, graph, names, proof, settings)), proof


def _home_of(symbol: sympy.Symbol, parts: Partition, graph: GraphSizes) -> tuple[int, int] | None:
    """(position, dimension) of the first call argument, no parameter or buffer, that has this size; else None."""
    for position, layout in graph.layouts.items():
        if symbol in layout.shape and not parts.inputs[position].is_static:
            return position, layout.shape.index(symbol)
    return None


def _rules_of(
    name: str, parts: Partition, graph: GraphSizes, names: _KeyNames, proof: PaddingProof, settings: Settings
) -> AutoRules:
    mode, off = _level(parts, settings)
    off = off or _never_captured(parts, graph)
    never = parts.never_padded()  # guard: exchanged_memory_padded
    padded, contents_decide = _padded_symbols(graph, names, proof, settings) if never is None else (frozenset(), False)
    positions = {
        position: settings.padding.get(parts.inputs[position].shown, "repeat")
        for position, layout in graph.layouts.items()
        if not parts.inputs[position].is_static and symbols_in(layout.shape) & padded
    }
    checks: Literal["once", "often", "never"] = "often" if contents_decide else "once"
    return AutoRules(
        mode=mode,
        keys=RecurringKeys(
            _key_fields(parts, graph, names, padded, settings),
            admits=graph.admits,
            max_graphs=settings.max_graphs,
            at_once=settings.policy.lazy_capture,
            fixed=names.fixed,
        ),
        padded=positions,
        declared=frozenset(p for p in positions if parts.inputs[p].shown in settings.padding),
        written=parts.mutated_inputs,
        dynamic=tuple(p for p in graph.layouts if not parts.inputs[p].is_static),
        checks="never" if settings.padding_check == "off" else checks,
        check_contents="real" if proof.needs_real_contents else "random",  # guard: padding_index_of_floats
        on_fallback=settings.on_fallback,
        is_strict=settings.padding_check == "strict",
        moves=settings.policy.on_moved_input == "copy",
        reads_padding=_calls(parts, "zero_padding"),
        off=off,
        unproved=() if off is not None else _unproved(name, graph, names, padded, proof, settings, never),
    )


def _level(parts: Partition, settings: Settings) -> tuple[CUDAGraphMode, Reason | None]:
    modes, not_whole = settings.undirected_modes(), parts.never_full()
    if CUDAGraphMode.FULL in modes and not_whole is None:
        return CUDAGraphMode.FULL, None
    if CUDAGraphMode.PIECEWISE in modes:
        return CUDAGraphMode.PIECEWISE, None
    if not modes or not_whole is None:  # the user asked for no graphs
        return CUDAGraphMode.NONE, Reason(f"mode {settings.mode}", "", is_expected=True)
    why = f"mode {settings.mode}, and the graph cannot be captured whole: {not_whole}"
    pieces = "set mode='FULL_AND_PIECEWISE': the regions around it get graphs"
    return CUDAGraphMode.NONE, Reason(why, f"{pieces}, or {not_whole.remedy}" if not_whole.remedy else pieces)


def _never_captured(parts: Partition, graph: GraphSizes) -> Reason | None:
    if graph.unread:
        why = f"sizes that cannot be read from an input: {', '.join(sorted(map(str, graph.unread)))}"
        return Reason(why, "pass the tensor that has this size as an argument of the model")
    if _calls(parts, "c10d") or _calls(parts, "torch.distributed"):
        why = "collectives: the ranks have to agree on a key"
        return Reason(why, "set a forward context (graphpass.set_forward_context) with the same key on every rank")
    if not any(region.kind == "captured" for region in parts.regions):
        cannot = parts.never_full()
        return Reason("nothing to capture", "", is_expected=True) if cannot is None else cannot
    return None


def _calls(parts: Partition, part_of_name: str) -> bool:
    """Whether a node calls a function whose module or name contains ``part_of_name``."""
    nodes = (node for region in parts.regions for node in region.graph_module.graph.nodes)
    return any(
        part_of_name in f"{getattr(node.target, '__module__', '')}.{node.target}"
        for node in nodes
        if node.op == "call_function"
    )


def _padded_symbols(
    graph: GraphSizes, names: _KeyNames, proof: PaddingProof, settings: Settings
) -> tuple[frozenset[sympy.Symbol], bool]:
    """The sizes to pad, and whether the safety of some depends on the contents of a call."""
    padded, contents_decide = set(), False
    with_data = names.with_data(graph)
    for symbol, field in names.candidates.items():
        verdict = proof.verdicts[field]
        if field in with_data:  # guard: sizes_from_data
            continue
        is_declared = field in names.declared
        asks_anyway = settings.padding_check in ("declared", "off")
        if verdict is Verdict.PROVED or (is_declared and (verdict is Verdict.RUNTIME or asks_anyway)):
            padded.add(symbol)
            contents_decide |= verdict is not Verdict.PROVED
    return frozenset(padded), contents_decide


def _unproved(
    name: str,
    graph: GraphSizes,
    names: _KeyNames,
    padded: frozenset[sympy.Symbol],
    proof: PaddingProof,
    settings: Settings,
    never: Reason | None,
) -> tuple[tuple[str, str, str], ...]:
    """(key field, text, remedy) of each size that is not padded, or that is padded without proof and without a check.

    Raises:
        CaptureError: see :func:`dispatched`.
    """
    problems, with_data = {}, names.with_data(graph)
    for symbol, field in names.candidates.items():
        if proof.verdicts[field] is Verdict.PROVED and field not in with_data and never is None:
            continue
        why, remedy = _obstacle(field, names, proof)
        if field in with_data:
            why = f"the size of output {with_data[field]} depends on it and on data, so it cannot be cut"
        if never is not None:
            why, remedy = str(never), never.remedy or _EXACT
        if symbol in padded and settings.padding_check == "off":
            problems[field] = (f"{field} is padded without a check: {why}", "set padding_check='declared'")
        if symbol in padded:
            continue
        is_declared = field in names.declared
        if is_declared and settings.padding_check == "strict":
            raise CaptureError(
                f"{name}: {field} cannot be padded",
                expected="a graph whose real entries do not depend on padding",
                found=why,
                remedy=f"{remedy}, or set padding_check='prove' to capture exact sizes",
            )
        problems[field] = (f"{field} is not padded, its sizes are captured unpadded: {why}", remedy)
    return tuple((field, *problem) for field, problem in problems.items())


def _obstacle(field: str, names: _KeyNames, proof: PaddingProof) -> tuple[str, str]:
    """Why no proof covers a size, and the remedy."""
    findings = [finding for finding in proof.findings if finding.field == field]
    findings.sort(key=lambda finding: finding.verdict is Verdict.RUNTIME or finding.remedy == CHECK_IF_DECLARED)
    if not findings:
        return "no proof covers it", _EXACT
    remedy, is_declared = findings[0].remedy or _EXACT, field in names.declared
    data_decides, by_option = all(finding.is_by_contents for finding in findings), remedy == CHECK_IF_DECLARED
    if (data_decides or by_option) and not is_declared:
        remedy = f"declare the dimension ({names.declaration(field)})" + f" and {remedy}" * by_option
    if by_option or (data_decides and not is_declared):
        remedy += ": it is then padded, and checked"
    return str(findings[0]), remedy


def _key_fields(
    parts: Partition, graph: GraphSizes, names: _KeyNames, padded: frozenset[sympy.Symbol], settings: Settings
) -> list[KeyField]:
    return [
        KeyField(
            name=names.fields[symbol],
            ladder=_ladder(symbol, parts, graph, names, settings),
            is_padded=symbol in padded,
            is_number=symbol not in names.candidates and _is_number(symbol, parts, graph),
        )
        for symbol in graph.symbols
    ]


def _ladder(
    symbol: sympy.Symbol, parts: Partition, graph: GraphSizes, names: _KeyNames, settings: Settings
) -> tuple[int, ...] | None:
    """The capture sizes of a symbol, by its key field.

    Behind a graph break no input has a declared name; if one key field has capture sizes, its dimension identifies it.
    """
    sizes = settings.capture_sizes.get(names.fields[symbol])
    if sizes is not None or names.declared or len(settings.capture_sizes) != 1:
        return sizes
    ((field, sizes),) = settings.capture_sizes.items()
    dims = {dim for of_input in settings.dynamic_dims.values() for dim, name in of_input.items() if name == field}
    home = _home_of(symbol, parts, graph)
    return sizes if home is not None and home[1] in (dims or {0}) else None


def _is_number(symbol: sympy.Symbol, parts: Partition, graph: GraphSizes) -> bool:
    """Whether a symbol is a number that the caller passes, and no size or stride of a tensor."""
    position, dim = graph.places[graph.symbols.index(symbol)]
    return dim is None and not parts.inputs[position].is_of_tensor
