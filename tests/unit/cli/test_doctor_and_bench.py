"""``graphpass doctor`` and ``graphpass bench``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from typer.testing import Result

from graphpass.cli import benchmark, doctor

Command = Callable[..., Result]
MODELS = "tests.unit.cli.models"
QUICK = ("--compiler", "eager", "--rounds", 2, "--calls", 1, "--device", "cpu")


def test_doctor_says_what_is_slow(command: Command) -> None:
    finished = command("doctor", "--no-try", "--device", "cpu", "--json")
    assert finished.exit_code == 0, finished.output
    figures = json.loads(finished.stdout)
    assert sorted(figures) == ["attention", "checks", "command", "compilers", "failure", "machine", "slow"]
    assert figures["machine"]["torch"] == torch.__version__
    assert figures["attention"]["math"] is True
    assert "replays" in [row["what"] for row in figures["slow"]]
    assert all(row["remedy"] for row in figures["slow"])
    assert figures["checks"] == []


def test_a_failed_check_is_exit_code_1(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> None:
        raise RuntimeError(f"no compiler for {device}")

    monkeypatch.setattr(doctor, "_compiles", fails)
    finished = command("doctor", "--device", "cpu")
    assert finished.exit_code == 1
    assert "RuntimeError: no compiler for cpu" in finished.stdout
    assert "failed checks: inductor compiles" in finished.stdout


def test_variants_are_timed_beside_each_other(command: Command) -> None:
    finished = command("bench", f"{MODELS}:cut", *QUICK, "--json")
    assert finished.exit_code == 0, finished.output
    figures = json.loads(finished.stdout)
    variants = {variant["name"]: variant for variant in figures["variants"]}
    assert list(variants) == ["eager", "compile", "reduce-overhead", "graphpass", "raw replay"]
    for name in ("eager", "compile", "graphpass"):
        assert variants[name]["host_us"]["median"] > 0
        assert variants[name]["device_us"] is None  # a CPU has no time apart from the host's
        assert variants[name]["agrees"] is True
    assert variants["reduce-overhead"]["missing"] == variants["raw replay"]["missing"] == "needs a GPU"
    assert figures["failure"] is None


def test_another_output_is_exit_code_1(command: Command) -> None:
    finished = command("bench", f"{MODELS}:wrong", *QUICK)
    assert finished.exit_code == 1
    assert "the output differs from eager: compile, graphpass" in finished.stdout


@pytest.mark.parametrize(
    ("one", "other", "agrees"),
    [
        ([1.0, 100.0], [1.0, 100.005], True),
        ([1.0, 100.0], [1.0, 100.02], False),
        ([float("nan"), 1.0], [float("nan"), 1.0], True),
        ([float("nan"), 1.0], [0.0, 1.0], False),
        ([1.0], [1.0, 1.0], False),
        ([0.0], [1e-3], False),
    ],
)
def test_differences_are_in_tolerances(one: list[float], other: list[float], agrees: bool) -> None:
    assert (benchmark._difference([torch.tensor(one)], [torch.tensor(other)]) <= 1) is agrees


def test_other_dtypes_and_integers_differ() -> None:
    whole: Any = torch.tensor([1, 2])
    assert benchmark._difference([whole], [whole.float()]) == float("inf")
    assert benchmark._difference([whole], [whole + 1]) == float("inf")
    assert benchmark._difference([whole], [whole.clone()]) == 0
    assert benchmark._difference([whole], []) == float("inf")


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # of reduce-overhead
def test_all_variants_on_a_gpu(command: Command) -> None:
    finished = command("bench", "bert", "--config", "num_hidden_layers=2", "--rounds", 3, "--json")
    assert finished.exit_code == 0, finished.output
    for variant in json.loads(finished.stdout)["variants"]:
        assert variant["missing"] is None
        assert variant["device_us"]["median"] > 0
    torch._C._cuda_clearCublasWorkspaces()  # beside graphs of others, ours leave their workspaces to torch
