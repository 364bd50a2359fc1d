"""What each process of the lockstep tests runs: the same calls in the same order, and failures on single ranks."""

from __future__ import annotations

import importlib
import os
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed, nn

import graphpass as gp
from graphpass.capture import recorder
from graphpass.capture.tape import TapeDevice
from graphpass.text import CausalLM
from tests.e2e.data_parallel_ranks import refusal

WIDTH, CALLS = 8, 1000
FAILURES = {20: 0, 120: 1, 350: 0, 500: 1}
"""{call: rank in its group} from which on the next capture of a rank fails: before its warm-up for rank 0, after the
recording for rank 1."""


class Halved(nn.Module):
    """Two linear layers as tensor parallelism shards them: each rank has a part of the hidden features."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        super().__init__()
        rank, num_ranks, self.group = distributed.get_rank(group), distributed.get_world_size(group), group
        torch.manual_seed(0)
        up, down = torch.randn(2 * WIDTH, WIDTH), torch.randn(WIDTH, 2 * WIDTH)
        self.whole = (up, down)
        self.up = nn.Parameter(up.chunk(num_ranks)[rank].clone())
        self.down = nn.Parameter(down.chunk(num_ranks, dim=1)[rank].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial = nn.functional.linear(nn.functional.linear(x, self.up).relu(), self.down)
        distributed.all_reduce(partial, group=self.group)
        return partial.tanh() + x

    def alone(self, x: torch.Tensor) -> torch.Tensor:
        """The same on one rank."""
        up, down = self.whole
        return nn.functional.linear(nn.functional.linear(x, up).relu(), down).tanh() + x


@contextmanager
def one_failing_capture(at: int) -> Iterator[None]:
    """The next capture of this rank fails, before its warm-up (0) or after its recording (1)."""
    failed = mock.Mock(side_effect=[RuntimeError("put in")])
    where = (recorder, "without_collections") if at == 0 else (TapeDevice, "refuse_frozen")
    original = getattr(*where)

    def once(*args: Any) -> Any:
        if not failed.called:
            failed()
        return original(*args)

    with mock.patch.object(*where, once):
        yield


def traffic(group: distributed.ProcessGroup, seed: int, **options: Any) -> dict[str, Any]:
    """Random sizes, some of them often; what each call did, by the counts after it."""
    rank, model, runtime, sizes = (
        distributed.get_rank(group),
        Halved(group).eval(),
        gp.GraphRuntime(),
        random.Random(seed),
    )
    given = {"compiler": "aot_eager", "runtime": runtime, "dispatch": "auto", "ranks": "lockstep", **options}
    fast = torch.compile(model, backend="cgpass", dynamic=True, options=given)
    did, wrong = [], []
    with ExitStack() as failing, torch.no_grad():
        for call in range(CALLS):
            if FAILURES.get(call) == rank:
                failing.enter_context(one_failing_capture(rank))
            size = sizes.choice((3, 5, 7, 11, 13, 20, sizes.randint(2, 40)))
            x = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(call))
            if not torch.allclose(fast(x), model.alone(x), atol=1e-5):
                wrong.append(call)
            stats = runtime.stats()
            did.append((stats.captured, stats.replayed))
    counts = {f"{key[0]} {key[2]}": (of.captured, of.replayed) for key, of in runtime.counts().items()}
    runtime.close()
    return {"did": did, "wrong": wrong, "counts": counts}


def lockstep(rank: int) -> dict[str, Any]:
    """All ranks together; then two groups of two, which make other calls than each other."""
    pairs = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
    groups = {"four": (distributed.group.WORLD, 1), "two": (pairs[rank // 2], 2 + rank // 2)}
    pieces = {"splitting_ops": ["torch.tanh"], "mode": "PIECEWISE"}
    return {
        f"{name}, {mode}": traffic(group, seed, **options)
        for name, (group, seed) in groups.items()
        for mode, options in (("whole", {}), ("regions", pieces))
    }


def decoding(folder: Path, rank: int) -> dict[str, Any]:
    """A stock decoder by its own ``tp_plan``: its own tokens, those of a paged engine, and calls of one argument."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(distributed.get_world_size()))
    config = importlib.import_module("transformers.distributed").DistributedConfig(tp_plan="auto")
    auto = importlib.import_module("transformers").AutoModelForCausalLM
    model = auto.from_pretrained(folder, distributed_config=config).eval()
    prompts = [[5, 6, 7], list(range(1, 9))]
    with torch.no_grad():
        own = [
            model.generate(torch.tensor([p]), max_new_tokens=6, do_sample=False)[0, len(p) :].tolist() for p in prompts
        ]
    with closing(CausalLM(model, max_num_reqs=2, max_num_tokens=16, max_seq_len=32, ranks="lockstep")) as engine:
        tokens = engine.generate(prompts, max_new_tokens=6)
        full = sum(str(key.captured.mode) == "FULL" and key.replays > 0 for key in engine.stats().keys)
    options = {"compiler": "aot_eager", "ranks": "lockstep"}
    fast = torch.compile(model, backend="cgpass", dynamic=True, options=options)
    equal = []
    with torch.no_grad():
        for size in (5, 7, 6, 8, 6, 7, 5, 8):
            ids = torch.arange(size)[None]
            equal.append(
                torch.allclose(fast(ids, use_cache=False).logits, model(ids, use_cache=False).logits, atol=1e-4)
            )
    replayed = gp.runtime_of(fast).stats().replayed
    return {"own": own, "tokens": tokens, "full": full, "replayed": replayed, "equal": all(equal)}


def dying(rank: int) -> dict[str, Any]:
    """One rank dies between two replays."""
    model = Halved(distributed.group.WORLD).eval()
    fast = torch.compile(model, backend="cgpass", options={"compiler": "aot_eager", "ranks": "lockstep"})
    x = torch.ones(3, WIDTH)
    with torch.no_grad():
        for _ in range(3):
            fast(x)
        if rank == 1:
            os._exit(7)
        seen = refusal(lambda: [fast(x) for _ in range(2)])
    return {"replayed": gp.runtime_of(fast).stats().replayed, "one dies": seen}


def ending(closes: bool) -> None:
    """A program with captured collectives, as a user writes it."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    fast = torch.compile(
        Halved(distributed.group.WORLD).eval(),
        backend="cgpass",
        options={"compiler": "aot_eager", "ranks": "lockstep"},
    )
    with torch.no_grad():
        for _ in range(3):
            fast(torch.ones(3, WIDTH))
    runtime = gp.runtime_of(fast)
    assert runtime.stats().replayed == 2
    if closes:
        runtime.close()
    drops = mock.Mock(wraps=runtime.lease.close)
    with mock.patch.object(runtime.lease, "close", drops):
        distributed.destroy_process_group()
    sys.stdout.write("closed" if drops.called else "not closed")


if __name__ == "__main__":
    ending(sys.argv[1] == "close")
