"""The rules of a graph's own dispatcher: its keys, which sizes are padded and why others are not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import fx

from cgpass.cuts import GraphOutputs
from cgpass.namedsizes import GraphSizes, Size, symbols_in
from graphpass.compat import symbolic
from graphpass.compile import RegionTrace
from graphpass.dispatch.recurring import RecurringKeys
from graphpass.errors import CaptureError
from graphpass.keys import CUDAGraphMode
from graphpass.ledger import PaddingFinding, Reason, Verdict
from graphpass.options import Settings
from graphpass.paddedcalls import PadRule
from graphpass.padding import DECLARE_MASK, NO_RULE, PaddingProof
from graphpass.regions.partitionproof import prove_partition
from graphpass.regions.split import Partition

_NOTHING_TO_PAD = PaddingProof({}, (), (), (), needs_real_contents=False)
_NOT_ASKED = Reason("", is_expected=True)
_EXACT = "no padding suits this operation: keep the sizes few, or leave the operation out of the compiled model"
_WITH_ATEN = "leave out compiler='eager', which makes no padding neutral; else "
#: Kind of product, as torch has settings of precision for -> pattern of its operators.
_PRODUCTS = {"conv": "conv", "rnn": "rnn|lstm|gru", "matmul": r"(mm|mv|matmul|dot|linear)(\.|$)"}


@dataclass(frozen=True, slots=True)
class AutoRules:
    """Sizes, keys, padding and checks of one graph's dispatcher."""

    sizes: GraphSizes
    outputs: GraphOutputs
    mode: CUDAGraphMode  #: FULL or PIECEWISE: how keys are captured; NONE where ``off`` says why not
    keys: RecurringKeys  #: the key fields, their ladders, and the keys seen so far
    #: {position: what fills its padding, unless the user says} of the inputs that have a padded field among their
    #: sizes: a number where a proof relies on it
    padded: Mapping[int, PadRule]
    written: tuple[int, ...]  #: positions of the tensors that the graph writes to
    dynamic: tuple[int, ...]  #: positions of the tensors that are neither parameters nor buffers
    #: What a check writes to the padding of floats: random numbers; or copies of real entries, because an operator may
    #: fail for other numbers.
    check_contents: Literal["random", "real"]
    products: frozenset[str]  #: kinds of products in the graph: matmul, conv, rnn
    off: Reason | None  #: why no call is captured; None if calls are captured
    unproved: Mapping[str, Reason]  #: {key field: why} of each size that is not padded


def reads_real_sizes(parts: Partition, traces: Mapping[str, RegionTrace]) -> bool:
    """Whether a region reads the real sizes of each call: its padding is made, or nobody knows."""
    found = [traces.get(region.name) for region in parts.regions if region.kind == "captured"]
    return any(trace is None or trace.problem is not None or trace.result.insertions for trace in found)


