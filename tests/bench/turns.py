"""Processes that prepare side by side and measure one at a time.

Compilation takes minutes and a measurement seconds. So each variant has a process of its own that compiles while the
others do, says that it is ready, and waits for its turn; only one measures at a time. A process may ask for several
turns, which then go round, so that a host that becomes slower does so for all.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from tests.bench.timing import free_bytes, gpu_or_cpu, own_environment

READY, RESULT = "ready", "result "


def in_turn(
    module: str, commands: Mapping[str, Sequence[str]], folder: Path, ready_s: float, measured_s: float = 120
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The figures of a process for each command, by its name; ``problem`` is all there is of one that failed.

    Each has empty compiler caches. One that is not ready after ``ready_s`` seconds is not measured, and a turn ends
    after ``measured_s``. ``process_mib`` is the device memory that came back when the process ended.
    """
    # Inductor's command line for g++ takes no spaces in a path.
    children = {name: _Child(module, cmd, folder / name.replace(" ", "_")) for name, cmd in commands.items()}
    with ThreadPoolExecutor(len(children)) as threads:
        deadline = time.monotonic() + ready_s
        is_ready = list(threads.map(lambda child: child.says(deadline) == READY, children.values()))
    waiting = dict(zip(children, is_ready, strict=True))
    while waiting:
        for name, may_measure in list(waiting.items()):
            said = children[name].measured(time.monotonic() + measured_s) if may_measure else ""
            if said != READY:
                del waiting[name]
                yield name, children[name].ended(said)


class _Child:
    def __init__(self, module: str, command: Sequence[str], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = (folder / "log").open("w+", encoding="utf-8")
        settings = {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"tests.bench.{module}", *command],
            env={**own_environment(folder), **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def says(self, deadline: float) -> str:
        """``READY``, its result, or nothing where it has ended or the deadline has passed."""
        assert self._process.stdout is not None
        while select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            line = self._process.stdout.readline()
            if not line or line.strip() == READY or line.startswith(RESULT):
                return line.strip()
        return ""

    def measured(self, deadline: float) -> str:
        """What it says after a turn."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return ""
        return self.says(deadline)

    def ended(self, said: str) -> dict[str, Any]:
        """The figures of a result; without one, the end of the process's log. The process is ended."""
        device = gpu_or_cpu()
        free_before = free_bytes(device)
        self._process.kill()
        self._process.wait()
        time.sleep(1)  # the driver frees the memory of an ended process a moment later
        self._log.seek(0)
        log = self._log.read()[-3000:]
        self._log.close()
        if not said:
            return {"problem": log or "not ready in time"}
        freed = free_bytes(device) - free_before
        return {**json.loads(said.removeprefix(RESULT)), "process_mib": freed / 2**20}


def take_turn(measure: Callable[[Callable[[], None]], Mapping[str, Any]]) -> None:
    """In such a process: hand over the figures of ``measure``, which waits for a turn where it calls its argument."""
    says = sys.stdout

    def wait() -> None:
        print(READY, file=says, flush=True)
        sys.stdin.readline()

    with redirect_stdout(sys.stderr):
        figures = measure(wait)
    print(RESULT + json.dumps(figures), file=says, flush=True)
    sys.stdin.readline()  # its memory is measured
