"""Operators of torch that work row by row are padded; for others the report names what a user can do about them."""

from __future__ import annotations

import ast
import inspect
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as aot_config
from torch._higher_order_ops.invoke_subgraph import mark_compile_region
from torch._higher_order_ops.out_dtype import out_dtype
from torch._higher_order_ops.scan import scan
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from graphpass.compat import operators
from graphpass.errors import OptionError
from graphpass.regions import register_padding_rule
from tests.unit.cgpass.attended import Make
from tests.unit.models import module

TABLE = torch.randn(50, 6)
flex = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


PADDED: dict[str, tuple[Callable[..., Any], Callable[..., tuple[torch.Tensor, ...]], dict[str, Any]]] = {
    "bags beside padding that is made": (
        lambda ids: (F.embedding_bag(ids.expand(3, -1), TABLE, padding_idx=0), ids.float().softmax(0)),
        lambda n: (torch.randint(1, 50, (2 * n,)),),
        {"padding": {"ids": 0}, "compiler": "aot_eager"},
    ),
    "a product in another dtype": (
        lambda x, w: out_dtype(torch.ops.aten.mm.default, torch.int32, x + 1, w).relu() * 2,
        lambda n: (torch.randint(-99, 99, (n, 8), dtype=torch.int8), torch.randint(-99, 99, (8, 4), dtype=torch.int8)),
        {"compiler": "aot_eager"},
    ),
}


@pytest.mark.parametrize("name", PADDED)
def test_operators_of_torch_that_work_row_by_row_are_padded(compiled: Make, name: str) -> None:
    model, make, options = PADDED[name]
    fast = compiled(model, dynamic=True, **options)
    assert fast.serve([make(n) for n in (5, 6, 7, 5, 8)], passes=2) == 5
    first = next(iter(inspect.signature(model).parameters))
    assert fast.padded_sizes[f"{first}[0]"]
    assert fast.is_padded


def ragged(self: Any, ids: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
    """A recommender: a bag of ids for each row, as flat ids and offsets, or as rows that end in padding."""
    return self.score(self.bags(ids, offsets)).sigmoid()  # type: ignore[no-any-return]


def test_a_ragged_recommender_replays_after_its_remedy(compiled: Make) -> None:
    drawn, bags = random.Random(0), nn.EmbeddingBag(50, 6, mode="sum", padding_idx=0)
    model = module(ragged, bags=bags, score=nn.Linear(6, 1)).eval()
    bags = [[torch.randint(1, 50, (drawn.randint(1, 9),)) for _ in range(drawn.randint(3, 20))] for _ in range(60)]
    flat = [(torch.cat(ids), torch.tensor([0, *map(len, ids[:-1])]).cumsum(0)) for ids in bags]
    fast = compiled(model, dynamic=True)
    assert fast.serve(flat) < 5
    remedies = {found.remedy for found in fast.problems if found.kind == "not padded"}
    (remedy,) = remedies
    assert "pass ids of two dimensions, a row for each bag that is filled up with padding_idx" in remedy
    declared = re.search(r"padding=(\{.*?\}) for padding_idx=0", remedy)
    assert declared is not None
    rows = [(nn.utils.rnn.pad_sequence(ids, batch_first=True),) for ids in bags]
    for as_rows, as_bags in zip(rows, flat, strict=True):
        torch.testing.assert_close(model(*as_rows), model(*as_bags))
    fast = compiled(model, dynamic=True, padding=ast.literal_eval(declared[1]))
    assert fast.serve(rows) > 40
    assert fast.problems == ()


def test_what_cannot_be_registered_is_of_torch() -> None:
    """The remedy names register_padding_rule for operators that it takes."""
    for name in ("higher_order::flex_attention", "higher_order::scan"):
        assert operators.is_of_torch(name)
        with pytest.raises(OptionError, match="no operator is named"):
            register_padding_rule(name, lambda call: call.fresh())
    assert not operators.is_of_torch("mylib::attention")


ATTENDING: dict[str, Callable[..., torch.Tensor]] = {
    "in blocks": lambda q, k, v: flex_attention(q * 2, k, v, block_mask=BLOCKS).relu(),
    "with a bias": lambda q, k, v: flex_attention(
        q * 2, k, v, score_mod=lambda score, batch, head, i, j: score + BIAS[head, i]
    ).relu(),
}
BIAS, OF_BATCHES = torch.randn(2, 16), torch.randn(9)
BLOCKS = create_block_mask(lambda batch, head, i, j: i >= j, None, None, 16, 16, device="cpu")


def batches(n: int, length: int = 16) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(n, 2, length, 16) for _ in range(3))


@flex
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ATTENDING)
def test_batches_of_flex_attention_are_padded_where_it_runs_eagerly(compiled: Make, name: str, compiler: str) -> None:
    calls = [batches(n) for n in (5, 6, 7, 5, 8)]
    fast = compiled(ATTENDING[name], dynamic=True, compiler=compiler)
    fast.serve(calls)
    problem = fast.problem("cannot be captured")
    assert "list it in splitting_ops" in problem.remedy
    (op,) = re.findall(r"at op \S+ = (\S+) at", problem.what)
    fast = compiled(ATTENDING[name], dynamic=True, compiler=compiler, splitting_ops=[op])
    assert fast.serve(calls, passes=2) == 5
    assert fast.is_padded
    assert fast.problems == ()


