"""Runs commands in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from typer.testing import CliRunner, Result

from graphpass.cli.app import app


@pytest.fixture
def command() -> Callable[..., Result]:
    """``command("plan", "sizes.json")``: the result, with ``exit_code``, ``stdout`` and ``stderr``."""
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])
