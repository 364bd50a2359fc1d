"""A decode-like step, untuned and tuned by ``tune="measure"``, as a share of its weights' floor.

``python -m tests.bench.tuning`` on a GPU. The step is one token for each of B requests through a Mistral of 8 layers of
width 2048 in bfloat16, without a cache. Its floor is the time to read its weights once, at the bandwidth that copies of
512 MiB reach. *Replay* is the device's time of a replay of the step's graph, *call* the time of a call of the compiled
model, host and device together. Both variants run in one process, so compile times are those of a warm cache where the
other one has compiled the same. ``--smoke`` runs tiny sizes on a CPU, where nothing is tuned.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from transformers import MistralConfig, MistralForCausalLM

import graphpass as gp
from tests.bench.timing import environment, parser_of, seconds, table_of, write_json


@dataclass(frozen=True, slots=True)
class Figures:
    """One row of the table."""

    batch: int
    variant: str
    replay_ms: float
    call_ms: float
    of_floor: float  #: floor / replay
    compile_s: float  #: of the first two calls, without the tuning
    tuning_s: float
    settings: str  #: what was chosen
    error: float  #: relative to a float32 run of the model


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = parser_of("tuning", __doc__, width=2048, layers=8)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--seconds", type=float, default=600.0, help="tune_seconds")
    options = parser.parse_args(arguments)
    device = torch.device("cpu" if options.smoke else "cuda")
    width, layers = (64, 2) if options.smoke else (options.width, options.layers)
    model = _model(width, layers, device)
    num_bytes = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if "embed_tokens" not in name)
    floor_ms = num_bytes / _bandwidth(device, options.smoke) * 1e3
    rows = []
    for batch in options.batch:
        for variant, given in {"untuned": {}, "tuned": {"tune": "measure", "tune_seconds": options.seconds}}.items():
            rows.append(_measured(model, batch, variant, given, floor_ms))
            print(asdict(rows[-1]), flush=True)
    where = environment(device)
    columns = "B | variant | replay, ms | call, ms | of the floor | compile, s | tuning, s | settings | error"
    cells = [
        (
            row.batch, row.variant, f"{row.replay_ms:.3f}", f"{row.call_ms:.3f}", f"{row.of_floor:.0%}",
            f"{row.compile_s:.0f}", f"{row.tuning_s:.0f}", row.settings, f"{row.error:.4f}",
        )
        for row in rows
    ]  # fmt: skip
    title = f"{where['device']}, torch {where['torch']}, floor {floor_ms:.3f} ms"
    Console(width=160).print(table_of(title, columns, cells))
    write_json(options.json, {"environment": where, "floor_ms": floor_ms, "rows": list(map(asdict, rows))})


def _model(width: int, layers: int, device: torch.device) -> MistralForCausalLM:
    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 128 or 1,
        num_key_value_heads=width // 512 or 1,
        intermediate_size=3 * width,
        vocab_size=32000 if width > 64 else 256,
        sliding_window=None,
        use_cache=False,
    )
    return MistralForCausalLM(config).to(device, torch.bfloat16).eval()


def _measured(model: Any, batch: int, variant: str, given: dict[str, Any], floor_ms: float) -> Figures:
    torch.compiler.reset()
    runtime = gp.GraphRuntime()
    compiled = torch.compile(
        model, backend="cgpass", dynamic=False, options={"runtime": runtime, "dispatch": "auto", **given}
    )
    ids = torch.arange(5, 5 + batch, device=model.device)[:, None]
    with torch.inference_mode():
        exact = deepcopy(model).float()(input_ids=ids, use_cache=False)[0]
        call = partial(compiled, input_ids=ids, use_cache=False)
        compile_s = 2 * seconds(call, model.device, calls=2)
        error = float((call()[0].float() - exact).norm() / exact.norm())
        tables = runtime._tables()
        graphs = [entry.graph for table in tables for key in table.descriptors() for entry in table.at(key)]
        assert len(graphs) == 1, f"the step is one graph, not {len(graphs)}: {runtime.report()}"
        replay_ms, call_ms = (_median_ms(model.device, step) for step in (graphs[0].replay, call))
    tuned = runtime.report().figures.costs.tuned
    print(runtime.report(), *runtime.notes, sep="\n", flush=True)
    tuning_s = sum(found.tuning_s for found in tuned)
    settings = ", ".join(f"{found.region}: {found.settings}" for found in tuned)
    runtime.close()
    of_floor = floor_ms / replay_ms
    return Figures(batch, variant, replay_ms, call_ms, of_floor, compile_s - tuning_s, tuning_s, settings, error)


def _median_ms(device: torch.device, step: Callable[[], Any], rounds: int = 15) -> float:
    """Of a step, over rounds of many steps between two synchronisations."""
    count, rounds = (100, rounds) if device.type == "cuda" else (3, 2)
    times = []
    for _ in range(rounds):
        step()
        times.append(seconds(step, device, calls=count) * 1e3)
    return statistics.median(times)


def _bandwidth(device: torch.device, smoke: bool) -> float:
    """Bytes a second that copies read and write."""
    source = torch.empty(2**16 if smoke else 2**28, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (_median_ms(device, partial(target.copy_, source), rounds=5) / 1e3)


if __name__ == "__main__":
    main()
