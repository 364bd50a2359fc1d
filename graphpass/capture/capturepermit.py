"""Decides whether a key may be captured now, and raises the error if not."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from graphpass.capture.arguments import Call
from graphpass.capture.entry import EntryTable, GraphEntry
from graphpass.capture.policy import CapturePolicy
from graphpass.capture.replayplan import StaticSet
from graphpass.capture.runtime import GraphRuntime
from graphpass.context import ForwardContext
from graphpass.errors import CaptureError, StaticInputError
from graphpass.keys import BatchDescriptor
from graphpass.modes import CUDAGraphMode
from graphpass.report.records import RegionId

__all__ = ["MAX_STATIC_SETS", "CapturePermit", "FreedInputs"]

MAX_STATIC_SETS = 4
_FEW_REPLAYS = 8
_REMEMBERED_SETS = 256
_REFILL = "refill them in place (`tensor.copy_(new)`): each new address is one more capture"
_INDEX = (
    "pass the whole tensor and index it inside the model with a tensor of positions; a copy (`tensor.clone()`) serves "
    "where the model only reads it"
)
_UPDATE = "write into it in place (`tensor.copy_(new)` under torch.no_grad(), in the model's forward too)"


@dataclass(frozen=True, slots=True)
class _CapturedSet:
    """The static inputs of one graph, and the module instance that they belong to."""

    spec: Any
    owner_ids: tuple[int, ...]
    statics: StaticSet

    @classmethod
    def of(cls, entry: GraphEntry) -> _CapturedSet:
        return cls(entry.spec, entry.owner_ids, entry.plan.statics)


@dataclass(slots=True)
class FreedInputs:
    """Static inputs whose memory was freed while a graph of a key read it, which drops the graph.

    Attributes:
        latest: positions of the inputs freed since the last capture of the key.
        soon: {position: how often the input was freed after few replays}.
        sets: what the dropped graphs read. ``weight.data = new`` frees memory of a module that lives on, whose sets are
            limited.
    """

    latest: set[int] = field(default_factory=set)
    soon: Counter[int] = field(default_factory=Counter)
    sets: deque[_CapturedSet] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_SETS))

    def add(self, position: int, entry: GraphEntry, num_replays: int) -> None:
        """Count an input whose graph ``entry`` was replayed ``num_replays`` times."""
        self.latest.add(position)
        self.soon[position] += num_replays < _FEW_REPLAYS
        self.sets.append(_CapturedSet.of(entry))


@dataclass(frozen=True, slots=True)
class CapturePermit:
    """Decides for one wrapper whether a capture may take place.

    Attributes:
        region: the wrapper's region.
        mode: the runtime mode at which it captures.
        runtime: whose scope has to be open.
        policy: what to do about moved inputs, and whether to capture while serving.
        entries: the graphs that exist.
        freed: static inputs whose graphs of the key were dropped.
    """

    region: RegionId
    mode: CUDAGraphMode
    runtime: GraphRuntime
    policy: CapturePolicy
    entries: EntryTable
    freed: FreedInputs

    def baked(self, context: ForwardContext, descriptor: BatchDescriptor, call: Call) -> frozenset[int]:
        """Permit the capture of this key, and return the positions of the inputs that the new graph may bake in.

        If a static input has moved, the key is captured again for the new set of static inputs. Once a module instance
        has :data:`MAX_STATIC_SETS` sets, the moving inputs are staged instead. Each instance is counted separately,
        because 24 blocks that share a region have different parameters without any of them moving.

        Raises:
            CaptureError: capture is not permitted, and the key has no graph for these arguments.
            StaticInputError: capture is not permitted, and a static input moved.
        """
        is_open = self.runtime.scopes.is_mine()
        is_lazy = self.policy.lazy_capture and not is_open
        inside = call.inside_static()
        owner_ids = call.owner_ids()
        freed = [captured for captured in self.freed.sets if captured.owner_ids == owner_ids]
        peers = [
            captured
            for captured in (*map(_CapturedSet.of, self.entries.at(descriptor)), *freed)
            if captured.spec == call.spec and call.static | inside >= set(captured.statics.positions)
        ]
        own = [captured for captured in peers if captured.owner_ids == owner_ids]
        moved = sorted({p for captured in own or peers for p in captured.statics.moved(call.leaves)})
        # guard: moved_input_refused
        if moved and not is_open and (self.policy.on_moved_input == "error" or not is_lazy):
            raise self._moved(peers[0], call, moved[0])
        if not is_open and not is_lazy:  # guard: capture_closed
            raise self._not_captured(descriptor)
        scope = self.runtime.scopes.current()
        is_automatic = scope is not None and scope.is_automatic
        if is_lazy:
            self._refuse_lazy_capture_across_ranks(context)  # guard: lazy_capture_across_ranks
            self.runtime.warn(
                "captured while serving, as lazy_capture allows; a capture takes much longer than a replay",
                "capture the key inside `with runtime.capturing():`",
                at=f"{self.region} {descriptor}",
            )
        elif is_automatic and self.freed.latest and not peers:
            return self._baked_of_freed(descriptor, call)
        elif is_automatic and not moved:
            self.runtime.note("captured without a context, because its size recurs", at=f"{self.region} {descriptor}")
        return (
            self._baked_of_moved(descriptor, call, moved, num_peers=len(peers), num_own=len(own))
            if moved
            else call.static
        )

    def _baked_of_freed(self, descriptor: BatchDescriptor, call: Call) -> frozenset[int]:
        """Positions that the next graph of a key may bake in, after a parameter or buffer was replaced by another."""
        at = f"{self.region} {descriptor} ({', '.join(call.names[p] for p in sorted(self.freed.latest)[:3])})"
        keeps_moving = {p for p, times in self.freed.soon.items() if times >= MAX_STATIC_SETS}
        if keeps_moving & self.freed.latest:
            self.runtime.warn("a static input is replaced again and again, and copied from now on", _UPDATE, at=at)
        else:
            self.runtime.warn(
                "captured again while serving, because a static input was replaced, which dropped its graph",
                f"{_UPDATE}, or capture again before serving: precapture()",
                at=at,
            )
        return call.static - keeps_moving  # guard: replaced_inputs_copied

    def _baked_of_moved(
        self, descriptor: BatchDescriptor, call: Call, moved: Sequence[int], *, num_peers: int, num_own: int
    ) -> frozenset[int]:
        """Positions that the next graph of a key may bake in, after static inputs have moved."""
        at = f"{self.region} {descriptor} ({', '.join(call.names[p] for p in moved[:3])})"
        inside = call.inside_static().intersection(moved)
        if num_own < MAX_STATIC_SETS:  # guard: max_static_sets
            text = "static inputs moved, so their key was captured once more"
            if num_own and self._is_serving():
                self.runtime.warn(text, _INDEX if inside else _REFILL, at=at)
            else:  # another instance of the module, or a capture that the caller asked for
                self.runtime.note(text, at=f"{at}, set {num_peers + 1}")
            return call.static
        if inside:  # guard: moves_inside_static
            raise StaticInputError(
                f"{call.names[min(inside)]!r} of {self.region} keeps moving inside a static input",
                expected=f"at most {MAX_STATIC_SETS} offsets in it: a copy would hide that the two share memory",
                found=f"{num_own} offsets captured, and another one now",
                remedy=_INDEX,
            )
        remedy = "refill them in place (`tensor.copy_(new)`): a tensor that stays at its address is not copied"
        self.runtime.warn("static inputs keep moving, and are copied from now on", remedy, at=at)
        return call.static - set(moved)

    def _is_serving(self) -> bool:
        """Whether the auto dispatcher captures, in an ordinary call; a lazy capture has its own warning."""
        scope = self.runtime.scopes.current()
        return scope is not None and scope.is_automatic

    def _moved(self, captured: _CapturedSet, call: Call, position: int) -> StaticInputError:
        return StaticInputError(
            f"static input {call.names[position]!r} of {self.region} moved",
            expected=f"address {captured.statics.addresses[position] or 0:#x}, as captured",
            found=f"{call.leaves[position].data_ptr():#x}",
            remedy="refill it in place (`tensor.copy_(new)`), capture the key for the new address inside "
            "`with runtime.capturing():`, or set on_moved_input='copy' to capture it while serving (and "
            "lazy_capture=True, if you set the forward context)",
        )

    def _refuse_lazy_capture_across_ranks(self, context: ForwardContext) -> None:
        ranks = context.num_tokens_across_dp
        if ranks is not None and len(ranks) > 1 and not self.runtime.scopes.is_mine():
            raise CaptureError(
                f"{self.region} would be captured lazily under data parallel",
                expected="a capture of every key before the first batch, on all ranks",
                found=f"lazy_capture with {len(ranks)} ranks",
                remedy="capture inside `with runtime.capturing():` on every rank",
            )

    def _not_captured(self, descriptor: BatchDescriptor) -> CaptureError:
        captured = ", ".join(sorted(str(key) for key in self.entries.descriptors())) or "nothing"
        found = f"captured at {self.mode}: {captured}"
        if self.entries.at(descriptor):
            found += "; this key with other arguments, or with inputs that share memory in another way"
        older = self.runtime.recompiled_from(self.region, self.mode, descriptor)
        if older is not None:
            found += f"; {older} has this key, but torch.compile has compiled the function again since"
        return CaptureError(
            f"{self.region} has no graph for {self.mode} {descriptor}, and capture is closed",
            expected="a key that was captured",
            found=found,
            remedy="dispatch among captured keys, capture inside `with runtime.capturing():`, or set lazy_capture=True",
        )
