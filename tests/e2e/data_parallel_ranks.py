"""What each process of the data-parallel tests runs; it leaves what it saw in a file that the test reads."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import distributed, nn

import cgpass  # noqa: F401  # with what follows: imported once, before the processes part
from graphpass import (
    Batch,
    CudagraphDispatcher,
    CudaGraphManager,
    GraphpassError,
    InputSpec,
    LoraKeys,
    get_forward_context,
)
from graphpass.ranks import DataParallelAgreement
from graphpass.regions import register_padding_rule
from tests.unit.models import Rowwise
from tests.unit.serving.managed import GrowingRuntime

NUM_RANKS, WIDTH, LARGEST = 4, 6, 24
SIZES = (2, 4, 8, 16)
FORWARDS: list[tuple[str, int, tuple[int, ...]]] = []
"""(mode, rows, tokens of all ranks) of each forward, as the op in the model's middle sees it."""


@torch.library.custom_op("graphpass_dp_test::count_ranks", mutates_args=())
def count_ranks(x: torch.Tensor) -> torch.Tensor:
    """``x`` times the share of the ranks that are here: all of them, or it hangs."""
    here = torch.ones(1)
    distributed.all_reduce(here)
    context = get_forward_context()
    FORWARDS.append((str(context.runtime_mode), x.shape[0], context.num_tokens_across_dp))
    return x * (here / NUM_RANKS)


count_ranks.register_fake(torch.empty_like)


register_padding_rule("graphpass_dp_test::count_ranks", lambda call: call.tensor("x"))


