"""Measured costs: what is timed, what is interpolated, and that they decide which plan runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from graphpass.encoder import EncoderGraphKey
from graphpass.encoder.costs import EncoderCosts, ItemCosts, Load, TimedExample, eager_curve, measured_costs
from graphpass.encoder.protocol import EncoderItems, EncoderOutput
from graphpass.serving import traffic
from tests.unit.encoder import toy
from tests.unit.encoder.toy import BUDGETS, assert_right, assert_same, made


class Clock:
    """A clock that only pauses move, and each look at it by a millisecond: a busy machine changes nothing."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        self.now_s += 1e-3
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


CLOCK = Clock()


@pytest.fixture
def by_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "time", CLOCK)


@pytest.mark.usefixtures("by_clock")
def test_without_examples_the_forward_itself_is_timed() -> None:
    """It is slow, and replays do not run it."""

    def late(call: Callable[..., Any], *given: Any) -> Any:
        CLOCK.sleep(0.04)
        return call(*given)

    encoder = toy.changed(toy.ToyEncoder(), "encoder_cudagraph_forward", late)
    manager = made(encoder, costs="measured")
    assert_right(manager, encoder, [8, 8, 8])
    assert manager.get_cumulative_stats().hits == 3


def keys_of(tokens: range, longest: int) -> list[EncoderGraphKey]:
    return [EncoderGraphKey(count, count, 4, axes=(("longest", longest),)) for count in reversed(tokens)]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, EncoderGraphKey]]:
    """What was timed; each takes what it returns."""
    monkeypatch.setattr("graphpass.encoder.costs.timed_s", lambda run, device, enough_s: run())
    return []


def measured(
    groups: Mapping[object, list[EncoderGraphKey]],
    replay_s: Callable[[EncoderGraphKey], float],
    eager_s: Callable[[EncoderGraphKey], float],
    timed: list[tuple[str, EncoderGraphKey]],
) -> EncoderCosts:
    """Costs by keys alone: no encoder of other items."""

    def example(key: EncoderGraphKey, num_items: int | None) -> TimedExample:
        def timing(kind: str, seconds: float) -> Callable[[], Any]:
            return lambda: timed.append((kind, key)) or seconds  # type: ignore[func-returns-value]

        return Load(key.tokens, 1, 0.0), timing("replay", replay_s(key)), timing("eager", eager_s(key))

    return measured_costs(groups, example, torch.device("cpu"))


def test_a_few_sizes_are_timed_and_those_between_interpolated(timed: list[tuple[str, EncoderGraphKey]]) -> None:
    """Each ladder of an axis for itself, eager calls at the keys of one: there the bound of an axis matters little."""
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
    eagerly = [tokens for kind, _, tokens in of_a if kind == "eager"]
    replayed = [tokens for kind, bound, tokens in of_a if (kind, bound) == ("replay", 8)]
    assert len(eagerly) == 6
    assert set(eagerly) < set(replayed)
    assert (min(eagerly), max(eagerly)) == (1, 40)
    assert [key.tokens for kind, key in timed if kind == "eager" and key in groups["b"]] == [5, 6, 7]
    assert found.eager["a"](np.array([1, 20, 40, 80])) == pytest.approx([3, 60, 120, 240])


def test_an_eager_call_below_and_above_what_was_measured() -> None:
    curve = eager_curve((10, 20), (1.0, 3.0))
    assert curve(np.array([0, 1, 10, 15, 20, 40])).tolist() == [1.0, 1.0, 1.0, 2.0, 3.0, 6.0]


# -- what items add ---------------------------------------------------------------------------------------------------


