"""Runs a region's traced graph in float64, the reference by which tuned variants are judged.

Floating-point tensors become float64 when an operator reads them, so that copies of parameters live as long as an
operator needs them; results in narrower types are asked for in float64. An operator without float64 runs in the types
of the traced graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from graphpass.compat import operators, trees
from graphpass.regions.assign import Region
from graphpass.regions.execute import value_of

_WIDE: Mapping[torch.dtype, torch.dtype] = MappingProxyType(
    {
        torch.float16: torch.float64,
        torch.bfloat16: torch.float64,
        torch.float32: torch.float64,
        torch.complex32: torch.complex128,
        torch.complex64: torch.complex128,
    }
)
_OWN_OPERATORS = frozenset({"graphpass::zero_padding"})


def region_in_float64(region: Region, args: Sequence[Any]) -> list[torch.Tensor]:
    """Run a region in float64; the tensors that it returns, then copies of its written inputs."""
    with torch.no_grad():
        # guard: float64_copies
        written = {position: _wide(args[position].clone()) for position in sorted(region.mutated_inputs)}
        run = _Interpreter(region.graph_module).run
        returned = trees.flatten(run(*(written.get(position, arg) for position, arg in enumerate(args))))[0]
    return [*(value for value in returned if isinstance(value, torch.Tensor)), *written.values()]


def _wide(value: Any) -> Any:
    """A tensor or type in float64 or complex128 where it is narrower; any other value unchanged."""
    if isinstance(value, torch.Tensor):
        return value.to(_WIDE[value.dtype]) if value.dtype in _WIDE else value
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def _narrow(value: Any, traced: Any) -> Any:
    """``value`` with all tensors in the types of ``traced``, a value of the same structure."""
    if isinstance(value, torch.Tensor) and isinstance(traced, torch.Tensor):
        return value.to(traced.dtype)
    if isinstance(value, (tuple, list)) and isinstance(traced, (tuple, list)):
        return type(value)([_narrow(*pair) for pair in zip(value, traced, strict=True)])
    return value


class _InFloat64(operators.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operators.schema_of(func).name
        leaves, structure = trees.flatten((args, kwargs or {}))
        narrow = any(isinstance(leaf, torch.Tensor) and leaf.dtype in _WIDE for leaf in leaves)
        if not (name.startswith(("aten::", "prims::")) or name in _OWN_OPERATORS):
            raise TypeError(name)  # it depends on the type of its arguments
        if func is torch.ops.aten.view.dtype or (narrow and operators.schema_of(func).is_mutable):
            raise TypeError(name)
        args, kwargs = trees.unflatten([_wide(leaf) for leaf in leaves], structure)
        return trees.map_tensors(_wide, func(*args, **kwargs))


class _Interpreter(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "get_attr", "output"):
            return super().run_node(n)
        try:
            with _InFloat64():  # type: ignore[no-untyped-call]
                return trees.map_tensors(_wide, super().run_node(n))
        except (torch.AcceleratorError, torch.OutOfMemoryError):
            raise
        except Exception:
            return self._run_in_own_type(n)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        """The arguments of a node in float64, except for the graph's own result."""
        fetched = super().fetch_args_kwargs_from_env(n)
        return fetched if n.op == "output" else trees.map_tensors(_wide, fetched)

    def _run_in_own_type(self, n: fx.Node) -> Any:
        wide = {argument: self.env[argument] for argument in n.all_input_nodes}
        narrow = {argument: _narrow(value, value_of(argument)) for argument, value in wide.items()}
        args, kwargs = fx.map_arg((n.args, n.kwargs), narrow.__getitem__)
        result = getattr(self, n.op)(n.target, args, kwargs)
        pairs = [
            (one, other)
            for argument in wide
            for one, other in zip(*(trees.flatten(each[argument])[0] for each in (wide, narrow)), strict=True)
            if isinstance(one, torch.Tensor) and one is not other
        ]
        for one, other in pairs:
            is_kept = other == one.to(other.dtype)
            if not bool(is_kept.all()):  # the operator wrote to it
                one.copy_(torch.where(is_kept, one, other))
        originals = {id(other): one for one, other in pairs}
        return trees.map_tensors(lambda tensor: _wide(originals.get(id(tensor), tensor)), result)
