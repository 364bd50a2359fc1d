"""The op for attention over a paged KV cache, and the metadata of a step, which it reads from the forward context."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from graphpass.context import get_forward_context, is_forward_context_available
from graphpass.errors import ContextError, ShapeError
from graphpass.regions.padding import OpCall, PaddedValue, register_padding_rule
from graphpass.text.paged.cache import FixedMetadata, PagedLayer
from graphpass.text.paged.kernels import BatchedKeys, FlashKeys, Scores
from graphpass.text.paged.tables import Tables

PAGED_ATTENTION = "graphpass::paged_attention"
NO_WINDOW = -1
GIVE_BACK = "if a CausalLM serves the model, `lm.close()` gives it back, and generate() takes it again"
SCRATCH_SLOTS = "padded tokens of paged attention write to scratch slots alone"


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """One call of the op; see there."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    layer: int
    scores: Scores
    window: int  #: the sliding window that the layer passes; 0: it passes none

    def check(self, fixed: FixedMetadata, layer: PagedLayer, num_tokens: int) -> None:
        """Raise ShapeError if tensors, sliding window or scores are not those of the layer."""
        self._check_tensors(layer, fixed.cache.dtype, num_tokens)
        declared = fixed.masks[fixed.mask_of[self.layer]].window
        passed = self.window if self.window < fixed.longest else 0
        if self.window and passed != declared:
            raise ShapeError(
                f"layer {self.layer} passes a sliding window that its cache was not created for",
                expected=f"{declared}" if declared else "none",
                found=str(self.window),
                remedy="create the cache with the layer's mask: PagedLayer(..., mask=LayerMask(window=4096))",
            )
        if layer.is_plain and not self.scores.is_plain:
            raise ShapeError(
                f"layer {self.layer} uses a soft cap or sinks that its cache was not created for",
                expected="scores that are scaled products",
                found="softcap" if self.scores.softcap else "sinks",
                remedy="create the cache with PagedLayer(..., is_plain=False) for this layer",
            )

    def _check_tensors(self, layer: PagedLayer, dtype: torch.dtype, num_tokens: int) -> None:
        query, key, value, out, sinks = self.query, self.key, self.value, self.out, self.scores.sinks
        num_kv_heads, head_dim, value_dim = layer.num_kv_heads, layer.head_dim, layer.dim_of_values
        fits = (
            query.dim() == 3
            and query.shape[0] >= num_tokens
            and query.shape[1] % num_kv_heads == 0
            and query.shape[2] == head_dim
            and key.shape == (query.shape[0], num_kv_heads, head_dim)
            and value.shape == (query.shape[0], num_kv_heads, value_dim)
            and out.shape == (*query.shape[:2], value_dim)
            and (sinks is None or sinks.shape == query.shape[1:2])
            and query.dtype == key.dtype == value.dtype == out.dtype == dtype
        )
        if not fits:
            raise ShapeError(
                "paged attention got tensors that do not fit its cache or step",
                expected=f"key [at least {num_tokens}, {num_kv_heads}, {head_dim}], value [..., {num_kv_heads}, "
                f"{value_dim}], query and out of as many rows and a multiple of the heads, of {dtype}; one sink a head",
                found=", ".join(f"{list(t.shape)} {t.dtype}" for t in (query, key, value, out))
                + " (q, k, v, out)"
                + ("" if sinks is None else f", {list(sinks.shape)} sinks"),
                remedy="create the cache for the model's heads, head_dim and dtype, and dispatch with the step's sizes",
            )


class PagedStep(ABC):
    """What the forward context must contain as ``attn_metadata`` for the op."""

    @abstractmethod
    def attend(self, call: AttentionCall) -> None:
        """Serve one call of the op: write to ``call.out``."""


@dataclass(eq=False)
class PagedMetadata(Tables[torch.Tensor], PagedStep):
    """The metadata of one step, which the op reads. A FULL key has one object, and each step refills its tables."""

    is_padded: bool  #: tokens at the end may be padding, whose rows of the result are to be zero
    keys: BatchedKeys | FlashKeys  #: how the keys are gathered
    writes_in_one_kernel: bool  #: a layer's keys and values are written by one kernel
    #: the layer whose op runs first and prepares the step for all; learned from the first call
    first_layer: int | None = None

    def attend(self, call: AttentionCall) -> None:
        """Write the step's keys and values into the cache, then attend over each request's pages, into ``call.out``."""
        num_tokens, fixed = self.keys.layout.num_tokens, self.keys.fixed
        layer, memory = fixed.layer(call.layer)
        call.check(fixed, layer, num_tokens)
        if call.out.shape[0] > num_tokens:
            call.out[num_tokens:].zero_()
        if num_tokens == 0:
            return
        new_keys, new_values = call.key[:num_tokens], call.value[:num_tokens]
        memory.write(self.slot_mapping, new_keys, new_values, in_one_kernel=self.writes_in_one_kernel)
        if self.first_layer is None:
            self.first_layer = call.layer
        if self.first_layer == call.layer:
            self.keys.prepare(self)
        query = call.query[:num_tokens]
        if layer.query_scale is not None:  # guard: paged_position_scale
            query = (query * layer.query_scale.of(self.positions).view(-1, 1, 1)).to(query.dtype)
        attended = self.keys.attend(self, memory, query, call.scores, fixed.mask_of[call.layer])
        real = call.out[:num_tokens]
        if attended.dim() == 5:
            real = real.unflatten(1, attended.shape[2:4]).unflatten(0, attended.shape[:2])
        real.copy_(attended)
        if self.is_padded:
            real.masked_fill_((self.token_rows < 0).view(-1, 1, 1), 0.0)


# -- the op ------------------------------------------------------------------------------------------------------------

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
    scores = Scores(scale, softcap, sinks)
    _step_in_context().attend(AttentionCall(query, key, value, out, layer, scores, max(window, 0)))


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
