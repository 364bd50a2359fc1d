"""graphpass in torch's own tools: TORCH_LOGS, the trace of tlparse, profiles; and the page about its warnings."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import cgpass
from graphpass import BatchDescriptor, CUDAGraphMode, GraphRuntime, set_forward_context
from tests import processes
from tests.processes import ROOT
from tests.unit.models import module

PROGRAM = """
import torch

def forward(x):
    y = torch.cumsum(x * 2, 0) + x.sum().item()
    return y - y.mean()

import cgpass
compiled = torch.compile(forward, backend=cgpass.backend, options={"compiler": "eager"}, fullgraph=True, dynamic=True)
torch._dynamo.config.capture_scalar_outputs = True
with torch.inference_mode():
    for _ in range(3):
        compiled(torch.ones(5))
"""


def ran(folder: Path, **environment: str) -> str:
    """What the program writes to stderr."""
    env = processes.environment(TORCHINDUCTOR_CACHE_DIR=str(folder), **environment)
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, cwd=folder, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    return process.stderr


@dataclass(frozen=True)
class Artifact:
    """One artifact of ours in a trace."""

    encoding: str
    of_frame: bool
    payload: str

    def json(self) -> Any:
        assert self.encoding == "json"
        return json.loads(self.payload)


def artifacts(log: Path) -> dict[str, list[Artifact]]:
    """Our artifacts in a trace: each line is a glog prefix and JSON, and the lines of its payload begin with a tab."""
    found: dict[str, list[Artifact]] = {}
    entries: list[tuple[dict[str, Any], list[str]]] = []
    for line in log.read_text(encoding="utf-8").splitlines():
        if line.startswith("\t"):
            entries[-1][1].append(line[1:])
        else:
            entries.append((json.loads(line[line.index("{") :]), []))
    for record, payload in entries:
        if record.get("artifact", {}).get("name", "").startswith("graphpass"):
            name, encoding = record["artifact"]["name"], record["artifact"]["encoding"]
            found.setdefault(name, []).append(Artifact(encoding, "frame_id" in record, "\n".join(payload)))
    return found


def test_torch_logs_and_torch_trace(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    said = ran(tmp_path, TORCH_LOGS="+graphpass", TORCH_TRACE=str(traces))
    assert said.count("runs eagerly between graphs: host read") == 1
    assert "because its size recurs" in said, "INFO"
    assert "g0 compiled: 2 regions for graphs" in said, "DEBUG"
    assert "recorded" in said
    (log,) = traces.glob("*.log")
    found = artifacts(log)
    (partition,) = found["graphpass_partition_g0"]
    assert partition.encoding == "string"
    assert partition.of_frame
    assert "host read" in partition.payload
    (compiled,) = found["graphpass_callable_g0"]
    assert compiled.json()["mode"] == "PIECEWISE"
    (size,) = compiled.json()["sizes"]
    assert (size["field"], size["verdict"], size["padded"]) == ("x[0]", "unproved", False)
    assert size["not_proved"]
    graphs = [of[0].json() for name, of in found.items() if name.startswith("graphpass_graph_g0")]
    assert graphs
    assert all(graph["mode"] == "PIECEWISE" for graph in graphs)
    warned = [note.json() for note in found["graphpass_note"] if note.json()["is_warning"]]
    assert any("host read" in note["what"] and "on the device" in note["remedy"] for note in warned)
    assert any("is not padded" in note["what"] for note in warned)


# Names in a profile: each replay by its key, each region by its name and module; nothing runs without a profiler.


KEY = BatchDescriptor(4)


def summed(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.layers(torch.cumsum(self.first(x), dim=1))


def step_of(rt: GraphRuntime, mode: str) -> Callable[[], torch.Tensor]:
    """A captured model's step: a replay of its key."""
    options = cgpass.options(compiler="eager", splitting_ops=["aten::cumsum"], runtime=rt)
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model = module(summed, first=nn.Linear(6, 6), layers=layers).eval()
    compiled = torch.compile(model, backend="cgpass", options=options, fullgraph=True)
    x = torch.ones(4, 6)

    def step() -> torch.Tensor:
        with torch.inference_mode(), set_forward_context(runtime_mode=CUDAGraphMode.parse(mode), batch_descriptor=KEY):
            return compiled(x)

    with rt.capturing():
        step()
    step()
    return step


def ranges(step: Callable[[], Any]) -> list[str]:
    """The names of ours in a profile of one step, in the order of their start."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        step()
    events = sorted(seen.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith("g0")]


def calls(step: Callable[[], Any]) -> Counter[str]:
    """How often each function, of Python or of C, is called in one step."""
    seen: Counter[str] = Counter()

    def count(frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            seen[f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}"] += 1
        elif event == "c_call":
            seen[f"C {getattr(called, '__qualname__', called)}"] += 1

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return seen


def test_a_replay_has_the_name_of_its_key(rt: GraphRuntime) -> None:
    assert ranges(step_of(rt, "FULL")) == [f"g0.full FULL {KEY}"]


def test_regions_have_their_names_and_modules(rt: GraphRuntime) -> None:
    assert ranges(step_of(rt, "PIECEWISE")) == [
        f"g0 PIECEWISE {KEY}",
        "g0.r0 replay first",
        "g0.r1 eager",
        "g0.r2 replay layers",
    ]


def test_without_a_profiler_no_function_of_python_runs_for_it(rt: GraphRuntime) -> None:
    step = step_of(rt, "PIECEWISE")
    before = calls(step)
    assert ranges(step)
    after = calls(step)
    assert after == before, "a profile leaves nothing behind"
    assert not [name for name in before if "in_range" in name or "record_function" in name]


# The page about logging lists every warning of the code, and no other.


SOURCES = sorted([*(ROOT / "graphpass").rglob("*.py"), *(ROOT / "backends" / "cgpass").rglob("*.py")])
LEAST_LETTERS = 12


def phrases() -> list[str]:
    """The texts of records in the page's first table."""
    table = (ROOT / "docs" / "logging.md").read_text(encoding="utf-8").split("## Levels")[0]
    return [match[1] for match in re.finditer(r"^\|[^|]+\| `([^`|]+)`", table, re.MULTILINE)]


def constants(node: ast.AST) -> str:
    """The text of a string, also of the constant parts of an f-string."""
    return "".join(
        part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)
    )


def warned() -> Iterator[tuple[str, str]]:
    """(place, text) of each call of ``warn`` whose text is written there."""
    for source in SOURCES:
        tree = ast.parse(source.read_text(encoding="utf-8"))
        for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
            assigned = {
                target.id: constants(node.value)
                for node in ast.walk(function)
                if isinstance(node, ast.Assign)
                for target in node.targets
                if isinstance(target, ast.Name)
            }
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("warn", "warning") and node.args:
                    text = constants(node.args[0])
                    names = [part.id for part in ast.walk(node.args[0]) if isinstance(part, ast.Name)]
                    whole = text + "".join(assigned.get(name, "") for name in names)
                    if len(re.sub(r"\W", "", whole)) >= LEAST_LETTERS:
                        yield f"{source.relative_to(ROOT)}:{node.lineno}", whole


def test_every_warning_has_a_row() -> None:
    rows = phrases()
    missing = {place: text for place, text in warned() if not any(phrase.split(": ")[0] in text for phrase in rows)}
    assert missing == {}


def test_every_row_is_a_text_of_the_code() -> None:
    texts = [constants(ast.parse(source.read_text(encoding="utf-8"))) for source in SOURCES]
    assert len(phrases()) > 30
    assert [phrase for phrase in phrases() if not any(phrase.split(": ")[0] in text for text in texts)] == []
