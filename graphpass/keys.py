"""Batch descriptors: the padded shape that names one captured graph."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, fields


@dataclass(frozen=True, slots=True, eq=False)
class BatchDescriptor:
    """The padded shape that names one captured graph.

    Descriptors are dictionary keys on the hot path, so the constructor computes the hash once.
    """

    num_tokens: int  #: padded token count
    num_reqs: int | None = None  #: padded request count; None if the graph serves any count (PIECEWISE keys)
    uniform: bool = False  #: every request has the same query length
    has_lora: bool = False  #: some request uses an adapter
    num_active_loras: int = 0  #: number of active adapters for which the graph was captured
    #: pairs (name, value) for other fixed values of the graph, such as a sequence length; their order counts
    extra: tuple[tuple[str, Hashable], ...] = ()
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self._fields()))

    def _fields(self) -> tuple[Hashable, ...]:
        return (self.num_tokens, self.num_reqs, self.uniform, self.has_lora, self.num_active_loras, self.extra)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, BatchDescriptor):
            return NotImplemented
        return self._hash == other._hash and self._fields() == other._fields()

    def __reduce__(self) -> tuple[object, ...]:
        # Hashes of strings differ between processes: unpickling must compute the hash again.
        return (BatchDescriptor, self._fields())

    def __str__(self) -> str:
        """Short text for reports: only the fields that differ from their defaults."""
        shown = [f"{self.num_tokens} tokens"]
        shown += [
            f"{f.name}={getattr(self, f.name)}"
            for f in fields(self)
            if f.init and f.name not in ("num_tokens", "extra") and getattr(self, f.name) != f.default
        ]
        shown += [f"{name}={value}" for name, value in self.extra]
        return " ".join(shown)
