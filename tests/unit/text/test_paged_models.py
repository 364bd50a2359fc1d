"""Stock models of Hugging Face over pages: their classes unmodified, their attention ours."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphpass as gp
from graphpass.errors import GraphpassError, OptionError, ShapeError
from graphpass.text import LayerMask, PageAllocator, PagedAttention, PagedRequests, PositionScale
from graphpass.text.paged.huggingface import HUGGING_FACE_NAME, register_with_hugging_face
from tests.e2e.small_decoders import small_decoder

STOCK: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 5},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "head_dim": 8},
    "Llama4Text": {"intermediate_size_mlp": 64, "attention_chunk_size": 5,
        "num_local_experts": 2, "interleave_moe_layer_step": 2, "no_rope_layer_interval": 2, "floor_scale": 3,
        "attn_scale": 0.7},
    "DeepseekV3": {"num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4, "head_dim": 4, "v_head_dim": 6, "first_k_dense_replace": 2},
    "Gemma2": {"sliding_window": 5, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    "GptOss": {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1},
    "Gemma4Text": {"sliding_window": 5, "global_head_dim": 24, "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 8},
    "Phimoe": {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1},
}  # fmt: skip


def stock(name: str) -> Any:
    return small_decoder(f"{name.removesuffix('Text')}ForCausalLM", **STOCK[name], attn_implementation="eager")


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        *((name, torch.float32, 1e-3) for name in STOCK),
        # torch has no grouped products of float64 for the experts of GptOss and Phimoe.
        *((name, torch.float64, 1e-5) for name in STOCK if name not in ("GptOss", "Phimoe")),
    ],
)
def test_a_stock_model_runs_over_pages(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """Prefill of three requests, then decode, against the stock model with its own cache, one request at a time."""
    expected_model = stock(name).to(dtype)
    model = copy.deepcopy(expected_model)
    attention = PagedAttention.for_model(
        model, num_pages=20, page_size=4, max_num_reqs=4, max_num_tokens=40, max_seq_len=32
    )
    assert model.config._attn_implementation == HUGGING_FACE_NAME
    allocator = PageAllocator(20)
    pages = [allocator.allocate(6) for _ in range(3)]
    seeded = torch.Generator().manual_seed(3)
    lengths, caches = [0, 0, 0], [None, None, None]
    # Transformers 5.24 has another name for it.
    cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.inference_mode():
        for query_lens in ([7, 3, 11], [1, 1, 1], [1, 1, 1], [2, 1, 4], [3, 9, 2], [1, 1, 1]):
            lengths = [n + q for n, q in zip(lengths, query_lens, strict=True)]
            ids = [torch.randint(61, (1, q), generator=seeded) for q in query_lens]
            positions = [torch.arange(n - q, n) for n, q in zip(lengths, query_lens, strict=True)]
            with gp.set_forward_context(attention.build(PagedRequests(query_lens, lengths, pages), None)):
                found = model(
                    input_ids=torch.cat(ids, 1), position_ids=torch.cat(positions).unsqueeze(0), use_cache=False
                ).logits[0]
            outputs = [
                expected_model(input_ids=i, use_cache=True, **{cache: c}) for i, c in zip(ids, caches, strict=True)
            ]
            caches = [getattr(output, cache) for output in outputs]
            expected = torch.cat([output.logits[0] for output in outputs])
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def refused(model: Any, **changes: int) -> OptionError:
    """The error for a model that cannot be served; the model is as before."""
    before = {
        name: module.config._attn_implementation for name, module in model.named_modules() if hasattr(module, "config")
    }
    sizes = {"num_pages": 20, "page_size": 4, "max_num_reqs": 4, "max_num_tokens": 40, "max_seq_len": 32, **changes}
    with pytest.raises(OptionError) as caught:
        PagedAttention.for_model(model, **sizes)
    assert before == {name: model.get_submodule(name).config._attn_implementation for name in before}
    return caught.value


def test_what_the_layers_need_is_read_again_and_limits_that_no_sequence_reaches_are_none() -> None:
    sizes = {"num_pages": 20, "page_size": 4, "max_num_reqs": 4, "max_num_tokens": 40}
    model, scaled = stock("Llama4Text"), PositionScale(3.0, 0.7)
    for _ in range(2):  # the second one finds the layers as the first one has set them
        layers = PagedAttention.for_model(model, max_seq_len=32, **sizes).cache.layers
        assert [layer.query_scale for layer in layers] == [None, scaled]
    for longest, mask in ((32, LayerMask(window=5)), (5, LayerMask())):
        layers = PagedAttention.for_model(stock("Phimoe"), max_seq_len=longest, **sizes).cache.layers
        assert {layer.mask for layer in layers} == {mask}


class FourPositions:
    """Attends to the first four positions too, like a prompt that all tokens see."""

    def __call__(self, batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) | (key < 4)


def test_another_mask_than_paged_attention_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the mask that the model builds, whatever its layers pass."""
    module = pytest.importorskip("transformers.models.llama.modeling_llama")
    causal = module.create_causal_mask
    model = stock("Llama")
    for function, message in (
        (FourPositions(), "found another mask"),
        (lambda *_: torch.ones(3, 3, dtype=torch.bool), "no function of positions"),
    ):
        monkeypatch.setattr(module, "create_causal_mask", lambda f=function, **more: causal(or_mask_function=f, **more))
        assert message in str(refused(model))


