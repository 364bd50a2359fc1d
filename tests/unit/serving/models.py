"""Models that tests of padding share, here and on a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import graphpass as gp


class Attends(nn.Module):
    """Attention along a padded sequence; the mask keeps padding out, unless it is NaN and not zeroed."""

    def __init__(self, zeroes: bool) -> None:
        super().__init__()
        self.zeroes = zeroes

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        keys = gp.zero_padding(x, 2) if self.zeroes else x
        return F.scaled_dot_product_attention(x, keys, keys, attn_mask=mask[:, None, :])
