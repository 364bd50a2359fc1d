"""A model's arguments by name, and the size of every key field in a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from graphpass.errors import OptionError, ShapeError

__all__ = ["CallSignature"]

_PASSED_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class CallSignature:
    """Binds calls of one model and reads the key fields off their shapes.

    Args:
        model: a module or function.
        dynamic_dims: {argument: {dimension: key field}}.
        fields: the key fields that have a ladder of sizes.

    Raises:
        OptionError: dynamic_dims names other key fields than ``fields``, or an argument the model does not have.
    """

    def __init__(
        self, model: Callable[..., Any], dynamic_dims: Mapping[str, Mapping[int, str]], fields: Collection[str]
    ) -> None:
        self._signature = inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model)
        self._dims = dynamic_dims
        self._fields = tuple(fields)
        parameters = self._signature.parameters.values()
        self._names = tuple(p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._binds_plainly = all(p.kind in _PASSED_BY_NAME for p in parameters)
        self.refuse_unknown("dynamic_dims", dynamic_dims)
        named = {field for dims in dynamic_dims.values() for field in dims.values()}
        if named != set(fields):
            raise OptionError(
                "dynamic_dims and capture_sizes name different key fields",
                expected=f"the fields of capture_sizes: {sorted(fields)}",
                found=f"the fields of dynamic_dims: {sorted(named)}",
                remedy="give each key field a ladder of sizes and a dimension",
            )

    def refuse_unknown(self, option: str, names: Collection[str]) -> None:
        """Refuse an option that names an argument the model does not have.

        Raises:
            OptionError: naming the argument.
        """
        parameters = self._signature.parameters
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            return
        for name in names:
            if name not in parameters:
                raise OptionError(
                    f"{option} names an argument the model does not have",
                    expected=f"one of {', '.join(parameters)}",
                    found=repr(name),
                    remedy="use the name in the model's forward",
                )

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The call's arguments by name.

        Raises:
            TypeError: the model does not take these arguments.
            OptionError: an argument that has no name.
        """
        if self._binds_plainly and len(args) <= len(self._names):
            # Missing names are refused where the call is compared with the captured one.
            given = dict(zip(self._names, args, strict=False))
            if given.keys().isdisjoint(kwargs) and kwargs.keys() <= self._signature.parameters.keys():
                given.update(kwargs)
                return given
        bound = self._signature.bind(*args, **kwargs)
        given = {}
        for name, value in bound.arguments.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                given.update(value)
            elif kind in _PASSED_BY_NAME:
                given[name] = value
            else:
                raise OptionError(
                    f"argument {name!r} cannot be passed by name",
                    expected="a model whose arguments have names",
                    found=f"{kind.description} argument {name!r}",
                    remedy="wrap the model in a function with named arguments",
                )
        return given

    def check_complete(self, given: Mapping[str, Any]) -> None:
        """Refuse what the model itself would: missing and unknown arguments.

        Raises:
            TypeError: as Python would raise it.
        """
        self._signature.bind(**given)

    def sizes(self, given: Mapping[str, Any]) -> dict[str, int]:
        """The real size of every key field in this call.

        Raises:
            TypeError: the model does not take these arguments.
            ShapeError: a declared argument is missing, has no such dimension, or two of them disagree.
        """
        sizes: dict[str, int] = {}
        for name, dims in self._dims.items():
            if name not in given:
                self.check_complete(given)
            tensor = given.get(name)
            for dim, field in dims.items():
                if not isinstance(tensor, torch.Tensor) or not -tensor.dim() <= dim < tensor.dim():
                    raise ShapeError(
                        f"argument {name!r} has no dimension {dim}",
                        expected=f"a tensor whose dimension {dim} is {field}",
                        found=f"shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else repr(tensor),
                        remedy="pass it as a tensor, or correct dynamic_dims",
                    )
                size = tensor.shape[dim]
                if sizes.setdefault(field, size) != size:
                    raise ShapeError(
                        f"arguments disagree on {field}",
                        expected=f"{field}={sizes[field]}",
                        found=f"{name!r} has {size} in dimension {dim}",
                        remedy="pass inputs of one batch",
                    )
        return {field: sizes[field] for field in self._fields}
