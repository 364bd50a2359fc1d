"""An encoder over ranks beside the same one alone: ``torchrun --nproc-per-node 2 -m tests.bench.encoder_ranks``.

The tower of ``tests.bench.encoder`` with random weights, equal on all ranks. For each load the median of some rounds in
which both take turns, and their ratio: over ranks a request is at most as slow as alone. Each row is printed as soon as
it is measured. ``--smoke`` runs tiny sizes over gloo on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import distributed

from graphpass import EncoderCudaGraphManager, EncoderOptions
from tests.bench.encoder import TOLERANCE, adapter_options, difference, make_items, make_tower, setup_of, together
from tests.bench.timing import interleaved, parser_of, write_json

LOADS = ("1 x 1024", "20 x 440", "20 mixed")
CALLS = 3


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("encoder_ranks", __doc__, rounds=None)
    parser.add_argument("--max-items", type=int, default=32, help="images of one replay, default 32")
    options = parser.parse_args(arguments)
    distributed.init_process_group("gloo" if options.smoke else "nccl")
    if not options.smoke:
        torch.cuda.set_device(distributed.get_node_local_rank())
    setup = setup_of(options)
    tower, rows = make_tower(setup), dict[str, Any]()

    def manager(group: Any) -> EncoderCudaGraphManager:
        given = {"options": EncoderOptions(compiler=setup.compiler), "group": group, **adapter_options(setup)}
        made = EncoderCudaGraphManager.from_model(tower, **given)
        made.capture()
        return made

    alone, over_ranks = manager(None), manager(distributed.group.WORLD)
    for load in setup.loads if options.smoke else LOADS:
        items = make_items(setup, setup.loads[load])
        distributed.broadcast(items["pixel_values"], 0)
        with torch.no_grad():
            wrong = difference(together(over_ranks.execute(items)), together(alone.execute(items)))
            assert wrong < TOLERANCE, f"{load} over ranks differs by {wrong:.1e}"
            steps = {"alone": partial(alone.execute, items), "over ranks": partial(over_ranks.execute, items)}
            given = {"rounds": setup.rounds, "steps_a_round": CALLS, "host_calls": 1}
            timings = interleaved(steps, device=setup.device, **given)
        ms = {name: timing.step.median / 1e3 for name, timing in timings.items()}
        rows[load] = {**ms, "ratio": ms["over ranks"] / ms["alone"]}
        if distributed.get_rank() == 0:
            figures = ", ".join(f"{name} {figure:.2f}" for name, figure in rows[load].items())
            Console(soft_wrap=True).print(f"{load}, ms: {figures}", markup=False)
    if distributed.get_rank() == 0:
        write_json(options.json, rows)
    for each in (alone, over_ranks):
        each.clear()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