def loads(key: EncoderGraphKey, num_items: int | None) -> Load:
    """Items of four tokens, or that many of equal size; a patch for each token."""
    count = num_items or max(1, key.tokens // 4)
    return Load(key.tokens, count, key.tokens**2 / count)


@pytest.mark.usefixtures("timed")
@pytest.mark.parametrize(
    ("of_replay", "of_eager"),
    [((0.0, 0.0), (0.5, 0.01)), ((0.25, 0.02), (0.5, 0.01)), ((0.0, 0.01), (0.0, 0.01)), ((0.1, 0.0), (0.0, 0.03))],
)
def test_what_items_add_is_found(of_replay: tuple[float, float], of_eager: tuple[float, float]) -> None:
    """Exactly, from seconds that are what the model says: a size, a constant an item, and squares of patches."""
    keys = [EncoderGraphKey(tokens, tokens, 8) for tokens in range(64, 3, -4)]

    def example(key: EncoderGraphKey, num_items: int | None) -> TimedExample:
        load = loads(key, num_items)
        replay, eager = (ItemCosts(*found).of_call(load) for found in (of_replay, of_eager))
        return load, lambda: 3.0 + key.tokens + replay, lambda: 1.0 + 2.0 * key.tokens + eager

    found = measured_costs({"a": keys}, example, torch.device("cpu"))
    surcharge = found.surcharges["a"]
    assert (surcharge.each_s, surcharge.square_s) == pytest.approx(
        (of_eager[0] - of_replay[0], of_eager[1] - of_replay[1]), abs=1e-9
    )
    assert list(found.replay.values()) == pytest.approx([3.0 + key.tokens for key in found.replay])
    assert found.eager["a"](np.array([4, 30, 64])) == pytest.approx([9, 61, 129])
    assert surcharge(np.array([6, 6]), np.array([1, 3])) == pytest.approx(
        [surcharge.each_s + squares * surcharge.square_s for squares in (36, 12)]
    )


class Timed(toy.WithExamples):
    """A replay takes a constant more than an eager call, but less for large images."""

    def prepare_encoder_cudagraph_replay_buffers(
        self, items: EncoderItems, key: EncoderGraphKey
    ) -> Mapping[str, torch.Tensor | None]:
        CLOCK.sleep(replay_s(key.tokens, items["sizes"]))
        return super().prepare_encoder_cudagraph_replay_buffers(items, key)

    def encoder_eager_forward(self, items: EncoderItems) -> EncoderOutput:
        CLOCK.sleep(eager_s(items["sizes"]))
        return super().encoder_eager_forward(items)


def squares(sizes: Sequence[int]) -> float:
    return sum(size**2 for size in sizes)


def replay_s(budget: int, sizes: Sequence[int]) -> float:
    return 6.0 + budget + 0.01 * squares(sizes)


def eager_s(sizes: Sequence[int]) -> float:
    return 4.0 + 1.1 * sum(sizes) / toy.MERGE + 0.02 * squares(sizes) + 0.125 * len(sizes)


def least_s(sizes: Sequence[int]) -> float:
    """The cheapest way to cut the sorted images, tried one by one."""

    def of_batch(batch: Sequence[int]) -> float:
        tokens = sum(batch) // toy.MERGE
        replays = [replay_s(budget, batch) for budget in BUDGETS if tokens <= budget]
        return min([*replays, *([eager_s(batch)] if tokens <= max(BUDGETS) else [])], default=math.inf)

    return toy.least_of_cuts(sorted(sizes), of_batch)


@pytest.mark.usefixtures("by_clock")
@pytest.mark.parametrize(
    ("sizes", "replayed"),
    [
        ([4] * 6, 0),  # 12 tokens: a replay of 16 costs more than the padding is worth
        ([24], 1),  # as many tokens of one image: attention takes longer in an eager call
        ([4] * 8, 8),  # no padding
        ([64], 1),
        ([4, 4, 62], 1),  # the large image replays, the small ones run eagerly
        ([34], 0),  # 17 tokens, padded to 32
        ([2] * 12, 0),
    ],
    ids=str,
)
def test_the_cheaper_call_of_these_very_images_runs(sizes: list[int], replayed: int) -> None:
    """Images that no example had: neither one of all tokens nor many of equal size."""
    encoder = Timed()
    manager = made(encoder, costs="measured")
    items = toy.images(sizes)
    started = CLOCK.now_s
    results = manager.execute(items)
    assert CLOCK.now_s - started == pytest.approx(least_s(sizes))
    assert manager.get_cumulative_stats().hits == replayed
    assert_same(results, toy.one_by_one(encoder, items))