def test_a_model_with_attention_of_its_own_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPTNeoConfig(
        hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], vocab_size=61
    )
    assert "does not use the attention implementation" in str(refused(transformers.GPTNeoForCausalLM(config).eval()))


def runs_a_layer_twice(model: Any) -> None:
    """The keys of the second run would overwrite those of the first."""
    model.model.layers[1] = model.model.layers[0]


def has_a_layer_of_another_width(model: Any) -> None:
    model.model.layers[0].mlp = torch.nn.Linear(8, 8)


def has_a_window_in_its_config(model: Any) -> None:
    """Moshi: the cache of its own generate() drops keys that its mask would show."""
    model.config.sliding_window = 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (runs_a_layer_twice, "twice as layer 0"),
        (has_a_layer_of_another_width, "does not run on a row of tokens"),
        (has_a_window_in_its_config, "are not those of its config"),
    ],
)
def test_a_model_that_cannot_be_paged_is_refused(change: Callable[[Any], None], message: str) -> None:
    model = stock("Llama")
    change(model)
    assert message in str(refused(model))
    if change is has_a_window_in_its_config:
        PagedAttention.for_model(model, num_pages=20, page_size=4, max_num_reqs=4, max_num_tokens=40, max_seq_len=7)


def test_a_layer_that_scales_queries_by_row_is_refused_without_for_model() -> None:
    """Llama 4 takes the row of a token for its position; ``for_model`` lets the op scale by position instead."""
    transformers = pytest.importorskip("transformers")
    function = transformers.AttentionInterface()[register_with_hugging_face()]
    layer = stock("Llama4Text").model.layers[1].self_attn
    tensors = (torch.zeros(1, heads, 3, 16) for heads in (4, 2, 2))
    with pytest.raises(OptionError, match="attn_temperature_tuning"):
        function(layer, *tensors, None)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"query": torch.zeros(2, 4, 3, 16)}, ShapeError),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, OptionError),
        ({"dropout": 0.1}, OptionError),
        ({"position_bias": torch.zeros(1, 4, 3, 3)}, OptionError),
        ({"indices": torch.zeros(1, 3, 2)}, OptionError),
        ({"is_causal": False}, OptionError),
        ({"module": type("Bidirectional", (), {"layer_idx": 0, "is_causal": False})()}, OptionError),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_layer_asks_for_in_vain_is_refused(change: dict[str, Any], error: type[GraphpassError]) -> None:
    transformers = pytest.importorskip("transformers")
    function = transformers.AttentionInterface()[register_with_hugging_face()]
    assert transformers.AttentionInterface()[register_with_hugging_face()] is function
    arguments = {
        "module": type("Causal", (), {"layer_idx": 0, "is_causal": True})(),
        "query": torch.zeros(1, 4, 3, 16),
        "key": torch.zeros(1, 2, 3, 16),
        "value": torch.zeros(1, 2, 3, 16),
        "attention_mask": None,
    }
    with pytest.raises(error):
        function(**{**arguments, **change})
