"""Padding that is made, in compiled models: with each option, kind of call and part of the backend that it meets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import nn

import graphpass as gp
from cgpass import extrainputs
from tests.threads import in_threads
from tests.unit.cgpass.attended import Make
from tests.unit.compiled import Compiled, agrees
from tests.unit.saved.stack import SAVES_AOT_EAGER

AHEAD: dict[str, Any] = {
    "dynamic_dims": {"x": {0: "rows", 1: "length"}},
    "capture_sizes": {"rows": [2, 4], "length": [8, 16]},
}
SIZES = [(3, 5), (4, 7), (2, 9), (3, 8), (4, 11), (2, 13), (3, 5), (2, 16), (4, 10), (3, 12)]


def features(size: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    return (torch.randn(*size, 6),)


def of_calls(sizes: Any) -> list[tuple[torch.Tensor, ...]]:
    return [features(size) for size in sizes]


def made(compiled: Make, model: Callable[..., Any], **options: Any) -> Compiled:
    """A model compiled by AOTAutograd for any rows and lengths, with a ladder of both."""
    given = {"dynamic": True, "compiler": "aot_eager", **AHEAD, **options}
    return compiled(model, make=features, **given)


def verdicts(fast: Compiled, *names: str) -> list[Any]:
    (record,) = fast.rt.callables()
    found = {size.field: size.verdict for size in record.sizes}
    return [found.get(name) for name in names]


def mean(x: torch.Tensor) -> torch.Tensor:
    return x.mean(1)


MODELS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[str]]] = {
    "mean": (mean, ["proved", "made"]),
    "last": (lambda x: x[:, -1] * 2, ["proved", "made"]),
    "attention": (lambda x: F.scaled_dot_product_attention(*[x[:, None]] * 3), ["proved", "made"]),
    "merged": (lambda x: x.flatten(0, 1).softmax(1).sum(0), ["made", "made"]),
    "divided": (lambda x: x.cumsum(1) / x.shape[1], ["proved", "made"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_it_is_made_by_a_compiler_with_a_step_of_aotautograd(name: str, compiled: Make) -> None:
    model, expected = MODELS[name]
    fast = made(compiled, model)
    assert fast.serve(of_calls(SIZES), passes=2) == len(SIZES)
    assert verdicts(fast, "rows", "length") == expected
    assert fast.is_padded
    assert [problem for problem in fast.problems if "x[2]" not in problem.what] == []


def test_zeros_are_there_that_are_asked_for(compiled: Make) -> None:
    """For an operator that runs between regions, and gets what a function put into the padding of this call."""

    def model(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        k = gp.zero_padding(x * 2, 2)[:, None]
        return F.scaled_dot_product_attention(x[:, None], k, k, attn_mask=mask[:, None, None])

    def poison(real: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return F.pad(real, (0, 0, 0, shape[1] - real.shape[1], 0, shape[0] - real.shape[0]), value=contents[-1])

    declared = {"padding": {"x": poison, "mask": False}, "dynamic_dims": {}}
    dims = {name: {0: "rows", 1: "length"} for name in ("x", "mask")}
    fast = made(
        compiled, model, **{**declared, "dynamic_dims": dims}, splitting_ops=["aten::scaled_dot_product_attention"]
    )
    contents = [1.0]
    for number in (1.0, float("nan")):
        contents.append(number)
        for size in SIZES:
            x, mask = torch.randn(*size, 6), torch.ones(size, dtype=torch.bool)
            agrees(fast(x, mask), model(x, mask))
    assert fast.is_padded


# -- options -----------------------------------------------------------------------------------------------------------


def bits(model: Callable[..., Any], calls: list[Any], compiled: Make, **options: Any) -> list[torch.Tensor]:
    fast = made(compiled, model, **options)
    found = [fast(*args) for args in calls]
    assert not fast.is_padded
    assert fast.problems == ()
    return found


def test_never_padded_has_the_bits_of_a_run_without_padding(compiled: Make) -> None:
    calls = of_calls(SIZES * 3)
    never = bits(mean, calls, compiled, padding="never")
    plain = torch.compile(mean, backend="aot_eager", dynamic=True)
    assert all(torch.equal(one, plain(*args)) for one, args in zip(never, calls, strict=True))


def test_each_size_is_compared_with_eager(compiled: Make) -> None:
    """The reference of ``compare`` has the insertions, too: at a padded size the traced graph would differ."""
    fast = made(compiled, mean, compare=True)
    fast.serve(of_calls(SIZES), passes=2)
    assert fast.is_padded
    assert fast.problems == ()


@pytest.mark.parametrize(
    ("wanted", "artifacts"),
    [
        ({"compile_ranges": {"length": [(8, 16)]}}, 2),
        ({"compile_sizes": {"rows": [2, 4]}}, 3),
        ({"compile_sizes": {"length": [8, 16]}}, 1),  # what is made of the length of 8 is not what is made of any
    ],
    ids=["range", "other size", "size"],
)
def test_sizes_that_are_compiled_for_themselves(wanted: dict[str, Any], artifacts: int, compiled: Make) -> None:
    fast = made(compiled, mean, **wanted)
    fast.serve(of_calls(SIZES), passes=2)
    assert fast.is_padded
    assert fast.rt.compiled() == artifacts
    is_told = any("other padding would be made" in problem.what for problem in fast.problems)
    assert is_told == (artifacts == 1)


# -- starts ------------------------------------------------------------------------------------------------------------


@SAVES_AOT_EAGER
def test_a_saved_start_is_loaded_and_pads(compiled: Make, tmp_path: Path) -> None:
    calls = of_calls(SIZES)
    saved = made(compiled, mean, warm_start=tmp_path)
    saved.serve(calls, passes=2)
    loaded = made(compiled, mean, warm_start=tmp_path)
    assert loaded.serve(calls, passes=2) == len(calls)
    costs = loaded.rt.report().figures.costs
    assert (loaded.rt.compiled(), costs.loaded) == (0, saved.rt.compiled())
    assert loaded.is_padded


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1) + x[:, -1]


@pytest.mark.parametrize("size", [(4, 16), (3, 5), (4, 13)])
def test_a_ladder_is_captured_ahead_from_any_example(size: tuple[int, int]) -> None:
    """Of an example that is longer than a key its last entry is beyond the key's."""
    model = Mean()
    fast = gp.graphed(model, compiler="aot_eager", progress=False, **AHEAD)
    try:
        fast.capture(*features(size))
        captured = fast.runtime.stats().captured
        for other in SIZES:
            (x,) = features(other)
            agrees(fast(x), model(x))
        assert fast.runtime.stats().captured == captured == 4
        assert [key.padding for key in fast.runtime.report().figures.keys if key.padding]
    finally:
        fast.close()


