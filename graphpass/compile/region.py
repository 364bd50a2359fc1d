"""A compiled region: one callable that picks, call by call, an artifact which was compiled for such a call."""

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
    """The inputs of a region that writes to some of them, for a compiler that functionalizes the writes.

    Such a compiler takes apart what overlaps, by the offsets it saw; at other offsets, or where nothing overlapped when
    the region was compiled, its artifact is wrong without a word. So it is where it is written to an input with gaps (a
    block of columns) at symbolic sizes: views of it that are returned get other strides. So artifacts serve inputs
    that do neither, and all others run as they were traced.

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

    def defeat_compilers(self, args: Sequence[Any]) -> bool:
        """Whether something written has gaps, or overlaps another input."""
        with symbolic.quiet_shapes(symbolic.fake_mode_of(args)):
            dense = all(memory.is_dense(args[position]) for position in self.written)
        return not dense or self.overlap(args)

    def overlap(self, args: Sequence[Any]) -> bool:
        """Whether something written lies in a storage where inputs overlap."""
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

    Asked of AOTAutograd, which acts on its answer, and once more: it takes rows of a strided matrix for apart.
    """
    with symbolic.quiet_shapes(symbolic.fake_mode_of(tensors)):
        return memory.any_overlap(tensors) or any(itertools.starmap(_may_meet, itertools.combinations(tensors, 2)))


def _may_meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """False where the byte ranges are apart, or both are blocks of columns of one matrix and the blocks are apart."""
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
    """First byte, bytes that a row reaches, bytes from row to row: a tensor as rows that its widest stride parts."""
    size = tensor.element_size()
    pairs = sorted(((d, s) for s, d in zip(tensor.shape, tensor.stride(), strict=True) if s > 1), reverse=True)
    inner = sum((s - 1) * d for d, s in pairs[1:])
    return tensor.storage_offset() * size, (inner + 1) * size, (pairs[0][0] if pairs else 1) * size or size


def _reach(tensor: torch.Tensor) -> Any:
    """Bytes from the first element to behind the last."""
    return (sum((s - 1) * d for s, d in zip(tensor.shape, tensor.stride(), strict=True)) + 1) * tensor.element_size()


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
        uncompiled: the region as it was traced, for inputs that no artifact serves.
        written_inputs: what is asked of inputs for the artifacts; None where nothing is.
        size_position: the input that is the size which ``sized`` goes by.
        sized: artifacts for certain sizes; the first that serves a size goes before ``function``.
        guards: what compiling assumed of the symbols, over the key's symbols.
        trace: what a trace function made of the aten graph; None where nobody asked.
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
        """A region that no compiler has to touch, as it writes to inputs that have gaps or overlap."""
        trace = GraphTrace(None, "it writes to inputs that have gaps or share memory")
        return cls(function, False, function, None, None, (), (), trace, {})

    def __call__(self, *args: Any) -> Any:
        """Run the region."""
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
        """How many times it was compiled."""
        return 1 + len(self.sized)

    def _artifact_for(self, size: int) -> Callable[..., Any]:
        return next((artifact.function for artifact in self.sized if artifact.serves(size)), self.function)
