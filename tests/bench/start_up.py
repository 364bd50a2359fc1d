"""Seconds until the first replay, and region compile time by number of layers: ``python -m tests.bench.start_up``.

Every figure is taken in a process of its own. The clock starts when the model is on the device, one eager step has run
and nothing is compiled; it stops when the step named in the table is done on the device. *Cold* is a run with empty
caches of Inductor and Triton, *warm* a second process with the caches that the first one left. *Loaded* is a process
with empty caches and the directory of ``warm_start`` that another one left. All find the bytecode of Python's modules,
as an installation has it; where Python writes none, runs of one layer make it first.

The second table has the parts of each process: Dynamo's trace, the backend, of which graphpass knows its own partition,
keys, compilation of regions and padding proof, and the rest: imports, loading, capture, the CUDA context's first uses.

The third table compiles a decoder with 24 and with 240 small layers from cold caches, for FULL and PIECEWISE, and
shows where the backend's time goes. What any compilation costs a fresh process before it compiles anything (loading
Inductor, Triton and their workers) is a row of its own.

``--smoke`` runs tiny sizes on a CPU: the code, not the figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import graphpass as gp
from tests.bench.decoder import DecoderSizes, make_decoder
from tests.bench.decoder_step import FULL, PIECEWISE, Engine, reduce_overhead
from tests.bench.timing import (
    environment,
    gpu_or_cpu,
    in_process,
    is_skipped,
    listed,
    parser_of,
    plain_compiled,
    synchronize,
    table_of,
    write_json,
)

LAYERS = "layers"
FIRST_STEP = "torch.compile, first step"
REDUCE_OVERHEAD = "reduce-overhead, third step"
ANY_COMPILE = "torch.compile of one linear layer"
FULL_REPLAY = "cgpass FULL, first replay"
UNSPLIT_REPLAY = "cgpass FULL without splitting ops, first replay"
PIECEWISE_REPLAY = "cgpass PIECEWISE, first replay"
GRAPHED_REPLAY = "graphpass.graphed, first replay"
BACKEND_PARTS = ("partition", "key", "compile")
OWN_PARTS = (*BACKEND_PARTS, "proof")
Figures = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every figure's process and print both tables; in such a process, print the figure."""
    options = _parsed(arguments)
    if options.figure:
        print(json.dumps(_figure(options)))
        return
    console = Console(width=140)
    if is_skipped("start_up", options):
        return
    where = environment(gpu_or_cpu(options.smoke))
    figures: Figures = {"environment": where, "batch": options.batch, "start_up": [], "layers": []}
    names = _variants(options, console)
    for name in names if sys.dont_write_bytecode else ():
        _cold_and_warm(name, options, console, num_layers=1)
    for name in names:
        figures["start_up"].append(_cold_and_warm(name, options, console))
        write_json(options.json, figures)
    console.print(_start_up_table(figures), _parts_table(figures))
    for num_layers in () if options.loaded_only else options.layer_counts:
        found = _cold_and_warm(LAYERS, options, console, num_layers)["cold"]
        figures["layers"].append({**found, "rest": found["seconds"] - sum(found[part] for part in BACKEND_PARTS)})
        write_json(options.json, figures)
    if figures["layers"]:
        console.print(_layers_table(figures))


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("start_up", __doc__, batch=8, layers=None)
    parser.add_argument("--layer-counts", type=listed, default=[24, 240])
    parser.add_argument("--loaded-only", action="store_true", help="reduce-overhead and loaded starts alone")
    parser.add_argument("--saved", type=Path, default=None, help="warm_start of a figure's process")
    parser.add_argument("--figure", default=None, help="take one figure in this process and print it as JSON")
    options: argparse.Namespace = parser.parse_args(arguments)
    return options


def _variants(options: argparse.Namespace, console: Console) -> list[str]:
    if options.smoke:
        console.print(f"{REDUCE_OVERHEAD} needs a GPU: skipped")
        return [ANY_COMPILE, FIRST_STEP, FULL_REPLAY, UNSPLIT_REPLAY, PIECEWISE_REPLAY, GRAPHED_REPLAY]
    if options.loaded_only:
        return [REDUCE_OVERHEAD, GRAPHED_REPLAY]
    return [REDUCE_OVERHEAD, ANY_COMPILE, FIRST_STEP, FULL_REPLAY, UNSPLIT_REPLAY, PIECEWISE_REPLAY, GRAPHED_REPLAY]


