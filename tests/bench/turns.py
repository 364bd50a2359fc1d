"""Processes that prepare side by side and are measured one after the other.

Compilation takes minutes and a measurement seconds. So each variant has a process of its own that compiles while the
others do, says that it is ready, and waits; then each measures while all others sleep.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from tests.bench.timing import cache_folders, free_bytes, gpu_or_cpu

READY, RESULT = "ready", "result "


def in_turn(
    module: str, commands: Mapping[str, Sequence[str]], folder: Path, ready_s: float, measured_s: float = 120
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The figures of a process for each command, by its name; ``problem`` is all there is of one that failed.

    Each has empty compiler caches. One that is not ready after ``ready_s`` seconds is not measured, and a measurement
    ends after ``measured_s``. ``process_mib`` is the device memory that came back when the process ended.
    """
    with ThreadPoolExecutor(len(commands)) as threads:
        # Inductor's command line for g++ takes no spaces in a path.
        children = {name: _Child(module, cmd, folder / name.replace(" ", "_")) for name, cmd in commands.items()}
        deadline = time.monotonic() + ready_s
        ready = dict(zip(children, threads.map(lambda child: child.is_ready(deadline), children.values()), strict=True))
        late = [name for name in children if not ready[name]]
        for name in late:
            yield name, {"problem": f"not ready within {ready_s:.0f} s: {children.pop(name).end()}"}
        for name, child in children.items():
            yield name, child.measured(time.monotonic() + measured_s)


class _Child:
    def __init__(self, module: str, command: Sequence[str], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = (folder / "log").open("w+", encoding="utf-8")
        settings = {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"tests.bench.{module}", *command],
            env={**os.environ, **settings, **cache_folders(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def is_ready(self, deadline: float) -> bool:
        """Whether it has said so before the deadline."""
        return any(line.strip() == READY for line in self._lines(deadline))

    def measured(self, deadline: float) -> dict[str, Any]:
        """Its figures, from the moment that it may measure; the process has ended then."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return {"problem": self.end()}
        result = next((line for line in self._lines(deadline) if line.startswith(RESULT)), "")
        device = gpu_or_cpu()
        free_before = free_bytes(device)
        said = self.end()
        if not result:
            return {"problem": said}
        time.sleep(1)  # the driver frees the memory of an ended process a moment later
        return {**json.loads(result.removeprefix(RESULT)), "process_mib": (free_bytes(device) - free_before) / 2**20}

    def end(self) -> str:
        """End the process; the end of what it said."""
        self._process.kill()
        self._process.wait()
        self._log.seek(0)
        said = self._log.read()[-3000:]
        self._log.close()
        return said

    def _lines(self, deadline: float) -> Iterator[str]:
        assert self._process.stdout is not None
        while select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            line = self._process.stdout.readline()
            if not line:
                return
            yield line


def take_turn(measure: Callable[[Callable[[], None]], Mapping[str, Any]]) -> None:
    """In such a process: prepare, wait for the turn where ``measure`` calls its argument, and hand the figures over."""
    says = sys.stdout

    def wait() -> None:
        print(READY, file=says, flush=True)
        sys.stdin.readline()

    with redirect_stdout(sys.stderr):
        figures = measure(wait)
    print(RESULT + json.dumps(figures), file=says, flush=True)
    sys.stdin.readline()  # its memory is measured
