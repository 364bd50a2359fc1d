"""Every causal language model class of the installed Transformers, tiny and with seeded weights."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

VOCABULARY, WIDTH, MAX_POSITIONS, WINDOW, GAIN = 128, 64, 128, 6, 2

_BY_NAME: dict[str, Any] = {
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_size", "embedding_dim"], WIDTH),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"], 2),
    **dict.fromkeys(["encoder_layers", "num_encoder_layers", "num_decoder_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"], 4),
    **dict.fromkeys(["num_key_value_heads", "num_kv_heads"], 2),
    "head_dim": 16,
    **dict.fromkeys(["intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim"], 96),
    **dict.fromkeys(["shared_expert_intermediate_size", "moe_intermediate_size", "expert_ffn_hidden_size"], 48),
    **dict.fromkeys(["vocab_size", "org_vocab_size"], VOCABULARY),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"], MAX_POSITIONS),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"], 2),
    **dict.fromkeys(["n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"], 1),
    **dict.fromkeys(["sliding_window", "attention_chunk_size", "local_attention", "window_size"], WINDOW),
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank"], 16),
    **dict.fromkeys(["qk_nope_head_dim", "v_head_dim"], 16),
    "qk_rope_head_dim": 8,
    "rotary_dim": 8,
    **dict.fromkeys(["pad_token_id", "pad_index"], 0),
}
_ALWAYS: dict[str, Any] = {"is_decoder": True, "tie_word_embeddings": False}


def decoder_classes() -> dict[str, type]:
    """{name of a causal language model class: its config's class}, of the installed Transformers, in order of name."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    classes: dict[str, type] = {}
    for config_class, model_class in auto.MODEL_FOR_CAUSAL_LM_MAPPING.items():
        classes[model_class.__name__] = getattr(model_class, "config_class", None) or config_class
    return dict(sorted(classes.items()))


def small_decoder(name: str, **config: Any) -> Any:
    """A model of a class of :func:`decoder_classes`, in eval mode, float32, with weights far from the initial ones.

    ``config`` replaces values of the small configuration.
    Under the initial weights every token would attend to all others alike, and most texts would repeat one token.
    """
    transformers = pytest.importorskip("transformers")
    small = small_config(decoder_classes()[name], {**_OF_CLASS.get(name, {}), **config})
    torch.manual_seed(0)
    model = getattr(transformers, name)(small).float().eval()
    seeded = torch.Generator().manual_seed(0)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=seeded)
            if id(weight) in embeddings:
                weight.copy_(0.5 * noise)
            elif weight.dim() > 1:
                weight.copy_(GAIN * noise / math.sqrt(weight.shape[-1]))
            else:
                weight.add_(0.2 * noise)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.eos_token_id = generation.bos_token_id = None
        generation.pad_token_id = 0
    return model


def small_config(config_class: type, own: Mapping[str, Any]) -> Any:
    """A config with small sizes and one layer of each kind that the class's default config has, two at least.

    Values of the class's ``own`` replace the ones by name; a mapping belongs to the sub-config of that name.
    """
    default = config_class()
    values = dict(vars(default))
    small: dict[str, Any] = {name: _BY_NAME[name] for name, value in values.items() if _takes(name, value)}
    if "qk_rope_head_dim" in values:  # latent attention: as many heads of keys as of queries, of sizes of their own
        small.pop("head_dim", None)
        small.pop("num_key_value_heads", None)
        if "num_key_value_heads" in values:
            small["num_key_value_heads"] = _BY_NAME["num_attention_heads"]
    kinds = list(dict.fromkeys(values.get("layer_types") or ()))
    if kinds:
        small["layer_types"] = kinds if len(kinds) > 1 else kinds * 2
        small["num_hidden_layers"] = len(small["layer_types"])
    small |= {name: value for name, value in _ALWAYS.items() if name in values}
    parts = [name for name in getattr(config_class, "sub_configs", {}) if name in values]
    for name in parts:
        if values[name] is not None and name not in own:
            small[name] = small_config(type(values[name]), {})
    for name, value in own.items():
        small[name] = small_config(type(values[name]), value) if name in parts else value
    return config_class(**copy.deepcopy(small))


_OF_CLASS: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "Gemma3nForCausalLM": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "GraniteMoeHybridForCausalLM": {"layer_types": ["linear_attention", "full_attention"]},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16},
    "NemotronForCausalLM": {"num_key_value_heads": 2},
}


def _takes(name: str, value: Any) -> bool:
    """Whether the default config has a number of this name, or a token id."""
    if name not in _BY_NAME:
        return False
    return name in _ALSO_NONE if value is None else isinstance(value, int) and not isinstance(value, bool)


_ALSO_NONE = {"pad_token_id", "head_dim", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"}
"""Values that are set even where the default is None."""