# -- the process that starts others ----------------------------------------------------------------------------------


def _cold_and_warm(name: str, options: argparse.Namespace, console: Console, num_layers: int | None = None) -> Figures:
    """A figure from empty caches and, but for layers, once more with what that left in them."""
    num_layers = num_layers or options.layers or (3 if options.smoke else 28)
    found: Figures = {"name": name}
    with tempfile.TemporaryDirectory(prefix="start_up_") as directory:
        for state in ("cold",) if name == LAYERS else ("cold", "warm"):
            found[state] = _in_a_process(name, options, num_layers, Path(directory))
            console.print(f"{name}, {num_layers} layers, {state}: {found[state]['seconds']:.2f} s")
        for state in ("saving", "loaded") if name == GRAPHED_REPLAY else ():
            caches, saved = Path(directory) / state, Path(directory) / "saved"
            found[state] = _in_a_process(name, options, num_layers, caches, saved)
            console.print(f"{name}, {num_layers} layers, {state}: {found[state]}")
    return found


def _in_a_process(
    name: str, options: argparse.Namespace, num_layers: int, caches: Path, saved: Path | None = None
) -> Figures:
    arguments = ["--figure", name, "--batch", str(options.batch), "--layers", str(num_layers)]
    arguments += [] if saved is None else ["--saved", str(saved)]
    start = time.perf_counter()
    figures = in_process("start_up", arguments + ["--smoke"] * options.smoke, caches)
    if not figures:
        raise RuntimeError(f"the process of {name} has failed")
    return {**figures, "process_seconds": time.perf_counter() - start}


def _start_up_table(figures: Mapping[str, Any]) -> Table:
    where, rows = figures["environment"], []
    reference = next((row for row in figures["start_up"] if row["name"] == REDUCE_OVERHEAD), None)
    for row in figures["start_up"]:
        cells = [row["name"]]
        for state in ("cold", "warm"):
            seconds = row[state]["seconds"]
            cells += [f"{seconds:.2f}", f"{seconds / reference[state]['seconds']:.2f}" if reference else ""]
        loaded = f"{row['loaded']['seconds']:.2f}" if "loaded" in row else ""
        rows.append((*cells, loaded, f"{row['cold']['process_seconds']:.1f}"))
    columns = "until | cold | ÷ reduce-overhead | warm | ÷ reduce-overhead | loaded | whole process, cold"
    title = f"Start-up, batch {figures['batch']}, {where['device']}, torch {where['torch']}: seconds"
    return table_of(title, columns, rows)


def _parts_table(figures: Mapping[str, Any]) -> Table:
    rows = []
    for row in figures["start_up"]:
        for state in ("cold", "warm", "saving", "loaded"):
            if state in row:
                found = row[state]
                rest = found["seconds"] - found["trace"] - found["backend"]
                own = [found.get(part, "") for part in OWN_PARTS]
                cells = (found["seconds"], found["trace"], found["backend"], *own, rest)
                rows.append((f"{row['name']}, {state}", *(c and f"{c:.2f}" for c in cells)))
    return table_of("By part, s", "process | all | trace | backend | partition | keys | regions | proof | rest", rows)


def _layers_table(figures: Mapping[str, Any]) -> Table:
    names = ("num_layers", "captured", "eager", "artifacts", "rest", "partition", "key", "compile", "seconds")
    columns = (
        "layers | captured | eager | artifacts | the rest s | partition and stitch s | hash s | region compile s | "
        "first call s"
    )
    values = [[row[name] for name in names] for row in figures["layers"]]
    rows = [[f"{value:.3f}" if isinstance(value, float) else value for value in row] for row in values]
    title = "One compile of small layers, cold caches; the rest is Dynamo's trace, imports and one step"
    return table_of(title, columns, rows)


