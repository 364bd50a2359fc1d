"""Functions with code objects of their own.

Dynamo counts compilations by code object: models of one class would share the limit of one.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

__all__ = ["entry_of", "with_own_code"]


def entry_of(model: Callable[..., Any]) -> Callable[..., Any]:
    """A new function that calls the model with keyword arguments, with code of its own."""

    def call_model(**arguments: Any) -> Any:
        return model(**arguments)

    return with_own_code(call_model)


def with_own_code(function: Any) -> Callable[..., Any]:
    """A copy of ``function`` whose code object no other function has."""
    code = function.__code__.replace()
    return types.FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
