"""graphed(): which size a call is padded to, what capture() captures, what runs without a graph; in numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphpass as gp
from graphpass.errors import CaptureError
from tests.unit.compiled import agrees
from tests.unit.graphed.oracle import agree, full_counts, graphed, replays
from tests.unit.graphed.oracle import rows as rows_of
from tests.unit.models import Rowwise, module

UP_TO_FOUR = ([2, 4], {"x": 0})


def rows(*sizes: int) -> list[Any]:
    return rows_of(*sizes, width=6)


def test_nothing_but_the_model_is_needed() -> None:
    fast = agree(Rowwise, rows(*[5, 3, 7, 6, 2, 8, 4] * 3))
    assert replays(fast) >= 12
    assert fast.runtime.stats().captured <= 6


def test_a_call_runs_at_the_next_size() -> None:
    model = Rowwise().eval()
    fast = graphed(model, [1, 2, 4, 8], {"x": 0})
    for _ in range(2):  # what is captured is not captured again
        fast.capture(torch.randn(5, 6))
    before = full_counts(fast)
    assert {tokens: captured for tokens, (captured, _) in before.items()} == {1: 1, 2: 1, 4: 1, 8: 1}
    for size, padded in ((1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8)):
        x = torch.randn(size, 6)
        got = fast(x)
        agrees(got, model(x).detach())
        assert not got.requires_grad
        before = {**before, padded: (1, before[padded][1] + 1)}
        assert full_counts(fast) == before


def test_without_capture_a_key_is_captured_at_its_second_call() -> None:
    assert full_counts(agree(Rowwise, rows(3, 4, 4, 7, 3), [2, 4, 8], {"x": 0})) == {4: (1, 3)}


@pytest.mark.parametrize(("sizes", "calls"), [([2, 4], [3]), ([1, 2, 4], [3, 1])])
def test_capture_calls_the_model_once_and_once_more_at_size_one(sizes: list[int], calls: list[int]) -> None:
    def counted(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(x.shape[0])
        return x.tanh()

    model = module(counted, calls=[])
    graphed(model, sizes, {"x": 0}).capture(torch.randn(3, 6))
    assert model.calls == calls


def test_an_empty_batch_runs_eagerly() -> None:
    fast = agree(Rowwise, rows(3, 0, 3, 0, 3), *UP_TO_FOUR)
    assert sum(captured for captured, _ in full_counts(fast).values()) == 1


def test_above_the_largest_size_it_runs_without_a_graph() -> None:
    fast = agree(Rowwise, rows(3, 3, 9, 10, 9, 9), *UP_TO_FOUR)
    assert set(full_counts(fast)) <= {4, 9, 10}
    assert full_counts(fast)[4] == (1, 1)


def test_two_dimensions_pad_each_in_its_ladder() -> None:
    dims = {"x": {0: "num_reqs", 1: "seq_len"}}
    fast = graphed(lambda x: x * 2 + 1, {"num_reqs": [2, 4], "seq_len": [3, 5]}, dims)
    fast.capture(torch.randn(3, 4))
    assert {tokens for tokens, (captured, _) in full_counts(fast).items() if captured} == {6, 10, 12, 20}
    before = fast.runtime.stats().captured
    for shape in ((2, 2), (2, 4), (3, 2), (4, 5)):
        x = torch.randn(shape)
        agrees(fast(x), x * 2 + 1)
    assert fast.runtime.stats().captured == before


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend="cgpass", dynamic=True, options={"compiler": "eager", **options})


class TestPrecapture:
    """The same of a callable that torch.compile made."""

    def test_across_a_graph_break_each_graph_has_its_ladder(self) -> None:
        class Broken(Rowwise):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = super().forward(x)
                torch._dynamo.graph_break()
                return y * 2

        model = Broken().eval()
        fast, x = compiled(model, capture_sizes=[2, 4], dynamic_dims={"x": 0}), torch.randn(3, 6)
        with torch.no_grad():
            gp.precapture(fast, x)
            first = [key.num_tokens for name, _, key in gp.runtime_of(fast).counts() if name.startswith("g0")]
            assert sorted(first) == [2, 4]
            agrees(fast(x), model(x))

    def test_training_graphs_are_refused(self) -> None:
        fast = compiled(Rowwise(), capture_sizes=[2], dynamic_dims={"x": 0})
        with pytest.raises(CaptureError, match="nothing to capture") as raised:
            gp.precapture(fast, torch.randn(3, 6))
        assert "inference_mode" in raised.value.remedy
