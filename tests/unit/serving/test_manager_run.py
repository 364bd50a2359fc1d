"""Any batch through a manager: right, over which graph, past Dynamo, and in whose memory its results lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from graphpass import CUDAGraphMode, DispatchReason
from graphpass.errors import ShapeError
from tests.unit.models import module
from tests.unit.serving.managed import (
    EVENTS,
    LARGEST,
    MODES,
    NONE,
    PIECEWISE,
    SIZES,
    WIDTH,
    Attends,
    Requests,
    Rows,
    SlotBuilder,
    assert_right,
    captured,
    hits,
    refused,
    replays,
    rows,
    run,
    sum_of_rows,
)


def expected_mode(mode: str, num_tokens: int, uniform: bool) -> CUDAGraphMode:
    parsed = CUDAGraphMode.parse(mode)
    if num_tokens == 0 or num_tokens > SIZES[-1]:
        return NONE
    return parsed.decode_mode() if uniform else parsed.mixed_mode()


@pytest.mark.parametrize(
    ("mode", "compiler"), [*((mode, "eager") for mode in MODES), ("FULL", "aot_eager"), ("PIECEWISE", "aot_eager")]
)
def test_every_batch_of_every_size_is_right_and_replays(mode: str, compiler: str) -> None:
    model = Rows().eval()
    manager = captured(model, mode, compiler=compiler)
    expected: dict[tuple[CUDAGraphMode, int], int] = {}
    for uniform in (False, True):
        for num_tokens in range(LARGEST + 1):
            x = rows(num_tokens)
            before, of_keys = replays(manager), hits(manager)
            torch.testing.assert_close(run(manager, x, uniform_decode=uniform), model(x).detach())
            level = expected_mode(mode, num_tokens, uniform)
            assert replays(manager) - before == (level is not NONE), (num_tokens, uniform)
            if level is not NONE:
                key = (level, next(size for size in SIZES if size >= num_tokens))
                expected[key] = expected.get(key, 0) + 1
            else:
                assert hits(manager) == of_keys
    assert hits(manager) == expected
    stats = manager.stats()
    assert sum(stats.fallbacks.values()) + stats.replays == 2 * (LARGEST + 1)
    assert stats.fallbacks[DispatchReason.EMPTY] == 2
    with pytest.raises(ShapeError, match="does not fit the buffers") as raised:
        run(manager, rows(LARGEST + 1))
    assert f"0 to {LARGEST}" in raised.value.expected
    assert f"{LARGEST + 1}" in raised.value.found
    assert_right(manager)


def test_a_step_copies_nothing_inside_of_the_graph() -> None:
    manager = captured(Rows().eval())
    for num_tokens in range(1, 9):
        run(manager, rows(num_tokens))
    assert {counts.copied for counts in manager.runtime.counts().values()} == {0}
    assert {counts.static_sets for counts in manager.runtime.counts().values()} == {1}


def test_inputs_that_require_grad_leave_the_buffers_as_they_are() -> None:
    """Embeddings, made by a layer outside of the manager."""
    model = Rows().eval()
    embeds = nn.Embedding(5, WIDTH)
    manager = captured(model)
    for num_tokens in (3, 5, 9):
        x = embeds(torch.arange(num_tokens) % 5)
        torch.testing.assert_close(run(manager, x), model(x).detach())
        assert not manager.buffers["x"].requires_grad
    assert_right(manager, [4, 9, 8])


# -- past Dynamo


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_a_step_enters_neither_dynamo_nor_the_model(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Dynamo is told to run everything eagerly, a call of the compiled model would run its forward."""
    model, ran, forward = Attends().eval(), list[int](), Attends.forward
    manager, requests = captured(model, mode, attention=SlotBuilder()), Requests(model)
    monkeypatch.setattr(Attends, "forward", lambda *args, **kwargs: ran.append(1) or forward(*args, **kwargs))
    with torch.compiler.set_stance("force_eager"):
        for uniform in (False, True):
            EVENTS.clear()
            before = replays(manager)
            requests.agree(manager, [5, 1, 7], uniform_decode=uniform)
            assert replays(manager) > before
            assert ("op" in EVENTS) == (expected_mode(mode, 3, uniform) is PIECEWISE)
        assert not ran
        run(manager, rows(9), attention=[9] * 9)
    assert ran, "a batch without a graph does"


