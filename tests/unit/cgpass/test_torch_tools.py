"""graphpass in torch's own tools: TORCH_LOGS, and the trace that tlparse reads; in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]

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
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    env = {**os.environ, "PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": str(folder), **environment}
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


def test_warnings_need_no_setting(tmp_path: Path) -> None:
    said = ran(tmp_path)
    assert said.count("runs eagerly between graphs: host read") == 1
    assert "because its size recurs" not in said
    assert not list(tmp_path.rglob("*.log")), "nobody asked for a trace"


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
    (padding,) = found["graphpass_padding_g0"]
    assert padding.json()["verdicts"] == {"x[0]": "UNPROVED"}
    assert {finding["field"] for finding in padding.json()["findings"]} == {"x[0]"}
    (keys,) = found["graphpass_keys_g0"]
    assert keys.json()["mode"] == "PIECEWISE"
    assert [field["is_padded"] for field in keys.json()["fields"]] == [False]
    graphs = [of[0].json() for name, of in found.items() if name.startswith("graphpass_graph_g0")]
    assert graphs
    assert all(graph["mode"] == "PIECEWISE" for graph in graphs)
    warned = [note.json() for note in found["graphpass_note"] if note.json()["is_warning"]]
    assert any("host read" in note["what"] and "on the device" in note["remedy"] for note in warned)
    assert any("is not padded" in note["what"] for note in warned)