EXACT: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "number of batches": (
        lambda q, k, v: flex_attention(q * 2, k, v, score_mod=lambda score, b, h, i, j: score * q.shape[0]),
        "is a number in it",
    ),
    "a table of batches": (
        lambda q, k, v: flex_attention(q * 2, k, v, score_mod=lambda score, b, h, i, j: score + OF_BATCHES[b]),
        "reads the number of the batch",
    ),
    "lengths": (lambda q, k, v: flex_attention(*(x.transpose(0, 2) for x in (q * 2, k, v))), "attends over"),
}


@flex
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", EXACT)
def test_flex_attention_whose_batches_are_not_apart_is_exact(compiled: Make, name: str, compiler: str) -> None:
    model, says = EXACT[name]
    fast = compiled(model, dynamic=True, compiler=compiler, splitting_ops=["flex_attention"])
    fast.serve([batches(n) for n in (5, 6, 7, 5, 8)], passes=2)
    assert says in fast.problem("q[0] is not padded").what
    assert not fast.is_padded


def running_sums(x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    return scan(lambda carry, row: (carry + row, carry * row), start, x)[1] * 2


def test_the_remedy_for_a_size_inside_a_scan_is_followed(compiled: Make) -> None:
    fast = compiled(running_sums, dynamic=True, compiler="aot_eager")
    fast.serve([(torch.randn(4, n, 6), torch.randn(n, 6)) for n in range(2, 9)])
    problem = fast.problem("start[0] is not padded")
    assert "higher_order.scan" in problem.what
    assert "rows_apart" not in problem.remedy
    assert "keep the sizes few" in problem.remedy
    fast = compiled(running_sums, dynamic=True, compiler="aot_eager")
    assert fast.serve([(torch.randn(4, n, 6), torch.randn(n, 6)) for n in (5, 7, 5, 7)], passes=2) == 4


WINDOW = torch.hann_window(16)


def spectrum(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(2, n)
    return torch.stft(x, 16, window=WINDOW, return_complex=True), x


def test_a_splitting_op_follows_the_name_that_is_suggested(compiled: Make) -> None:
    def model(of: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.istft(of * 2, 16, window=WINDOW) + 1

    with pytest.raises(BackendCompilerFailed, match="unknown splitting op 'istft'") as refused:
        compiled(model, splitting_ops=["istft"]).serve([spectrum(64)])
    name = re.findall(r"did you mean '(.*?)'", str(refused.value))[0]
    fast = compiled(model, splitting_ops=[name])
    assert fast.serve([spectrum(64)], passes=4) == 1
    assert fast.problems == ()


def test_a_size_that_an_operation_fixes_is_not_to_be_named_but_left_out(compiled: Make) -> None:
    def inverse(of: torch.Tensor, length: int) -> torch.Tensor:
        return torch.istft(of, 16, window=WINDOW, length=length)

    calls = [spectrum(n) for n in range(64, 144, 8)]
    fast = compiled(lambda of, x: inverse(of * 2, x.shape[1]) + 1, splitting_ops=["torch.istft"])
    fast.serve(calls)
    found = [problem for problem in fast.problems if "recompile limit" in problem.what]
    assert len(found) == 2, "of the 8th time, and of the limit"
    for problem in found:
        assert "name a dimension" not in problem.remedy
        assert "torch.istft(of, 16, window=WINDOW, length=length)" in problem.remedy
        assert "out of the compiled model (torch.compiler.disable)" in problem.remedy
    outside = torch.compiler.disable(inverse)
    fast = compiled(lambda of, x: outside(of * 2, x.shape[1]) + 1)
    assert fast.serve(calls, passes=3) == 2 * len(calls), "before and after it"
    assert not any("recompile limit" in problem.what for problem in fast.problems)


def running_products(x: torch.Tensor) -> torch.Tensor:
    return scan(lambda carry, row: (carry + row, carry * row), torch.zeros_like(x[0]), x)[1] * 2


@mark_compile_region
def waved(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


def waved_twice(x: torch.Tensor) -> torch.Tensor:
    return waved(x) + waved(x + 1)


@pytest.mark.parametrize("model", [running_products, waved_twice])
def test_bodies_of_higher_order_operators_are_captured(compiled: Make, model: Callable[..., torch.Tensor]) -> None:
    fast = compiled(model, compiler="aot_eager")
    assert fast.serve([(torch.randn(4, 6),)], passes=4) == 1
    assert fast.problems == ()


def block(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (torch.mul(x, scale).relu() + x).sin()


def test_subgraphs_that_dynamo_shares_are_padded_and_captured(compiled: Make) -> None:
    with dynamo_config.patch(use_graph_deduplication=True):
        fast = compiled(
            lambda x, scale: block(block(block(x, scale), scale), scale), dynamic=True, compiler="aot_eager"
        )
        calls = [(torch.randn(n, 6), torch.randn(6)) for n in (5, 6, 7, 5, 8)]
        assert fast.serve(calls, passes=2) == 5
    assert fast.is_padded
    assert fast.problems == ()


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.soak)])
def test_fake_tensors_that_hold_real_ones_are_compiled_and_padded(compiled: Make, compiler: str) -> None:
    with aot_config.patch(fake_tensor_propagate_real_tensors=True):
        fast = compiled(lambda x, scale: block(x, scale), dynamic=True, compiler=compiler)
        assert fast.serve([(torch.randn(n, 6), torch.randn(6)) for n in (5, 6, 7, 5, 8)], passes=2) == 5
    assert fast.is_padded
    assert fast.problems == ()
