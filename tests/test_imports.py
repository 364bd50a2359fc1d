"""The layers: what import-linter says about the contracts in pyproject.toml."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytest.importorskip("importlinter")


def test_imports_run_downwards() -> None:
    search_path = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    command = "from importlinter.cli import lint_imports_command as check; check()"
    finished = subprocess.run(
        [sys.executable, "-c", command, "--no-cache"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": search_path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
