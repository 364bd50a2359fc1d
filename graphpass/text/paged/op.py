"""The op for attention over a paged KV cache; it reads the metadata of a step from the forward context."""

from __future__ import annotations

import torch

from graphpass.context import get_forward_context, is_forward_context_available
from graphpass.errors import ContextError
from graphpass.padding import OpCall, PaddedValue, register_padding_rule
from graphpass.text.paged.metadata import AttentionCall, PagedStep

PAGED_ATTENTION = "graphpass::paged_attention"
NO_WINDOW = -1
GIVE_BACK = "if a CausalLM serves the model, `lm.close()` gives it back, and generate() takes it again"
SCRATCH_SLOTS = "padded tokens of paged attention write to scratch slots alone"


torch.library.define(
    PAGED_ATTENTION,
    "(Tensor query, Tensor key, Tensor value, Tensor(a!) out, int layer, float scale, int window, "
    "float softcap=0.0, Tensor? sinks=None) -> ()",
)


@torch.library.impl(PAGED_ATTENTION, "default")
@torch.no_grad()
def _paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    layer: int,
    scale: float,
    window: int,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Write the step's keys and values into the cache, then attend causally over each request's pages, into ``out``."""
    _step_in_context().attend(AttentionCall(query, key, value, out, layer, max(window, 0), scale, softcap, sinks))


def _step_in_context() -> PagedStep:
    if not is_forward_context_available():
        raise ContextError(
            "a model whose attention is paged was called by itself",
            expected="a step of CausalLM, or a call inside `with set_forward_context(...)`",
            found="no forward context in this thread or task",
            remedy=f"{GIVE_BACK}; around your own attention, pass attn_metadata=attention.build(requests, key) to "
            "set_forward_context",
        )
    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, PagedStep):
        raise ContextError(
            "paged attention has no metadata",
            expected="the result of PagedAttention.build() as attn_metadata of the forward context",
            found=type(metadata).__name__,
            remedy="pass attn_metadata=attention.build(requests, key) to set_forward_context; in PIECEWISE the op has "
            f"to stay outside of captured regions: splitting_ops=[{PAGED_ATTENTION!r}]",
        )
    return metadata


def _paged_attention_by_row(call: OpCall) -> tuple[PaddedValue, ...]:
    """Padding rule: a row depends on its query and on the pages of its request."""
    rows = call.tensor("query").factors[0]
    for name in ("query", "key", "value", "out"):
        tensor = call.tensor(name)
        call.unpadded(tensor, range(1, tensor.rank), "attends with features over")
        rows = call.unify(rows, tensor.factors[0])
    if not call.sizes.is_prefix(rows):
        raise call.refuse(f"its metadata counts tokens, and padding stands inside rows {list(rows)}", rows[-1])
    call.assumptions.add(SCRATCH_SLOTS)
    return (PaddedValue((rows, *call.tensor("out").factors[1:])),)


torch.library.register_fake(PAGED_ATTENTION, lambda *_, **__: None)
register_padding_rule(PAGED_ATTENTION, _paged_attention_by_row, ignores_numbers=True)
