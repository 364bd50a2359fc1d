"""Attention over packed images: each sequence by itself, whatever lies behind the last one left out.

Two forms, both free of host reads, so that they stand inside whole-encoder graphs, and inside a block that is compiled
for symbolic sizes. *Packed*: sequences of any length one behind the other, described by their pieces
(:mod:`graphpass.encoder.pieces`); on CUDA in half precision torch's flash attention, elsewhere one
``scaled_dot_product_attention`` under a block-diagonal mask. *Equal*: sequences of one length, which is a batch.

Both are attention functions of Hugging Face, under the names below. What they have to know beyond their arguments is in
the configuration of the layer that calls them: :func:`use_attention` writes it into a copy that only the adapter's
layers see.
"""

from __future__ import annotations

import copy
import functools
import logging
from typing import Any

import numpy.typing as npt
import torch
import torch.nn.functional as F

from graphpass.attentionlayers import by_token, refuse_unserved, register_attention
from graphpass.compat import nnmodules, operators
from graphpass.encoder.pieces import PIECE_LENGTH, Pieces, pieces_of
from graphpass.errors import OptionError

__all__ = [
    "EQUAL_ATTENTION",
    "PACKED_ATTENTION",
    "equal_attention",
    "packed_attention",
    "pieces_on",
    "register_with_hugging_face",
    "use_attention",
    "why_not_flash",
]

_log = logging.getLogger("graphpass")

PACKED_ATTENTION = "graphpass_flash_packed"
"""Towers pass bounds of sequences, instead of splitting by them on the host, to what has "flash" in its name."""
EQUAL_ATTENTION = "graphpass_equal"
_EQUAL_OP = "graphpass::equal_attention"
_SEQUENCE_LENGTH, _IS_FLASH = "graphpass_sequence_length", "graphpass_is_flash"
_HEAD_ALIGNMENT, _MAX_HEAD_DIM, _MIN_CAPABILITY = 8, 256, (8, 0)
"""What torch's flash attention takes."""
_TOLERANCE = 2e-2
"""Relative norm, half precision against float32."""


def why_not_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why torch's flash attention does not serve packed tensors; None where it does, heads padded as it asks for."""
    if device.type != "cuda":
        return f"there is none for {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if head_dim > _MAX_HEAD_DIM:
        return f"it takes heads of at most {_MAX_HEAD_DIM}, not {head_dim}"
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        return "it needs compute capability {}.{}, not {}.{}".format(*_MIN_CAPABILITY, *capability)
    return _fault_of_kernel(device, dtype, head_dim)


def pieces_on(lengths: npt.ArrayLike, device: torch.device) -> Pieces[torch.Tensor]:
    """The pieces of sequences of such lengths, [sequences], on a device.

    Raises:
        ShapeError: they are no lengths.
    """
    return Pieces(*(torch.from_numpy(part).to(device) for part in pieces_of(lengths)))


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pieces: Pieces[torch.Tensor],
    *,
    scale: float,
    is_flash: bool = False,
) -> torch.Tensor:
    """Attention within each of the sequences that lie one behind the other.

    Args:
        query: [tokens, heads, head_dim].
        key: like ``query``.
        value: like ``query``.
        pieces: of the sequences, on the same device.
        scale: of the scores.
        is_flash: by torch's kernel, where :func:`why_not_flash` has no reason against it.

    Returns:
        Shaped like ``query``; zero behind the end of the last sequence, and those rows are not read by others, whatever
        they hold.
    """
    rows = torch.arange(query.shape[0], device=query.device, dtype=torch.int32)
    is_packed = (rows < pieces.query_bounds[-1]).view(-1, 1, 1)
    if is_flash:
        return torch.where(is_packed, _flash(query, key, value, pieces, scale), 0.0)
    # A weight of zero does not keep a NaN out, so keys and values of rows that belong to no sequence are zeroed. Those
    # rows see each other: a softmax over nothing would be NaN.
    key, value = (torch.where(is_packed, tensor, 0.0) for tensor in (key, value))
    piece = torch.searchsorted(pieces.query_bounds, rows, right=True) - 1
    sequence = torch.where(is_packed.view(-1), pieces.key_starts[piece], -1)
    query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    mask = sequence.unsqueeze(1) == sequence.unsqueeze(0)
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)[0].transpose(0, 1)
    return torch.where(is_packed, attended, 0.0)


def equal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seq_len: int, *, scale: float
) -> torch.Tensor:
    """Attention within each of the sequences of ``seq_len`` that lie one behind the other.

    An opaque op: traced, one sequence would be compiled apart from several.

    Args:
        query: [tokens, heads, head_dim], where ``tokens`` is a multiple of ``seq_len``.
        key: like ``query``.
        value: like ``query``.
        seq_len: tokens of each sequence.
        scale: of the scores.

    Returns:
        Shaped like ``query``.
    """
    attended: torch.Tensor = torch.ops.graphpass.equal_attention(query, key, value, seq_len, scale)
    return attended


torch.library.define(_EQUAL_OP, "(Tensor query, Tensor key, Tensor value, int seq_len, float scale) -> Tensor")


@torch.library.impl(_EQUAL_OP, "default")
@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def _equal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seq_len: int, scale: float
) -> torch.Tensor:
    shape = query.shape
    query, key, value = (tensor.unflatten(0, (-1, seq_len)).transpose(1, 2) for tensor in (query, key, value))
    attended = F.scaled_dot_product_attention(query, key, value, scale=scale)
    return attended.transpose(1, 2).reshape(shape).contiguous()


