"""Measured costs: what is timed, what is interpolated, and that they decide which plan runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from graphpass.encoder import EncoderGraphKey, costs
from graphpass.encoder.costs import EagerCurve, EncoderCosts, measured_costs
from graphpass.encoder.protocol import EncoderItems, EncoderOutput
from tests.unit.encoder import toy
from tests.unit.encoder.toy import assert_same, made

PAUSE_S = 0.04
"""Of what is slow; everything else of the toy takes a millisecond or two."""


class SlowEagerCall(toy.WithExamples):
    def encoder_eager_forward(self, items: EncoderItems) -> EncoderOutput:
        time.sleep(PAUSE_S)
        return super().encoder_eager_forward(items)


class SlowForward(toy.ToyEncoder):
    """Its forward is slow from Python, which replays do not run. It has no examples: the forward itself is timed."""

    def encoder_cudagraph_forward(self, buffers: Mapping[str, torch.Tensor], key: EncoderGraphKey) -> EncoderOutput:
        time.sleep(PAUSE_S)
        return super().encoder_cudagraph_forward(buffers, key)


class SlowReplay(toy.WithExamples):
    """What a replay needs from the host is part of it."""

    def prepare_encoder_cudagraph_replay_buffers(
        self, items: EncoderItems, key: EncoderGraphKey
    ) -> Mapping[str, torch.Tensor | None]:
        time.sleep(PAUSE_S)
        return super().prepare_encoder_cudagraph_replay_buffers(items, key)


@pytest.mark.parametrize(("kind", "replays"), [(SlowEagerCall, True), (SlowForward, True), (SlowReplay, False)])
def test_the_quicker_of_the_two_runs(kind: type[toy.ToyEncoder], replays: bool) -> None:
    encoder = kind()
    manager = made(encoder, costs="measured")
    items = toy.images([8, 8, 8])
    assert_same(manager.execute(items), toy.one_by_one(encoder, items))
    stats = manager.get_cumulative_stats()
    assert (stats.hits, stats.misses) == ((3, 0) if replays else (0, 3))


def test_one_call_is_joined_where_replays_are_slow() -> None:
    """Three images in one eager call, not in three."""
    encoder = SlowReplay()
    manager = made(encoder, costs="measured")
    encoder.eager_calls.clear()
    manager.execute(toy.images([8, 8, 8]))
    assert encoder.eager_calls == [3]


def keys_of(tokens: range, longest: int) -> list[EncoderGraphKey]:
    return [EncoderGraphKey(count, count, 4, axes=(("longest", longest),)) for count in reversed(tokens)]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, EncoderGraphKey]]:
    """What was timed; each takes what it returns."""
    monkeypatch.setattr(costs, "timed_s", lambda run, device: run())
    return []


def measured(
    groups: Mapping[object, list[EncoderGraphKey]],
    replay_s: Callable[[EncoderGraphKey], float],
    eager_s: Callable[[EncoderGraphKey], float],
    timed: list[tuple[str, EncoderGraphKey]],
) -> EncoderCosts:
    def timing(kind: str, seconds: Callable[[EncoderGraphKey], float]) -> Callable[[EncoderGraphKey], Any]:
        return lambda key: lambda: timed.append((kind, key)) or seconds(key)  # type: ignore[func-returns-value]

    return measured_costs(groups, timing("replay", replay_s), timing("eager", eager_s), torch.device("cpu"))


def test_a_few_sizes_are_timed_and_those_between_interpolated(timed: list[tuple[str, EncoderGraphKey]]) -> None:
    """Each ladder of an axis for itself; eagerly the bound of an axis matters little."""
    groups: dict[object, list[EncoderGraphKey]] = {
        "a": [*keys_of(range(1, 41), 8), *keys_of(range(1, 41), 64)],
        "b": keys_of(range(5, 8), 16),
    }
    found = measured(groups, lambda key: key.tokens + dict(key.axes)["longest"], lambda key: 3.0 * key.tokens, timed)  # type: ignore[operator]
    for keys in groups.values():
        for key in keys:
            assert found.replay[key] == pytest.approx(key.tokens + dict(key.axes)["longest"])  # type: ignore[operator]
    of_a = [(kind, dict(key.axes)["longest"], key.tokens) for kind, key in timed if key in groups["a"]]
    for longest in (8, 64):
        counts = [tokens for kind, bound, tokens in of_a if (kind, bound) == ("replay", longest)]
        assert len(counts) == 12
        assert (min(counts), max(counts)) == (1, 40)
    assert len([1 for kind, *_ in of_a if kind == "eager"]) == 6
    assert [key.tokens for kind, key in timed if kind == "eager" and key in groups["b"]] == [5, 6, 7]
    assert found.eager["a"](np.array([1, 20, 40, 80])) == pytest.approx([3, 60, 120, 240])


def test_noise_does_not_make_a_larger_eager_call_cheaper(timed: list[tuple[str, EncoderGraphKey]]) -> None:
    seconds = {4: 2.0, 8: 1.0, 16: 3.0}
    found = measured(
        {"a": keys_of(range(4, 17, 4), 8)}, lambda key: 1.0, lambda key: seconds.get(key.tokens, 3.0), timed
    )
    at = found.eager["a"](np.arange(1, 40))
    assert (np.diff(at) >= 0).all()


def test_an_eager_call_below_and_above_what_was_measured() -> None:
    curve = EagerCurve((10, 20), (1.0, 3.0))
    assert curve(np.array([0, 1, 10, 15, 20, 40])).tolist() == [1.0, 1.0, 1.0, 2.0, 3.0, 6.0]
