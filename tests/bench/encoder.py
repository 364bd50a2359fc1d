"""A vision tower of Qwen3-VL's size in every form a user could run it: ``python -m tests.bench.encoder``.

Seven forms over one set of weights, on loads from one small image to twenty mixed ones, in interleaved rounds: the
stock tower image by image, and in one call as transformers runs it; the adapter's eager call, which packs all images
into one, with the tower as it is and with its block compiled; graphs of the eager tower on a doubling ladder, packed
greedily; the manager as it comes; and one hand-captured graph of exactly the load's size, replayed over filled buffers.
Before anything is timed, each form's results are compared with the stock tower's. ``execute`` is timed end to end:
packing, tables, copies, replays, results of the caller's own. Start-up is measured with empty compiler caches, before
everything else.

``--smoke`` runs tiny sizes on a CPU: the code, not the figures.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import graphpass as gp
from graphpass import EncoderCudaGraphManager, EncoderOptions
from graphpass.encoder import EncoderGraphKey, SupportsEncoderCudaGraph, generate_budgets
from graphpass.encoder.adapters import TowerAdapter
from tests.bench.generate import empty_caches
from tests.bench.timing import (
    HandCapture,
    environment,
    free_bytes,
    gpu_or_cpu,
    interleaved,
    is_skipped,
    parser_of,
    seconds,
    table_of,
    write_json,
)

ONE_BY_ONE = "stock, image by image"
STOCK = "stock, one call"
PACKED = "eager, packed in one call"
COMPILED = "block compiled, packed in one call"
DOUBLING = "graphs of the eager tower, doubling ladder"
MANAGER = "manager"
RAW = "one graph of this size, raw replay"
COLORS = {MANAGER: "#c0392b", RAW: "#7f8c8d"}
TOLERANCE = 5e-2
"""Relative norm, bfloat16 over 27 layers of random weights."""

Grids = Sequence[tuple[int, int, int]]
Step = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Setup:
    """What one run measures."""

    config: Mapping[str, Any]  #: of the tower
    loads: Mapping[str, Grids]  #: name -> grids
    budgets: tuple[int, int]  #: least and greatest output tokens of ladders
    max_items: int  #: images of one replay, and sequences that a graph's attention allows for
    device: torch.device  #: where it runs
    dtype: torch.dtype  #: of weights and patches
    compiler: str  #: of the block
    rounds: int  #: values behind each median


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one form on one load, in milliseconds."""

    load: str  #: which
    form: str  #: which
    median: float  #: end to end
    q1: float  #: first quartile
    q3: float  #: third quartile
    host: float  #: to enqueue one call on an idle device
    difference: float  #: from the stock tower's results, relative norm


@dataclass(frozen=True, slots=True)
class StartUp:
    """What it takes before the first replay."""

    graphs: int  #: in the default ladder
    compile_and_capture_s: float  #: with empty caches, costs measured too
    loaded_s: float  #: the same over artifacts that another manager saved
    capture_again_s: float  #: the same without compiling
    pool_bytes: int  #: of the whole ladder
    largest_pool_bytes: int  #: of its largest budget alone
    estimated_bytes: int  #: of the device, what ``estimate()`` said before capturing again
    taken_bytes: int  #: by how much the device's free memory shrank then
    estimate_s: float  #: how long the estimate took


def make_tower(setup: Setup) -> Any:
    """The stock tower with random weights."""
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    torch.manual_seed(0)
    tower = Qwen3VLVisionModel(Qwen3VLVisionModel.config_class(**setup.config))
    return tower.to(setup.device, setup.dtype).eval()


def make_items(setup: Setup, grids: Grids) -> dict[str, torch.Tensor]:
    """Random patches on the device, grids on the host, as a processor's mapping."""
    config = setup.config
    num_patches = sum(frames * height * width for frames, height, width in grids)
    patches = torch.randn(num_patches, 3 * 2 * config["patch_size"] ** 2, device=setup.device, dtype=setup.dtype)
    return {"pixel_values": patches, "image_grid_thw": torch.tensor(grids)}


