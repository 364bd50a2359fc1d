"""The op that multiplies each token by the weights of its experts.

Row ``[t, j]`` of the result is ``x[t] @ weight[experts[t, j]]``: it depends on token t and on no other token. Inside,
the op sorts the (token, expert) pairs by expert, so that pairs of one expert share a matrix product. No step of it
reads data on the host, so it can be captured on CUDA. There are two ways to the products of the sorted pairs:

- *Kernel*: ``torch.nn.functional.grouped_mm``, where it has a kernel that reads the group bounds on the device:
  bfloat16 on GPUs of compute capability 9, and all floating dtypes of its CPU implementation.
- *Blocks*: the pairs of each expert fill blocks of equal size, and one batched product multiplies each block by a copy
  of its expert's weight. The number of blocks follows from the shapes alone. The products compute at most three times
  as many rows as there are pairs, and copy at most two weights for each expert, a limited number of them at a time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from graphpass.errors import ShapeError
from graphpass.regions.padding import register_padding_rule
from graphpass.text.paddingrules import expert_linear_by_row

__all__ = ["EXPERT_LINEAR", "expert_linear", "products_by_blocks", "products_by_kernel"]

EXPERT_LINEAR = "graphpass::expert_linear"

_COPIED_BYTES = 256 << 20
"""Most bytes of weights that the blocks of one batched product copy, if a single weight is not larger."""
_KERNEL_ALIGNMENT = 16
"""In bytes: ``grouped_mm`` requires it of rows, and of the rows and columns of weights."""
_KERNEL_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16,),  # with other dtypes it reads the group bounds on the host
}
_KERNEL_CAPABILITY = 9
"""Major compute capability. On others ``grouped_mm`` reads the group bounds on the host."""


torch.library.define(
    EXPERT_LINEAR, "(Tensor x, Tensor experts, Tensor weight, Tensor? bias, bool transposed) -> Tensor"
)


def expert_linear(
    x: torch.Tensor, experts: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    """Multiply each token by the weights of its experts: the op of this module. It has no gradient.

    Args:
        x: [tokens, in features], one row for all experts of a token; or [tokens, k, in features], one for each expert.
        experts: the experts of each token, int64 [tokens, k]; a number outside of the range counts as the nearest one.
        weight: [experts, out features, in features], or [experts, in features, out features] if ``transposed``.
        bias: [experts, out features], or None.
        transposed: the layout of ``weight``.

    Returns:
        [tokens, k, out features], in the dtype of ``weight``.

    Raises:
        ShapeError: the shapes do not fit each other.
    """
    result: torch.Tensor = torch.ops.graphpass.expert_linear(x, experts, weight, bias, transposed)
    return result


@torch.library.impl(EXPERT_LINEAR, "default")
@torch.no_grad()
def _expert_linear(
    x: torch.Tensor, experts: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    """See :func:`expert_linear`."""
    _check_shapes(x, experts, weight, transposed)
    num_experts, top_k = weight.shape[0], experts.shape[1]
    result = _empty_result(x, experts, weight, bias, transposed)
    if result.numel() == 0:
        return result
    of_pair, order = experts.reshape(-1).clamp(0, num_experts - 1).sort(stable=True)
    source = order if x.dim() == 3 else order // top_k
    rows = x.reshape(-1, x.shape[-1]).index_select(0, source).to(weight.dtype)
    multiply = products_by_kernel if _has_kernel(rows, weight) else products_by_blocks
    products = multiply(rows, of_pair, weight, transposed)
    if bias is not None:
        products = products + bias.index_select(0, of_pair)
    result.view(-1, result.shape[-1]).index_copy_(0, order, products)
    return result


def _empty_result(
    x: torch.Tensor, experts: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    """Uninitialised memory for the result; the fake implementation, which tracing calls."""
    return x.new_empty((*experts.shape, weight.shape[2 if transposed else 1]), dtype=weight.dtype)


torch.library.register_fake(EXPERT_LINEAR, _empty_result)
register_padding_rule(EXPERT_LINEAR, expert_linear_by_row)


def products_by_kernel(
    rows: torch.Tensor, experts: torch.Tensor, weight: torch.Tensor, transposed: bool
) -> torch.Tensor:
    """Multiply rows, sorted by expert, with ``grouped_mm``. Arguments and result: see :func:`products_by_blocks`."""
    numbers = torch.arange(weight.shape[0], device=rows.device)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    return F.grouped_mm(rows, weight if transposed else weight.transpose(1, 2), offs=ends)


def products_by_blocks(
    rows: torch.Tensor, experts: torch.Tensor, weight: torch.Tensor, transposed: bool
) -> torch.Tensor:
    """Multiply rows, sorted by expert, in blocks of equal size that belong to one expert each.

    Args:
        rows: [pairs, in features].
        experts: the expert of each row, ascending, int64 [pairs].
        weight: as for the op.
        transposed: the layout of ``weight``.

    Returns:
        [pairs, out features].
    """
    num_pairs, num_experts, device = len(rows), len(weight), rows.device
    size = 1 << (-(-num_pairs // num_experts) - 1).bit_length()  # the mean group, up to a power of two
    num_blocks = min(num_pairs, num_pairs // size + num_experts)  # for any distribution over the experts
    numbers = torch.arange(num_experts, device=device)
    starts = torch.searchsorted(experts, numbers)
    lengths = torch.searchsorted(experts, numbers, right=True) - starts
    blocks = (lengths + size - 1) // size
    ends = blocks.cumsum(0)
    # The place of a row: its expert's first block, and its rank among the rows of its expert.
    shifts = (ends - blocks) * size - starts
    places = shifts.index_select(0, experts) + torch.arange(num_pairs, device=device)
    of_block = torch.searchsorted(ends, torch.arange(num_blocks, device=device), right=True)
    of_block.clamp_(max=num_experts - 1)  # blocks behind the last one that has rows
    filled = rows.new_zeros(num_blocks * size, rows.shape[1]).index_copy_(0, places, rows)
    at_once = max(1, _COPIED_BYTES // weight[0].nbytes)
    products = []
    for some, of_some in zip(filled.view(num_blocks, size, -1).split(at_once), of_block.split(at_once), strict=True):
        weights = weight.index_select(0, of_some)
        products.append(torch.bmm(some, weights if transposed else weights.transpose(1, 2)))
    return torch.cat(products).flatten(0, 1).index_select(0, places)


def _has_kernel(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``grouped_mm`` multiplies these without a read of data on the host."""
    device = weight.device
    if weight.dtype not in _KERNEL_DTYPES.get(device.type, ()):
        return False
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != _KERNEL_CAPABILITY:
        return False
    widths = [size * weight.element_size() for size in weight.shape[1:]]
    bounds = [rows.data_ptr(), weight.data_ptr(), *widths]
    return weight.is_contiguous() and all(bound % _KERNEL_ALIGNMENT == 0 for bound in bounds)


def _check_shapes(x: torch.Tensor, experts: torch.Tensor, weight: torch.Tensor, transposed: bool) -> None:
    if experts.dim() == 2 and weight.dim() == 3:
        in_features = weight.shape[1 if transposed else 2]
        if tuple(x.shape) in ((experts.shape[0], in_features), (*experts.shape, in_features)):
            return
    raise ShapeError(
        "the input of a layer of experts does not fit its weights or the experts of its tokens",
        expected="x [tokens, in features] or [tokens, k, in features], experts [tokens, k], weight of three dimensions",
        found=f"x {tuple(x.shape)}, experts {tuple(experts.shape)}, weight {tuple(weight.shape)}, "
        f"transposed={transposed}",
        remedy="pass one row for each token, or one for each token and expert",
    )
