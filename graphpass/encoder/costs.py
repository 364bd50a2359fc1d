"""What replays and eager calls cost: measured once, after the capture."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from graphpass.encoder.packing import PackingCosts, one_by_one, replay_cost
from graphpass.encoder.protocol import EncoderGraphKey

__all__ = ["EagerCurve", "EncoderCosts", "measured_costs", "spread", "timed_s"]

_log = logging.getLogger("graphpass")
_RUNS = 3
_REPLAYED_SIZES = 12
_EAGER_SIZES = 6
_NEVER_S = 1e6


@dataclass(frozen=True, slots=True)
class EagerCurve:
    """Seconds of an eager call by its output tokens.

    Linear between what was measured, constant below it (launches cost the same however small the batch), and
    proportional above.

    Attributes:
        tokens: ascending.
        seconds: of a call, not descending.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Seconds for each of ``tokens``."""
        between = np.interp(tokens, self.tokens, self.seconds)
        return between * np.maximum(1, tokens / self.tokens[-1])


@dataclass(frozen=True, slots=True)
class EncoderCosts:
    """What running costs, in seconds.

    Attributes:
        replay: of one replay of each key.
        eager: of an eager call, by the items' path and the axes on which they have to be equal.
    """

    replay: Mapping[EncoderGraphKey, float]
    eager: Mapping[object, Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float64]]]

    @classmethod
    def given(cls, costs: PackingCosts, groups: Mapping[object, Sequence[EncoderGraphKey]]) -> EncoderCosts:
        """Costs by budget, for all keys of a budget alike.

        Raises:
            EncoderConfigError: a budget has no cost.
        """
        replay = {key: replay_cost(key.tokens, costs) for keys in groups.values() for key in keys}
        return cls(replay, dict.fromkeys(groups, one_by_one(costs.eager)))


def measured_costs(
    groups: Mapping[object, Sequence[EncoderGraphKey]],
    replay: Callable[[EncoderGraphKey], Callable[[], object]],
    eager_call: Callable[[EncoderGraphKey], Callable[[], object]],
    device: torch.device,
) -> EncoderCosts:
    """Time some keys of each group, as replays and eagerly, and interpolate the others.

    Args:
        groups: the captured keys, by what their items have to have in common.
        replay: makes what is timed for a key: a replay as ``execute`` would do it.
        eager_call: makes an eager call of the same size.
        device: what has to be waited for.
    """
    replay_s: dict[EncoderGraphKey, float] = {}
    eager: dict[object, EagerCurve] = {}
    for group, keys in groups.items():
        by_axes: dict[object, list[EncoderGraphKey]] = {}
        for key in sorted(keys, key=lambda key: key.tokens):
            by_axes.setdefault(key.axes, []).append(key)
        for ladder in by_axes.values():
            timed = spread(ladder, _REPLAYED_SIZES)
            seconds = [timed_s(replay(key), device) for key in timed]
            known = np.interp([key.tokens for key in ladder], [key.tokens for key in timed], seconds)
            replay_s |= zip(ladder, known.tolist(), strict=True)
        # What bounds an axis matters little to an eager call: the ladder that reaches furthest stands for all.
        largest = spread(max(by_axes.values(), key=lambda ladder: ladder[-1].tokens), _EAGER_SIZES)
        seconds = [_seconds_or_never(eager_call, key, device) for key in largest]
        rising = np.maximum.accumulate(seconds).tolist()
        eager[group] = EagerCurve(tuple(key.tokens for key in largest), tuple(rising))
    return EncoderCosts(replay_s, eager)


def _seconds_or_never(
    eager_call: Callable[[EncoderGraphKey], Callable[[], object]], key: EncoderGraphKey, device: torch.device
) -> float:
    """Seconds of an eager call of that size; for one that finds no memory beside the graphs, more than any replay."""
    try:
        return timed_s(eager_call(key), device)
    except torch.OutOfMemoryError as error:
        _log.warning("no memory for an eager call of %s beside the graphs: it is not chosen. %s", key, error)
        return _NEVER_S


def timed_s(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run: the median of a few, after one that is not counted."""
    seconds = []
    for _ in range(1 + _RUNS):
        _wait(device)
        started = time.perf_counter()
        run()
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def spread(keys: Sequence[EncoderGraphKey], most: int) -> list[EncoderGraphKey]:
    """At most ``most`` (at least 2) of ``keys``, evenly spread; the first and the last are among them."""
    if len(keys) <= most:
        return list(keys)
    return [keys[round(index * (len(keys) - 1) / (most - 1))] for index in range(most)]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
