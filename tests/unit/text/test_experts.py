"""Experts of Hugging Face models by an op: each token has its own experts' outputs, whatever the other tokens are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpass.errors import OptionError, ShapeError
from graphpass.text import experts as experts_op
from graphpass.text.experts import HUGGING_FACE_NAME, compute_experts_by_token, expert_linear
from tests.e2e.small_decoders import small_decoder

Linear = Callable[..., Tensor]
# tokens, experts of each, experts, in, out: one token, many for few experts, few for many, widths for blocks alone
SHAPES = ((1, 2, 4, 8, 12), (5, 2, 16, 8, 12), (37, 3, 5, 16, 8), (64, 4, 3, 8, 4), (3, 1, 1, 4, 8), (9, 2, 8, 7, 5))
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(params=["kernel", "blocks"])
def linear(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Linear:
    """The op, with the kernel where it serves the shape, or without it; blocks copy three weights at a time."""
    if request.param == "blocks":
        monkeypatch.setattr(experts_op, "_has_kernel", lambda *_: False)
        monkeypatch.setattr(experts_op, "_COPIED_BYTES", 3 * 4 * 8 * 12)
    return expert_linear


def random_case(shape: tuple[int, ...], is_each: bool, transposed: bool, seed: int = 0) -> tuple[Any, ...]:
    """The arguments of one call."""
    tokens, top_k, count, inside, outside = shape
    seeded = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, *((top_k,) if is_each else ()), inside, generator=seeded)
    weight = torch.randn(count, *((inside, outside) if transposed else (outside, inside)), generator=seeded)
    experts = torch.randint(count, (tokens, top_k), generator=seeded)
    return x, experts, weight, torch.randn(count, outside, generator=seeded), transposed


def by_definition(x: Tensor, experts: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """One product for each token and expert."""
    each = x if x.dim() == 3 else x.unsqueeze(1).expand(-1, experts.shape[1], -1)
    matrices = weight if transposed else weight.transpose(1, 2)
    product = torch.einsum("tki,tkio->tko", each, matrices[experts])
    return product if bias is None else product + bias[experts]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("is_each", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_products_with_their_experts(
    shape: tuple[int, ...], is_each: bool, transposed: bool, linear: Linear
) -> None:
    x, experts, weight, bias, _ = random_case(shape, is_each, transposed)
    # Any distribution: as drawn, all tokens for the last expert, and for the first.
    for chosen in (experts, torch.full_like(experts, len(weight) - 1), torch.zeros_like(experts)):
        for added in (bias, None):
            found = linear(x, chosen, weight, added, transposed)
            torch.testing.assert_close(found, by_definition(x, chosen, weight, added, transposed), **CLOSE)


@pytest.mark.parametrize("is_each", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_token_does_not_depend_on_the_others(shape: tuple[int, ...], is_each: bool, linear: Linear) -> None:
    x, experts, weight, bias, transposed = random_case(shape, is_each, transposed=False)
    expected = linear(x, experts, weight, bias, transposed)
    other, others_experts, *_ = random_case(shape, is_each, transposed=False, seed=1)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))
    permuted = linear(x[order], experts[order], weight, bias, transposed)
    torch.testing.assert_close(permuted, expected[order], **CLOSE)
    for contents in (other, torch.full_like(x, torch.nan), torch.full_like(x, torch.inf)):
        kept = torch.arange(len(x)) % 2 == 0
        mixed = torch.where(kept.view(-1, *([1] * (x.dim() - 1))), x, contents)
        found = linear(mixed, torch.where(kept[:, None], experts, others_experts), weight, bias, transposed)
        torch.testing.assert_close(found[kept], expected[kept], **CLOSE)
        padded = linear(torch.cat([x, contents]), torch.cat([experts, others_experts]), weight, bias, transposed)
        torch.testing.assert_close(padded[: len(x)], expected, **CLOSE)


def test_no_token_and_numbers_out_of_range(linear: Linear) -> None:
    x, experts, weight, bias, transposed = random_case((4, 2, 3, 8, 12), is_each=False, transposed=False)
    assert linear(x[:0], experts[:0], weight, bias, transposed).shape == (0, 2, 12)
    nearest = by_definition(x, torch.full_like(experts, 2), weight, bias, transposed)
    torch.testing.assert_close(linear(x, experts + 3, weight, bias, transposed), nearest, **CLOSE)
    with pytest.raises(ShapeError, match="does not fit its weights"):
        linear(x[:3], experts, weight, bias, transposed)


# -- modules of transformers -----------------------------------------------------------------------------------------

# Gated, gated without concatenation and with biases in transposed weights, and behind a router of groups.
FAMILIES = ("Mixtral", "GptOss", "Qwen3Moe")


def small_model(family: str) -> Any:
    return small_decoder(f"{family}ForCausalLM")


def experts_of(model: Any) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith("experts")]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_stock_experts_compute_the_same(family: str) -> None:
    model, ids = small_model(family), torch.arange(12).view(2, 6)
    model.set_experts_implementation("eager")
    expected = model(input_ids=ids, use_cache=False).logits
    compute_experts_by_token(model)
    assert model.config._experts_implementation == HUGGING_FACE_NAME
    with torch.profiler.profile(acc_events=True) as profile:  # torch 2.11 warns without it
        found = model(input_ids=ids, use_cache=False).logits
    calls = [event.count for event in profile.key_averages() if event.key == experts_op.EXPERT_LINEAR]
    assert calls == [2 * len(experts_of(model))]
    torch.testing.assert_close(found, expected, **CLOSE)


def test_an_unknown_implementation_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "average_of_all", lambda *_: None)
    model = small_model("Mixtral")
    model.set_experts_implementation("average_of_all")
    with pytest.raises(OptionError, match=r"'average_of_all' is not known .*\(MixtralExperts\)"):
        compute_experts_by_token(model)
    assert model.config._experts_implementation == "average_of_all"


class Normed(nn.Module):
    """Stock experts whose forward does something else to their output."""

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(copy.copy(stock).__dict__)
        self.stock = stock

    def forward(self, *args: Any) -> Tensor:
        out: Tensor = self.stock(*args)
        is_ours = self.config._experts_implementation == HUGGING_FACE_NAME
        return out if is_ours else nn.functional.normalize(out)


def test_experts_that_compute_something_else_are_refused() -> None:
    model = small_model("Mixtral")
    mlp = model.model.layers[1].mlp
    mlp.experts = Normed(mlp.experts)
    before = model.config._experts_implementation
    with pytest.raises(OptionError, match=r"layers\.1\.mlp\.experts \(Normed\).*a difference of"):
        compute_experts_by_token(model)
    assert model.config._experts_implementation == before


def test_experts_without_floating_point_weights_are_refused() -> None:
    model = small_model("Mixtral")
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.to(torch.int8), requires_grad=False)
    with pytest.raises(OptionError, match=r"cannot compute the experts of .*layers\.0"):
        compute_experts_by_token(model)