# -- the process of one figure ---------------------------------------------------------------------------------------


def _figure(options: argparse.Namespace) -> Figures:
    device = gpu_or_cpu(options.smoke)
    small = options.smoke or options.figure == LAYERS
    sizes = DecoderSizes.small(options.layers) if small else DecoderSizes(options.layers)
    dtype = torch.float32 if options.smoke else torch.bfloat16
    model, *inputs = make_decoder(sizes, options.batch, device, dtype=dtype)
    compiler = "eager" if options.smoke else "inductor"
    with torch.inference_mode():
        model(*inputs)
        synchronize(device)
        start = time.perf_counter()
        described = _run_until(options.figure, model, inputs, compiler, options.saved)
        synchronize(device)
        return {"seconds": time.perf_counter() - start, **_dynamos_parts(), **described()}


def _dynamos_parts() -> Figures:
    """Seconds of all compilations of this process, apart from and within the backend."""
    spent = {name: sum(found) for name, found in torch._dynamo.utils.compilation_time_metrics.items()}
    backend = spent.get("OutputGraph.call_user_compiler", 0.0)
    return {"trace": spent.get("_compile.compile_inner", 0.0) - backend, "backend": backend}


def _run_until(
    figure: str, model: Any, inputs: list[torch.Tensor], compiler: str, saved: Path | None
) -> Callable[[], Figures]:
    """Compile and run to the step that the figure names; returns what else there is to say, asked off the clock."""
    if figure == FIRST_STEP:
        plain_compiled(model, compiler)(*inputs)
    elif figure == ANY_COMPILE:
        layer = torch.nn.Linear(inputs[0].shape[1], 8, device=inputs[0].device, dtype=inputs[0].dtype)
        torch.compile(lambda x: torch.relu(layer(x)), backend=compiler)(inputs[0])
    elif figure == REDUCE_OVERHEAD:
        step = reduce_overhead(model, inputs)
        for _ in range(3):
            step()
    elif figure == GRAPHED_REPLAY:
        start = time.perf_counter()
        fast = gp.graphed(model, compiler=compiler, warm_start=saved, progress=False, outputs="view")
        fast(*inputs)  # loads, or traces and compiles
        synchronize(inputs[0].device)
        compiled_s = time.perf_counter() - start
        fast.capture(*inputs)
        fast(*inputs)
        return partial(_graphed_figures, fast.runtime, compiled_s)
    elif figure == LAYERS:
        engine = Engine(model, inputs, mode="FULL_AND_PIECEWISE", compiler=compiler)
        engine.compile_only()
        return partial(_layer_figures, engine.runtime, model.sizes.num_layers)
    else:
        mode = PIECEWISE if figure == PIECEWISE_REPLAY else FULL
        built_for = "FULL" if figure == UNSPLIT_REPLAY else "FULL_AND_PIECEWISE"
        engine = Engine(model, inputs, mode=built_for, compiler=compiler)
        engine.capture(mode)
        engine.step(mode)
        return partial(_replays, engine.runtime)
    return dict


def _replays(runtime: gp.GraphRuntime) -> Figures:
    stats = runtime.stats()
    return {"captured": stats.captured, "replayed": stats.replayed}


def _graphed_figures(runtime: gp.GraphRuntime, compiled_s: float) -> Figures:
    frames = torch._dynamo.utils.counters["frames"]["total"]
    found = {"frames": frames, "artifacts": runtime.compiled(), "until first result": compiled_s}
    seconds = [asdict(record.seconds) for record in runtime.callables()]
    return {**_replays(runtime), **found, **{part: sum(each[part] for each in seconds) for part in OWN_PARTS}}


def _layer_figures(runtime: gp.GraphRuntime, num_layers: int) -> Figures:
    record = runtime.callables()[0]
    kinds = [region.kind for region in record.regions]
    return {
        "num_layers": num_layers,
        "captured": kinds.count("captured"),
        "eager": kinds.count("eager"),
        "artifacts": runtime.compiled(),
        **{part: getattr(record.seconds, part) for part in BACKEND_PARTS},
    }


if __name__ == "__main__":
    main()
