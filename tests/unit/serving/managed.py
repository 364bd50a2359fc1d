"""What the tests of CudaGraphManager share: models, how one is made and run, an attention, and what is counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import graphpass as gp
from graphpass import (
    AttentionSupport,
    Batch,
    BatchDescriptor,
    CudagraphDispatcher,
    CudaGraphManager,
    CUDAGraphMode,
    GraphRuntime,
    InputSpec,
)
from graphpass.errors import CaptureError, ShapeError
from graphpass.regions import register_padding_rule

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
WIDTH, LARGEST, NUM_SLOTS = 6, 10, 16
SIZES = (2, 4, 8)
MODES = ("FULL", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "NONE")
X = InputSpec("x", (LARGEST, WIDTH), torch.float32)


class GrowingRuntime(GraphRuntime):
    """A pool that holds 100 bytes for each graph, since the tape has none."""

    def pool_bytes(self) -> int:
        return 100 * sum(counts.static_sets for counts in self.counts().values())


class Rows(nn.Module):
    """Rows do not mix, so that any padding leaves the real ones as they are."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(width, 5)
        self.act = nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.inner(x))


class Doubled(nn.Module):
    """No weights, and a result that says which of the rows came from where."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1


def made(
    model: Any,
    mode: str = "FULL",
    sizes: Sequence[int] = SIZES,
    specs: Sequence[InputSpec] = (X,),
    *,
    query_len: int = 1,
    max_num_reqs: int = LARGEST,
    attention: Any = None,
    runtime: GraphRuntime | None = None,
    **options: Any,
) -> CudaGraphManager:
    dispatcher = CudagraphDispatcher(mode, sizes, max_num_reqs=max_num_reqs, uniform_decode_query_len=query_len)
    options = {"compiler": "eager", "on_fallback": "silent", **options}
    return CudaGraphManager(model, dispatcher, specs, attention=attention, runtime=runtime, **options)


def captured(model: Any, *args: Any, **given: Any) -> CudaGraphManager:
    manager = made(model, *args, **given)
    if manager.needs_capture():
        manager.capture()
    return manager


def refused(match: str, model: Any, *args: Any, error: type[Exception] = CaptureError, **given: Any) -> Any:
    """The error of a capture that is refused before there is a graph."""
    manager = made(model, *args, **given)
    with pytest.raises(error, match=match) as raised:
        manager.capture()
    assert manager.runtime.stats().captured == 0
    return raised.value


def rows(num_tokens: int, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(num_tokens))


def of_x(x: torch.Tensor, **given: Any) -> Batch:
    return Batch(x.shape[0], inputs={"x": x}, **given)


def run(manager: CudaGraphManager, x: torch.Tensor, **given: Any) -> Any:
    return manager.run(of_x(x, **given))


def assert_right(
    manager: CudaGraphManager, sizes: Sequence[int] = (3, 8, 1), *, model: Callable[..., Any] | None = None
) -> None:
    """Correct batches, one after the other, are right: as the manager's model computes them eagerly, or another."""
    for num_tokens in sizes:
        x = rows(num_tokens)
        torch.testing.assert_close(run(manager, x), (model or manager.model)(x).detach())


def captured_keys(manager: CudaGraphManager) -> list[tuple[CUDAGraphMode, int, bool]]:
    """(mode, padded tokens, for uniform decode), in the order of capture."""
    keys = [key.captured for key in manager.stats().keys]
    return [(key.mode, key.descriptor.num_tokens, key.descriptor.uniform) for key in keys]


def hits(manager: CudaGraphManager) -> dict[tuple[CUDAGraphMode, int], int]:
    """{(mode, padded tokens): batches}, keys that no batch reached left out."""
    return {
        (key.captured.mode, key.captured.descriptor.num_tokens): key.replays
        for key in manager.stats().keys
        if key.replays
    }


def replays(manager: CudaGraphManager) -> int:
    """Replays of all regions, those of the captures included: what ran, not what the manager says it ran."""
    return sum(counts.replayed for counts in manager.runtime.counts().values())


def notes(manager: CudaGraphManager) -> str:
    return "\n".join(manager.runtime.notes)


# -- an op that reads all rows, and whose author vouches that rows stay apart


@torch.library.custom_op("graphpass_manager_test::sum_of_rows", mutates_args=())
def sum_of_rows(x: torch.Tensor) -> torch.Tensor:
    """Shows what lies in all rows that a model is given, padding included."""
    return x.sum(0)


sum_of_rows.register_fake(lambda x: x.new_empty(x.shape[1:]))


