"""A copy of a region's example inputs in which some symbols are fixed or bounded.

The copy has a new shape environment. See Note [Guards of a compilation].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from graphpass.compat import memory, symbolic

__all__ = ["SpecializedInputs", "inputs_within", "symbols_of"]


@dataclass(frozen=True, slots=True)
class SpecializedInputs:
    """Example inputs for one compilation.

    Attributes:
        values: one fake tensor or size for each input.
        fake_mode: the fake mode of the tensors.
        symbols: symbol of the region -> its name in the new shape environment, or its fixed value.
    """

    values: list[Any]
    fake_mode: Any
    symbols: Mapping[sympy.Symbol, Any]

    def guards(self) -> tuple[sympy.Basic, ...]:
        """The guards that compilation has added to the new shape environment."""
        return symbolic.facts_of(self.fake_mode.shape_env)


def inputs_within(examples: Sequence[Any], bounds: Mapping[sympy.Symbol, tuple[int, int]]) -> SpecializedInputs | None:
    """Inputs like ``examples`` with symbols within ``bounds``; None if a layout cannot be reproduced.

    Args:
        examples: a region's fake tensors and sizes.
        bounds: symbol -> (smallest, largest) size; equal bounds fix the symbol.
    """
    tensors = [value for value in examples if isinstance(value, torch.Tensor)]
    if any(t.layout is not torch.strided or t.is_conj() or t.is_neg() for t in tensors):
        return None
    fake_mode = symbolic.new_fake_mode()
    env, traced_env = fake_mode.shape_env, symbolic.shape_env_of(examples)
    symbols: dict[sympy.Symbol, Any] = {}
    for symbol in symbols_of(examples):
        low, high = bounds.get(symbol) or symbolic.bounds_of(traced_env, symbol)
        like = int(symbolic.hints_of(traced_env)[symbol])
        symbols[symbol] = symbolic.new_symbol(env, str(symbol), low, high, like)
    storages: dict[int, torch.Tensor] = {}
    values = []
    with fake_mode, torch.no_grad():
        for value in examples:
            if isinstance(value, torch.Tensor):
                values.append(_like(value, env, symbols, storages))
            else:
                values.append(symbolic.size_of(env, symbolic.expression_of(value), symbols))
    return SpecializedInputs(values, fake_mode, symbols)


def symbols_of(examples: Iterable[Any]) -> tuple[sympy.Symbol, ...]:
    """The symbols in sizes, strides, offsets and storage sizes, in the order of the examples."""
    return tuple(dict.fromkeys(symbol for value in examples for symbol in _symbols_in(value)))


def _symbols_in(value: Any) -> list[sympy.Symbol]:
    numbers = [value]
    if isinstance(value, torch.Tensor):
        numbers = [*value.shape, *value.stride(), value.storage_offset(), value.untyped_storage().nbytes()]
    expressions = [symbolic.expression_of(number) for number in numbers]
    symbols = {s for e in expressions if isinstance(e, sympy.Basic) for s in e.free_symbols}
    return sorted(symbols, key=str)


def _like(
    tensor: torch.Tensor, env: Any, symbols: Mapping[sympy.Symbol, Any], storages: dict[int, torch.Tensor]
) -> torch.Tensor:
    """A copy of ``tensor`` over the new symbols; copies of tensors with a common storage have a common storage."""

    def sizes(values: Sequence[Any]) -> list[Any]:
        return [symbolic.size_of(env, symbolic.expression_of(value), symbols) for value in values]

    shape, strides, (offset,) = sizes(tensor.shape), sizes(tensor.stride()), sizes([tensor.storage_offset()])
    key = memory.storage_id(tensor)
    assert key is not None, "strided tensors have a storage"
    if key not in storages:
        (num_bytes,) = sizes([tensor.untyped_storage().nbytes()])
        storages[key] = torch.empty(num_bytes, dtype=torch.uint8, device=tensor.device)
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return whole.set_(storages[key].untyped_storage(), offset, shape, strides)
