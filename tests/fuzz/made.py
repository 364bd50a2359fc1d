"""Graphs whose padding is made, run at padded sizes with anything in the padding, beside the run without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from graphpass.compat import symbolic
from graphpass.padding import (
    Asked,
    AtenGraph,
    Insertion,
    Verdict,
    fills,
    input_values,
    made,
    padding_of,
    write,
)
from tests.fuzz.padding import walk

aten = torch.ops.aten

GARBAGE = (1.0, 1e4, float("nan"), float("inf"), float("-inf"))
"""What the padding of floats holds, or the scale of its random contents."""


class MadeGraph:
    """A graph with repairs, which takes the real sizes as a last input; or, where that does, with filled inputs."""

    def __init__(
        self,
        module: fx.GraphModule,
        symbols: Mapping[sympy.Symbol, str],
        declared: Mapping[int, float | int | bool],
        *,
        fills_inputs: bool = False,
    ) -> None:
        copies: dict[fx.Node, fx.Node] = {}
        own = fx.Graph()
        own.output(own.graph_copy(module.graph, copies))
        placeholders = list(own.find_nodes(op="placeholder"))
        mode = symbolic.fake_mode_of([node.meta["val"] for node in placeholders])
        with own.inserting_after(placeholders[-1]):
            vector = own.placeholder("real_sizes")
        with mode:
            vector.meta["val"] = torch.empty((len(symbols),), dtype=torch.int32)
        self.names = list(symbols.values())
        self.module = fx.GraphModule(module, own)
        record = AtenGraph.of(self.module)
        proof = padding_of(record, symbols, declared)
        self.proved = [name for name, verdict in proof.verdicts.items() if verdict is Verdict.PROVED]
        self.fields = self.proved
        self.insertions: tuple[Insertion, ...] = ()
        self.fills: dict[int, float | int | bool] = {}  #: input -> what its padding gets
        if len(self.proved) == len(symbols):
            return
        decomposed, recorded = AtenGraph.as_decomposed(self.module, {})

        def asked(more: Mapping[int, float | int | bool]) -> Asked:
            return Asked(symbols, lambda sizes: input_values(record.inputs, sizes, {**declared, **more}), is_whole=True)

        found = made(decomposed, asked({}), recorded)
        if found is None:
            return
        if fills_inputs:
            placeholders = enumerate(module.graph.find_nodes(op="placeholder"))
            integers = {at for at, node in placeholders if not node.meta["val"].is_floating_point()}
            self.fills = dict(fills(record, found.fields, asked, integers))
        if self.fills:
            self.fields, self.insertions = list(found.fields), found.graph.insertions
            shapes: list[Any] = [record.inputs[position] for position in self.fills]
            named = dict(symbols)
            self._sizes = [[named.get(size) for size in shape.sizes] for shape in shapes]
            return
        entries = {symbol: at for at, symbol in enumerate(symbols)}
        write(self.module, decomposed, recorded, found, (vector, entries))
        proof = padding_of(found.graph, symbols, declared)
        self.fields = [name for name, verdict in proof.verdicts.items() if verdict is Verdict.PROVED]
        self.insertions = found.graph.insertions

    def run(self, inputs: list[Tensor], sizes: Mapping[str, int]) -> list[Any]:
        """The outputs for inputs whose real sizes are these."""
        vector = torch.tensor([sizes[name] for name in self.names], dtype=torch.int32)
        torch.default_generator.manual_seed(0)
        given = [value.clone() for value in inputs]
        for (position, fill), names in zip(self.fills.items(), getattr(self, "_sizes", ()), strict=True):
            for dim, name in enumerate(names):
                if name in sizes:
                    given[position].narrow(dim, sizes[name], given[position].shape[dim] - sizes[name]).fill_(fill)
        with torch.no_grad():
            return list(self.module(*given, vector))


def filled(real: Tensor, shape: tuple[int, ...], contents: float, generator: torch.Generator) -> Tensor:
    """Real entries in front, and anything behind: integers repeat real ones."""
    if shape == tuple(real.shape):
        return real.clone()
    if real.is_floating_point() or real.is_complex():
        draw = torch.randn(shape, generator=generator, dtype=torch.float64)
        padded = (draw * contents if abs(contents) <= 1e4 else torch.full(shape, contents)).to(real.dtype)
    elif real.dtype is torch.bool:
        padded = torch.rand(shape, generator=generator) < 0.5
    else:
        padded = real.flatten()[torch.randint(real.numel(), shape, generator=generator)]
    padded[tuple(slice(size) for size in real.shape)] = real
    return padded


_SUMS = (aten.mm.default, aten.bmm.default, aten.sum.dim_IntList, aten.mean.dim, aten.cumsum.default)
_ROUNDINGS = 8 * torch.finfo(torch.float64).eps


def roundings(graph: fx.Graph, inputs: Sequence[Tensor]) -> list[float]:
    """For each result what float64 leaves of the terms that cancel in the sums and products behind it."""
    behind: dict[fx.Node, float] = {}

    def see(node: fx.Node, args: Any, result: Any) -> None:
        behind[node] = max((behind.get(operand, 0.0) for operand in node.all_input_nodes), default=0.0)
        if node.target not in _SUMS or not result.is_floating_point() or not result.numel():
            return
        given = fx.node.map_aggregate(args, lambda one: one.abs() if isinstance(one, Tensor) else one)
        terms = node.target(*given[: len(node.args)], **node.kwargs)
        cancelled = terms[terms.isfinite() & (result.abs() < terms / 2)]
        behind[node] = max(behind[node], _ROUNDINGS * float(cancelled.max()) if len(cancelled) else 0.0)

    walk(graph, [value.clone() for value in inputs], see)
    return [behind.get(node, 0.0) for node in graph.output_node().args[0]]  # type: ignore[union-attr, arg-type]


def differs(real: Any, padded: Any, tolerance: float, rounding: float = 0.0) -> bool:
    """Whether the real entries of a result are others than without padding; ``rounding`` is allowed besides."""
    if not isinstance(real, Tensor):
        return False  # a size, which the caller computes
    if real.dim() != padded.dim() or any(a > b for a, b in zip(real.shape, padded.shape, strict=True)):
        return True
    cut = padded[tuple(slice(size) for size in real.shape)]
    if not (real.is_floating_point() or real.is_complex()):
        return not torch.equal(real, cut)
    return not torch.allclose(real, cut, rtol=tolerance, atol=tolerance + rounding, equal_nan=True)