def dispatched(
    name: str, parts: Partition, sizes: GraphSizes, traces: Mapping[str, RegionTrace], settings: Settings
) -> tuple[AutoRules, PaddingProof]:
    """The rules of a compiled graph's dispatcher, and the padding proof that they rely on."""
    outputs = GraphOutputs.of(parts, sizes.layouts)
    fills = _fills(parts, traces)
    constants = {**fills, **declared_constants(parts, sizes, settings)}
    fields = {size.symbol: size.name for size in sizes.sizes if size.is_of_calls}
    proof = prove_partition(parts, traces, fields, constants) if fields else _NOTHING_TO_PAD
    if settings.makes_padding():  # guard: finding_of_an_unknown_operator
        # An operator that no rule knows is at fault before those that are repaired.
        proof = replace(proof, findings=tuple(sorted(proof.findings, key=_is_known)))
    mode, off = _level(parts, settings)
    off = off or _never_captured(parts, sizes, settings)
    obstacles = list(_obstacles(parts, sizes, outputs, proof, settings))
    if off is None and settings.padding_check == "strict":
        _refuse_unpadded(name, obstacles)
    padded = {size.symbol for size, obstacle in obstacles if obstacle is None}
    positions: dict[int, PadRule] = {
        position: fills.get(position, "repeat")
        for position, layout in sizes.layouts.items()
        if not parts.inputs[position].is_static and symbols_in(layout.shape) & padded
    }
    if positions and reads_real_sizes(parts, traces):
        positions |= {p: "repeat" for p, given in enumerate(parts.inputs) if given.has_real_sizes}
    sizes = replace(sizes, sizes=tuple(replace(size, is_padded=size.symbol in padded) for size in sizes.sizes))
    rules = AutoRules(
        sizes=sizes,
        outputs=outputs,
        mode=mode,
        keys=RecurringKeys(
            sizes.sizes,
            admits=sizes.admits,
            max_graphs=settings.max_graphs,
            at_once=settings.policy.lazy_capture,
            fixed=sizes.fixed,
        ),
        padded=positions,
        written=parts.mutated_inputs,
        dynamic=tuple(p for p in sizes.layouts if not parts.inputs[p].is_static),
        check_contents="real" if proof.needs_real_contents else "random",  # guard: padding_index_of_floats
        products=frozenset(
            kind
            for trace in traces.values()
            for node in (() if trace.problem else trace.result.nodes)
            for kind, named in _PRODUCTS.items()
            if re.search(named, node.op)
        ),
        off=off,
        unproved={
            size.name: replace(why, why=f"{size.name} is not padded, its sizes are captured unpadded: {why.why}")
            for size, why in obstacles
            if off is None and why is not None and why is not _NOT_ASKED
        },
    )
    return rules, proof


def _fills(parts: Partition, traces: Mapping[str, RegionTrace]) -> dict[int, float | int | bool]:
    """{input: what its padding gets instead of repairs}, as the pass over the only region decided."""
    positions = {given.name: position for position, given in enumerate(parts.inputs)}
    return {
        positions[region.inputs[at]]: fill
        for region in parts.regions
        if region.name in traces and traces[region.name].problem is None
        for at, fill in traces[region.name].result.fills
    }


def declared_constants(parts: Partition, sizes: GraphSizes, settings: Settings) -> dict[int, float | int | bool | None]:
    """{input: what the user says that its padding holds}, None where a function pads."""
    return {
        position: rule if isinstance(rule, (bool, int, float)) else None
        for position in sizes.layouts
        if (rule := settings.padding.get(parts.inputs[position].source_name or "", "repeat")) != "repeat"
    }


def _level(parts: Partition, settings: Settings) -> tuple[CUDAGraphMode, Reason | None]:
    modes, not_whole = settings.undirected_modes(), parts.never_full()
    if CUDAGraphMode.FULL in modes and not_whole is None:
        return CUDAGraphMode.FULL, None
    if CUDAGraphMode.PIECEWISE in modes:
        return CUDAGraphMode.PIECEWISE, None
    if not settings.runtime_modes():  # the user asked for no graphs
        return CUDAGraphMode.NONE, Reason(f"mode {settings.mode}", "", is_expected=True)
    pieces = "set mode='FULL_AND_PIECEWISE': the regions around it get graphs"
    if not_whole is None or not modes:
        why = f"mode {settings.mode}, and a graph of the whole would hold the operations in splitting_ops"
        return CUDAGraphMode.NONE, Reason(why, pieces.replace("it", "them"))
    why = f"mode {settings.mode}, and the graph cannot be captured whole: {not_whole}"
    return CUDAGraphMode.NONE, Reason(why, f"{pieces}, or {not_whole.remedy}" if not_whole.remedy else pieces)


def _never_captured(parts: Partition, sizes: GraphSizes, settings: Settings) -> Reason | None:
    if sizes.unread:
        why = f"sizes that cannot be read from an input: {', '.join(sorted(map(str, sizes.unread)))}"
        return Reason(why, "pass the tensor that has this size as an argument of the model")
    if settings.ranks is None and calls_collectives(parts):  # guard: collectives_alone
        why = "collectives: the ranks have to agree on a key"
        in_step = "pass options={'ranks': 'lockstep'} if every rank makes the same calls in the same order"
        return Reason(why, f"{in_step}; else set a forward context with the same key on every rank")
    if not any(region.kind == "captured" for region in parts.regions):
        cannot = parts.never_full()
        return Reason("nothing to capture", "", is_expected=True) if cannot is None else cannot
    return None


