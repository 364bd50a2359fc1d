"""The experts of Hugging Face's mixtures, computed by an op that keeps the tokens of a batch apart.

Transformers' own implementations sort the tokens of a batch by expert (``grouped_mm``), which cannot be proved to keep
them apart, copy one weight for each token (``batched_mm``), gigabytes for a long prompt, or read on the host which
experts have tokens (``eager``).

Row ``[t, j]`` of the op's result is ``x[t] @ weight[experts[t, j]]``: it depends on token t alone. Inside, the op sorts
the (token, expert) pairs by expert, so that pairs of one expert share a matrix product. It reads no data on the host.
There are two ways to the products of the sorted pairs:

- *Kernel*: ``torch.nn.functional.grouped_mm``, where it reads the group bounds on the device: bfloat16 on GPUs of
  compute capability 9, and all floating dtypes on the CPU.
- *Blocks*: the pairs of each expert fill blocks of equal size, and one batched product multiplies each block by a copy
  of its expert's weight. The products compute at most three times as many rows as there are pairs, and copy at most two
  weights for each expert, a limited number of them at a time.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F

from graphpass.errors import OptionError, ShapeError
from graphpass.padding import OpCall, PaddedValue, register_padding_rule

EXPERT_LINEAR = "graphpass::expert_linear"
HUGGING_FACE_NAME = "graphpass_experts"

_REPLACED = (None, "eager", "batched_mm", "grouped_mm")
"""Implementations of transformers that compute the same."""
_TRIAL_TOKENS = 4
_TRIAL_ERROR = 0.05
"""Relative to the largest entry: more than rounding in half precision, less than what a bias or a norm makes."""
_COPIED_BYTES = 256 << 20
"""Most bytes of weights that one batched product copies, if a single weight is not larger."""
_KERNEL_ALIGNMENT = 16
"""In bytes: ``grouped_mm`` requires it of rows, and of the rows and columns of weights."""
_KERNEL_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16,),  # with other dtypes it reads the bounds on the host
}
_KERNEL_CAPABILITY = 9
"""Major compute capability; on others ``grouped_mm`` reads the bounds on the host."""

# -- modules of transformers -------------------------------------------------------------------------------------------


def compute_experts_by_token(model: torch.nn.Module) -> None:
    """Set the experts of a Hugging Face model, and of others with its config object, to :func:`expert_linear`."""
    modules = {name: module for name, module in model.named_modules() if _has_experts(module)}
    if not modules:
        return
    functions: Any = importlib.import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
    functions.register(HUGGING_FACE_NAME, _experts_forward)
    for name, module in modules.items():
        implementation = module.config._experts_implementation
        if implementation not in (*_REPLACED, HUGGING_FACE_NAME):  # guard: expert_implementation
            raise OptionError(
                f"the experts implementation {implementation!r} is not known to keep the tokens of a batch apart",
                expected=f"one of {', '.join(map(str, _REPLACED))}, which {HUGGING_FACE_NAME!r} replaces",
                found=f"{implementation!r} in {name} ({type(module).__name__})",
                remedy="call model.set_experts_implementation('grouped_mm') first, if that computes the same",
            )
        _try_out(name, module)
    for module in modules.values():
        _set_implementation(module.config, HUGGING_FACE_NAME)


def _has_experts(module: torch.nn.Module) -> bool:
    config = getattr(module, "config", None)
    return all(hasattr(module, name) for name in ("has_gate", "is_transposed")) and hasattr(
        config, "_experts_implementation"
    )


def _set_implementation(config: Any, name: str | None) -> None:
    config._experts_implementation = {"": name}  # as a dict: not for configs within this one


@torch.no_grad()
def _try_out(name: str, module: Any) -> None:
    """Refuse a module whose own forward computes something else for random tokens."""
    before = module.config._experts_implementation
    try:
        inputs = _trial_inputs(module)
        _set_implementation(module.config, "eager")
        expected: torch.Tensor = module.forward(*inputs)
        _set_implementation(module.config, HUGGING_FACE_NAME)
        own: torch.Tensor = module.forward(*inputs)
        bound = _TRIAL_ERROR * float(expected.abs().nan_to_num(0.0, 0.0).max())
        if torch.allclose(own, expected, rtol=_TRIAL_ERROR, atol=bound, equal_nan=True):  # guard: expert_trial
            return
        found = f"a difference of {float((own - expected).abs().max()):.3g}"
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        found = f"{type(error).__name__}: {error}"
    finally:
        _set_implementation(module.config, before)
    raise OptionError(
        f"graphpass cannot compute the experts of {name} ({type(module).__name__})",
        expected="a module whose output is the weighted sum of its experts' outputs: up projection, activation, down "
        "projection, in floating point weights of three dimensions",
        found=found,
        remedy="use a model with stock, unquantized experts",
    )


def _trial_inputs(module: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = module.down_proj
    if weight.is_cuda:
        torch.cuda.synchronize(weight.device)  # offloaded weights may still be on their way
    num_experts, features = weight.shape[0], weight.shape[2 if module.is_transposed else 1]
    top_k, seeded = min(2, num_experts), torch.Generator().manual_seed(0)
    x = torch.randn(_TRIAL_TOKENS, features, generator=seeded)
    experts = torch.stack([torch.randperm(num_experts, generator=seeded)[:top_k] for _ in range(_TRIAL_TOKENS)])
    weights = torch.rand(_TRIAL_TOKENS, top_k, generator=seeded) + 0.5
    return x.to(weight), experts.to(weight.device), weights.to(weight)


def _experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The output of a module of experts, with the signature that transformers calls; indices are [tokens, k]."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    biases = {name: getattr(module, f"{name}_bias") if module.has_bias else None for name in (first, "down_proj")}
    inner = expert_linear(hidden_states, top_k_index, getattr(module, first), biases[first], module.is_transposed)
    activation: Any = getattr(module, "_apply_gate", None) if module.has_gate else module.act_fn
    inner = activation(inner.flatten(0, 1)).view(*top_k_index.shape, -1)
    out = expert_linear(inner, top_k_index, module.down_proj, biases["down_proj"], module.is_transposed)
    if getattr(module, "has_post_expert_norm", False):
        out = module.post_expert_norm(out)
    summed: torch.Tensor = (out * top_k_weights.unsqueeze(-1)).sum(1)
    return summed.to(hidden_states.dtype)


# -- the op ------------------------------------------------------------------------------------------------------------

torch.library.define(
    EXPERT_LINEAR, "(Tensor x, Tensor experts, Tensor weight, Tensor? bias, bool transposed) -> Tensor"
)


def expert_linear(
    x: torch.Tensor, experts: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    """Multiply each token by the weights of its experts: the op, without a gradient."""
    result: torch.Tensor = torch.ops.graphpass.expert_linear(x, experts, weight, bias, transposed)
    return result


@torch.library.impl(EXPERT_LINEAR, "default")
@torch.no_grad()
def _expert_linear(
    x: torch.Tensor, experts: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
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
    """Memory for the result; also the fake implementation."""
    return x.new_empty((*experts.shape, weight.shape[2 if transposed else 1]), dtype=weight.dtype)


def _expert_linear_by_row(call: OpCall) -> PaddedValue:
    """Padding rule: a row depends on its input and on the numbers of its token's experts."""
    x, experts, weight, bias = call.tensor("x"), call.tensor("experts"), call.tensor("weight"), call.argument("bias")
    for tensor in (weight, bias):
        if isinstance(tensor, PaddedValue):  # guard: expert_rows
            call.unpadded(tensor, range(tensor.rank), "multiplies by weights along")
    for tensor in (x, experts):
        call.unpadded(tensor, range(1, tensor.rank), "multiplies matrices over")
    rows = call.unify(x.factors[0], experts.factors[0])
    return PaddedValue((rows, *call.fresh().factors[1:]))


