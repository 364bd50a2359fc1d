"""The experts of Hugging Face's mixtures, computed by an op that keeps the tokens of a batch apart.

Transformers' own implementations sort the tokens of a batch by expert (``grouped_mm``), copy one weight for each token
(``batched_mm``), or read on the host which experts have tokens (``eager``). So none of them can be captured for every
size: it cannot be proved that the first keeps tokens apart, the second needs gigabytes for a long prompt, and the third
cannot be recorded.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from graphpass.errors import OptionError
from graphpass.text.experts.op import expert_linear

__all__ = ["HUGGING_FACE_NAME", "compute_experts_by_token"]

HUGGING_FACE_NAME = "graphpass_experts"
_REPLACED = (None, "eager", "batched_mm", "grouped_mm")
"""Implementations of transformers that compute what this one computes."""
_TRIAL_TOKENS = 4
_TRIAL_ERROR = 0.05
"""Largest difference in the trial, relative to the largest entry: more than rounding in half precision, and less than
what a bias, a norm or another activation makes."""


def compute_experts_by_token(model: torch.nn.Module) -> None:
    """Set the experts of a Hugging Face model to :func:`expert_linear`. A model without experts does not change.

    The implementation is a setting of the model's config, so it holds for all models with the same config object.

    Args:
        model: a Hugging Face model on its device. Each module of experts first computes a few tokens in both ways.

    Raises:
        OptionError: the experts use an implementation, or weights, for which this one is no replacement. The model is
            unchanged.
    """
    modules = {name: module for name, module in model.named_modules() if _has_experts(module)}
    if not modules:
        return
    _registry().register(HUGGING_FACE_NAME, _experts_forward)
    for name, module in modules.items():
        _check_replaceable(name, module)
        _try_out(name, module)
    for module in modules.values():
        _set_implementation(module.config, HUGGING_FACE_NAME)


def _experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The output of a module of experts, with the signature that transformers calls.

    Args:
        module: the module of experts.
        hidden_states: [tokens, features].
        top_k_index: the experts of each token, int64 [tokens, k].
        top_k_weights: the weights of their outputs in the sum, [tokens, k].

    Returns:
        Shaped like ``hidden_states``.
    """
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


def _registry() -> Any:
    """Transformers' experts implementations."""
    return importlib.import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS


def _has_experts(module: torch.nn.Module) -> bool:
    """Whether the module computes experts by the implementation that its config names."""
    config = getattr(module, "config", None)
    return (
        hasattr(module, "has_gate") and hasattr(module, "is_transposed") and hasattr(config, "_experts_implementation")
    )


def _set_implementation(config: Any, name: str | None) -> None:
    config._experts_implementation = {"": name}  # as a dict: not for configs within this one


def _check_replaceable(name: str, module: Any) -> None:
    """Refuse an implementation that may compute something else.

    Raises:
        OptionError: see above; the error names the implementation and the module.
    """
    implementation = module.config._experts_implementation
    if implementation not in (*_REPLACED, HUGGING_FACE_NAME):  # guard: expert_implementation
        raise OptionError(
            f"the experts implementation {implementation!r} is not known to keep the tokens of a batch apart",
            expected=f"one of {', '.join(map(str, _REPLACED))}, which {HUGGING_FACE_NAME!r} replaces",
            found=f"{implementation!r} in {name} ({type(module).__name__})",
            remedy="call model.set_experts_implementation('grouped_mm') first, if that computes the same",
        )


@torch.no_grad()
def _try_out(name: str, module: Any) -> None:
    """Compare the outputs of this implementation and of the module's own forward, for a few random tokens.

    Raises:
        OptionError: they differ, or one of them fails; the error names the module.
    """
    before = module.config._experts_implementation
    try:
        x, experts, weights = _trial_inputs(module)
        _set_implementation(module.config, "eager")
        expected: torch.Tensor = module.forward(x, experts, weights)
        _set_implementation(module.config, HUGGING_FACE_NAME)
        own: torch.Tensor = module.forward(x, experts, weights)
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
    """A few random tokens, their experts, and the weights of these."""
    weight = module.down_proj
    if weight.is_cuda:
        torch.cuda.synchronize(weight.device)  # offloaded weights may still be on their way
    num_experts, features = weight.shape[0], weight.shape[2 if module.is_transposed else 1]
    top_k, seeded = min(2, num_experts), torch.Generator().manual_seed(0)
    x = torch.randn(_TRIAL_TOKENS, features, generator=seeded)
    experts = torch.stack([torch.randperm(num_experts, generator=seeded)[:top_k] for _ in range(_TRIAL_TOKENS)])
    weights = torch.rand(_TRIAL_TOKENS, top_k, generator=seeded) + 0.5
    return x.to(weight), experts.to(weight.device), weights.to(weight)
