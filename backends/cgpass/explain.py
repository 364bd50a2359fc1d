"""Reports how the backend would split and pad a model, without capturing anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphpass.capture.runtime import GraphRuntime
from graphpass.options import Settings
from graphpass.report import Report

__all__ = ["explain"]


def explain(
    model: Callable[..., Any], *inputs: Any, options: Mapping[str, Any] | None = None, dynamic: bool | None = True
) -> Report:
    """Partition ``model`` for ``inputs``; report its regions with their reasons, and which sizes may be padded.

    Runs the model once, without graphs.

    Args:
        model: a module or function.
        inputs: positional example inputs.
        options: as for the backend; ``compiler``, ``runtime`` and ``dispatch`` are ignored.
        dynamic: as for ``torch.compile``. By default every size is symbolic unless the model specializes it. Padding is
            reported for symbolic sizes only.

    Raises:
        OptionError: an option is unknown or cannot be used.
    """
    Settings.of(options)
    runtime = GraphRuntime()
    used = {**(options or {}), "compiler": "eager", "runtime": runtime, "dispatch": "auto"}
    compiled = torch.compile(model, backend="cgpass", options=used, dynamic=dynamic)
    with torch.no_grad():
        compiled(*inputs)
    return runtime.report()
