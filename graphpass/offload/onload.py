"""The op ``graphpass::onload``, which a layer of a compiled model calls when it begins.

It is a splitting op: in PIECEWISE mode it runs eagerly between captured regions, and in a FULL graph its waits and
copies are recorded at its place. No region contains it, so a compiler cannot move the read of a weight before or after
the time in which the weight is on the device.
"""

from __future__ import annotations

import torch

from graphpass.compat import operators
from graphpass.context import current_context
from graphpass.errors import ContextError

ONLOAD = "graphpass::onload"
IN_CONTEXT = "onload"
"""Key in ``ForwardContext.extra`` of the function that the op calls with the layer's index."""


torch.library.define(ONLOAD, "(int layer) -> ()")


@torch.library.impl(ONLOAD, "default")
def _onload(layer: int) -> None:
    context = current_context()
    extra = None if context is None else context.extra
    onload = extra.get(IN_CONTEXT) if isinstance(extra, dict) else None
    if onload is None:
        raise ContextError(
            "a layer's weights are offloaded, but the forward context has no offloader to copy them",
            expected="a forward of a manager that was created with the offloader",
            found="no context" if context is None else f"extra={extra!r}",
            remedy="pass offloader= to CudaGraphManager, or run the model without compiling it",
        )
    onload(layer)


torch.library.register_fake(ONLOAD, lambda layer: None)
# A compiler that does not split at the op would otherwise drop it, because it has no results.
operators.keep_in_order(ONLOAD)  # guard: offload_order_of_compilers