def stock_call(tower: Any, items: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The tower as transformers runs it."""
    pixels, grids = items["pixel_values"], items["image_grid_thw"]
    output = tower(pixels, grids.to(pixels.device))
    return (output.pooler_output, *output.deepstack_features)


def image_by_image(tower: Any, parts: Sequence[Mapping[str, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """One call an image."""
    each = [stock_call(tower, part) for part in parts]
    return tuple(torch.cat(rows) for rows in zip(*each, strict=True))


def one_graph(
    setup: Setup, adapter: SupportsEncoderCudaGraph, items: Mapping[str, torch.Tensor], capture: HandCapture
) -> tuple[Step, tuple[torch.Tensor, ...]]:
    """A graph of exactly the load's size over filled buffers, and where its results lie."""
    specs = adapter.get_encoder_cudagraph_item_specs(items)
    tokens, patches = (sum(getattr(spec, name) for spec in specs) for name in ("output_tokens", "input_size"))
    key = EncoderGraphKey(tokens, patches, len(specs), len(specs))
    buffers = adapter.prepare_encoder_cudagraph_replay_buffers(items, key)

    def body() -> tuple[torch.Tensor, ...]:
        with gp.set_forward_context():
            outputs = adapter.encoder_cudagraph_forward(buffers, key)
        assert isinstance(outputs, tuple)
        return outputs

    return capture.capture(body)


def together(results: Sequence[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """The manager's results, image by image, as rows of each output."""
    return tuple(torch.cat(rows) for rows in zip(*results, strict=True))


def difference(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest relative norm among the outputs."""
    pairs = zip(found, expected, strict=True)
    return max(float((one.double() - other.double()).norm() / other.double().norm()) for one, other in pairs)


@dataclass(frozen=True, slots=True)
class Forms:
    """What all loads share: the tower, adapters over its weights, and captured managers."""

    tower: Any
    eager: TowerAdapter
    compiled: TowerAdapter
    doubling: EncoderCudaGraphManager
    manager: EncoderCudaGraphManager

    def steps(
        self, setup: Setup, items: dict[str, torch.Tensor], capture: HandCapture
    ) -> dict[str, tuple[Step, Callable[[Any], Sequence[torch.Tensor]]]]:
        """{form: (one call, what reads its result)}."""
        indices = range(len(items["image_grid_thw"]))
        selected = [self.eager.select_encoder_cudagraph_items(items, [index]) for index in indices]
        parts = [{"pixel_values": one["pixel_values"], "image_grid_thw": one["grid_thw"]} for one in selected]
        replay, outputs = one_graph(setup, self.compiled, items, capture)
        return {
            ONE_BY_ONE: (partial(image_by_image, self.tower, parts), tuple),
            STOCK: (partial(stock_call, self.tower, items), tuple),
            PACKED: (partial(self.eager.encoder_eager_forward, items), tuple),
            COMPILED: (partial(self.compiled.encoder_eager_forward, items), tuple),
            DOUBLING: (partial(self.doubling.execute, items), together),
            MANAGER: (partial(self.manager.execute, items), together),
            RAW: (replay, lambda _: outputs),
        }


def make_forms(setup: Setup, tower: Any, manager: EncoderCudaGraphManager) -> Forms:
    """Capture what has not been."""
    options = adapter_options(setup)
    compiled = TowerAdapter(tower, **options)
    compiled.compile_encoder(setup.compiler, gp.GraphRuntime())
    ladder = generate_budgets(max(setup.budgets[0], setup.budgets[1] // 64), setup.budgets[1])
    greedy = EncoderOptions(token_budgets=ladder, compile=False, costs=None)
    doubling = EncoderCudaGraphManager.from_model(tower, options=greedy, **options)
    doubling.capture()
    return Forms(tower, TowerAdapter(tower, **options), compiled, doubling, manager)


def adapter_options(setup: Setup) -> dict[str, int]:
    """The limits that all ladders have."""
    least, most = setup.budgets
    return {"min_tokens": least, "max_tokens": most, "max_items": setup.max_items, "max_frames": setup.max_items}


def start_up(setup: Setup, tower: Any, folder: Path) -> tuple[StartUp, EncoderCudaGraphManager]:
    """Capture the default ladder cold, loaded, once more, and its largest budget; the ladder is left captured."""
    limits = adapter_options(setup)
    options = EncoderOptions(compiler=setup.compiler)
    manager = EncoderCudaGraphManager.from_model(tower, options=options, **limits)
    with empty_caches(folder):
        cold_s = seconds(manager.capture, setup.device)
    manager.clear()
    loaded_s = load_s(setup, tower, folder)
    alone = EncoderCudaGraphManager.from_model(
        tower, options=EncoderOptions(compiler=setup.compiler, token_budgets=[setup.budgets[1]]), **limits
    )
    alone.capture()
    largest = alone.get_cumulative_stats().pool_bytes
    alone.clear()
    estimate = manager.estimate()
    free = free_bytes(setup.device)
    again_s = seconds(manager.capture, setup.device)
    taken = free - free_bytes(setup.device)
    pool_bytes = manager.get_cumulative_stats().pool_bytes
    graphs = manager.get_num_graphs_to_capture()
    begin = StartUp(
        graphs, cold_s, loaded_s, again_s, pool_bytes, largest, estimate.total_bytes, taken, estimate.seconds
    )
    return begin, manager


def load_s(setup: Setup, tower: Any, folder: Path) -> float:
    """Seconds until the default ladder is captured, by a manager that loads what another one saved."""
    options = EncoderOptions(compiler=setup.compiler, warm_start=folder / "saved")
    for caches in ("saving", "loading"):
        manager = EncoderCudaGraphManager.from_model(tower, options=options, **adapter_options(setup))
        with empty_caches(folder / caches):
            taken_s = seconds(manager.capture, setup.device)
        manager.clear()
    return taken_s


def measure(setup: Setup, forms: Forms, load: str) -> list[Row]:
    """All forms on one load."""
    items, by_hand = make_items(setup, setup.loads[load]), HandCapture(setup.device)
    with torch.no_grad():
        steps = forms.steps(setup, items, by_hand)
        first, read_first = steps[ONE_BY_ONE]
        expected = read_first(first())
        differences = {name: difference(read(step()), expected) for name, (step, read) in steps.items()}
        for name, found in differences.items():
            assert found < TOLERANCE, f"{name} on {load} differs from the stock tower by {found:.1e}"
        timings = interleaved(
            {name: step for name, (step, _) in steps.items()},
            device=setup.device,
            rounds=setup.rounds,
            steps_a_round=3,
            host_calls=3,
        )
    rows = []
    for name, timing in timings.items():
        figures = (timing.step.median, timing.step.q1, timing.step.q3, timing.host.median)
        median, q1, q3, host = (figure / 1e3 for figure in figures)
        rows.append(Row(load, name, median, q1, q3, host, differences[name]))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure start-up and every load; one table each."""
    options, console = _parsed(arguments), Console(width=140)
    if is_skipped("encoder", options):
        return
    setup = setup_of(options)
    tower = make_tower(setup)
    with tempfile.TemporaryDirectory(prefix="encoder_") as folder:
        begin, manager = start_up(setup, tower, Path(folder))
    console.print(_start_up_table(begin))
    forms = make_forms(setup, tower, manager)
    rows: list[Row] = []
    for load in options.loads or setup.loads:
        rows += measure(setup, forms, load)
        console.print(_table(load, [row for row in rows if row.load == load]))
        figures = {"start_up": asdict(begin), "rows": [asdict(row) for row in rows]}
        write_json(options.json, {"environment": environment(setup.device), "config": dict(setup.config), **figures})
    console.print(str(manager.get_cumulative_stats()))
    for each in (manager, forms.doubling):
        each.clear()
    if options.png is not None:
        draw(rows, options.png)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("encoder", __doc__, rounds=None)
    parser.add_argument("--loads", type=lambda text: text.split(","), default=None, help="names, default all")
    parser.add_argument("--max-items", type=int, default=32, help="images of one replay, default 32")
    parser.add_argument("--png", type=Path, default=None, metavar="PATH", help="a picture; needs matplotlib")
    options: argparse.Namespace = parser.parse_args(arguments)
    return options


def setup_of(options: argparse.Namespace) -> Setup:
    """The tower and the loads."""
    if options.smoke:
        config = _config(depth=2, width=32, heads=2, inner=64, patch=4, out=48, positions=16, levels=[0, 1])
        loads: dict[str, Grids] = {"1 x 16": [(1, 4, 4)], "5 mixed": [(1, 2 + 2 * n, 6) for n in range(5)]}
        return Setup(
            config, loads, (4, 64), options.max_items, torch.device("cpu"), torch.float32, "eager", options.rounds or 1
        )
    config = _config(depth=27, width=1152, heads=16, inner=4304, patch=16, out=3584, positions=2304, levels=[8, 16, 24])
    seeded = random.Random(0)
    sides = [8, 48, *(2 * seeded.randint(4, 24) for _ in range(18))]
    loads = {
        "1 x 256": [(1, 16, 16)],
        "1 x 1024": [(1, 32, 32)],
        "1 x 2304": [(1, 48, 48)],
        "1 x 4096": [(1, 64, 64)],
        "4 x 256": [(1, 16, 16)] * 4,
        "16 x 256": [(1, 16, 16)] * 16,
        "20 x 440": [(1, 20, 22)] * 20,
        "20 mixed": [(1, side, side) for side in sides],
    }
    rounds = options.rounds or 9
    return Setup(config, loads, (16, 4096), options.max_items, gpu_or_cpu(), torch.bfloat16, "inductor", rounds)


def _config(**sizes: Any) -> dict[str, Any]:
    names = {
        "width": "hidden_size", "heads": "num_heads", "inner": "intermediate_size", "patch": "patch_size",
        "out": "out_hidden_size", "positions": "num_position_embeddings", "levels": "deepstack_visual_indexes",
    }  # fmt: skip
    return {names.get(name, name): value for name, value in sizes.items()}


def _start_up_table(begin: StartUp) -> Table:
    ratio = f"{begin.pool_bytes / begin.largest_pool_bytes:.2f}" if begin.largest_pool_bytes else ""
    pool, estimated, taken = (
        f"{value / 2**20:.0f}" for value in (begin.pool_bytes, begin.estimated_bytes, begin.taken_bytes)
    )
    times = (f"{value:.1f}" for value in (begin.compile_and_capture_s, begin.loaded_s, begin.capture_again_s))
    row = (begin.graphs, *times, pool, ratio, estimated, taken, f"{begin.estimate_s:.1f}")
    times_of = "cold, s | loaded, s | capture alone, s"
    columns = f"graphs | {times_of} | pool, MiB | ÷ largest | estimated, MiB | taken, MiB | estimated in s"
    return table_of("Start-up of the manager", columns, [row])


def _table(load: str, rows: Sequence[Row]) -> Table:
    (own,) = (row for row in rows if row.form == MANAGER)
    cells = [
        (
            row.form, f"{row.median:.2f}", f"{row.q1:.2f}..{row.q3:.2f}", f"{row.host:.2f}",
            f"{row.median / own.median:.2f} x", f"{row.difference:.1e}",
        )
        for row in rows
    ]  # fmt: skip
    return table_of(f"{load} patches", "form | ms | spread | host, ms | manager is faster by | difference", cells)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Milliseconds of each form, a group of bars for each load."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot, ticker

    loads, forms = (list(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("load", "form"))
    figure, axes = pyplot.subplots(figsize=(1.4 * len(loads) + 4, 4.5), layout="constrained")
    width = 0.85 / len(forms)
    blues = pyplot.get_cmap("Blues")
    for number, form in enumerate(forms):
        heights = [row.median for load in loads for row in rows if (row.load, row.form) == (load, form)]
        places = [place + (number - len(forms) / 2 + 0.5) * width for place in range(len(loads))]
        axes.bar(places, heights, width, label=form, color=COLORS.get(form, blues(0.85 - 0.13 * number)))
    axes.set_yscale("log")
    axes.set_ylabel("ms a call")
    axes.set_xticks(range(len(loads)), [f"{load} patches" if "x" in load else load for load in loads])
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    figure.legend(loc="outside upper left", fontsize="small", ncols=3, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
