"""Costs of replays and eager calls, measured once after the capture."""

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
    """Duration of an eager call as a function of its output tokens.

    It is linear between measured sizes, constant below the smallest (the cost of launches does not depend on the size),
    and proportional above the largest.

    Attributes:
        tokens: measured sizes in output tokens, ascending.
        seconds: duration at each size, not descending.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Seconds of a call with each of ``tokens``."""
        between = np.interp(tokens, self.tokens, self.seconds)
        return between * np.maximum(1, tokens / self.tokens[-1])


@dataclass(frozen=True, slots=True)
class EncoderCosts:
    """Costs of replays and eager calls, in seconds.

    Attributes:
        replay: {key: cost of one replay}.
        eager: {group of :func:`graphpass.encoder.planner.group_of`: function from output tokens to costs}.
    """

    replay: Mapping[EncoderGraphKey, float]
    eager: Mapping[object, Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float64]]]

    @classmethod
    def of_user(cls, costs: PackingCosts, groups: Mapping[object, Sequence[EncoderGraphKey]]) -> EncoderCosts:
        """The user's costs, which are equal for all keys of a budget.

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
    """Measure replays and eager calls of some keys of each group, and interpolate the costs of the others.

    Args:
        groups: {group: its captured keys}.
        replay: ``replay(key)`` returns a function that replays ``key`` as ``execute`` does.
        eager_call: ``eager_call(key)`` returns a function that runs an eager call of the same size.
        device: device to synchronize with.
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
        # An eager call does not depend on bounds of axes: only the ladder with the largest budget is measured.
        largest = spread(max(by_axes.values(), key=lambda ladder: ladder[-1].tokens), _EAGER_SIZES)
        seconds = [_seconds_or_never(eager_call, key, device) for key in largest]
        rising = np.maximum.accumulate(seconds).tolist()
        eager[group] = EagerCurve(tuple(key.tokens for key in largest), tuple(rising))
    return EncoderCosts(replay_s, eager)


def _seconds_or_never(
    eager_call: Callable[[EncoderGraphKey], Callable[[], object]], key: EncoderGraphKey, device: torch.device
) -> float:
    """Seconds of an eager call of that size; if it runs out of memory, a cost higher than that of any replay."""
    try:
        return timed_s(eager_call(key), device)
    except torch.OutOfMemoryError as error:
        _log.warning("no memory for an eager call of %s beside the graphs: it is not chosen. %s", key, error)
        return _NEVER_S


def timed_s(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run: the median of three runs after a warm-up."""
    seconds = []
    for _ in range(1 + _RUNS):
        _wait(device)
        started = time.perf_counter()
        run()
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def spread(keys: Sequence[EncoderGraphKey], most: int) -> list[EncoderGraphKey]:
    """At most ``most`` (at least 2) of ``keys``, evenly spaced, including the first and the last."""
    if len(keys) <= most:
        return list(keys)
    return [keys[round(index * (len(keys) - 1) / (most - 1))] for index in range(most)]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
