"""Each operator's padding rule against brute force, and against what torch knows of sharded tensors.

torch.distributed.tensor says for about a thousand operators along which single dimensions they may be sharded: a
result that is sharded with its inputs, without a reduction, is computed block by block, so padding cannot reach it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sympy
import torch
from torch.utils._pytree import tree_map

from graphpass.padding import AtenGraph, PaddingProof, Verdict, padding_of
from graphpass.padding.table import BUILT_IN, rule_for
from tests.fuzz.padding import world
from tests.unit.padding.onecall import REAL, difference, graph_of, real_tensors, results_of, tensors_of
from tests.unit.padding.samples import POINTWISE, SAMPLES, Drawn, Sample

CONSTANTS: dict[str, tuple[Any, ...]] = {
    "float": (0.0, 1.0, float("-inf"), float("inf"), -1e9),
    "bool": (False, True),
    "int": (0, 1),
}

# Refused over padding although the contents drawn here change nothing, and why.
CAUTIOUS = {
    "aten::any": "one true entry decides",
    "aten::all": "one false entry decides",
    "aten::any.dim": "one true entry decides",
    "aten::all.dim": "one false entry decides",
    "aten::avg_pool1d": "windows without a rest",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "its second result",
}

# Rules that no sample calls, by an operator of theirs, and why.
UNSAMPLED = {
    "aten::_weight_int8pack_mm": "its weights are packed; test_quantised covers it",
    "_c10d_functional::all_reduce": "its group has several ranks; test_lockstep covers it",
    "_c10d_functional::all_gather_into_tensor": "the same",
    "aten::mkldnn_rnn_layer": "its last result is undefined; test_programs covers it",
    "graphpass::neutral": "no operator but a repair; test_made covers it",
    "graphpass::real_size": "the same",
    "graphpass::real_index": "the same",
    "graphpass::real_order": "the same",
    "graphpass::attention_to_keys": "the same",
    "graphpass::zero_padding": "a context marks rows for it; test_own_ops covers it",
    "higher_order::flex_attention": "its arguments are functions; test_operators_of_torch covers it",
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def name_of(sample: Sample) -> str:
    tensors = ", ".join(str(list(drawn.shape)) for drawn in tensors_of(sample.arguments(REAL)))
    return f"{sample.op}({tensors})"


def declarations(sample: Sample) -> list[dict[int, Any]]:
    """No declared padding, and each interesting constant in the first padded tensor, or in the last one."""
    small, large = (tensors_of(sample.arguments(size)) for size in (REAL, REAL + 3))
    padded = [at for at, (a, b) in enumerate(zip(small, large, strict=True)) if a.shape != b.shape]
    if sample in POINTWISE:
        return [{}, *({at: 0} for at in padded[:1] if small[at].kind in CONSTANTS)]
    ends = sorted({padded[0], padded[-1]}) if padded else []
    return [{}, *({at: constant} for at in ends for constant in CONSTANTS.get(small[at].kind, ()))]


def prove(graph: AtenGraph, declared: dict[int, Any]) -> PaddingProof:
    return padding_of(graph, {world().s: "n"}, {1 + at: value for at, value in declared.items()})


@pytest.mark.parametrize("sample", SAMPLES, ids=name_of)
def test_a_rule_holds_for_small_tensors(sample: Sample) -> None:
    graph = AtenGraph.of(graph_of(sample))
    for declared in declarations(sample):
        proof, found = prove(graph, declared), difference(sample, declared)
        if proof.verdicts["n"] is Verdict.PROVED:
            assert found is None, (sample.arguments(world().s), declared)
        elif not declared and not any(finding.is_by_contents for finding in proof.findings):
            assert (found is None) == (sample.op in CAUTIOUS), [str(finding) for finding in proof.findings]


def test_every_rule_has_a_sample() -> None:
    called = {rule_for(sample.op) for sample in SAMPLES}
    assert set(BUILT_IN.values()) - called == {BUILT_IN[name] for name in UNSAMPLED}


# --- torch.distributed.tensor


def strategies() -> dict[Any, Any]:
    """Operator -> its strategies along single dimensions; empty where this torch has none."""
    tensor = pytest.importorskip("torch.distributed.tensor")
    propagator = tensor.DTensor._op_dispatcher.sharding_propagator
    return getattr(propagator, "op_single_dim_strategy_funcs", {})


def block_by_block(sample: Sample, strategy: Any) -> Iterator[tuple[tuple[int | None, ...], tuple[int | None, ...]]]:
    """For each strategy without a reduction: the sharded dimension of each result, and of each tensor argument."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    def meta(leaf: Any) -> Any:
        if not isinstance(leaf, Drawn):
            return leaf
        real = torch.empty(leaf.shape, dtype=leaf.real((1,) * len(leaf.shape), torch.Generator()).dtype)
        return TensorMeta(real.shape, real.stride(), real.dtype)

    arguments = sample.arguments(REAL)
    num_tensors = len(tensors_of(arguments))
    for placements in strategy(sample.operator, tree_map(meta, arguments), sample.keywords):
        known = [isinstance(p, (Shard, Replicate)) or type(p).__name__ == "_ShardingPlaceholder" for p in placements]
        if not all(known):
            continue
        dims = tuple(None if isinstance(placement, Replicate) else placement.dim for placement in placements)
        yield dims[:-num_tensors], dims[-num_tensors:]


