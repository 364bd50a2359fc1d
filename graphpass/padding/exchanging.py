"""Operators of torch that do several things at once, as the operators that they consist of: those have repairs.

An operator is exchanged in a copy of the graph, and only if a padded size is among the dimensions that it mixes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from graphpass.compat import symbolic
from graphpass.padding.opcall import words
from graphpass.padding.table import rule_for

aten = torch.ops.aten


def exchanged(
    graph_module: fx.GraphModule, padded: Collection[sympy.Symbol], decompositions: Mapping[Any, Any]
) -> fx.GraphModule:
    """A copy of an aten graph without such operators where their dimensions are padded; itself if it has none.

    ``decompositions`` are those of the compiler, by which the rest of the graph was made.
    """
    found = [node for node in graph_module.graph.nodes if _is_mixed(node, padded)]
    if not found:
        return graph_module
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(graph_module.graph, copies))
    decompositions = {**decompositions, **_decomposed()}
    for node in map(copies.__getitem__, found):
        _exchange(node, decompositions)
    return fx.GraphModule(graph_module, graph)


def _is_mixed(node: Any, padded: Collection[sympy.Symbol]) -> bool:
    if node.target not in _EXCHANGES and node.target not in _decomposed():
        return False
    first = 0 if rule_for(node.target.name()) is None else 1  # guard: made_exchanges
    values = (one.meta["val"] for one in node.all_input_nodes)
    shapes = (value.shape[first:] for value in values if isinstance(value, Tensor))
    sizes = map(symbolic.expression_of, (size for shape in shapes for size in shape))
    return any(not size.free_symbols.isdisjoint(padded) for size in sizes if isinstance(size, sympy.Basic))


def _exchange(node: fx.Node, decompositions: Mapping[Any, Any]) -> None:
    function: Any = _EXCHANGES.get(node.target, node.target)
    read = node.all_input_nodes

    def call(*values: Any) -> Any:
        given = dict(zip(read, values, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), given.__getitem__)
        return function(*args, **kwargs)

    traced = symbolic.traced(call, [one.meta["val"] for one in read], decompositions)
    if traced is None:
        return
    traced.graph.eliminate_dead_code()  # results that nothing reads would count
    inputs = dict(zip(traced.graph.find_nodes(op="placeholder"), read, strict=True))
    where = {key: one for key, one in node.meta.items() if key != "val"}
    result: Any
    with node.graph.inserting_before(node):
        result = node.graph.graph_copy(traced.graph, inputs)
    for copied, source in ((copy, one) for one, copy in inputs.items() if one.op == "call_function"):
        copied.meta = {**where, "val": source.meta["val"]}
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    for user in list(node.users):  # it has several results
        at: Any = user.args[1]
        user.replace_all_uses_with(result[at])
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def _attended(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, *, has_weights: bool) -> Any:
    if hidden is None and not has_weights:
        return F.scaled_dot_product_attention(query, key, value), None
    scores = (query / math.sqrt(query.shape[-1])) @ key.mT
    # A row that hides all keys is NaN, as the operator makes it.
    weights = (scores if hidden is None else scores.masked_fill(hidden, -math.inf)).softmax(-1)
    return weights @ value, weights


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``nn.MultiheadAttention`` in eval mode."""
    if query is key is value:
        projected = F.linear(query, qkv_weight, qkv_bias).chunk(3, -1)
    else:
        of_each = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
        projected = tuple(F.linear(x, weight, bias) for x, weight, bias in of_each)
    query, key, value = (x.unflatten(-1, (num_head, embed_dim // num_head)).transpose(1, 2) for x in projected)
    hidden = None if mask is None else (mask != 0)[:, None, None] if mask_type == 1 else mask != 0
    mixed, weights = _attended(query, key, value, hidden, has_weights=need_weights)
    result = F.linear(mixed.transpose(1, 2).flatten(2), proj_weight, proj_bias)
    return result, weights.mean(1) if need_weights and average_attn_weights else weights


def transformer_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """``nn.TransformerEncoderLayer`` in eval mode."""
    projections = embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias

    def attends(x: Tensor) -> Tensor:
        return multi_head_attention(x, x, x, *projections, mask, need_weights=False, mask_type=mask_type)[0]

    def feeds_forward(x: Tensor) -> Tensor:
        inner = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(inner) if use_gelu else F.relu(inner), ffn_weight_2, ffn_bias_2)

    x, norms = src, ((attends, norm_weight_1, norm_bias_1), (feeds_forward, norm_weight_2, norm_bias_2))
    for block, weight, bias in norms:
        inner = F.layer_norm(x, (embed_dim,), weight, bias, eps) if norm_first else x
        x = x + block(inner)
        x = x if norm_first else F.layer_norm(x, (embed_dim,), weight, bias, eps)
    return x


def adaptive_pool(x: Tensor, output_size: Sequence[int]) -> Tensor:
    """Averages over parts of the last two dimensions. Torch's decomposition asks whether the traced sizes divide."""
    for dim, parts in zip((x.dim() - 2, x.dim() - 1), output_size, strict=True):
        size, part = x.shape[dim], torch.arange(parts, device=x.device)[:, None]
        first, end = part * size // parts, ((part + 1) * size + parts - 1) // parts
        at = torch.arange(size, device=x.device)
        inside = ((at >= first) & (at < end)).view(parts, size, *[1] * (x.dim() - 1 - dim))
        number = (end - first).view(parts, *[1] * (x.dim() - 1 - dim))
        x = torch.where(inside, x.unsqueeze(dim), 0).sum(dim + 1) / number
    return x


_NAMED: Mapping[str, Callable[..., Any]] = {
    "_transformer_encoder_layer_fwd": transformer_layer,
    "_native_multi_head_attention": multi_head_attention,
    "_adaptive_avg_pool2d": adaptive_pool,
}
_EXCHANGES: Mapping[Any, Callable[..., Any]] = {getattr(aten, name).default: one for name, one in _NAMED.items()}


_DECOMPOSED = words(
    "upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_nearest1d upsample_nearest2d",
    "_upsample_nearest_exact1d _upsample_nearest_exact2d _prelu_kernel",
)
"""Operators that consist of what torch says. None of these decompositions decides by the sizes of the traced call."""


@functools.cache
def _decomposed() -> Mapping[Any, Callable[..., Any]]:
    return symbolic.decompositions_of(getattr(aten, name) for name in _DECOMPOSED)