torch.library.register_fake(EXPERT_LINEAR, _empty_result)
register_padding_rule(EXPERT_LINEAR, _expert_linear_by_row)


def products_by_kernel(
    rows: torch.Tensor, experts: torch.Tensor, weight: torch.Tensor, transposed: bool
) -> torch.Tensor:
    """:func:`products_by_blocks` with ``grouped_mm``."""
    numbers = torch.arange(weight.shape[0], device=rows.device)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    return F.grouped_mm(rows, weight if transposed else weight.transpose(1, 2), offs=ends)


def products_by_blocks(
    rows: torch.Tensor, experts: torch.Tensor, weight: torch.Tensor, transposed: bool
) -> torch.Tensor:
    """Multiply rows [pairs, in features] in blocks of equal size that belong to one expert each; [pairs, out features].

    ``experts`` has the expert of each row, ascending, int64 [pairs]; ``weight`` is that of the op.
    """
    num_pairs, num_experts, device = len(rows), len(weight), rows.device
    size = 1 << (-(-num_pairs // num_experts) - 1).bit_length()  # the mean group, up to a power of two
    num_blocks = min(num_pairs, num_pairs // size + num_experts)  # for any distribution over the experts
    numbers = torch.arange(num_experts, device=device)
    starts = torch.searchsorted(experts, numbers)
    lengths = torch.searchsorted(experts, numbers, right=True) - starts
    blocks = (lengths + size - 1) // size
    ends = blocks.cumsum(0)
    # Of a row: its expert's first block, and its rank among the rows of its expert.
    shifts = (ends - blocks) * size - starts
    places = shifts.index_select(0, experts) + torch.arange(num_pairs, device=device)
    of_block = torch.searchsorted(ends, torch.arange(num_blocks, device=device), right=True)
    of_block.clamp_(max=num_experts - 1)  # blocks after the last one that has rows
    filled = rows.new_zeros(num_blocks * size, rows.shape[1]).index_copy_(0, places, rows)
    at_once = max(1, _COPIED_BYTES // weight[0].nbytes)
    products = []
    for some, of_some in zip(filled.view(num_blocks, size, -1).split(at_once), of_block.split(at_once), strict=True):
        weights = weight.index_select(0, of_some)
        products.append(torch.bmm(some, weights if transposed else weights.transpose(1, 2)))
    return torch.cat(products).flatten(0, 1).index_select(0, places)


def _has_kernel(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``grouped_mm`` multiplies these without a read on the host."""
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
