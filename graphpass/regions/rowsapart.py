"""A function of the user's as one operator whose rows do not depend on each other, so that they can be padded."""

from __future__ import annotations

import inspect
import itertools
import re
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from graphpass.compat import operators, trees
from graphpass.errors import OptionError, ShapeError
from graphpass.padding.opcall import OpCall, Returned, tensors_of
from graphpass.padding.table import register_padding_rule
from graphpass.padding.values import PaddedValue
from graphpass.regions.execute import storages_of

_NUMBERS = itertools.count()


def rows_apart(function: Callable[..., Any], dims: Sequence[int] = (0,)) -> Callable[..., Any]:
    """Make a function one operator whose row i depends on row i of its arguments alone, along each of ``dims``.

    Sizes along ``dims`` are then padded, whatever the function calls: experts that sort their rows, FFT, a kernel of
    yours. The promise is checked at the first padded call of each key; if it is wrong, nothing is padded any more.
    Arguments and results without padding (weights) may have any dimensions. There are no gradients.

    Args:
        function: takes tensors and numbers, weights included, and returns tensors without writing to an argument. It
            calls no operator of torch that takes a function, such as ``scan``.
            Parameters and results without annotations are tensors. An overload (``torch.ops.mylib.scan.default``) stays
            what it is; through any other function, fake tensors must pass.
        dims: non-negative dimensions, the same ones of each padded argument and result.

    Raises:
        OptionError: ``dims`` are no dimensions, ``function`` is a module or has other parameters.
        ShapeError: at a call, no argument has one of ``dims``.
    """
    if not dims or any(not isinstance(dim, int) or isinstance(dim, bool) or dim < 0 for dim in dims):
        raise OptionError(
            "rows_apart got dims that are no dimensions",
            expected="one or more dimensions, counted from 0",
            found=repr(dims),
            remedy="pass the dimensions whose rows the function keeps apart, (0,) for the first one",
        )
    if isinstance(getattr(function, "__self__", function), nn.Module):
        raise OptionError(
            "rows_apart got a module, whose weights a graph would not see",
            expected="a function that takes its weights as arguments",
            found=type(getattr(function, "__self__", function)).__name__,
            remedy="pass a function of tensors, and call it with the module's parameters",
        )
    named: Any = function
    if not isinstance(function, operators.OpOverload):
        named, function = _operator(function, tuple(dims))
    register_padding_rule(named, lambda call: _by_row(call, tuple(dims)))
    return function


def _operator(function: Callable[..., Any], dims: tuple[int, ...]) -> tuple[str, Callable[..., Any]]:
    def run(*args: Any, **kwargs: Any) -> Any:
        held = [arg for arg in trees.flatten((args, kwargs))[0] if isinstance(arg, torch.Tensor)]
        if not all(any(dim < arg.dim() for arg in held) for dim in dims):
            raise ShapeError(
                f"{name} got no argument with one of its dims",
                expected=f"a tensor with each of the dimensions {dims}",
                found=f"tensors of {[arg.dim() for arg in held]} dimensions",
                remedy="pass rows_apart the dimensions that the arguments have",
            )
        storages = storages_of(held)

        def own(result: torch.Tensor) -> torch.Tensor:
            return result.clone() if storages_of(result) & storages else result

        return trees.map_tensors(own, function(*args, **kwargs))

    name = getattr(function, "__qualname__", type(function).__name__)
    try:
        hints = typing.get_type_hints(function)
        parameters = inspect.signature(function).parameters.values()
        typed = [each.replace(annotation=hints.get(each.name, torch.Tensor)) for each in parameters]
        result = hints.get("return", torch.Tensor)
        run.__signature__ = inspect.Signature(typed, return_annotation=result)  # type: ignore[attr-defined]
        schema = torch.library.infer_schema(run, mutates_args=())
    except (TypeError, ValueError, NameError) as error:
        raise OptionError(
            f"rows_apart cannot make an operator of {name}",
            expected="parameters and results that are tensors and numbers",
            found=str(error),
            remedy="annotate them with types that torch.library.custom_op takes, such as torch.Tensor, int, float",
        ) from error
    qualified = f"graphpass_rows::{re.sub(r'[^a-zA-Z0-9]+', '_', name).strip('_')}_{next(_NUMBERS)}"
    op = torch.library.custom_op(qualified, run, mutates_args=(), schema=schema)
    op.register_fake(run)
    return qualified, op


def _by_row(call: OpCall, dims: tuple[int, ...]) -> Returned:
    """Sizes stand along ``dims`` in the results as in the arguments, and nowhere else."""
    call.no_padded_numbers()
    padded = [value for value in tensors_of(call.arguments.values()) if call.places(value)]
    for value in padded:
        others = [dim for dim in range(value.rank) if dim not in dims]
        call.unpadded(value, others, "may mix")  # guard: rows_apart_dims

    def made(shape: Any) -> PaddedValue:
        fresh = call.fresh(shape)
        factors = list(fresh.factors)
        for dim in dims:
            for value in padded:
                if dim < min(value.rank, fresh.rank) and call.places(value, [dim]):
                    of_dim = value.factors[dim]
                    factors[dim] = call.unify(factors[dim], of_dim) if call.places(fresh, [dim]) else of_dim
        result = PaddedValue(tuple(factors), dtype=fresh.dtype)
        call.unpadded(result, [dim for dim in range(result.rank) if dim not in dims], "may mix")
        return call.carried(result)

    return call.each(made)
