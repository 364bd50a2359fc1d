"""Plans batches from the sizes of a request's items, and selects the key that each batch replays."""

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
    """Items that are encoded together.

    Attributes:
        items: indices of the items in the request.
        key: the key to replay; None: the batch runs eagerly.
    """

    items: tuple[int, ...]
    key: EncoderGraphKey | None


class BatchPlanner:
    """Packs items into batches that respect all limits of the captured keys.

    Args:
        config: the encoder's configuration.
        keys: the captured keys. Without keys all items run eagerly, in as few calls as ``max_eager_tokens`` allows.
        costs: costs of replays and eager calls; None: pack greedily.
        max_eager_tokens: maximum output tokens of an eager call over several items.
    """

    def __init__(
        self,
        config: EncoderCudaGraphConfig,
        keys: Sequence[EncoderGraphKey],
        costs: EncoderCosts | None,
        max_eager_tokens: int,
    ) -> None:
        self._config, self._costs, self._max_eager_tokens = config, costs, max_eager_tokens
        # On an axis that rounds up, the index of a value is that of the smallest bound that is at least the value.
        self._bounds = [
            (place, cast("tuple[int, ...]", axis.values)) for place, axis in enumerate(config.axes) if axis.rounds_up
        ]
        self._keys = grouped(config, keys)
        self._tables = {group: RungTable([self._rung(key) for key in found]) for group, found in self._keys.items()}
        # Requests with the same sizes are frequent, and planning takes host time.
        self._plan = functools.lru_cache(_KEPT_PLANS)(self._planned)

    def plan(self, specs: Sequence[EncoderItemSpec]) -> tuple[EncoderBatch, ...]:
        """Batches that together contain each item once. Groups of items that cannot share a graph are planned apart."""
        return (self._plan if len(specs) <= _KEPT_ITEMS else self._planned)(tuple(specs))

    def _planned(self, specs: Sequence[EncoderItemSpec]) -> tuple[EncoderBatch, ...]:
        groups: dict[Hashable, list[int]] = {}
        for item, group in enumerate(self._groups_of(specs)):
            groups.setdefault(group, []).append(item)
        batches = []
        for group, items in groups.items():
            keys = (*self._keys.get(group, ()), None)  # None: the key of eager batches
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
        surcharge, surcharges = self._costs.surcharges.get(group), None
        if surcharge is not None:
            surcharges = surcharge(table[1], np.array([spec.frames for spec in specs]))
        eager = self._costs.eager[group]
        return plan_cheaply(table, self._tables[group], eager, self._max_eager_tokens, peaks, surcharges)

    def _groups_of(self, specs: Sequence[EncoderItemSpec]) -> list[Hashable]:
        """:func:`group_of` each item, with a fast path if all axes round up."""
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
    """The properties that items need in common to share a replay: path and values of axes that do not round up."""
    return (path, *(value for axis, (_, value) in zip(config.axes, axes, strict=True) if not axis.rounds_up))


def grouped(config: EncoderCudaGraphConfig, keys: Sequence[EncoderGraphKey]) -> dict[Hashable, list[EncoderGraphKey]]:
    """{group: its keys}, in the order of ``keys``."""
    groups: dict[Hashable, list[EncoderGraphKey]] = {}
    for key in keys:
        groups.setdefault(group_of(config, key.path, key.axes), []).append(key)
    return groups


def checked_specs(specs: Sequence[EncoderItemSpec], config: EncoderCudaGraphConfig) -> list[EncoderItemSpec]:
    """Return ``specs`` if they agree with the configuration.

    Raises:
        EncoderConfigError: a size is negative, a path is unknown, the axes differ from the configuration, or the value
            of an axis that rounds up is not an integer.
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
        f"the spec of item {item} from get_encoder_cudagraph_item_specs contradicts the configuration",
        expected=expected,
        found=str(spec),
        remedy="correct the item specs or the configuration",
    )
