"""Our share of the host time of one call of BERT-base: ``python -m tests.bench.call_cost [--profile]``; needs a GPU.

The share is the host time of a call less that of the same call with a callable that returns at once, which is what
Dynamo's guards and the model's Python cost. Another backend pays these, too.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

import graphpass as gp
from cgpass.callable import GraphedCallable
from tests.bench import host_time
from tests.bench.one_argument import bert, moved

# Fewer calls a round than launches fit the device's queue.
host_us = partial(host_time.host_us, rounds=25, calls=40)


def main() -> None:
    """Print the table."""
    console = Console(width=110)
    if not torch.cuda.is_available():
        console.print("call_cost needs a GPU: skipped")
        return
    torch.manual_seed(0)
    make, inputs = bert()
    model = make.cuda().bfloat16().eval()
    title = f"BERT-base, 64 tokens, 64, {torch.cuda.get_device_name()}, torch {torch.__version__}"
    table = Table("call", "host µs", "with an empty callable", "our share", "reduce-overhead", title=title)
    with torch.inference_mode():
        for dynamic in (None, True):
            torch.compiler.reset()
            overhead = torch.compile(model, dynamic=dynamic, mode="reduce-overhead")
            fast = torch.compile(model, backend="cgpass", dynamic=dynamic)
            for size, what in ((3, "padded to 3"), (8, "at its own size"), (7, "padded to 8")):
                batch = moved(inputs(size))
                run = partial(fast, **batch)
                for _ in range(4):
                    returned = run()
                    overhead(**batch)
                if size == 3:  # the second size makes Dynamo compile for all sizes
                    continue
                whole = host_us(run)
                flat = [value for value in returned.values() if value is not None]
                call = GraphedCallable.__call__
                GraphedCallable.__call__ = lambda *_, flat=flat: flat  # type: ignore[method-assign]
                empty = host_us(run)
                GraphedCallable.__call__ = call  # type: ignore[method-assign]
                beside = host_us(partial(overhead, **batch))
                figures = (f"{figure:.0f}" for figure in (whole, empty, whole - empty, beside))
                table.add_row(f"{what}, dynamic={dynamic}", *figures)
    console.print(table)
    if "--profile" in sys.argv:
        with torch.inference_mode(), cProfile.Profile() as profile:
            for _ in range(300):
                run()
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    gp.runtime_of(fast).close()


if __name__ == "__main__":
    main()
