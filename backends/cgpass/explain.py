"""What the backend would do with a model, without capturing anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from cgpass.settings import Settings
from graphpass.capture import GraphRuntime
from graphpass.tables import Report

__all__ = ["explain"]


def explain(model: Callable[..., Any], *inputs: Any, options: Mapping[str, Any] | None = None) -> Report:
    """Partition ``model`` for ``inputs`` and report regions with reasons; runs the model once, without graphs.

    Args:
        model: a module or function.
        inputs: positional example inputs.
        options: as for the backend; ``compiler`` and ``runtime`` are not used.

    Raises:
        OptionError: an option is unknown or cannot be used.
    """
    Settings.of(options)
    runtime = GraphRuntime()
    given = {**(options or {}), "compiler": "eager", "runtime": runtime}
    compiled = torch.compile(model, backend="cgpass", options=given)
    with torch.no_grad():
        compiled(*inputs)
    return runtime.report()
