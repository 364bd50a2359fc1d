"""Stock models of Hugging Face over pages: their classes unmodified, their attention ours."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import graphpass as gp
from graphpass.errors import GraphpassError, OptionError, ShapeError
from graphpass.text.paged.attention import PagedAttention
from graphpass.text.paged.cache import PageAllocator, PagedRequests
from graphpass.text.paged.huggingface import HUGGING_FACE_NAME, register_with_hugging_face

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
STOCK: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 5},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "head_dim": 8},
}


def stock(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**TEXT, **STOCK[name]}, attn_implementation="eager")
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.mark.parametrize("name", list(STOCK))
def test_a_stock_model_runs_over_pages(name: str) -> None:
    """Prefill of three requests, then decode, against the stock model with its own cache, one request at a time."""
    expected_model = stock(name)
    model = copy.deepcopy(expected_model)
    attention = PagedAttention.for_model(
        model, num_pages=20, page_size=4, max_num_reqs=4, max_num_tokens=40, max_seq_len=32
    )
    assert model.config._attn_implementation == HUGGING_FACE_NAME
    allocator = PageAllocator(20)
    pages = [allocator.allocate(5) for _ in range(3)]
    seeded = torch.Generator().manual_seed(3)
    lengths, caches = [0, 0, 0], [None, None, None]
    with torch.inference_mode():
        for query_lens in ([7, 3, 11], [1, 1, 1], [1, 1, 1], [2, 1, 4]):
            lengths = [n + q for n, q in zip(lengths, query_lens, strict=True)]
            ids = [torch.randint(61, (1, q), generator=seeded) for q in query_lens]
            positions = [torch.arange(n - q, n) for n, q in zip(lengths, query_lens, strict=True)]
            with gp.set_forward_context(attention.build(PagedRequests(query_lens, lengths, pages), None)):
                found = model(
                    input_ids=torch.cat(ids, 1), position_ids=torch.cat(positions).unsqueeze(0), use_cache=False
                ).logits[0]
            outputs = [
                expected_model(input_ids=i, past_key_values=c, use_cache=True) for i, c in zip(ids, caches, strict=True)
            ]
            caches = [output.past_key_values for output in outputs]
            expected = torch.cat([output.logits[0] for output in outputs])
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_a_stock_model_is_one_graph() -> None:
    """Dynamo traces the op as it stands, once for all lengths."""
    model = stock("Llama")
    attention = PagedAttention.for_model(
        model, num_pages=20, page_size=4, max_num_reqs=4, max_num_tokens=40, max_seq_len=32
    )
    graphs = []

    def backend(graph_module: Any, _: Any) -> Any:
        graphs.append(graph_module)
        return graph_module

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for query_lens in ([3, 2], [4, 5]):
        tokens = {
            "input_ids": torch.arange(sum(query_lens)).unsqueeze(0),
            "position_ids": torch.cat([torch.arange(n) for n in query_lens]).unsqueeze(0),
        }
        step = PagedRequests(query_lens, query_lens, [[2, 3], [4, 5]])
        with torch.no_grad(), gp.set_forward_context(attention.build(step, None)):
            found, expected = (f(**tokens, use_cache=False).logits for f in (compiled, model))
        torch.testing.assert_close(found, expected)
    assert len(graphs) == 1
    ops = [node for node in graphs[0].graph.nodes if "paged_attention" in str(node.target)]
    assert len(ops) == 2


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"query": torch.zeros(2, 4, 3, 16)}, ShapeError),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, OptionError),
        ({"dropout": 0.1}, OptionError),
        ({"softcap": 50.0}, OptionError),
        ({"s_aux": torch.zeros(4)}, OptionError),
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
