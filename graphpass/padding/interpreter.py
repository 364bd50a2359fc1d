"""Runs an aten graph over abstract values, with one padding rule for each operator."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from graphpass.compat import operators, symbolic
from graphpass.ledger import PaddingFinding
from graphpass.padding.attending import infinities_of
from graphpass.padding.indexing import by_position, needs_real_contents, new_fields, reads_outside
from graphpass.padding.opcall import (
    REGISTER_RULE,
    ROWS_APART,
    OpCall,
    PaddingReason,
    Unknown,
    tensors_of,
)
from graphpass.padding.program import CONSTANT, GETITEM, NUMBER, RESULTS, AtenGraph, AtenNode, Ref, references
from graphpass.padding.sizes import Sizes, as_size, product, quotient
from graphpass.padding.table import applied, is_registered, rule_for
from graphpass.padding.values import (
    PaddedValue,
    Place,
    Size,
    TensorShape,
    by_data,
    cast_pad,
    is_extreme,
)

_ONE_EACH = (
    "return a tuple from the padding rule: one PaddedValue for each tensor of call.result, None for what is no tensor,"
    " then one for each written argument"
)
_WITHOUT_EFFECT = frozenset(
    f"aten::{name}"
    for name in ("_assert_scalar", "_assert_tensor_metadata", "sym_constrain_range", "sym_constrain_range_for_size")
)


NO_RULE = "it has no padding rule"
"""The finding for an operator that is not known."""


def _remedy_for(op: str) -> str:
    """What a user can do about an operator without a rule; empty where nothing pads it."""
    if op.startswith("higher_order::"):  # guard: remedy_for_higher_order_operators
        return ""
    return ROWS_APART if operators.is_of_torch(op) else REGISTER_RULE


def _to_correct(call: OpCall) -> str:
    """The remedy for a rule that does not fit: only its author can correct it."""
    return "correct the padding rule of the operator" if is_registered(call.op.replace(".", "::", 1)) else ""


@dataclass(frozen=True, slots=True)
class Interpretation:
    """The effects of a graph on the padding of its inputs."""

    #: For each flat output the abstract value of a tensor, the expression of a number, else None.
    outputs: tuple[PaddedValue | Size | None, ...]
    written: Mapping[int, PaddedValue]  #: input position -> the abstract value that the graph writes to it
    #: Findings for the whole graph, even if nothing uses its outputs: random numbers, host reads.
    findings: frozenset[PaddingFinding]
    assumptions: frozenset[str]  #: the conditions on which the values depend
    needs_real_contents: bool  #: an operator may fail for numbers in the padding that no real entry has


def input_values(
    shapes: Iterable[TensorShape | Size | None],
    sizes: Sizes,
    declared: Mapping[int, float | int | bool | None] | None = None,
) -> tuple[PaddedValue | Size | None, ...]:
    """Abstract inputs of a graph, from their shapes, with one factor for each dimension.

    ``declared`` says what the padding of inputs holds: a constant, or None for contents that the caller chooses. Other
    inputs repeat real entries.
    """
    values: list[PaddedValue | Size | None] = []
    for position, shape in enumerate(shapes):
        if not isinstance(shape, TensorShape):
            values.append(shape if shape is None else sizes.renamed(shape))
            continue
        value, declared = PaddedValue(sizes.one_each(shape.sizes), dtype=shape.dtype), declared or {}
        places, pad = sizes.places(value), declared.get(position)  # guard: proof_declared_padding
        if position in declared:
            fields = {field for dim, at in places for field in sizes.fields_of(value.factors[dim][at])}
            value = replace(value, new_fields=frozenset(fields))
        if pad is not None:
            held = cast_pad(pad, shape.dtype)
            value = value.with_pads(dict.fromkeys(places, held))
            value = value.with_real(by_data(None, held) if is_extreme(held) else None)
        values.append(value)
    return tuple(values)


def interpret(
    graph: AtenGraph, inputs: Sequence[PaddedValue | Size | None], sizes: Sizes, trusted: Collection[str] = ()
) -> Interpretation:
    """Walk a graph over abstract values."""
    return Walk(graph, sizes, frozenset(trusted)).run(inputs)


class Walk:
    """The state of one run: the values so far, which of them depend on padded inputs, and the findings."""

    def __init__(self, graph: AtenGraph, sizes: Sizes, trusted: frozenset[str]) -> None:
        self._graph = graph
        self._sizes = sizes
        self._trusted = trusted
        self._values: list[Any] = []
        self._depends: list[bool] = []
        self._written: dict[int, PaddedValue] = {}
        self._everywhere: set[PaddingFinding] = set()
        self._assumptions: set[str] = set()
        self._needs_real_contents = False

    def run(self, inputs: Sequence[PaddedValue | Size | None]) -> Interpretation:
        """Walk the graph on abstract inputs."""
        for position, (shape, value) in enumerate(zip(self._graph.inputs, inputs, strict=True)):
            checked = self._input(position, shape, value)
            self._values.append(checked)
            is_padded = isinstance(checked, PaddedValue) and bool(checked.findings or self._sizes.places(checked))
            self._depends.append(is_padded)
        self._walk()
        outputs = tuple(self._of(output) for output in self._outputs())
        outputs = tuple(output if isinstance(output, (PaddedValue, int, sympy.Basic)) else None for output in outputs)
        findings, assumptions = frozenset(self._everywhere), frozenset(self._assumptions)
        return Interpretation(outputs, self._written, findings, assumptions, self._needs_real_contents)

    def _walk(self) -> None:
        for node in self._graph.nodes:
            self._add(node)

    def _add(self, node: AtenNode) -> Ref:
        """Walk one node on the values so far."""
        self._depends.append(any(map(self._depends.__getitem__, references(node.arguments))))
        self._values.append(self._step(node))
        return Ref(len(self._values) - 1)

    def _outputs(self) -> tuple[Ref | Size | None, ...]:
        return self._graph.outputs

    def _input(self, position: int, shape: object, value: object) -> object:
        if not isinstance(shape, TensorShape):
            return self._sizes.renamed(shape) if isinstance(shape, (int, sympy.Basic)) else value
        if not isinstance(value, PaddedValue):
            value = PaddedValue(self._sizes.one_each(shape.sizes))
        renamed = tuple(self._sizes.merged([self._sizes.renamed(f) for f in of_dim]) for of_dim in value.factors)
        value = replace(value, factors=renamed, dtype=shape.dtype)
        call = self._call("input", {"input": value}, shape, "")
        if self._fits(value, shape):
            return self._checked(call, value, shape)
        why = f"input '{self._graph.input_names[position]}' has other sizes than its graph"
        return call.reached(call.fresh(shape), PaddingReason(why))

    def _of(self, argument: Any) -> Any:
        if isinstance(argument, Ref):
            return self._values[argument.index]
        if isinstance(argument, tuple):
            return tuple(self._of(part) for part in argument)
        return self._sizes.renamed(argument) if isinstance(argument, sympy.Basic) else argument

    def _call(self, op: str, arguments: Mapping[str, Any], result: Any, where: str) -> OpCall:
        name = op.partition("::")[2].partition(".")[0] or op
        text = op.replace("::", ".")
        return OpCall(text, name, arguments, result, where, self._sizes, self._assumptions, self._everywhere)

    # --- one node

    def _step(self, node: AtenNode) -> Any:
        if node.op == GETITEM:
            of, at = self._of(node.arguments[0][1]), node.arguments[1][1]
            return of[at] if isinstance(of, tuple) else None
        if node.op == RESULTS:
            return self._of(node.arguments[0][1])
        if node.op == NUMBER:
            return self._renamed(node.result)
        result = self._renamed(node.result)
        if node.op == CONSTANT:
            if not isinstance(result, TensorShape):
                return None
            return self._call(node.op, {}, result, node.where).fresh()
        arguments = {name: self._of(argument) for name, argument in node.arguments}
        own, bases = (result[: -len(node.bases)], node.bases) if node.bases else (result, ())
        own = () if own == (None,) else own  # auto_functionalized returns None for an op without results
        call = self._call(node.op, arguments, own, node.where)
        if call.name.startswith("sym_") and not call.shapes:
            return result
        values, written = self._operator(node, call)
        after = dict(zip(node.writes, written, strict=True))
        if bases:
            return (*(values or (None,)), *(after.get(base or "") for base in bases))
        for name, value in after.items():
            self._write(dict(node.arguments)[name], value)
        results = values if isinstance(own, tuple) else values[0] if values else None
        return (None, *values) if node.has_token else results

    def _renamed(self, result: Any) -> Any:
        if isinstance(result, TensorShape):
            return replace(result, sizes=tuple(map(self._sizes.renamed, result.sizes)))
        if isinstance(result, tuple):
            return tuple(self._renamed(part) for part in result)
        return self._sizes.renamed(as_size(result)) if isinstance(result, sympy.Basic) else result

    def _write(self, argument: Any, value: PaddedValue) -> None:
        for position in references(argument):
            self._values[position] = value
            self._depends[position] = self._depends[position] or self._depends[-1]
            if position < len(self._graph.inputs):
                self._written[position] = value

    def _operator(self, node: AtenNode, call: OpCall) -> tuple[tuple[Any, ...], tuple[PaddedValue, ...]]:
        """The results of one operator, and the new values of the arguments that it writes to."""
        if node.op in _WITHOUT_EFFECT:
            return (), ()
        tensors = list(tensors_of(call.arguments.values()))
        findings = frozenset[PaddingFinding]().union(*(value.findings for value in tensors))
        own = () if call.result is None else call.results
        wanted = (*own, *(self._shape_of(call, name) for name in node.writes))
        self._needs_real_contents |= self._depends[-1] and needs_real_contents(call, tensors)
        outside = reads_outside(call)
        values = self._applied(call, node, tensors, wanted)
        values = values if outside is None else self._fresh(call, wanted, outside)
        if tensors and not any(isinstance(shape, TensorShape) for shape in wanted):
            self._read_by_host(call, own, tensors)  # guard: proof_host_reads
            return own, ()
        results = tuple(
            replace(
                value.with_findings(findings).with_real(  # guard: proof_earlier_findings
                    infinities_of(call, rule_for(node.op), value)
                ),
                new_fields=new_fields(call, tensors, value),
                by_position=self._by_position(node, call, value),
            )
            if isinstance(value, PaddedValue)
            else shape
            for at, (value, shape) in enumerate(zip(values, wanted, strict=True))
        )
        self._hidden_sizes(own, results)
        return results[: len(own)], tuple(value for value in results[len(own) :] if isinstance(value, PaddedValue))

    def _by_position(self, node: AtenNode, call: OpCall, value: PaddedValue) -> frozenset[PaddingFinding]:
        if self._sizes.real_first or node.op.partition(".")[0] in self._trusted:
            return frozenset()
        return by_position(call, rule_for(node.op), value, depends=self._depends[-1])

    def _shape_of(self, call: OpCall, name: str) -> TensorShape | None:
        value = call.arguments[name]
        if not isinstance(value, PaddedValue) or value.dtype is None:
            return None
        return TensorShape(tuple(product(of_dim) for of_dim in value.factors), value.dtype)

    def _applied(
        self, call: OpCall, node: AtenNode, tensors: list[PaddedValue], wanted: tuple[Any, ...]
    ) -> tuple[PaddedValue | None, ...]:
        """One value for each wanted tensor: from the operator's rule, or with findings if the rule refuses."""
        if node.op.partition(".")[0] in self._trusted:
            return self._fresh(call, wanted)
        rule = rule_for(node.op)
        touched = any(map(self._sizes.padded, call.sizes_at_hand()))
        is_shared = not self._sizes.real_first and not self._depends[-1]  # by all rows, so that a refusal says nothing
        if not touched and (rule is None or (tensors and all(value.constant is None for value in tensors))):
            return self._fresh(call, wanted)
        returned: Any
        try:
            # guard: proof_operators_without_a_rule
            returned = PaddingReason(NO_RULE, remedy=_remedy_for(node.op)) if rule is None else applied(rule, call)
        except Unknown as unknown:
            returned = unknown.reason
        except Exception as error:
            returned = PaddingReason(f"its padding rule failed: {error!r}", remedy=_to_correct(call))
        if isinstance(returned, PaddingReason):
            return self._fresh(call, wanted, *(() if is_shared else (returned,)))
        if isinstance(returned, PaddedValue) and is_registered(node.op):
            if any(returned is value for value in tensors):  # its rows depend on the argument's; they are not equal
                returned = call.carried(PaddedValue(returned.factors), returned)  # guard: proof_rows_by_a_rule
            if all(self._fits(returned, shape) for shape in call.shapes):
                returned = tuple(returned if isinstance(shape, TensorShape) else None for shape in wanted)
        returned = returned if isinstance(returned, tuple) else (returned,)
        if len(returned) != len(wanted):
            why = f"its padding rule returned {len(returned)} value(s) for {len(wanted)} results of other sizes"
            return self._fresh(call, wanted, PaddingReason(why, remedy=_ONE_EACH))
        values = tuple(self._checked(call, value, shape) for value, shape in zip(returned, wanted, strict=True))
        return tuple(value and replace(value, findings=frozenset()) for value in values) if is_shared else values

    def _fresh(self, call: OpCall, wanted: tuple[Any, ...], *reasons: PaddingReason) -> tuple[PaddedValue | None, ...]:
        """Values of unknown contents, which depend on padding for each of ``reasons``."""
        return tuple(
            call.reached(call.fresh(shape), *reasons) if isinstance(shape, TensorShape) else None for shape in wanted
        )

    def _checked(self, call: OpCall, value: PaddedValue | None, shape: Any) -> PaddedValue | None:
        """A rule's result in canonical form; a fresh value with findings if its sizes do not match the graph."""
        if not isinstance(shape, TensorShape):
            return None
        if not isinstance(value, PaddedValue) or not self._fits(value, shape):
            why = f"its padding rule says {getattr(value, 'factors', value)} of a result of sizes {shape.sizes}"
            return call.reached(call.fresh(shape), PaddingReason(why, remedy=_to_correct(call)))
        dims = zip(value.factors, self._sizes.one_each(shape.sizes), strict=True)
        value = replace(value, factors=tuple(f if self._sizes.any_padded(f) else own for f, own in dims))
        places = set(self._sizes.places(value))
        for size in (value.factors[dim][at] for dim, at in places):
            if not self._sizes.grows(size):
                why = f"its result has a dimension of size {size}, which need not grow with the padded size"
                return call.reached(call.fresh(shape), PaddingReason(why, size=size))
        known = value.padding if self._sizes.real_first else ()
        pads = {place: cast_pad(pad, shape.dtype) for place, pad in known if place in places}
        constant = cast_pad(value.constant, shape.dtype) if value.constant is not None else None
        index = value.index
        exists = index and index.dim < value.rank and index.factor < len(value.factors[index.dim])
        index = index if exists and shape.dtype in (torch.int64, torch.int32) else None
        made = (value.whole & places, value.counted) if call.op.startswith("graphpass.") else (frozenset[Place](), None)
        value = replace(value.with_pads(pads), constant=constant, index=index, dtype=shape.dtype)
        # guard: made_padding_of_other_results
        return replace(value, whole=made[0], counted=made[1], rows=value.rows & places)

    def _fits(self, value: PaddedValue, shape: TensorShape) -> bool:
        pairs = zip(value.factors, map(self._sizes.renamed, shape.sizes), strict=False)
        return value.rank == len(shape.sizes) and all(self._is_size(product(of_dim), size) for of_dim, size in pairs)

    def _is_size(self, size: Size, of_graph: Size) -> bool:
        if quotient(size, of_graph) == 1 or size == of_graph == 0:
            return True
        # One unpadded size may be written in two ways: the graph runs, so the sizes that meet in it are equal.
        padded = self._sizes.padded(size) or self._sizes.padded(of_graph)
        return not padded and not (isinstance(size, int) and isinstance(of_graph, int))

    # --- effects besides the outputs

    def _read_by_host(self, call: OpCall, own: tuple[Any, ...], tensors: list[PaddedValue]) -> None:
        """Add findings for an operator without tensor results: a host number, an assertion, an outside effect."""
        findings = {finding for value in tensors for finding in value.findings}
        if any(map(self._sizes.padded, call.sizes_at_hand())):
            findings |= call.findings_for(PaddingReason("it reads padded entries"))
        target = "a number that the host reads" if own else "an effect outside the graph"
        self._everywhere |= {finding.reaching(target) for finding in findings}

    def _hidden_sizes(self, own: tuple[Any, ...], results: tuple[Any, ...]) -> None:
        """Add findings for a result whose size depends on contents: later tensors of that size have no findings."""
        for shape, value in zip(own, results, strict=False):
            if not isinstance(value, PaddedValue) or not value.findings:
                continue
            symbols = {symbol for size in shape.sizes if isinstance(size, sympy.Basic) for symbol in size.free_symbols}
            if any(symbolic.is_unbacked(symbol) for symbol in symbols):
                self._everywhere |= {finding.reaching("a size that contents decide") for finding in value.findings}
