"""From the sizes of a request's items to batches, each with the key that it replays."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from graphpass.encoder.costs import EncoderCosts
from graphpass.encoder.cuts import Rung, RungTable
from graphpass.encoder.packing import PlannedBatch, plan_cheaply, plan_eagerly, plan_greedily
from graphpass.encoder.protocol import Axes, EncoderCudaGraphConfig, EncoderGraphKey, EncoderItemSpec
from graphpass.errors import EncoderConfigError

__all__ = ["BatchPlanner", "EncoderBatch", "checked_specs", "group_of", "grouped"]

_KEPT_PLANS, _KEPT_ITEMS = 256, 256


@dataclass(frozen=True, slots=True)
class EncoderBatch:
    """Items that run together.

    Attributes:
        items: their indices in the request.
        key: what they replay; None: they run eagerly.
    """

    items: tuple[int, ...]
    key: EncoderGraphKey | None


class BatchPlanner:
    """Packs items into the keys that were captured, within every limit that they have.

    Args:
        config: names the axes.
        keys: what was captured; without any, everything runs eagerly, in as few calls as ``max_eager_tokens`` allows.
        costs: None packs greedily.
        max_eager_tokens: of one eager call over several items.
    """

    def __init__(
        self,
        config: EncoderCudaGraphConfig,
        keys: Sequence[EncoderGraphKey],
        costs: EncoderCosts | None,
        max_eager_tokens: int,
    ) -> None:
        self._config, self._costs, self._max_eager_tokens = config, costs, max_eager_tokens
        # Of what rounds up an item has as its value the place of the smallest bound that holds it.
        self._bounds = [
            (place, cast("tuple[int, ...]", axis.values)) for place, axis in enumerate(config.axes) if axis.rounds_up
        ]
        self._keys = grouped(config, keys)
        self._tables = {group: RungTable([self._rung(key) for key in found]) for group, found in self._keys.items()}
        # Requests repeat themselves, and hosts are slow: the same sizes are planned once.
        self._plan = functools.lru_cache(_KEPT_PLANS)(self._planned)

    def plan(self, specs: Sequence[EncoderItemSpec]) -> tuple[EncoderBatch, ...]:
        """A batch for each item; batches of items that can never share a graph are planned apart."""
        return (self._plan if len(specs) <= _KEPT_ITEMS else self._planned)(tuple(specs))

    def _planned(self, specs: Sequence[EncoderItemSpec]) -> tuple[EncoderBatch, ...]:
        groups: dict[Hashable, list[int]] = {}
        for item, group in enumerate(self._groups_of(specs)):
            groups.setdefault(group, []).append(item)
        batches = []
        for group, items in groups.items():
            keys = (*self._keys.get(group, ()), None)  # what replays nothing is the last one
            for batch in self._plan_group(group, [specs[item] for item in items]):
                key = keys[-1 if batch.rung is None else batch.rung]
                batches.append(EncoderBatch(tuple(map(items.__getitem__, batch.items)), key))
        return tuple(batches)

    def _plan_group(self, group: Hashable, specs: Sequence[EncoderItemSpec]) -> list[PlannedBatch]:
        sizes = [[s.output_tokens for s in specs], [s.input_size for s in specs], [1] * len(specs)]
        if self._config.max_frames is not None:
            sizes.append([spec.frames for spec in specs])
        table = np.array(sizes, dtype=np.int64)
        if group not in self._tables:
            return plan_eagerly(table[0], self._max_eager_tokens)
        peaks = np.empty((len(self._bounds), len(specs)), dtype=np.int64)
        for row, (place, bounds) in zip(peaks, self._bounds, strict=True):
            row[:] = np.searchsorted(bounds, [cast("int", spec.axes[place][1]) for spec in specs])
        if self._costs is None:
            return plan_greedily(table, self._tables[group], peaks)
        return plan_cheaply(table, self._tables[group], self._costs.eager[group], self._max_eager_tokens, peaks)

    def _groups_of(self, specs: Sequence[EncoderItemSpec]) -> list[Hashable]:
        """As :func:`group_of` says, which takes longer where many items are of one group."""
        if len(self._bounds) == len(self._config.axes):
            return [(spec.path,) for spec in specs]
        return [group_of(self._config, spec.path, spec.axes) for spec in specs]

    def _rung(self, key: EncoderGraphKey) -> Rung:
        limits: tuple[int, ...] = (key.tokens, key.patches, key.items)
        if key.frames is not None:
            limits = (*limits, key.frames)
        bounds = tuple(bisect_left(bounds, cast("int", key.axes[place][1])) for place, bounds in self._bounds)
        return Rung(limits, 0.0 if self._costs is None else self._costs.replay[key], bounds)


def group_of(config: EncoderCudaGraphConfig, path: str, axes: Axes) -> Hashable:
    """What items have to have in common to share a replay: the path, and the axes that do not round up."""
    return (path, *(value for axis, (_, value) in zip(config.axes, axes, strict=True) if not axis.rounds_up))


def grouped(config: EncoderCudaGraphConfig, keys: Sequence[EncoderGraphKey]) -> dict[Hashable, list[EncoderGraphKey]]:
    """The keys by group, in their order."""
    groups: dict[Hashable, list[EncoderGraphKey]] = {}
    for key in keys:
        groups.setdefault(group_of(config, key.path, key.axes), []).append(key)
    return groups


def checked_specs(specs: Sequence[EncoderItemSpec], config: EncoderCudaGraphConfig) -> list[EncoderItemSpec]:
    """``specs`` if they keep to the configuration.

    Raises:
        EncoderConfigError: a size is negative, a path is unknown, or an axis has no value, or one of another kind.
    """
    names, specs = tuple(axis.name for axis in config.axes), list(specs)
    for item, spec in enumerate(specs):
        if min(spec.input_size, spec.output_tokens, spec.frames) < 0:
            raise _wrong(item, spec, "sizes of at least 0")
        if spec.path not in config.paths:
            raise _wrong(item, spec, f"a path among {list(config.paths)}")
        if tuple(name for name, _ in spec.axes) != names:
            raise _wrong(item, spec, f"values of the axes {list(names)}")
        if any(axis.rounds_up and type(v) is not int for axis, (_, v) in zip(config.axes, spec.axes, strict=True)):
            raise _wrong(item, spec, "integers on axes that round up")
    return specs


def _wrong(item: int, spec: EncoderItemSpec, expected: str) -> EncoderConfigError:
    return EncoderConfigError(
        f"get_encoder_cudagraph_item_specs returned for item {item} what the configuration has not",
        expected=expected,
        found=str(spec),
        remedy="correct the item specs, or list it in the configuration",
    )