class WithCollective(nn.Module):
    """Two layers, and between them something that needs every rank. It counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("forwards", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards.add_(1)
        return self.after(torch.ops.graphpass_dp_test.count_ranks(self.before(x))).relu() + x

    def alone(self, x: torch.Tensor) -> torch.Tensor:
        """The same on one rank."""
        return self.after(self.before(x)).relu() + x


class WithoutCollective(Rowwise):
    """Can be one graph."""

    def alone(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


@dataclass(frozen=True)
class Load:
    """What one rank brings to a step."""

    num_tokens: int
    uniform: bool = False
    num_loras: int = 0


@dataclass(frozen=True)
class Seen:
    """What one rank saw of a step."""

    ran: tuple[Any, ...]  #: (mode, padded tokens, adapters), or (NONE, reason)
    is_right: bool  #: the result is that of one rank alone
    #: of the op in the model's middle; none where it is part of a graph
    forwards: list[tuple[str, int, tuple[int, ...]]]
    others_have_work: bool | None  #: what ``run_idle`` said; None of a rank with a batch


STEPS: dict[str, tuple[Load | None, ...]] = {
    "mixed load": (Load(3), Load(5), Load(9), Load(16)),
    "all decode": (Load(3, uniform=True), Load(1, uniform=True), Load(2, uniform=True), Load(4, uniform=True)),
    "one decodes": (Load(3, uniform=True), Load(5), Load(2), Load(7)),
    "one is idle": (Load(3, uniform=True), None, Load(2, uniform=True), Load(8, uniform=True)),
    "one has work": (None, None, Load(3), None),
    "all are idle": (None, None, None, None),
    "one is oversized": (Load(3), Load(20), Load(2, uniform=True), None),
    "adapters": (Load(3, num_loras=1), Load(5), None, Load(2, num_loras=2)),
    "after all that": (Load(1), Load(2), Load(3), Load(4)),
}


def made(
    model: nn.Module,
    agreement: DataParallelAgreement,
    mode: str = "FULL_AND_PIECEWISE",
    sizes: Sequence[int] = SIZES,
    **options: Any,
) -> CudaGraphManager:
    dispatcher = CudagraphDispatcher(mode, sizes, max_num_reqs=LARGEST, lora=LoraKeys(2))
    inputs = [InputSpec("x", (LARGEST, WIDTH), torch.float32)]
    options = {"compiler": "eager", "on_fallback": "silent", **options}
    return CudaGraphManager(model, dispatcher, inputs, agreement=agreement, **options)


def hits(manager: CudaGraphManager) -> dict[tuple[Any, ...], int]:
    keys = [(key.captured.mode, key.captured.descriptor, key.replays) for key in manager.stats().keys]
    of_graphs = {(str(mode), key.num_tokens, key.num_active_loras): number for mode, key, number in keys}
    return {**of_graphs, **{("NONE", str(reason)): number for reason, number in manager.stats().fallbacks.items()}}


def step(manager: CudaGraphManager, load: Load | None, seed: int) -> Seen:
    before = hits(manager)
    FORWARDS.clear()
    others, is_right = None, True
    if load is None:
        others = manager.run_idle()
    else:
        x = torch.randn(load.num_tokens, WIDTH, generator=torch.Generator().manual_seed(seed))
        batch = Batch(load.num_tokens, inputs={"x": x}, uniform_decode=load.uniform, num_active_loras=load.num_loras)
        result = manager.run(batch)
        with torch.no_grad():
            is_right = torch.allclose(result, manager.model.alone(x), atol=1e-6)
    (ran,) = [key for key, number in hits(manager).items() if number != before.get(key, 0)]
    return Seen(ran, is_right, list(FORWARDS), others)


def refusal(action: Callable[[], object]) -> tuple[str, str]:
    """The kind and the text of what ``action`` is refused with."""
    try:
        action()
    except GraphpassError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def agreeing(rank: int) -> dict[str, Any]:
    """Every load, on a model that needs all ranks in each forward; then what one rank has that the others do not."""
    agreement = DataParallelAgreement(timeout_s=60)
    model = WithCollective().eval()
    manager = made(model, agreement, "PIECEWISE", splitting_ops=["graphpass_dp_test::count_ranks"])
    manager.capture()
    seen: dict[str, Any] = {"regions": {name: step(manager, loads[rank], rank) for name, loads in STEPS.items()}}
    seen["forwards"] = model.forwards.item()
    whole = made(WithoutCollective().eval(), agreement)
    whole.capture()
    seen["whole"] = {name: step(whole, loads[rank], rank) for name, loads in STEPS.items()}
    seen["notes"] = list(whole.runtime.notes)

    x = torch.randn(2, WIDTH + (rank == 2))
    seen["one is refused"] = refusal(lambda: manager.run(Batch(2, inputs={"x": x})))
    seen["after a refusal"] = step(manager, Load(3), rank)

    bounded = made(WithoutCollective().eval(), agreement, sizes=(8, 4), runtime=GrowingRuntime())
    bounded.capture(max_bytes=100 if rank == 2 else None)
    seen["left out"] = [(str(mode), key.num_tokens) for mode, key in bounded.stats().left_out]
    seen["a key of all"] = step(bounded, Load(5, num_loras=1), rank)
    seen["a key of none"] = step(bounded, Load(5, num_loras=1) if rank else Load(3), rank)
    agreement.close()
    return seen


def parting(rank: int) -> dict[str, Any]:
    """One rank stays away; then one dies."""
    seen: dict[str, Any] = {}
    patient, short = DataParallelAgreement(timeout_s=60), DataParallelAgreement(timeout_s=3)
    manager = made(WithoutCollective().eval(), patient, sizes=(4,))
    late = made(WithoutCollective().eval(), short, "NONE", sizes=(4,))
    manager.capture()
    seen["together"] = step(manager, Load(3), rank)
    if rank != NUM_RANKS - 1:
        seen["one stays away"] = refusal(late.run_idle)
        seen["again"] = refusal(late.run_idle)
    seen["the others go on"] = step(manager, Load(2), rank)
    if rank == 1:
        os._exit(7)
    seen["one dies"] = refusal(lambda: step(manager, Load(2), rank))
    return seen


def main(rank: int, what: Callable[[int], dict[str, Any]], folder: Path, num_ranks: int) -> None:
    """One process."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=60),
    )
    torch.save(what(rank), folder / f"rank{rank}.pt")
    os._exit(0)  # a group whose member died is not taken down
