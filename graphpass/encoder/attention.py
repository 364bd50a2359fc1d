"""Attention over packed images: tokens attend within their own sequence, and padding rows are ignored.

It takes concatenated sequences, described by their pieces (Note [Pieces of sequences] in docs/design), and reads no
device data on the host. On CUDA in half precision it is torch's flash attention, otherwise one
``scaled_dot_product_attention`` with a block-diagonal mask; the configuration of the calling layer says which.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from graphpass.compat import operators
from graphpass.errors import ShapeError
from graphpass.ops import by_token, kernel_fault, refuse_unserved, register_attention
from graphpass.report import KernelUse

PACKED_ATTENTION = "graphpass_flash_packed"
"""Towers pass bounds of sequences only to functions with "flash" in their name; else they split on the host."""
_WHY_NOT_FLASH = "graphpass_why_not_flash"
_HEAD_ALIGNMENT = 8
_NO_REMEDY = "nothing on this GPU and this torch: small token_budgets keep the mask small"
PIECE_LENGTH = 128
"""Rows of a piece: as many as a block of flash attention computes for most widths of heads."""


class Pieces(NamedTuple):
    """Rows of the pieces of packed sequences; arrays or tensors, int32."""

    query_bounds: Any  #: first row of each piece, and the end of the last one, also for unused pieces, [pieces + 1]
    #: likewise of the sequences of pieces. Read as bounds of sequences, they have more empty ones.
    key_starts: Any
    key_lengths: Any  #: length of the sequence of each piece, [pieces]; 0 for unused pieces


def pieces_of(lengths: npt.ArrayLike) -> Pieces:
    """The pieces of concatenated sequences, and an unused one: Dynamo would compile a block for one piece apart."""
    lengths = np.asarray(lengths)
    if lengths.ndim != 1 or not np.issubdtype(lengths.dtype, np.integer) or (lengths < 0).any():
        raise ShapeError(
            "lengths of sequences have wrong values",
            expected="a one-dimensional array of integers, none below 0",
            found=f"{lengths.tolist()!r:.100}",
            remedy="pass the number of rows of each sequence",
        )
    counts = -(-lengths // PIECE_LENGTH)
    begins = np.cumsum(lengths) - lengths
    first = np.cumsum(counts) - counts
    number = np.arange(counts.sum()) - np.repeat(first, counts)
    key_starts = np.repeat(begins, counts)
    end = lengths.sum()
    found = (
        np.append(key_starts + number * PIECE_LENGTH, [end, end]),
        np.append(key_starts, [end, end]),  # guard: encoder_piece_keys
        np.append(np.repeat(lengths, counts), 0),
    )
    return Pieces(*(part.astype(np.int32) for part in found))


def most_pieces(num_sequences: int, num_rows: int, longest: int) -> int:
    """The unused one included."""
    cut = 0 if longest <= PIECE_LENGTH else num_rows // PIECE_LENGTH
    return num_sequences + cut + 1


def why_not_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why torch's flash attention cannot be used for packed tensors; None if it can."""
    # guard: encoder_kernel_tried
    return operators.flash_obstacle(device, dtype, head_dim) or _fault_of_kernel(device, dtype, head_dim)


