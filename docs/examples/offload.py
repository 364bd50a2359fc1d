"""Run a model whose weights do not fit: a quarter of them on the device, the rest in host memory.

Run it with ``python docs/examples/offload.py``; it takes seconds, also without a GPU. A stack of layers is made, its
weights are moved to (pinned) host memory, and batches run over CUDA graphs (on a CPU: over the tape) that bring each
layer's weights in while the one before computes.

Exits with 1 when a result differs from the same model with all weights on the device, or when nothing was replayed.
"""

from __future__ import annotations

import copy
import sys

import torch
from rich.console import Console
from rich.table import Table

import graphpass

NUM_LAYERS, NUM_SLOTS, WIDTH, LARGEST = 8, 2, 64, 16


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def main() -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Layer() for _ in range(NUM_LAYERS))).eval()
    reference = copy.deepcopy(model).to(device)

    offloader = graphpass.offload.WeightOffloader(model, num_slots=NUM_SLOTS, device=device)
    console = Console()
    console.print(
        f"weights: {offloader.host_bytes() / 2**10:.0f} KiB on the host, {offloader.device_bytes() / 2**10:.0f} KiB on "
        f"{device} ({offloader.device_bytes() / offloader.host_bytes():.0%})"
    )
    inputs = [graphpass.InputSpec("input", (LARGEST, WIDTH), torch.float32)]
    table = Table("mode", "batches", "largest difference", "replays", title="one offloader, three managers")
    largest_difference, fewest_replays = 0.0, sys.maxsize
    for mode in ("NONE", "PIECEWISE", "FULL"):
        dispatcher = graphpass.CudagraphDispatcher(mode, [1, 2, 4, 8], max_num_reqs=LARGEST)
        manager = graphpass.CudaGraphManager(
            model, dispatcher, inputs, offloader=offloader, compiler="aot_eager", on_fallback="silent"
        )
        if manager.needs_capture():
            manager.capture()
        captured = manager.runtime.stats().replayed
        difference = 0.0
        sizes = [1, 3, 8, 11, 2, 16, 5]
        for num_tokens in sizes:
            x = torch.randn(num_tokens, WIDTH, device=device)
            result = manager.run(graphpass.Batch(num_tokens, inputs={"input": x}))
            with torch.no_grad():
                difference = max(difference, float((result - reference(x)).abs().max()))
        replays = manager.runtime.stats().replayed - captured
        table.add_row(mode, str(len(sizes)), f"{difference:.1e}", str(replays))
        largest_difference = max(largest_difference, difference)
        if mode != "NONE":
            fewest_replays = min(fewest_replays, replays)
        manager.close()
    console.print(table)
    return 0 if largest_difference < 1e-4 and fewest_replays else 1


if __name__ == "__main__":
    sys.exit(main())
