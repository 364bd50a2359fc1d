"""Progress bars: shown on terminals, unless somebody turns them off."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import graphpass
from graphpass.ladder.progress import capture_progress

ROOT = Path(__file__).parents[3]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stderr", "progress", "is_shown"),
    [
        (Terminal, None, True),
        (Terminal, False, False),
        (Terminal, True, True),
        (io.StringIO, None, False),
        (io.StringIO, False, False),
        (io.StringIO, True, True),
    ],
)
def test_a_bar_is_shown_on_a_terminal_or_where_it_is_asked_for(
    stderr: type[io.StringIO], progress: bool | None, is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = stderr()
    monkeypatch.setattr(sys, "stderr", screen)
    assert list(capture_progress([1, 2, 3], progress)) == [1, 2, 3]
    assert bool(screen.getvalue()) == is_shown


def test_a_process_without_stderr_has_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert list(capture_progress([1, 2])) == [1, 2]


@pytest.mark.parametrize(("disable", "is_shown"), [("", True), ("1", False)])
def test_tqdm_disable_turns_bars_off(disable: str, is_shown: bool) -> None:
    """tqdm reads its environment when it is imported."""
    program = (
        "import sys; from graphpass.ladder.progress import capture_progress; sys.stderr.isatty = lambda: True; "
        "list(capture_progress([1, 2, 3]))"
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    environment = {**os.environ, "PYTHONPATH": path, **({"TQDM_DISABLE": disable} if disable else {})}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert ("capturing" in ran.stderr) == is_shown


@pytest.mark.parametrize(("progress", "is_shown"), [(None, False), (True, True)])
def test_the_option_of_a_graphed_model(progress: bool | None, is_shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    fast = graphpass.graphed(torch.nn.Linear(3, 3), [2], {"input": 0}, compiler="eager", progress=progress)
    monkeypatch.setattr(sys, "stderr", screen)
    fast.capture(torch.ones(2, 3))
    assert ("capturing" in screen.getvalue()) == is_shown


def test_another_value_is_refused() -> None:
    with pytest.raises(graphpass.errors.OptionError, match="progress"):
        graphpass.graphed(torch.nn.Linear(3, 3), progress="never")
