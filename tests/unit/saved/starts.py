"""One start of each kind, for tests that save in one process and load in another.

``python -m tests.unit.saved.starts COMPILER FOLDER KIND ...`` prints a line of JSON for each kind.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

import graphpass as gp
from graphpass import EncoderCudaGraphManager, EncoderOptions
from tests.processes import ROOT, environment
from tests.unit.saved.stack import INPUTS, OPTIONS, Plain, example, stack

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = (4, 3, 2)
Started = tuple[gp.GraphRuntime, Iterable[torch.Tensor]]


def torch_compile(folder: Path, compiler: str) -> Started:
    runtime = gp.GraphRuntime()
    options = {**OPTIONS, "compiler": compiler, "dispatch": "auto", "runtime": runtime, "warm_start": folder}
    fast = torch.compile(stack().to(DEVICE), backend="cgpass", dynamic=True, options=options)
    return runtime, [fast(example(rows).to(DEVICE)) for rows in ROWS]


def last_and_mean(x: torch.Tensor) -> torch.Tensor:
    return x.mean(1) + x[:, -1]


def made(folder: Path, compiler: str) -> Started:
    """A model whose length is padded because that is made neutral."""
    runtime = gp.GraphRuntime()
    options = {"dynamic_dims": {"x": {1: "length"}}, "capture_sizes": {"length": [8]}, "compiler": compiler}
    given = {**options, "dispatch": "auto", "runtime": runtime, "warm_start": folder}
    fast = torch.compile(last_and_mean, backend="cgpass", dynamic=True, options=given)
    xs = [torch.randn(3, length, 4, generator=torch.Generator().manual_seed(length)).to(DEVICE) for length in (5, 7)]
    return runtime, [fast(x) for x in xs * 3]


def graphed(folder: Path, compiler: str) -> Started:
    given = {**OPTIONS, "compiler": compiler}
    fast = gp.graphed(stack().to(DEVICE), **given, warm_start=folder)
    fast.capture(example().to(DEVICE))
    return fast.runtime, [fast(example(rows).to(DEVICE)) for rows in ROWS]


def manager(folder: Path, compiler: str) -> Started:
    dispatcher = gp.CudagraphDispatcher("FULL_AND_PIECEWISE", [2, 4], max_num_reqs=4)
    inputs = [gp.InputSpec("x", (4, INPUTS), torch.float32)]
    made = gp.CudaGraphManager(
        stack(Plain).to(DEVICE), dispatcher, inputs, compiler=compiler, progress=False, warm_start=folder
    )
    made.capture()
    results = [made.run(gp.Batch(rows, inputs={"x": example(rows).to(DEVICE)})).clone() for rows in ROWS]
    return made.runtime, results


def causal_lm(folder: Path, compiler: str) -> Started:
    from graphpass.text import CausalLM
    from tests.unit.text import test_model as text

    given = {"compiler": compiler, "capture_sizes": [2, 8], "warm_start": folder, "progress": False}
    made = CausalLM(text.llama().to(DEVICE), **{**text.SIZES, **given})
    made.capture()
    return made.manager.runtime, [torch.tensor(tokens) for tokens in text.tokens(made)]


def encoder(folder: Path, compiler: str) -> Started:
    from tests.unit.encoder import toy

    options = EncoderOptions(token_budgets=(8,), costs=None, compiler=compiler, warm_start=folder)
    one = toy.Compiled()
    one.tower.to(DEVICE)
    made = EncoderCudaGraphManager(one, options=options, device=DEVICE, dtype=torch.float32)
    made.capture()
    return made.runtime, made.execute(toy.images((4, 8, 2)))


STARTS = {kind.__name__: kind for kind in (torch_compile, made, graphed, manager, causal_lm, encoder)}

TRACE_NOTHING = {"graphed", "manager", "causal_lm"}
"""Kinds whose loaded starts need no trace; the others find their graphs by tracing."""


def start(kind: str, compiler: str, folder: Path) -> dict[str, Any]:
    """What a start compiled and traced, a digest of its results, and the notes of its runtime."""
    counters.clear()
    with torch.no_grad():
        runtime, results = STARTS[kind](folder / kind, compiler)
        bits = b"".join(result.cpu().numpy().tobytes() for result in results)
    return {
        "compiled": runtime.compiled(),
        "loaded": runtime.report().figures.costs.loaded,
        "rows": [row[0] for row in runtime.report()["Costs"].rows],
        "frames": sum(counters["frames"].values()),
        "bits": hashlib.sha256(bits).hexdigest(),
        "notes": [str(note) for note in runtime.notes],
    }


def started(compiler: str, folder: Path, kinds: Sequence[str], **environ: str) -> dict[str, dict[str, Any]]:
    """What :func:`start` says of each kind, in a process of its own."""
    command = [sys.executable, "-m", "tests.unit.saved.starts", compiler, str(folder), *kinds]
    env = environment(**environ)
    ran = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    lines = ran.stdout.splitlines()[-len(kinds) :]
    return dict(zip(kinds, map(json.loads, lines), strict=True))


def assert_loaded(kind: str, saved: dict[str, Any], loaded: dict[str, Any]) -> None:
    """A start that saved, and one that compiled nothing and has its bits."""
    assert saved["compiled"] > saved["loaded"] == 0, kind
    assert loaded["loaded"] > loaded["compiled"] == 0, (kind, loaded["notes"])
    assert loaded["bits"] == saved["bits"], kind
    assert "load" in loaded["rows"], "its seconds are a row of the costs"
    assert not loaded["frames"] or kind not in TRACE_NOTHING, (kind, loaded["notes"])


if __name__ == "__main__":
    for name in sys.argv[3:]:
        sys.stdout.write(json.dumps(start(name, sys.argv[1], Path(sys.argv[2]))) + "\n")
