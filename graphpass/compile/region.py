"""A compiled region: a callable that chooses an artifact for each call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from graphpass.compat import memory, symbolic
from graphpass.compile.traces import GraphTrace

__all__ = ["CompiledRegion", "SizedArtifact", "WrittenInputs"]


@dataclass(frozen=True, slots=True)
class WrittenInputs:
    """Finds calls for which a functionalizing compiler's artifact is wrong, for a region that writes to its inputs.

    Such a compiler resolves overlaps between inputs by the offsets at compile time. The artifact is silently wrong for
    other offsets, and for inputs that overlap only at run time. It is also wrong for writes to an input with gaps (a
    block of columns) at symbolic sizes, because returned views get other strides. Artifacts therefore run only if no
    written input has gaps or overlaps another input; all other calls run the traced graph.

    Attributes:
        tensors: positions of the tensor inputs.
        written: positions of the inputs that are written to.
    """

    tensors: tuple[int, ...]
    written: frozenset[int]

    @classmethod
    def of(cls, examples: Sequence[Any], written: Sequence[int]) -> WrittenInputs | None:
        """The record for a region with inputs like ``examples``; None if it writes to no input."""
        tensors = tuple(p for p, value in enumerate(examples) if isinstance(value, torch.Tensor))
        return cls(tensors, frozenset(written)) if written else None

    def defeat_compilers(self, args: Sequence[Any]) -> bool:
        """Whether a written input has gaps or overlaps another input."""
        with symbolic.quiet_shapes(symbolic.fake_mode_of(args)):
            dense = all(memory.is_dense(args[position]) for position in self.written)
        return not dense or self.overlap(args)  # guard: written_inputs_with_gaps

    def overlap(self, args: Sequence[Any]) -> bool:
        """Whether a written input is in a storage in which inputs overlap."""
        groups: dict[int, list[int]] = {}
        for position in self.tensors:
            groups.setdefault(memory.memory_id(args[position]) or -position, []).append(position)
        return any(
            len(group) > 1
            and not self.written.isdisjoint(group)
            and _any_overlap([args[position] for position in group])
            for group in groups.values()
        )


def _any_overlap(tensors: list[torch.Tensor]) -> bool:
    """Whether two of these tensors, all in one storage, may have an element in common.

    AOTAutograd's own test counts, because it acts on it. A second test covers rows of a strided matrix, which the first
    one takes for disjoint.
    """
    with symbolic.quiet_shapes(symbolic.fake_mode_of(tensors)):
        # guard: rows_of_a_matrix
        return memory.any_overlap(tensors) or any(itertools.starmap(_may_meet, itertools.combinations(tensors, 2)))


def _may_meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """False if the byte ranges are disjoint, or if both are disjoint blocks of columns of one matrix."""
    if not one.numel() or not other.numel():
        return False
    (start, width, pitch), (other_start, other_width, other_pitch) = _columns(one), _columns(other)
    if start + _reach(one) <= other_start or other_start + _reach(other) <= start:
        return False
    if pitch != other_pitch or one.element_size() != other.element_size():
        return True
    apart = (other_start - start) % pitch
    return not (width <= apart and apart + other_width <= pitch)


def _columns(tensor: torch.Tensor) -> tuple[Any, Any, Any]:
    """(first byte, width of a row in bytes, distance of rows in bytes), where the widest stride separates the rows."""
    size = tensor.element_size()
    pairs = sorted(((d, s) for s, d in zip(tensor.shape, tensor.stride(), strict=True) if s > 1), reverse=True)
    inner = sum((s - 1) * d for d, s in pairs[1:])
    return tensor.storage_offset() * size, (inner + 1) * size, (pairs[0][0] if pairs else 1) * size or size


def _reach(tensor: torch.Tensor) -> Any:
    """Bytes from the first element to the end of the last."""
    return (sum((s - 1) * d for s, d in zip(tensor.shape, tensor.stride(), strict=True)) + 1) * tensor.element_size()


@dataclass(frozen=True, slots=True, eq=False)
class SizedArtifact:
    """An artifact for a single size or a range of sizes of one symbol.

    Attributes:
        lowest: the smallest size that it serves.
        highest: the largest size that it serves.
        function: the artifact.
        symbol: the symbol of the size in ``guards``.
        guards: conditions on the size that the compilation added besides the range.
    """

    lowest: int
    highest: int
    function: Callable[..., Any]
    symbol: sympy.Symbol
    guards: tuple[sympy.Basic, ...]

    def serves(self, size: int) -> bool:
        """Whether the artifact is valid for this size."""
        numbers = {self.symbol: sympy.Integer(size)}
        return self.lowest <= size <= self.highest and all(g.xreplace(numbers) == sympy.true for g in self.guards)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class CompiledRegion:
    """A region as a callable from flat arguments to a flat tuple. Structurally identical regions share it.

    Attributes:
        function: the artifact that serves every size.
        opaque: whether its kernels bypass torch's dispatcher, so a recorder must treat a call as one op.
        uncompiled: the traced region, for inputs that no artifact serves.
        written_inputs: the check that inputs must pass before an artifact runs; None if there is none.
        size_position: the position of the input whose value selects from ``sized``.
        sized: artifacts for certain sizes; the first that serves a size is used instead of ``function``.
        guards: conditions that the compilation added, over the symbols of the structural key.
        trace: the result of the trace function for the aten graph; None without a trace function.
    """

    function: Callable[..., Any]
    opaque: bool
    uncompiled: Callable[..., Any]
    written_inputs: WrittenInputs | None
    size_position: int | None
    sized: tuple[SizedArtifact, ...]
    guards: tuple[sympy.Basic, ...]
    trace: GraphTrace | None
    _chosen: dict[int, Callable[..., Any]]

    @classmethod
    def as_traced(cls, function: Callable[..., Any]) -> CompiledRegion:
        """A region that stays uncompiled because it writes to inputs that have gaps or overlap."""
        trace = GraphTrace(None, "it writes to inputs that have gaps or share memory")
        return cls(function, False, function, None, None, (), (), trace, {})

    def __call__(self, *args: Any) -> Any:
        """Run the artifact for these arguments, or the traced region if no artifact is valid for them."""
        # guard: written_inputs_overlap
        if self.written_inputs is not None and self.written_inputs.defeat_compilers(args):
            return self.uncompiled(*args)
        if self.size_position is None:
            return self.function(*args)
        size = args[self.size_position]
        chosen = self._chosen.get(size)
        if chosen is None:
            chosen = self._chosen[size] = self._artifact_for(size)
        return chosen(*args)

    def num_artifacts(self) -> int:
        """The number of artifacts, hence of compilations."""
        return 1 + len(self.sized)

    def _artifact_for(self, size: int) -> Callable[..., Any]:
        return next((artifact.function for artifact in self.sized if artifact.serves(size)), self.function)
