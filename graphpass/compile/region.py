"""A compiled region: one callable that picks, call by call, an artifact which was compiled for such a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from graphpass import compat

__all__ = ["CompiledRegion", "SizedArtifact", "WrittenInputs"]


@dataclass(frozen=True, slots=True)
class WrittenInputs:
    """The inputs of a region that writes to some of them, for a compiler that functionalizes the writes.

    Such a compiler takes apart what overlaps, by the offsets it saw; at other offsets, or where nothing overlapped when
    the region was compiled, its artifact is wrong without a word. So artifacts serve inputs that do not overlap, and
    all others run as they were traced.

    Attributes:
        tensors: positions of the tensor inputs.
        written: positions of the inputs that are written to.
    """

    tensors: tuple[int, ...]
    written: frozenset[int]

    @classmethod
    def of(cls, examples: Sequence[Any], written: Sequence[int]) -> WrittenInputs | None:
        """Those of a region with inputs like ``examples``; None for one that writes to no input."""
        tensors = tuple(p for p, value in enumerate(examples) if isinstance(value, torch.Tensor))
        return cls(tensors, frozenset(written)) if written else None

    def overlap(self, args: Sequence[Any]) -> bool:
        """Whether something written lies in a storage where inputs overlap."""
        groups: dict[int, list[int]] = {}
        for position in self.tensors:
            groups.setdefault(compat.storage_id(args[position]) or -position, []).append(position)
        return any(
            len(group) > 1
            and not self.written.isdisjoint(group)
            and compat.any_overlap([args[position] for position in group])
            for group in groups.values()
        )


@dataclass(frozen=True, slots=True, eq=False)
class SizedArtifact:
    """An artifact for a single size or a range of sizes of one symbol.

    Attributes:
        lowest: the least size that it serves.
        highest: the greatest.
        function: the artifact.
        symbol: what its guards call the size.
        guards: what compiling it assumed of the size besides the range.
    """

    lowest: int
    highest: int
    function: Callable[..., Any]
    symbol: sympy.Symbol
    guards: tuple[sympy.Basic, ...]

    def serves(self, size: int) -> bool:
        """Whether it was compiled for this size."""
        numbers = {self.symbol: sympy.Integer(size)}
        return self.lowest <= size <= self.highest and all(g.xreplace(numbers) == sympy.true for g in self.guards)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class CompiledRegion:
    """A region as one callable: flat arguments in, a flat tuple out. Structurally identical regions share it.

    Attributes:
        function: the artifact that serves every size.
        opaque: whether its kernels bypass torch's dispatcher, so that a recorder has to treat a call as one op.
        uncompiled: the region as it was traced, for inputs that overlap.
        written_inputs: what must not overlap for the artifacts; None where nothing is asked.
        size_position: the input that is the size which ``sized`` goes by.
        sized: artifacts for certain sizes; the first that serves a size goes before ``function``.
        guards: what compiling assumed of the symbols, over the key's symbols.
    """

    function: Callable[..., Any]
    opaque: bool
    uncompiled: Callable[..., Any]
    written_inputs: WrittenInputs | None
    size_position: int | None
    sized: tuple[SizedArtifact, ...]
    guards: tuple[sympy.Basic, ...]
    _chosen: dict[int, Callable[..., Any]]

    @classmethod
    def as_traced(cls, function: Callable[..., Any]) -> CompiledRegion:
        """A region that no compiler has to touch."""
        return cls(function, False, function, None, None, (), (), {})

    def __call__(self, *args: Any) -> Any:
        """Run the region."""
        if self.written_inputs is not None and self.written_inputs.overlap(args):
            return self.uncompiled(*args)
        if self.size_position is None:
            return self.function(*args)
        size = args[self.size_position]
        chosen = self._chosen.get(size)
        if chosen is None:
            chosen = self._chosen[size] = self._artifact_for(size)
        return chosen(*args)

    def num_artifacts(self) -> int:
        """How many times it was compiled."""
        return 1 + len(self.sized)

    def _artifact_for(self, size: int) -> Callable[..., Any]:
        return next((artifact.function for artifact in self.sized if artifact.serves(size)), self.function)
