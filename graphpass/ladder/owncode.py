"""Copies of functions with separate code objects.

Dynamo limits the number of compilations of each code object. Without copies, all models of one class share that limit.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

__all__ = ["entry_of", "with_own_code"]


def entry_of(model: Callable[..., Any]) -> Callable[..., Any]:
    """A new function that calls the model with keyword arguments; no other function shares its code object."""

    def call_model(**arguments: Any) -> Any:
        return model(**arguments)

    return with_own_code(call_model)


def with_own_code(function: Any) -> Callable[..., Any]:
    """A copy of ``function`` with a new code object."""
    code = function.__code__.replace()
    return types.FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