def calls_collectives(parts: Partition) -> bool:
    """Whether a region waits for other ranks."""
    return _calls(parts, "c10d") or _calls(parts, "torch.distributed")


def nodes_of(parts: Partition) -> Iterator[fx.Node]:
    """The nodes of all regions."""
    return (node for region in parts.regions for node in region.graph_module.graph.nodes)


def _calls(parts: Partition, part_of_name: str) -> bool:
    return any(
        part_of_name in f"{getattr(node.target, '__module__', '')}.{node.target}"
        for node in nodes_of(parts)
        if node.op == "call_function"
    )


def _obstacles(
    parts: Partition, sizes: GraphSizes, outputs: GraphOutputs, proof: PaddingProof, settings: Settings
) -> Iterator[tuple[Size, Reason | None]]:
    never = parts.never_padded()  # guard: exchanged_memory_padded
    uncut = {size.name: at for at, own in outputs.by_data.items() for size in sizes.sizes if size.symbol in own}
    for size in sizes.sizes:
        if not size.is_of_calls:
            continue
        unproved = _unproved(size, parts, proof, settings)
        if not settings.pads:
            yield size, _NOT_ASKED
        elif never is not None:
            yield size, replace(never, remedy=never.remedy or _EXACT)
        elif size.name in uncut:  # guard: sizes_from_data
            why = f"the size of output {uncut[size.name]} depends on it and on data, so it cannot be cut"
            yield size, replace(unproved, why=why)
        else:
            yield size, None if proof.verdicts[size.name] is Verdict.PROVED else unproved


def _unproved(size: Size, parts: Partition, proof: PaddingProof, settings: Settings) -> Reason:
    findings = [finding for finding in proof.findings if finding.field == size.name]
    if not (settings.makes_padding() and findings and not _is_known(findings[0])):
        findings.sort(key=lambda finding: bool(finding.remedy))  # what no remedy helps comes first
    remedy = _in_names_of_inputs((findings[0].remedy if findings else "") or _EXACT, size, parts)
    if settings.compiler == "eager":  # guard: remedy_for_the_eager_compiler
        remedy = _WITH_ATEN + remedy
    return Reason(str(findings[0]) if findings else "no proof covers it", remedy)


def _is_known(finding: PaddingFinding) -> bool:
    return finding.why != NO_RULE


def _in_names_of_inputs(remedy: str, size: Size, parts: Partition) -> str:
    """A remedy with the names of the inputs that have a size, in place of ``mask`` and ``ids``."""
    tensors = [given for given in parts.inputs if isinstance(given.value, torch.Tensor) and not given.is_static]
    having = [given for given in tensors if size.symbol in map(symbolic.expression_of, given.value.shape)]
    for given in having:
        is_bool, is_float = given.value.dtype == torch.bool, given.value.is_floating_point()
        if is_bool or "mask" in given.shown:  # guard: remedy_names_the_mask
            hiding = "False} (True where that hides)" if is_bool else "0}" + " (-inf where it is added)" * is_float
            remedy = remedy.replace(
                DECLARE_MASK, f"under {given.shown}, declared with padding={{{given.shown!r}: {hiding}"
            )
        elif given.value.dim() > 1 and not is_float:
            remedy = remedy.replace("'ids'", repr(given.shown))
    return remedy


def _refuse_unpadded(name: str, obstacles: Iterable[tuple[Size, Reason | None]]) -> None:
    for size, obstacle in obstacles:
        if size.is_declared and obstacle is not None:
            raise CaptureError(
                f"{name}: {size.name} cannot be padded",
                expected="a graph whose real entries do not depend on padding",
                found=obstacle.why,
                remedy=f"{obstacle.remedy}, or set padding_check='prove' to capture exact sizes",
            )
