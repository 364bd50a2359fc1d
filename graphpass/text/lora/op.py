"""The op that adds the output of low-rank adapters to a linear layer, and the layer that calls it.

The op multiplies all tokens by the stacked down-projections of all n adapters of the step, sets the results of other
adapters than the token's to zero, and multiplies by the stacked up-projections. So a step with n adapters of rank r
costs two matrix products of inner size n * r, and a graph that is captured for n adapters serves every mix of up to n.

The op reads n from the forward context's batch descriptor when it runs; a captured graph belongs to one descriptor.
Without a descriptor the op computes all slots.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from graphpass.context import current_context
from graphpass.errors import ShapeError
from graphpass.regions.padding import register_padding_rule
from graphpass.text.paddingrules import add_lora_by_row

__all__ = ["ADD_LORA", "NO_ADAPTER", "LoraLinear", "TokenAdapters"]

ADD_LORA = "graphpass::add_lora"
NO_ADAPTER = -1


class TokenAdapters:
    """The adapters of the running forward; all adapted layers of a model share one object.

    Attributes:
        slots: the slot of each token, :data:`NO_ADAPTER` for a token without adapter, int64 (tokens,); None outside of
            a forward.
        order: all slots, those in use first, int64 (slots,); None outside of a forward.
    """

    def __init__(self) -> None:
        self.slots: torch.Tensor | None = None
        self.order: torch.Tensor | None = None


class LoraLinear(nn.Linear):
    """A linear layer that adds the output of each token's adapter.

    It has the parameters of the replaced layer under the same names. Adapters are not part of the state dict.

    Args:
        linear: the replaced layer.
        tokens: the adapters of the running forward.
        max_loras: number of slots.
        max_rank: rows of each slot's down-projection.

    Attributes:
        lora_a: down-projections, (slots, rank, in_features); zero in a free slot.
        lora_b: up-projections, scaled, (slots, rank, out_features).
    """

    lora_a: torch.Tensor
    lora_b: torch.Tensor

    def __init__(self, linear: nn.Linear, tokens: TokenAdapters, *, max_loras: int, max_rank: int) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate another weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.training = linear.training
        self._tokens = tokens
        with torch.inference_mode(False):
            for name, width in (("lora_a", self.in_features), ("lora_b", self.out_features)):
                self.register_buffer(name, linear.weight.new_zeros(max_loras, max_rank, width), persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as nn.Linear calls it
        """The layer's output for ``input`` (..., in_features) plus the adapters' outputs, (..., out_features)."""
        out = F.linear(input, self.weight, self.bias)
        tokens = self._tokens
        if tokens.slots is not None:
            torch.ops.graphpass.add_lora(input, out, self.lora_a, self.lora_b, tokens.slots, tokens.order)
        return out


torch.library.define(
    ADD_LORA, "(Tensor x, Tensor(a!) out, Tensor lora_a, Tensor lora_b, Tensor slots, Tensor order) -> ()"
)


@torch.library.impl(ADD_LORA, "default")
@torch.no_grad()
def _add_lora(
    x: torch.Tensor,
    out: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    slots: torch.Tensor,
    order: torch.Tensor,
) -> None:
    """Add the outputs of the tokens' adapters for ``x`` to ``out``, in place.

    Args:
        x: [..., in features], a row for each token.
        out: [..., out features], contiguous.
        lora_a: [slots, rank, in features].
        lora_b: [slots, rank, out features].
        slots: of each token, negative for none, int64 [tokens].
        order: all slots, those in use first, int64 [slots]; only the first ones are computed.
    """
    _check_rows(x, slots)
    max_loras, rank, _ = lora_a.shape
    count = min(_num_active(max_loras), max_loras)
    num_tokens = slots.shape[0]
    if count == 0 or num_tokens == 0:
        return
    if count < max_loras:
        computed = order[:count]
        lora_a, lora_b = lora_a.index_select(0, computed), lora_b.index_select(0, computed)
    else:  # all of them, as they lie
        computed = torch.arange(max_loras, device=slots.device)
    low = x.reshape(num_tokens, -1) @ lora_a.view(count * rank, -1).t()
    # Fill instead of multiply by zero: the result of another adapter may be infinite.
    # guard: lora_filled, lora_own_tokens
    low.view(num_tokens, count, rank).masked_fill_((slots.unsqueeze(1) != computed).unsqueeze(2), 0.0)
    out.view(num_tokens, -1).addmm_(low, lora_b.view(count * rank, -1))


def _writes_out_only(*_: Any) -> None:
    """The fake implementation, which tracing calls."""


torch.library.register_fake(ADD_LORA, _writes_out_only)
register_padding_rule(ADD_LORA, add_lora_by_row)


def _num_active(otherwise: int) -> int:
    """The number of adapters in the forward context's batch descriptor; ``otherwise`` without a descriptor."""
    context = current_context()
    if context is None or context.batch_descriptor is None:
        return otherwise
    return context.batch_descriptor.num_active_loras  # guard: lora_count_of_the_key


def _check_rows(x: torch.Tensor, slots: torch.Tensor) -> None:
    num_rows = x.numel() // x.shape[-1]
    if num_rows != slots.shape[0]:
        raise ShapeError(
            "the input of a layer with adapters does not have one row per token",
            expected=f"a row for each of {slots.shape[0]} tokens",
            found=f"{num_rows} rows, of an input {tuple(x.shape)}",
            remedy="leave the layer out of the targets: adapters need one row for each token",
        )