def _shaped_like_query(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seq_len: int, scale: float
) -> torch.Tensor:
    """What tracing sees of the op."""
    return query.new_empty(query.shape)


torch.library.register_fake(_EQUAL_OP, _shaped_like_query)


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pieces: Pieces[torch.Tensor], scale: float
) -> torch.Tensor:
    """Torch's kernel, which does not write rows that belong to no sequence."""
    head_dim = query.shape[-1]
    missing = -head_dim % _HEAD_ALIGNMENT
    if missing:
        query, key, value = (F.pad(tensor, (0, missing)) for tensor in (query, key, value))
    return operators.flash_attention(query, key, value, *pieces, PIECE_LENGTH, scale=scale)[..., :head_dim]


@functools.cache
def _fault_of_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the kernel is not to be used, found by trying it.

    Torch documents keys that lie one behind the other; those of pieces are the same ones again. A kernel that does not
    do that would answer wrongly.
    """
    lengths = [PIECE_LENGTH + 3, 5, 2 * PIECE_LENGTH]
    seeded = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(sum(lengths), 1, head_dim, generator=seeded, device="cpu").to(device, dtype) for _ in range(3)
    )
    pieces, scale = pieces_on(lengths, device), head_dim**-0.5
    expected = packed_attention(query.float(), key.float(), value.float(), pieces, scale=scale)
    try:
        found = packed_attention(query, key, value, pieces, scale=scale, is_flash=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return str(error)
    is_right = bool((found.float() - expected).norm() < _TOLERANCE * expected.norm())
    return None if is_right else f"with heads of {head_dim} it does not attend to the keys that it is given"


def register_with_hugging_face() -> None:
    """Make both forms known to transformers. Once or often, it is the same."""
    register_attention(PACKED_ATTENTION, _packed_of_layer)
    register_attention(EQUAL_ATTENTION, _equal_of_layer)


def use_attention(module: torch.nn.Module, name: str, *, seq_len: int | None = None) -> torch.nn.Module:
    """A copy of ``module`` that attends in one of the forms, with a configuration of its own.

    Weights and hooks are those of ``module``, also such hooks as come later.

    Args:
        module: layers of a stock tower.
        name: of the form.
        seq_len: tokens of each sequence; for ``EQUAL_ATTENTION``.
    """
    register_with_hugging_face()
    weight = next(module.parameters())
    kept = [*module.parameters(), *module.buffers(), *nnmodules.hooks_of(module)]
    own = copy.deepcopy(module, memo={id(shared): shared for shared in kept})
    for config in {id(c): c for layer in own.modules() if (c := getattr(layer, "config", None)) is not None}.values():
        config._attn_implementation = name
        setattr(config, _SEQUENCE_LENGTH, seq_len)
        head_dim = config.hidden_size // config.num_attention_heads
        setattr(config, _IS_FLASH, name == PACKED_ATTENTION and _attends_by_flash(weight, head_dim))
    return own


def _attends_by_flash(weight: torch.Tensor, head_dim: int) -> bool:
    reason = why_not_flash(weight.device, weight.dtype, head_dim)
    if reason is not None and weight.is_cuda:
        _log.warning("packed images attend under a mask, not by torch's flash attention: %s", reason)
    return reason is None


def _packed_of_layer(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    is_causal: bool | None = None,
    query_bounds: torch.Tensor | None = None,
    key_lengths: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Packed attention in the shape in which transformers asks for it: [1, heads, tokens, head_dim].

    Raises:
        OptionError: the layer asks for something else than attention within sequences.
        ShapeError: a batch of other than one row.
    """
    _refuse_other_attention(module, attention_mask, dropout, is_causal)
    if cu_seq_lens_q is None or query_bounds is None or key_lengths is None:
        raise OptionError(
            f"{PACKED_ATTENTION} attends within packed sequences",
            expected="cu_seq_lens_q, as transformers passes it to flash attention, query_bounds and key_lengths",
            found=f"none from {type(module).__name__}",
            remedy="use the tower through its adapter",
        )
    query, key, value, scale = _one_row(module, query, key, value, scaling)
    pieces = Pieces(query_bounds, cu_seq_lens_q, key_lengths)
    is_flash = getattr(module.config, _IS_FLASH)
    attended = packed_attention(query, key, value, pieces, scale=scale, is_flash=is_flash)
    return attended.unsqueeze(0), None


def _equal_of_layer(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of equal sequences in the shape in which transformers asks for it.

    Raises:
        OptionError: the layer asks for something else than attention within sequences.
        ShapeError: a batch of other than one row.
    """
    _refuse_other_attention(module, attention_mask, dropout, is_causal)
    query, key, value, scale = _one_row(module, query, key, value, scaling)
    return equal_attention(query, key, value, getattr(module.config, _SEQUENCE_LENGTH), scale=scale).unsqueeze(0), None


def _one_row(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    what = f"attention of {type(module).__name__} takes the tokens of all images in one row"
    return by_token((query, key, value), scaling, what=what, remedy="use the tower through its adapter")


def _refuse_other_attention(
    module: Any, attention_mask: torch.Tensor | None, dropout: float, is_causal: bool | None
) -> None:
    refuse_unserved(
        module,
        {"attention_mask": attention_mask is not None, "dropout": bool(dropout), "is_causal": bool(is_causal)},
        what="attention within packed images",
        expected="attention of all tokens of an image to each other",
        remedy="call model.eval(); other attention needs an adapter of its own",
    )