register_padding_rule("graphpass_manager_test::sum_of_rows", lambda call: call.fresh())


# -- an attention that keeps something of every token, in a slot of its own


@dataclass(frozen=True, slots=True)
class Slots:
    """Where each token keeps its sum.

    Attributes:
        sums: [slots + 1, width]; the last is scratch.
        slot_mapping: the slot of each token, [tokens].
    """

    sums: torch.Tensor
    slot_mapping: torch.Tensor


EVENTS: list[str] = []
"""What the op below and the builder were asked for, in order; tests clear it."""


@torch.library.custom_op("graphpass_manager_test::add_to_slots", mutates_args=())
def add_to_slots(x: torch.Tensor) -> torch.Tensor:
    """Add each row to its slot; the sums after that. Rows behind those of the metadata are padding of regions."""
    EVENTS.append("op")
    context = gp.get_forward_context()
    metadata = context.attn_metadata
    slots = Slots(metadata["sums"], metadata["slot_mapping"]) if isinstance(metadata, Mapping) else metadata
    assert context.slot_mapping is slots.slot_mapping
    num_tokens = slots.slot_mapping.shape[0]
    out = torch.zeros_like(x)
    sums = slots.sums[slots.slot_mapping] + x[:num_tokens]
    slots.sums.index_put_((slots.slot_mapping,), sums)
    out[:num_tokens].copy_(sums)
    return out


add_to_slots.register_fake(torch.empty_like)


class SlotBuilder:
    """Makes :class:`Slots`; a batch's attention is the list of its slots. Implements ``AttentionMetadataBuilder``."""

    splitting_ops = ("graphpass_manager_test::add_to_slots",)

    def __init__(
        self,
        support: AttentionSupport = AttentionSupport.ALWAYS,
        num_slots: int = NUM_SLOTS,
        width: int = WIDTH,
        device: torch.device | str = "cpu",
    ) -> None:
        self.support = support
        self.num_slots = num_slots
        self.sums = torch.zeros(num_slots + 1, width, device=device)
        self.examples: list[tuple[BatchDescriptor, int | None]] = []
        self.built_for: list[BatchDescriptor | None] = []
        self._by_key: dict[BatchDescriptor, Slots] = {}

    def extra(self, attention: Any) -> tuple[tuple[str, Any], ...]:
        return ()

    def example(self, key: BatchDescriptor, *, query_len: int | None) -> list[int]:
        EVENTS.append("example")
        self.examples.append((key, query_len))
        return [self.num_slots] * key.num_tokens

    def build(self, attention: Sequence[int], key: BatchDescriptor | None) -> Slots:
        EVENTS.append("build")
        self.built_for.append(key)
        mapping = torch.tensor(attention, dtype=torch.long, device=self.sums.device)
        if key is None:
            return Slots(self.sums, mapping)
        if len(attention) > key.num_tokens:
            raise ShapeError(
                "too many slots", expected=str(key.num_tokens), found=str(len(attention)), remedy="pass fewer"
            )
        slots = self._by_key.get(key)
        if slots is None:
            slots = self._by_key[key] = Slots(self.sums, mapping.new_empty(key.num_tokens))
        slots.slot_mapping.fill_(self.num_slots)
        slots.slot_mapping[: len(attention)].copy_(mapping)
        return slots


class DictBuilder(SlotBuilder):
    """The same metadata in plain dicts."""

    def __init__(self) -> None:
        super().__init__()
        self._dicts: dict[int, dict[str, torch.Tensor]] = {}

    def build(self, attention: Sequence[int], key: BatchDescriptor | None) -> Any:
        slots = super().build(attention, key)
        made = {"sums": slots.sums, "slot_mapping": slots.slot_mapping}
        return made if key is None else self._dicts.setdefault(id(slots), made)


class Attends(nn.Module):
    """An attention between two layers."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.before, self.after = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended = torch.ops.graphpass_manager_test.add_to_slots(self.before(x))
        return self.after(attended).relu() + x


class Requests:
    """The same sums kept beside, by the same layers without graph or padding."""

    def __init__(self, model: Attends, num_slots: int = NUM_SLOTS) -> None:
        self.model, self.sums = model, torch.zeros(num_slots, WIDTH)

    def step(self, x: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            self.sums[list(slots)] += self.model.before(x)
            return self.model.after(self.sums[list(slots)]).relu() + x

    def agree(self, manager: CudaGraphManager, slots: Sequence[int], **given: Any) -> None:
        """A batch with a token in each slot is right."""
        x = rows(len(slots))
        torch.testing.assert_close(run(manager, x, attention=slots, **given), self.step(x, slots))
