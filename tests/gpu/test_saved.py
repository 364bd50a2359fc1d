"""Saved starts on a GPU: one process compiles by Inductor and saves, another one loads kernels with empty caches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.saved.starts import STARTS, TRACE_NOTHING

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("kind", STARTS)
def test_another_process_loads_and_compiles_nothing(kind: str, tmp_path: Path) -> None:
    saved, loaded = (started(kind, tmp_path, caches) for caches in ("first", "second"))
    assert saved["compiled"] > 0
    assert loaded["compiled"] == 0, loaded["notes"]
    assert loaded["bits"] == saved["bits"]
    assert not loaded["frames"] or kind not in TRACE_NOTHING, loaded["notes"]


def started(kind: str, folder: Path, caches: str) -> dict[str, Any]:
    empty = {name: str(folder / caches / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    command = [sys.executable, "-m", "tests.unit.saved.starts", "inductor", str(folder), kind]
    ran = subprocess.run(command, env={**os.environ, **empty}, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found