def pieces_on(lengths: npt.ArrayLike, device: torch.device) -> Pieces:
    """The pieces of concatenated sequences, on a device."""
    return Pieces(*(torch.from_numpy(part).to(device) for part in pieces_of(lengths)))


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pieces: Pieces,
    *,
    scale: float,
    is_flash: bool = False,
) -> torch.Tensor:
    """Attention within each of several concatenated sequences; all tensors are [tokens, heads, head_dim].

    Rows after the last sequence are zero, and no sequence attends to them. ``is_flash`` needs a
    :func:`why_not_flash` of None.
    """
    rows = torch.arange(query.shape[0], device=query.device, dtype=torch.int32)
    is_packed = (rows < pieces.query_bounds[-1]).view(-1, 1, 1)
    if is_flash:
        return torch.where(is_packed, _flash(query, key, value, pieces, scale), 0.0)
    # A NaN times a weight of zero is a NaN, so keys and values of padding rows are zero. A softmax over no entries is a
    # NaN, so these rows attend to each other.
    key, value = (torch.where(is_packed, tensor, 0.0) for tensor in (key, value))  # guard: encoder_nan_padding
    piece = torch.searchsorted(pieces.query_bounds, rows, right=True) - 1
    sequence = torch.where(is_packed.view(-1), pieces.key_starts[piece], -1)
    query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    mask = sequence.unsqueeze(1) == sequence.unsqueeze(0)
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)[0].transpose(0, 1)
    return torch.where(is_packed, attended, 0.0)


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pieces: Pieces, scale: float) -> torch.Tensor:
    """Leaves padding rows uninitialised."""
    head_dim = query.shape[-1]
    missing = -head_dim % _HEAD_ALIGNMENT
    if missing:
        query, key, value = (F.pad(tensor, (0, missing)) for tensor in (query, key, value))
    sequences = operators.PackedSequences(*pieces, PIECE_LENGTH, key.shape[0])
    return operators.flash_attention(query, key, value, sequences, scale=scale)[..., :head_dim]


@functools.cache
def _fault_of_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Test the kernel on this device, with keys that pieces share."""
    lengths = [PIECE_LENGTH + 3, 5, 2 * PIECE_LENGTH]
    seeded = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(sum(lengths), 1, head_dim, generator=seeded, device="cpu").to(device, dtype) for _ in range(3)
    )
    pieces, scale = pieces_on(lengths, device), head_dim**-0.5
    expected = packed_attention(query.float(), key.float(), value.float(), pieces, scale=scale)
    return kernel_fault(lambda: packed_attention(query, key, value, pieces, scale=scale, is_flash=True), expected)


def use_packed_attention(module: torch.nn.Module) -> None:
    """Let a module, whose configuration is its own, call packed attention."""
    register_attention(PACKED_ATTENTION, _packed_of_layer)
    weight = next(module.parameters())
    for config in _configs(module):
        config._attn_implementation = PACKED_ATTENTION
        heads = getattr(config, "num_attention_heads", None) or config.num_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        setattr(config, _WHY_NOT_FLASH, why_not_flash(weight.device, weight.dtype, head_dim))


def kernel_of(module: torch.nn.Module) -> KernelUse:
    """The kernel of packed attention, and what a faster one needs."""
    weight, reason = next(module.parameters()), getattr(_configs(module)[0], _WHY_NOT_FLASH)
    if reason is None:
        return KernelUse("flash attention over packed images", "all items", "it needs no mask")
    remedy = "load the tower in torch.bfloat16 or torch.float16" if weight.itemsize > 2 else _NO_REMEDY
    remedy = remedy if weight.is_cuda else ""
    return KernelUse("scaled_dot_product_attention over packed images with a mask", "all items", reason, remedy)


def _configs(module: torch.nn.Module) -> list[Any]:
    found = (getattr(layer, "config", None) for layer in module.modules())
    return list({id(config): config for config in found if config is not None}.values())


def _packed_of_layer(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    query_bounds: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    key_lengths: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """With the signature of transformers; bounds of sequences are ``key_starts``."""
    refuse_unserved(
        module,
        {
            "attention_mask": attention_mask is not None,
            "dropout": bool(dropout),
            "is_causal": bool(is_causal),
            "no query_bounds": query_bounds is None,
            "no cu_seq_lens_q": cu_seq_lens_q is None,
            "no key_lengths": key_lengths is None,
        },
        what="attention within packed images",
        expected="unmasked attention between all tokens of an image, without dropout, through the tower's adapter",
        remedy="call model.eval(); other attention needs a separate adapter",
    )
    if key.shape[1] != query.shape[1]:  # several heads of queries share one of keys and values
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
    what = f"attention of {type(module).__name__} takes the tokens of all images in one row"
    query, key, value, scale = by_token(
        (query, key, value), scaling, what=what, remedy="use the tower through its adapter"
    )
    pieces, is_flash = Pieces(query_bounds, cu_seq_lens_q, key_lengths), getattr(module.config, _WHY_NOT_FLASH) is None
    attended = packed_attention(query, key, value, pieces, scale=scale, is_flash=is_flash)
    return attended.unsqueeze(0), None