# -- parts of a model --------------------------------------------------------------------------------------------------


def test_threads_have_their_own_sizes(compiled: Make) -> None:
    fast = made(compiled, lambda x: x.mean(1) + x[:, -1])
    fast.serve(of_calls(SIZES))

    def run(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for at in range(40):
            x = torch.randn(*SIZES[(at * (number + 1)) % len(SIZES)], 6, generator=generator)
            agrees(fast(x), fast.model(x))

    in_threads(run)
    assert fast.is_padded
    assert fast.problems == ()


def test_an_input_that_is_written_to_is_left_as_it_is(compiled: Make) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x.mean(1)

    fast = made(compiled, model)
    for size in SIZES * 2:
        (x,) = features(size)
        agrees(fast(x.clone()), 2 * x.mean(1))
    assert verdicts(fast, "length") == ["unproved"]


def test_a_graph_that_it_does_not_help_is_left_as_it_is(compiled: Make) -> None:
    """The masked sum is proved; nothing makes the median of its rows one of the real rows alone."""

    def model(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x * mask[..., None]).sum(1).median(0).values

    def masked(size: tuple[int, int]) -> tuple[torch.Tensor, ...]:
        return torch.randn(*size, 6), torch.ones(size)

    fast = made(compiled, model, padding={"mask": 0.0}, dynamic_dims={}, capture_sizes=[1, 2, 4, 8, 16])
    fast.make = masked
    fast.serve([masked(size) for size in SIZES], passes=2)
    (record,) = fast.rt.callables()
    assert {size.verdict for size in record.sizes if size.is_padded} == {"proved"}


def test_where_no_padding_is_made_all_calls_have_one_vector(compiled: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never filled: a copy in each call would launch a kernel for what nobody reads."""
    vectors, of = list[torch.Tensor](), extrainputs.RealSizes.of

    def watched(sizes: extrainputs.RealSizes, args: Any) -> torch.Tensor:
        vectors.append(of(sizes, args))
        return vectors[-1]

    monkeypatch.setattr(extrainputs.RealSizes, "of", watched)
    for model, is_one in ((torch.abs, True), (mean, False)):
        vectors.clear()
        made(compiled, model).serve(of_calls(SIZES), passes=2)
        assert (len(set(map(id, vectors))) == 1) is is_one


def test_real_sizes_of_a_users_capture_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture records how they are made; memory that only its replay fills serves no other call."""
    symbol = sympy.Symbol("s0")
    sizes = extrainputs.RealSizes({symbol: (0, 0)}, torch.device("cpu"))
    x = torch.zeros(3)
    monkeypatch.setattr(extrainputs.memory, "is_capturing_stream", lambda device: True)
    captured = sizes.of([x])
    monkeypatch.undo()
    first, second = sizes.of([x]), sizes.of([x])
    assert captured.tolist() == first.tolist() == [3]
    assert first is second is not captured


def test_calls_that_make_the_vector_at_once_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph has recorded its address, so it cannot be exchanged by a thread that was late."""
    sizes, x, cat = extrainputs.RealSizes({sympy.Symbol("s0"): (0, 0)}, torch.device("cpu")), torch.zeros(3), torch.cat
    sizes.is_read, others = False, list[torch.Tensor]()

    def meanwhile(parts: list[torch.Tensor]) -> torch.Tensor:
        monkeypatch.undo()
        others.append(sizes.of([x]))
        return cat(parts)

    monkeypatch.setattr(torch, "cat", meanwhile)
    assert sizes.of([x]) is sizes.of([x]) is others[0]


# -- calls under a context ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_under_a_context_all_entries_are_real(mode: str, rt: gp.GraphRuntime) -> None:
    """The caller pads, and says so by a mask that is no prefix; what it passes is what counts."""
    fast = Compiled(rt, mean, make=features, key=lambda size: gp.BatchDescriptor(size[0]), compiler="aot_eager")
    fast.check(mode, sizes=[(4, 8)], capture=True)
    fast.check(mode, sizes=[(4, 8)])
    (record,) = rt.callables()
    assert record.sizes == ()
    assert fast.uses("captured", "replayed") == {(1, 2)}


@pytest.mark.parametrize(
    "function",
    [
        lambda u, at: F.embedding(at, u),
        lambda u, at: u.index_select(0, at),
        lambda u, at: u.gather(0, at[:, None]),
        lambda u, at: u.index_add(0, at, torch.ones_like(u[:3])),
        lambda u, at: u.index_copy(0, at, torch.ones_like(u[:3])),
    ],
    ids=["embedding", "index_select", "gather", "index_add", "index_copy"],
)
def test_a_negative_index_is_refused_as_torch_refuses_it(function: Callable[..., Any]) -> None:
    fast: Any = torch.compile(function, backend="cgpass", dynamic=True, options={"compiler": "aot_eager"})
    rows, right, wrong = torch.randn(9, 4), torch.tensor([1, 8, 0]), torch.tensor([1, -1, 0])
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(fast(rows, right), function(rows, right))
        with pytest.raises((IndexError, RuntimeError)):
            fast(rows, wrong)
