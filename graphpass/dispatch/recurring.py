"""The keys of calls without a dispatcher, by their sizes.

A field whose padding is proved harmless is rounded up in a ladder; all other fields are exact. The first call of a key
runs without a graph as warm-up, the next call captures, later calls replay. No key of a ladder is evicted: above a
maximum number of graphs, further keys run without one.
"""

from __future__ import annotations

import functools
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


@dataclass
class RecurringKey:
    """The state of one key. Traffic with ever new sizes makes many, so one has no name before it gets a graph."""

    sizes: tuple[int, ...]  #: the size of each field
    name_of: Callable[[], BatchDescriptor]  #: makes its name
    is_declared: bool  #: the user declared the sizes of all fields; such keys do not count towards ``max_graphs``
    calls: int = 0  #: number of calls so far
    num_graphs: int = 0  #: one for each set of static inputs
    refusal: Reason | None = None  #: why it gets no graph; None if it may get one
    #: it is for one size that padding could serve, see ``owngraphs``; another bound holds for those
    is_exact: bool = False
    is_checked: bool = False  #: a call that it pads was compared with other padding and with none

    @functools.cached_property
    def descriptor(self) -> BatchDescriptor:
        """Its name in counts and reports."""
        return self.name_of()

    @property
    def is_captured(self) -> bool:
        """Whether it has a graph."""
        return self.num_graphs > 0

    @property
    def counts(self) -> bool:
        """Whether its graphs count towards ``max_graphs``."""
        return not self.is_declared and not self.is_exact


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
        self._keys: dict[tuple[tuple[int, ...], str], RecurringKey] = {}
        self._first_numbers: tuple[tuple[str, int], ...] | None = None  # of the first call that was counted
        self._numbers_vary = False

    def key_of(self, real: tuple[int, ...], *, as_is: bool = False) -> RecurringKey:
        """The key for a call with these sizes, padded where padding is allowed and the graph admits the padded size."""
        if as_is:
            return self._key(real, "as_is")
        key = self._key(self._padded(real))
        if key.calls == 0 and key.refusal is None:
            key.refusal = self._too_large(real)
        return key

    def exact_key(self, real: tuple[int, ...]) -> RecurringKey:
        """The key for exactly these sizes, which are otherwise padded."""
        return self._key(real, "exact")

    def _key(self, sizes: tuple[int, ...], kind: str = "") -> RecurringKey:
        key = self._keys.get((sizes, kind))
        if key is None:
            if len(self._keys) >= _MAX_COUNTED:
                self._keys = {s: k for s, k in self._keys.items() if k.is_captured or k.refusal is not None}
            is_declared = not kind and self._is_declared(sizes)
            name_of = functools.partial(_named, self.fields, self._fixed, sizes, kind)  # keeps no keys alive
            key = self._keys[sizes, kind] = RecurringKey(sizes, name_of, is_declared, is_exact=kind == "exact")
        return key

    def counted(self, key: RecurringKey) -> bool:
        """Count a call of a key without a graph; returns whether the key has had enough calls to be captured."""
        key.calls += 1
        self._first_numbers = self._numbers_of(key) if self._first_numbers is None else self._first_numbers
        self._numbers_vary |= self._numbers_of(key) != self._first_numbers
        needed = CALLS_OF_A_NUMBER if self.numbers(key) else 1
        return key.calls > (0 if key.is_declared and self._at_once else needed)

    def refusal(self, key: RecurringKey) -> Reason | None:
        """Why the key gets no graph; None while it may get one."""
        if key.refusal is None and key.counts and self.num_graphs >= self.max_graphs:
            why = f"max_graphs={self.max_graphs} keys have graphs already" if self.max_graphs else "max_graphs=0"
            return Reason(why, "raise max_graphs, or pass the sizes that recur as capture_sizes: they do not count")
        return key.refusal

    def captured(self, key: RecurringKey, num_graphs: int) -> None:
        """Record how many graphs the key has now; a call that waited for another capture may have added none."""
        if key.counts:  # guard: exact_graphs_uncounted
            self.num_graphs += num_graphs - key.num_graphs  # guard: graphs_counted_once
        key.num_graphs = num_graphs

    def numbers(self, key: RecurringKey) -> tuple[tuple[str, int], ...]:
        """(field, value) of the Python numbers in a key; none as long as all calls have the same."""
        return self._numbers_of(key) if self._numbers_vary else ()

    def _numbers_of(self, key: RecurringKey) -> tuple[tuple[str, int], ...]:
        return tuple((field.name, size) for field, size in zip(self.fields, key.sizes, strict=True) if field.is_number)

    def recount(self, graphs_of: Callable[[BatchDescriptor], int]) -> None:
        """Count graphs again after some were dropped; ``graphs_of`` says how many a key has now."""
        self.num_graphs = 0
        for key in self._keys.values():
            key.num_graphs = graphs_of(key.descriptor)
            self.num_graphs += key.num_graphs if key.counts else 0

    def forget(self) -> None:
        """Reset all keys after all graphs were dropped; they may be captured again."""
        self.num_graphs = 0
        self._keys.clear()

    def ladder_keys(
        self, example: tuple[int, ...], used: Sequence[tuple[tuple[int, ...], bool]] = ()
    ) -> list[RecurringKey]:
        """The declared keys, largest first, then those that were :meth:`used`, first those under padding.

        Fields without declared sizes have the size of the example's key.
        """
        names = dict(zip((field.name for field in self.fields), zip(self.fields, example, strict=True), strict=True))
        rungs = [(size,) if field.ladder is None else field.ladder for field, size in names.values()]
        combinations = [dict(zip(names, sizes, strict=True)) for sizes in itertools.product(*rungs)]
        wanted = {tuple([named[field.name] for field in self.fields]) for named in combinations}
        padded = {self._padded(sizes) for sizes in filter(self._admits, wanted)}
        keys = [self._key(sizes) for sizes in sorted(padded, key=math.prod, reverse=True)]
        in_order = sorted(used, key=lambda key: (key[1], -math.prod(key[0])))
        more = [self._key(sizes, "exact" if exact else "") for sizes, exact in in_order if self._admits(sizes)]
        return [*keys, *(key for key in more if key not in keys)]

    def used(self, calls_of: Callable[[RecurringKey], int]) -> list[tuple[tuple[int, ...], bool]]:
        """(sizes, whether exact) of the undeclared keys that have graphs and served calls."""
        found = [key for (_, kind), key in self._keys.items() if kind != "as_is" and not key.is_declared]
        # guard: saved_keys_served
        return [(key.sizes, key.is_exact) for key in found if key.is_captured and calls_of(key)]

    def named(self, sizes: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
        """(field, size) of the sizes of a call or key, in the order of the fields; fields of one name once."""
        return tuple(dict(zip((field.name for field in self.fields), sizes, strict=True)).items())

    def differs(self, real: Sequence[int]) -> bool:
        """Whether fields with the same name have different sizes in a call."""
        return any(len({real[index] for index in indices}) > 1 for indices in self._padded_groups)

    def padded_sizes(self, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The sizes of the padded fields, and those of the exact ones."""
        pairs = list(zip(self.fields, sizes, strict=True))
        padded = tuple([size for field, size in pairs if field.is_padded])
        return padded, tuple([size for field, size in pairs if not field.is_padded])

    def _padded(self, real: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes, those of each padded field raised to the largest size, up to its step, that the graph admits."""
        padded = real
        for indices in self._padded_groups:
            field, size = self.fields[indices[0]], real[indices[0]]
            for step in range(_step(field, size), size, -1):
                raised = tuple([step if index in indices else other for index, other in enumerate(padded)])
                if self._admits(raised):
                    padded = raised
                    break
        return padded

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


def _named(fields: Sequence[KeyField], fixed: Mapping[str, int], sizes: Sequence[int], kind: str) -> BatchDescriptor:
    named = dict(fixed)
    for number, (field, size) in enumerate(zip(fields, sizes, strict=True)):
        named[field.name if named.get(field.name, size) == size else f"{field.name} {number}"] = size
    num_tokens = named.pop("num_tokens", None)
    if num_tokens is None:
        declared = {field.name: size for field, size in zip(fields, sizes, strict=True) if field.ladder}
        counted = [*{**fixed, **declared}.values()]
        num_tokens = max(1, math.prod(counted or sizes[:1]))
    return BatchDescriptor(num_tokens, extra=(*named.items(), *([(kind, True)] if kind else ())))
