"""The sizes that the options name, for one graph: which ones it admits, and which are compiled separately."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from graphpass.compile import SizeRanges
from graphpass.dispatch.sizes import SizeGrid
from graphpass.errors import DispatchError
from graphpass.keys import BatchDescriptor
from graphpass.ledger import Reason
from graphpass.options import Settings
from graphpass.regions.split import Partition
from graphpass.regions.symbols import GuardedSymbols, key_symbols

__all__ = ["KeySizes"]

_NAME_DIMENSION = (
    "compile with dynamic=True, and name the dimension in dynamic_dims: {{input: {{dimension: {field!r}}}}}"
)


@dataclass(frozen=True, slots=True)
class KeySizes:
    """The key fields of one graph.

    Attributes:
        symbols: key field -> its size in this graph, a symbol, an expression or an int.
        guards: which sizes the graph admits.
        settings: the backend's options.
        arguments: names of the tensors that callers pass.
    """

    symbols: Mapping[str, Any]
    guards: GuardedSymbols
    settings: Settings
    arguments: tuple[str, ...]

    @classmethod
    def of(cls, parts: Partition, graph_module: fx.GraphModule, settings: Settings) -> KeySizes:
        """The key fields among the inputs of a partitioned graph."""
        arguments = tuple(i.source_name for i in parts.inputs if i.source_name and isinstance(i.value, torch.Tensor))
        symbols = key_symbols(parts.inputs, settings.dynamic_dims)
        return cls(symbols, GuardedSymbols.from_graph(graph_module), settings, arguments)

    def compiled_apart(self) -> SizeRanges | None:
        """The symbol by whose size regions are compiled separately, and its ranges; None without ranges or symbol."""
        wanted = self.settings.size_ranges()
        symbol = self.symbols.get(wanted[0]) if wanted is not None else None
        if wanted is None or not isinstance(symbol, sympy.Symbol):
            return None
        ranges = [pair for pair in wanted[1] if any(self.guards.excludes(symbol, end) is None for end in pair)]
        return symbol, tuple(ranges)

    def admits(self, descriptor: BatchDescriptor) -> bool:
        """Whether the graph's guards admit the sizes that ``descriptor`` names."""
        try:
            fields = SizeGrid.of(self.settings.capture_sizes or [1]).fields(descriptor)
        except DispatchError:  # a key that does not name the fields
            return False
        pairs = [(symbol, fields[name]) for name, symbol in self.symbols.items() if name in fields]
        return bool(pairs) and all(self.guards.excludes(symbol, size) is None for symbol, size in pairs)

    def unmatched_names(self, *, is_first: bool) -> Iterator[str]:
        """A sentence for each option that names inputs which the graph lacks, perhaps by a slip.

        A graph need not have all inputs that are named, so a name that resembles none of its others says nothing.

        Args:
            is_first: whether it is the first graph of the model; later ones may begin behind a graph break.
        """
        named: Mapping[str, Collection[str]] = {
            "dynamic_dims": self.settings.dynamic_dims,
            "padding": self.settings.padding,
        }
        for option, names in named.items():
            unknown = [name for name in names if name not in self.arguments]
            others = [name for name in self.arguments if name not in names]
            knows_none = is_first and len(unknown) == len(names) > 0 and bool(self.arguments)
            if knows_none or any(difflib.get_close_matches(name, others, cutoff=0.7) for name in unknown):
                yield f"{option} names {', '.join(unknown)}, and the graph's inputs are {', '.join(self.arguments)}"
        fields = [field for field in self.settings.capture_sizes if "[" not in field and field not in self.symbols]
        if is_first and len(self.settings.capture_sizes) > 1 and not self.settings.dynamic_dims and fields:
            yield f"capture_sizes names {', '.join(fields)}, and the graph's inputs are {', '.join(self.arguments)}"

    def excluded(self) -> Iterator[str]:
        """Which named sizes the graph does not serve, and why. Dynamo compiles another graph for each of them."""
        for field, sizes in self.settings.capture_sizes.items():
            if field in self.symbols:
                yield from self._excluded(field, sizes)

    def not_compiled_apart(self) -> Reason | None:
        """Why no size gets an artifact of its own although options ask for it; None if they do not, or it does."""
        wanted = self.settings.size_ranges()
        if wanted is None or isinstance(self.symbols.get(wanted[0]), sympy.Symbol):
            return None
        size = self.symbols.get(wanted[0], "no symbol that can be read from an input")
        return Reason(f"nothing is compiled by size: {wanted[0]} is {size}", _NAME_DIMENSION.format(field=wanted[0]))

    def _excluded(self, field: str, sizes: tuple[int, ...]) -> Iterator[str]:
        symbol = self.symbols[field]
        if not getattr(symbol, "free_symbols", None):
            yield f"{field} is fixed at {symbol}: other sizes are compiled again"
            return
        for size in sizes:
            constraint = self.guards.excludes(symbol, size)
            if constraint is not None:
                yield f"{field}={size} is outside this graph's guards ({constraint})"