# What a manager returns, in whose memory, and what becomes of what the model writes.


class Pair(NamedTuple):
    hidden: torch.Tensor
    pooled: torch.Tensor


@dataclass
class Output:
    last_hidden_state: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...]


torch.export.register_dataclass(Output)

RESULTS: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "a tuple of one": lambda x: (x + 1,),
    "a nested dict": lambda x: {"hidden": x + 1, "auxiliary": (x * 2, {"third": [x * 3]})},
    "a named tuple": lambda x: Pair(x + 1, x.sum(-1)),
    "a dataclass": lambda x: Output(x + 1, (x, x * 2)),
    "one tensor twice": lambda x: ((y := x + 1), y),
    "a view of another": lambda x: ((y := x + 1), y[:, :2]),
    "an input among them": lambda x: (x + 1, x),
    "a view of an input": lambda x: x[:, 1:3],
    "a number": lambda x: (x + 1, 3.5, True),
}


def equal_results(found: Any, expected: Any) -> None:
    if dataclasses.is_dataclass(expected):
        assert type(found) is type(expected)
        found, expected = vars(found), vars(expected)
    assert type(found) is type(expected)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, "FULL") for name in RESULTS), ("a nested dict", "PIECEWISE"), ("an input among them", "PIECEWISE")],
)
def test_results_of_every_structure(name: str, mode: str) -> None:
    function = RESULTS[name]
    manager = captured(function, mode, (8,))
    for num_tokens in (3, 8, 1, 9):
        x = rows(num_tokens)
        equal_results(run(manager, x), function(x.clone()))
    assert manager.stats().replays == 3


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_parameters_and_what_is_never_padded_are_returned_whole(mode: str) -> None:
    def returns(self: Any, x: torch.Tensor) -> Any:
        return {"hidden": x + 1, "weight": self.weight, "scale": self.weight * 2}

    model: Any = module(returns, weight=nn.Parameter(torch.arange(3.0)))
    manager = captured(model, mode)
    for num_tokens in (3, 8, 9):
        x = rows(num_tokens)
        torch.testing.assert_close(run(manager, x), {k: v.detach() for k, v in model(x).items()}, check_stride=False)
    with torch.no_grad():
        model.weight.add_(1)
    torch.testing.assert_close(run(manager, rows(3))["weight"], model.weight.detach())
    torch.testing.assert_close(run(manager, rows(3))["scale"], model.weight.detach() * 2)


@pytest.mark.parametrize("size", [lambda x: x.shape[0], lambda x: x.shape[0] * 2, lambda x: 8], ids=["", "twice", "8"])
def test_a_number_that_may_be_a_padded_size_is_refused(size: Callable[[torch.Tensor], int]) -> None:
    refused("a number that comes from the padded size", lambda x: (x * 2, size(x)), error=ShapeError)


def test_a_result_that_nothing_says_how_to_cut_is_refused_by_name() -> None:
    error = refused("output 0", lambda x: x.reshape(-1), error=ShapeError)
    assert "separate dimension" in error.remedy


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_results_of_all_sizes_lie_in_the_same_buffers(mode: str) -> None:
    manager = captured(lambda x: {"hidden": x + 1, "other": (x * 2, x[:, 0])}, mode)
    addresses = set()
    for num_tokens in (1, 8, 3, 10, 9, 4):
        for uniform in (False, True):
            got = run(manager, rows(num_tokens), uniform_decode=uniform)
            addresses.add((got["hidden"].data_ptr(), *(tensor.data_ptr() for tensor in got["other"])))
    assert len(addresses) == 1
    (address,) = addresses
    assert len(set(address)) == 3
    assert manager.stats().buffer_bytes >= LARGEST * (3 * WIDTH + 1) * 4


# -- what the model writes


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_what_the_model_writes_to_padding_is_padding_again_in_the_next_step(mode: str) -> None:
    """Ids that go up in every step would leave the table."""

    def model(x: torch.Tensor) -> Any:
        rest = sum_of_rows(x)
        x.add_(1)
        return x * 2, rest

    manager = captured(model, mode)
    for _ in range(3):
        _, total = run(manager, torch.ones(3, WIDTH))
        torch.testing.assert_close(total, torch.full((WIDTH,), 3.0))
