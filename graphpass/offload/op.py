"""The op by which a layer of a compiled model says that it begins.

It is a splitting op: between captured regions it runs as it is, and in a graph of the whole its waits and copies are
recorded where it stands. No region spans it, which keeps compilers from reading a weight before it is there, or after.
"""

from __future__ import annotations

import torch

from graphpass.compat import operators
from graphpass.context import current_context
from graphpass.errors import ContextError

__all__ = ["IN_CONTEXT", "ONLOAD"]

ONLOAD = "graphpass::onload"
IN_CONTEXT = "onload"
"""The name in the forward context's ``extra`` of the function that brings a layer's weights."""


torch.library.define(ONLOAD, "(int layer) -> ()")


@torch.library.impl(ONLOAD, "default")
def _onload(layer: int) -> None:
    """A layer of a compiled model begins."""
    context = current_context()
    extra = None if context is None else context.extra
    onload = extra.get(IN_CONTEXT) if isinstance(extra, dict) else None
    if onload is None:
        raise ContextError(
            "a layer's weights are offloaded, and nothing in the forward context brings them",
            expected="a forward of a manager that was given the offloader",
            found="no context" if context is None else f"extra={extra!r}",
            remedy="pass offloader= to CudaGraphManager, or run the model without compiling it",
        )
    onload(layer)


def _changes_weights(layer: int) -> None:
    """What tracing sees of the op."""


torch.library.register_fake(ONLOAD, _changes_weights)
# Compilers that do not split at it would drop an op without results, and read weights that are not there.
operators.keep_in_order(ONLOAD)
