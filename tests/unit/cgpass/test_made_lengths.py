"""Padding that is made for the lengths of two inputs, which Dynamo may give a symbol each."""

from __future__ import annotations

import torch

from tests.unit.cgpass.attended import Make
from tests.unit.cgpass.test_made import verdicts


def marked(rows: int, length: int, other: int | None = None) -> tuple[torch.Tensor, ...]:
    """Two inputs whose lengths have symbols of their own, as Dynamo gives them where it traces a function again."""
    inputs = torch.randn(rows, length), torch.randn(rows, other or length)
    for each in inputs:
        torch._dynamo.mark_dynamic(each, 1)
    return inputs


def ends(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Nothing compares the two lengths."""
    return x[:, -1] + x.mean(1), mask[:, -1], mask.flip(1)


def test_lengths_of_two_inputs_are_padded_as_one(compiled: Make) -> None:
    fast = compiled(ends, compiler="aot_eager")
    calls = [marked(4, length) for length in (5, 7, 6, 9, 13, 11)]
    assert fast.serve(calls, passes=2) == len(calls)
    assert verdicts(fast, "x[1]") == ["made"]
    assert fast.padded_sizes == {"x[1]": True}
    assert fast.is_padded


def test_calls_in_which_lengths_differ_have_a_graph_in_which_each_is_padded(compiled: Make) -> None:
    fast = compiled(ends, compiler="aot_eager")
    fast.serve([marked(4, length) for length in (5, 7, 9)], passes=2)
    calls = [marked(4, *lengths) for lengths in [(5, 9), (9, 5), (7, 6), (13, 3), (5, 7), (7, 5)]]
    assert fast.serve(calls, passes=2) == len(calls)
    records = fast.rt.callables()
    assert [[size.verdict for size in record.sizes] for record in records] == [["made"], ["made", "made"]]
    assert fast.serve([marked(4, length) for length in (5, 6, 11)], passes=2) == 3
    assert len(fast.rt.callables()) == 2


def test_a_size_that_one_of_two_lengths_does_not_admit_is_no_key(compiled: Make) -> None:
    """Their guards are about symbols of which one has replaced the other."""

    def in_fours(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert mask.shape[1] % 4 == 0
        return x.mean(1), mask.mean(1)

    fast = compiled(in_fours, compiler="aot_eager", capture_sizes={"mask[1]": [10, 18]})
    fast.serve([marked(4, length) for length in (8, 4, 12)], passes=2)
    assert len(fast.rt.callables()) == 1
    assert {dict(key.extra)["mask[1]"] for _, _, key in fast.rt.counts()} == {8, 16}


def test_a_length_that_only_its_successor_was_compared_with(compiled: Make) -> None:
    """The guard ``s1 + 1 == s2 + 1`` makes one symbol of two, and still names the one that went."""

    def with_virtual_token(x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores, bias = (torch.nn.functional.pad(each, (1, 0)) for each in (x, bias))
        weights = (scores + bias).softmax(1)
        return weights, weights.sum(1)

    fast = compiled(with_virtual_token, compiler="aot_eager")
    calls = [marked(4, length) for length in (5, 7, 6, 9, 13, 11)]
    assert fast.serve(calls, passes=2) == len(calls)
    assert verdicts(fast, "x[1]") == ["made"]


def test_what_lies_behind_a_batch_is_viewed_in_any_sizes(compiled: Make) -> None:
    """As where an image model computes its grid by a square root."""

    def of_patches(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        side = int((grid.shape[0] ** 2) ** 0.5)
        return x.reshape(x.shape[0], 2, side, 2, 3).permute(0, 1, 3, 2, 4).reshape(x.shape[0], -1) * 2

    fast = compiled(of_patches, make=lambda size: (torch.randn(size, 4, 6), torch.ones(2, 3)), dynamic=True)
    fast.serve((5, 7, 6, 8, 5, 7))
    assert fast.padded_sizes["x[0]"] is True
