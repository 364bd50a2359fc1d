"""Keys for calls without a dispatcher: the key for the sizes of a call, and when the key gets a graph.

A field whose padding is proved harmless is rounded up in a ladder; all other fields are exact. The first call of a key
runs without a graph as warm-up, the next call captures, later calls replay. No graph is evicted: above a maximum number
of graphs, further keys run without one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from graphpass.keys import BatchDescriptor
from graphpass.ledger import Reason

# Bound of the number of remembered keys: traffic with ever new sizes must not fill the memory.
_MAX_COUNTED = 4096
CALLS_OF_A_NUMBER = 8


@dataclass(frozen=True, slots=True)
class KeyField:
    """A size that distinguishes the keys of a graph."""

    #: the user's name for it, or the place where it is read: ``input_ids[0]``. Fields with the same name are the same
    #: size at several places: they are padded together, and only if they are equal.
    name: str
    #: the sizes that the user declared, ascending; None for powers of two and the steps halfway between them
    ladder: tuple[int, ...] | None
    is_padded: bool  #: whether the size is rounded up; other fields are exact
    #: whether it is an int argument that is no tensor's size. A counter never has the same value twice, so keys with
    #: such fields need more calls before they are captured.
    is_number: bool


@dataclass(slots=True)
class RecurringKey:
    """The state of one key."""

    descriptor: BatchDescriptor  #: its name in counts and reports
    sizes: tuple[int, ...]  #: the size of each field
    is_declared: bool  #: the user declared the sizes of all fields; such keys do not count towards ``max_graphs``
    calls: int = 0  #: number of calls so far
    is_captured: bool = False  #: whether it has a graph
    refusal: Reason | None = None  #: why it gets no graph; None if it may get one


def step_above(size: int) -> int:
    """The smallest step of the default ladder (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, ...) that is at least ``size``."""
    power = 1
    while power < size:
        if power >= 2 and power + power // 2 >= size:
            return power + power // 2
        power *= 2
    return power


class RecurringKeys:
    """The keys of one graph."""

    def __init__(
        self,
        fields: Sequence[KeyField],
        *,
        admits: Callable[[tuple[int, ...]], bool],
        max_graphs: int,
        at_once: bool = False,
        fixed: Mapping[str, int] | None = None,
    ) -> None:
        self.fields = tuple(fields)
        self.max_graphs = max_graphs
        self.num_graphs = 0
        self._admits = admits
        self._at_once = at_once
        self._fixed = dict(fixed or {})
        names = dict.fromkeys(field.name for field in fields if field.is_padded)
        self._padded_groups = [[i for i, field in enumerate(fields) if field.name == name] for name in names]
        self._keys: dict[tuple[tuple[int, ...], bool], RecurringKey] = {}
        self._calls_needed = CALLS_OF_A_NUMBER if any(field.is_number for field in fields) else 1

    def key_of(self, real: tuple[int, ...], *, as_is: bool = False) -> RecurringKey:
        """The key for a call with these sizes, padded where padding is allowed and the graph admits the padded size."""
        if as_is:
            return self._key(real, as_is=True)
        key = self._key(self._padded(real))
        if key.calls == 0 and key.refusal is None:
            key.refusal = self._too_large(real)
        return key

    def _key(self, sizes: tuple[int, ...], *, as_is: bool = False) -> RecurringKey:
        key = self._keys.get((sizes, as_is))
        if key is None:
            if len(self._keys) >= _MAX_COUNTED:
                self._keys = {s: k for s, k in self._keys.items() if k.is_captured or k.refusal is not None}
            descriptor = self._descriptor(sizes, as_is)
            key = RecurringKey(descriptor, sizes, not as_is and self._is_declared(sizes))
            self._keys[sizes, as_is] = key
        return key

    def counted(self, key: RecurringKey) -> bool:
        """Count a call of a key without a graph; returns whether the key has had enough calls to be captured."""
        key.calls += 1
        return key.calls > (0 if key.is_declared and self._at_once else self._calls_needed)

    def refusal(self, key: RecurringKey) -> Reason | None:
        """Why the key gets no graph; None while it may get one."""
        if key.refusal is None and not key.is_declared and self.num_graphs >= self.max_graphs:
            why = f"max_graphs={self.max_graphs} keys have graphs already" if self.max_graphs else "max_graphs=0"
            return Reason(why, "raise max_graphs, or pass the sizes that recur as capture_sizes: they do not count")
        return key.refusal

    def captured(self, key: RecurringKey) -> None:
        """Record a new graph of the key; a key has one graph for each set of static inputs."""
        key.is_captured = True
        if not key.is_declared:
            self.num_graphs += 1

    def numbers(self, key: RecurringKey) -> tuple[tuple[str, int], ...]:
        """(field, value) of the Python numbers in a key."""
        return tuple((field.name, size) for field, size in zip(self.fields, key.sizes, strict=True) if field.is_number)

    def recount(self) -> None:
        """Reset the graph counts after some graphs were dropped; the next call of a key captures missing graphs."""
        self.num_graphs = 0
        for key in self._keys.values():
            key.is_captured = False

    def forget(self) -> None:
        """Reset all keys after all graphs were dropped; they may be captured again."""
        self.num_graphs = 0
        self._keys.clear()

    def ladder_keys(self, example: tuple[int, ...]) -> list[RecurringKey]:
        """The declared keys, largest first; fields without declared sizes have the size of the example's key."""
        names = dict(zip((field.name for field in self.fields), zip(self.fields, example, strict=True), strict=True))
        rungs = [(size,) if field.ladder is None else field.ladder for field, size in names.values()]
        combinations = [dict(zip(names, sizes, strict=True)) for sizes in itertools.product(*rungs)]
        wanted = {tuple([named[field.name] for field in self.fields]) for named in combinations}
        padded = {self._padded(sizes) for sizes in filter(self._admits, wanted)}
        return [self._key(sizes) for sizes in sorted(padded, key=math.prod, reverse=True)]

    def named(self, key: RecurringKey) -> tuple[tuple[str, int], ...]:
        """(field, size) of a key, in the order of the fields; fields of one name once."""
        return tuple(dict(zip((field.name for field in self.fields), key.sizes, strict=True)).items())

    def differs(self, real: Sequence[int]) -> bool:
        """Whether fields with the same name have different sizes in a call."""
        return any(len({real[index] for index in indices}) > 1 for indices in self._padded_groups)

    def _descriptor(self, sizes: Sequence[int], as_is: bool) -> BatchDescriptor:
        named = dict(self._fixed)
        for number, (field, size) in enumerate(zip(self.fields, sizes, strict=True)):
            named[field.name if named.get(field.name, size) == size else f"{field.name} {number}"] = size
        num_tokens = named.pop("num_tokens", None)
        if num_tokens is None:
            declared = {field.name: size for field, size in zip(self.fields, sizes, strict=True) if field.ladder}
            counted = [*{**self._fixed, **declared}.values()]
            num_tokens = max(1, math.prod(counted or sizes[:1]))
        return BatchDescriptor(num_tokens, extra=(*named.items(), *([("as_is", True)] if as_is else ())))

    def _padded(self, real: tuple[int, ...]) -> tuple[int, ...]:
        padded = real
        for indices in self._padded_groups:
            padded = self._largest_admitted(padded, indices)
        return padded

    def _largest_admitted(self, sizes: tuple[int, ...], indices: Sequence[int]) -> tuple[int, ...]:
        """``sizes`` with the fields at ``indices`` raised to the largest size, up to their step, that is admitted."""
        real = sizes[indices[0]]
        for size in range(_step(self.fields[indices[0]], real), real, -1):
            padded = tuple([size if index in indices else other for index, other in enumerate(sizes)])
            if self._admits(padded):
                return padded
        return sizes

    def _is_declared(self, sizes: Sequence[int]) -> bool:
        declared = [(field.ladder, size) for field, size in zip(self.fields, sizes, strict=True) if field.ladder]
        return bool(declared or self._fixed) and all(size in ladder for ladder, size in declared)

    def _too_large(self, real: Sequence[int]) -> Reason | None:
        for field, size in zip(self.fields, real, strict=True):
            if field.ladder is not None and field.is_padded and size > field.ladder[-1]:
                why = f"{field.name} is above the largest capture size {field.ladder[-1]}"
                return Reason(why, "add a size that holds it to capture_sizes", sizes=((field.name, size),))
        return None


def _step(field: KeyField, size: int) -> int:
    if field.ladder is None:
        return step_above(size)
    return next((step for step in field.ladder if step >= size), size)