def sharded(sample: Sample, dims: tuple[int | None, ...]) -> Sample | None:
    """The sample with a size to pad at these dimensions; None if they differ in size."""
    drawn = tensors_of(sample.arguments(REAL))
    sizes = {d.shape[dim] for d, dim in zip(drawn, dims, strict=True) if dim is not None}
    if len(sizes) != 1 or sizes == {1}:
        return None

    def arguments(n: Any) -> Any:
        at = iter(dims)

        def resized(leaf: Any) -> Any:
            if not isinstance(leaf, Drawn):
                return leaf
            dim = next(at)
            shape = tuple(n if d == dim else size for d, size in enumerate(leaf.shape))
            return Drawn(shape, leaf.kind, leaf.below)

        return tree_map(resized, sample.arguments(REAL))

    return Sample(sample.op, arguments, sample.keywords)


def test_what_torch_computes_block_by_block_is_proved() -> None:
    known, proved, refused = strategies(), 0, []
    for sample in SAMPLES:
        strategy = known.get(sample.operator)
        if strategy is None or torch.Tag.nondeterministic_seeded in sample.operator.tags:
            continue
        for of_results, dims in block_by_block(sample, strategy):
            variant = sharded(sample, dims)
            if variant is None or not runs(variant):
                continue
            graph = AtenGraph.of(graph_of(variant))
            proof = prove(graph, {})
            if proof.verdicts["n"] is Verdict.PROVED and padded_along(proof, of_results):
                proved += 1
            else:
                refused.append(f"{name_of(sample)} along {dims}: {'; '.join(map(str, proof.findings))}")
    assert refused == []
    assert proved >= 200 or len(known) < 100, "torch 2.11 knows few strategies"


def _has_size(of_dim: tuple[sympy.Expr, ...]) -> bool:
    return world().s in sympy.Mul(*of_dim, sympy.S.One).free_symbols


def padded_along(proof: PaddingProof, of_results: tuple[int | None, ...]) -> bool:
    """Whether each result that is sharded has its padding along the same dimension."""
    padded = [
        None if factors is None else [of_dim == (0,) or _has_size(of_dim) for of_dim in factors]
        for factors in proof.output_factors
    ]
    pairs = zip(padded, of_results, strict=False)
    return all(along is None or dim is None or along[dim] for along, dim in pairs)


def runs(sample: Sample) -> bool:
    """Whether the call can be made at other sizes: numbers among its arguments may fix them."""
    try:
        for size in (REAL, REAL + 3, REAL + 6):
            results_of(sample, sample.arguments(size), real_tensors(sample, size))
    except (RuntimeError, IndexError):
        return False
    return True
