"""Four data-parallel ranks on one machine, which run every step alike: ``python docs/examples/data_parallel.py``.

Each rank has a load of its own; the model has a collective in its middle, like the all-to-all of a mixture of experts,
so that a rank that ran anything else than the others would hang them. The table shows, step by step, what each rank
brought, what all of them ran, and why. Real ranks are started by ``torchrun``, one a GPU, and skip the first function.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import distributed, multiprocessing, nn

import graphpass
from graphpass.regions import register_padding_rule

NUM_RANKS, WIDTH, LARGEST = 4, 16, 32
# One row a step, one column a rank: tokens, 0 for a rank without a batch. "d": each request decodes one token.
LOADS = """
    3    5    9    16
    3d   1d   2d   4d
    3d   5    2    7
    3d   0    2d   8d
    0    0    3    0
    3    20   2d   0
    0    0    0    0
"""


@torch.library.custom_op("example::mean_over_ranks", mutates_args=())
def mean_over_ranks(x: torch.Tensor) -> torch.Tensor:
    """Something that each rank needs of all others: here the mean of the real rows of every rank."""
    context = graphpass.get_forward_context()
    real = x[~context.is_padding]
    sums = torch.cat((real.sum(0), x.new_tensor([len(real)])))
    distributed.all_reduce(sums)
    return x + sums[:-1] / sums[-1]


@mean_over_ranks.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


# Rows meet in it on purpose, real ones alone: without this line the manager would refuse the op.
register_padding_rule("example::mean_over_ranks", lambda call: call.tensor("x"))


class Model(nn.Module):
    """Two layers and a collective."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.ops.example.mean_over_ranks(self.first(x)).relu())


def batch_of(load: str, rank: int, step: int) -> graphpass.Batch:
    """Random rows: the same for one rank and step, so that anybody can make those of the others."""
    num_tokens = int(load.removesuffix("d"))
    rows = torch.randn(num_tokens, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    return graphpass.Batch(num_tokens, inputs={"x": rows}, uniform_decode=load.endswith("d"))


def expected(model: Model, loads: list[str], rank: int, step: int) -> torch.Tensor:
    """What this rank's rows come to, computed from the batches of all ranks in one process."""
    inner = [model.first(batch_of(load, other, step).inputs["x"]) for other, load in enumerate(loads)]  # type: ignore[index]
    return model.second((inner[rank] + torch.cat(inner).mean(0)).relu())


def serve(rank: int, store: str) -> None:
    """One rank."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=NUM_RANKS)
    model = Model().eval()
    agreement = graphpass.ranks.DataParallelAgreement(timeout_s=60)
    manager = graphpass.CudaGraphManager(
        model,
        graphpass.CudagraphDispatcher("PIECEWISE", [2, 4, 8, 16], max_num_reqs=LARGEST),
        [graphpass.InputSpec("x", (LARGEST, WIDTH), torch.float32)],
        agreement=agreement,
        splitting_ops=["example::mean_over_ranks"],
        compiler="eager",
        on_fallback="silent",
    )
    manager.capture()  # on every rank: they capture key by key together
    table = Table("step", "rank", "tokens", "mode", "runs", "reason", title="What each rank brought and ran")
    worst = 0.0
    with torch.no_grad():
        for number, line in enumerate(LOADS.strip().splitlines()):
            loads = line.split()
            batch = batch_of(loads[rank], rank, number)
            if batch.num_tokens:
                worst = max(worst, (manager.run(batch) - expected(model, loads, rank, number)).abs().max().item())
            else:
                manager.run_idle()  # False where no rank has a batch: then all may stop
            step = manager.last_step
            assert step is not None
            ran = [loads[rank], str(step.mode), str(step.descriptor.num_tokens), str(step.reason)]
            rows: list[list[str]] = [[]] * NUM_RANKS
            distributed.all_gather_object(rows, ran)
            for other, row in enumerate(rows):
                table.add_row(str(number) if other == 0 else "", str(other), *row, end_section=other == NUM_RANKS - 1)
    if rank == 0:
        Console().print(table)
        for note, times in manager.runtime.notes.items():
            print(f"{times} times: {note}")
    if worst > 1e-5:
        sys.exit(f"rank {rank}: differs by {worst:.1e} from one process that has all batches")
    agreement.close()
    distributed.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(serve, args=(f"file://{Path(folder) / 'store'}",), nprocs=NUM_RANKS)


if __name__ == "__main__":
    main()
