"""Refuses a model that mixes the tokens or requests of a batch outside of its attention.

A batch packs the tokens of many requests into one row, with padding behind them. The ops that the attention declares
know the request of each token, so they may combine tokens. In any other op the result of a request would depend on the
other requests of the batch and on the padding.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from graphpass.capture.scope import ReachedCallable
from graphpass.compat.nnmodules import where_of
from graphpass.engine.results import GraphSymbols
from graphpass.errors import CaptureError
from graphpass.ladder.modelstate import PythonState
from graphpass.regions.padding import PaddingFinding
from graphpass.regions.padding.mixing import mixing_of
from graphpass.regions.split import Partition

__all__ = ["refuse_mixing", "refuse_tensors_between"]


def refuse_mixing(
    callable_: ReachedCallable, symbols: GraphSymbols, declared: Collection[str], unpassed: Collection[str]
) -> None:
    """Refuse a graph in which tokens or requests depend on each other.

    Args:
        callable_: the graph's callable.
        symbols: the key fields of the graph's symbols.
        declared: qualified names of the ops that may mix tokens and requests.
        unpassed: the names of the model's parameters that no input has.

    Raises:
        CaptureError: an op mixes them, or the graph fixes a size; the error names op and line.
    """
    if symbols.fixed:  # guard: manager_mixing_fixed
        fixed = " and ".join(symbols.fixed)
        raise CaptureError(
            f"the model fixes {fixed}, so it cannot be proved that tokens and requests stay apart",
            expected="a graph that serves every size: its code neither loops over a size nor depends on its value",
            found=f"{callable_.name}, compiled for one {fixed}",
            remedy="do not branch or loop on sizes in Python, or move that code into an op with a padding rule "
            "(graphpass.regions.register_padding_rule)",
        )
    for field in dict.fromkeys(symbols.fields.values()):  # guard: manager_mixing_of_requests
        of_field = {symbol: name for symbol, name in symbols.fields.items() if name == field}
        findings = mixing_of(callable_.partition, callable_.traces, of_field, declared)
        if findings:  # guard: manager_mixing
            raise _mixes(callable_.partition, _WHAT[field], findings, unpassed)


def refuse_tensors_between(callable_: ReachedCallable, symbols: GraphSymbols, state: PythonState) -> None:
    """Refuse a later graph of a run that reads tensors which Python code has computed between the graphs.

    Args:
        callable_: the graph's callable.
        symbols: the graph's symbols and its inputs of unknown origin.
        state: attributes and containers of the model's modules; tensors in them are allowed.

    Raises:
        CaptureError: the graph reads such a tensor; the error names it.
    """
    names = [name for name, tensor in symbols.unknown if not state.holds_tensor(tensor)]
    if names:
        raise CaptureError(
            f"{callable_.name} reads a tensor that Python computes between the graphs of the model",
            expected="inputs, weights, or results of an earlier graph: only for code inside graphs can it be proved "
            "that tokens and requests stay apart",
            found=", ".join(names),
            remedy="remove the graph break (TORCH_LOGS=graph_breaks names it), or move that code into an op with a "
            "padding rule (graphpass.regions.register_padding_rule)",
        )


_WHAT = {"num_tokens": "tokens", "num_reqs": "requests"}
_SHOWN = 4
_NAME = re.compile(r"[^\W\d]\w*")


def _mixes(parts: Partition, what: str, findings: Sequence[PaddingFinding], unpassed: Collection[str]) -> CaptureError:
    lines = [f"{finding.op} ({finding.why}) {_place_of(parts, finding)}" for finding in findings]
    more = f", and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    first = findings[0]
    read = dict.fromkeys(name for found in findings for name in _NAME.findall(found.where.partition(": ")[2]))
    made = ", ".join(name for name in read if name in unpassed)
    pass_them = f"pass {made} as an input (an InputSpec), which the model makes itself otherwise; or " if made else ""
    return CaptureError(
        f"the model mixes the {what} of a batch through {first.op} {_place_of(parts, first)}",
        expected=f"only the ops that the attention declares combine {what}: a batch packs the {what} of many requests, "
        "with padding behind them",
        found="; ".join(lines[:_SHOWN]) + more,
        remedy=f"{pass_them}use attention that knows the requests (attn_implementation='graphpass_paged', or your own "
        f"op in splitting_ops of the AttentionMetadataBuilder); for another op that keeps {what} apart register a "
        "padding rule (graphpass.regions.register_padding_rule); or take the op out of the model",
    )


def _place_of(parts: Partition, finding: PaddingFinding) -> str:
    """Module and line of a finding: ``in layers.3.mixer at model.py:12: `x.mean(0)` ``."""
    line, _, source = finding.where.partition(": ")
    module = _module_at(parts, line)
    place = f"at {line}: `{source}`" if source else f"at {line}" if line else "in an unknown line"
    return f"in {module} {place}" if module else place


def _module_at(parts: Partition, line: str) -> str:
    """Path and class of the module whose forward contains this line; empty if no node of the graph has the line."""
    for region in parts.regions:
        for node in region.graph_module.graph.nodes:
            if line and where_of(node.meta.get("stack_trace")).partition(": ")[0] == line:
                stack = node.meta.get("nn_module_stack") or {}
                for path, kind in reversed(stack.values()):
                    name = kind.rpartition(".")[2] if isinstance(kind, str) else kind.__name__
                    return f"{path.partition('].')[2] or 'the model'} ({name})"  # behind L['model'].
    return ""
