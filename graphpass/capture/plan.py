"""A replay plan: one key of a whole callable as a flat sequence of replays and eager calls.

Going through the wrappers, every region looks its entry up and checks its static inputs by itself. Once all regions of
a key are captured, a plan runs the same stitched code with each captured region bound to its entry, and checks the
static inputs of the whole callable once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphpass.capture.entry import GraphEntry, StaticSet
from graphpass.capture.layout import storage_id
from graphpass.capture.runtime import GraphRuntime
from graphpass.capture.staging import AliasPattern, alias_pattern
from graphpass.errors import StaticInputError
from graphpass.keys import BatchDescriptor

__all__ = ["ReplayPlan", "replay_of"]


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """The replays and eager calls of one key, valid for one set of static inputs.

    Attributes:
        name: the callable, ``g0``.
        descriptor: the key's padded shape.
        steps: (region, ``replay`` or ``eager``), in order.
        function: runs the steps; flat arguments of the callable in, its outputs out, pool memory uncopied.
        generation: the runtime's generation that the entries belong to.
    """

    name: str
    descriptor: BatchDescriptor
    steps: tuple[tuple[str, str], ...]
    function: Callable[..., Any]
    _statics: StaticSet
    _dynamic_positions: tuple[int, ...]
    _pattern: AliasPattern
    generation: int

    @classmethod
    def of(
        cls,
        name: str,
        descriptor: BatchDescriptor,
        steps: Sequence[tuple[str, str]],
        function: Callable[..., Any],
        *,
        args: Sequence[Any],
        static_positions: Sequence[int],
        dynamic_positions: Sequence[int],
        generation: int,
    ) -> ReplayPlan:
        """The plan for calls like ``args``.

        Args:
            name: the callable.
            descriptor: the key's padded shape.
            steps: (region, ``replay`` or ``eager``), in order.
            function: runs the steps.
            args: flat arguments of the call that was captured.
            static_positions: arguments whose addresses some entry baked in.
            dynamic_positions: all other tensor arguments.
            generation: the runtime's generation that the entries belong to.
        """
        return cls(
            name=name,
            descriptor=descriptor,
            steps=tuple(steps),
            function=function,
            _statics=StaticSet.of(args, static_positions),
            _dynamic_positions=tuple(dynamic_positions),
            _pattern=alias_pattern(args, dynamic_positions),
            generation=generation,
        )

    def serves(self, args: Sequence[Any], generation: int) -> bool:
        """Whether the plan holds for these arguments: same static addresses, same sharing, no graph dropped since."""
        statics = self._statics
        return (
            generation == self.generation
            and statics.matches(list(args))
            and alias_pattern(args, self._dynamic_positions) == self._pattern
            and not any(storage_id(args[p]) in statics.storages for p in self._dynamic_positions)
        )


def replay_of(entry: GraphEntry, runtime: GraphRuntime) -> Callable[..., list[Any]]:
    """The callee of a captured region inside a plan: checks what the plan cannot know, and replays."""
    mutates = entry.staging.mutates
    staged, pattern = entry.staging.positions, entry.staging.pattern

    def replay(*leaves: Any) -> list[Any]:
        entry.check(leaves)
        if mutates and alias_pattern(leaves, staged) != pattern:
            raise StaticInputError(
                f"inputs of {entry.name} share memory in another way than at capture, and it writes to them",
                expected=f"the sharing {pattern} among {[entry.names[p] for p in staged]}",
                found=str(alias_pattern(leaves, staged)),
                remedy="make the eager region before it return fresh tensors, or always views",
            )
        return entry.run(leaves, clone=False, before_replay=runtime.before_replay)

    return replay


def entries_by_region(entries: Sequence[GraphEntry], prefix: str) -> Mapping[str, GraphEntry]:
    """The entries of one callable's regions, by region name."""
    return {entry.name.removeprefix(prefix): entry for entry in entries if entry.name.startswith(prefix)}
