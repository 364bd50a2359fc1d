"""``graphpass explain``: what cuts a model is named with its line in text, JSON and HTML."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

from graphpass.cli.program import load
from tests.pages import Page

Command = Callable[..., Result]
MODELS = "tests.unit.cli.models"
# What cuts, and the user's line.
READ = ("host read", "limit = x.sum().item()")
ON_CPU = ("cpu tensor", "x = x * self.temperature")
SPLIT = ("splitting op: torch.relu", "x = torch.relu(self.inner(x))")
MEAN = ("aten.mean.dim", "return x - x.mean(0)")


def explained(command: Command, *arguments: Any) -> dict[str, Any]:
    finished = command("explain", *arguments, "--json")
    assert finished.exit_code == 0, finished.output
    figures: dict[str, Any] = json.loads(finished.stdout)
    return figures


def cuts(figures: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (reason["why"], reason["where"])
        for graph in figures["graphs"]
        for region in graph["regions"]
        for reason in region["reasons"]
    ]


def named(found: list[tuple[str, str]], expected: tuple[str, str]) -> bool:
    return any(expected[0] in why and expected[1] in where for why, where in found)


@pytest.fixture
def scalars_in_the_graph() -> Iterator[None]:
    """Fake tensors have no values, so a host read must not run between two graphs."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield


def test_four_causes_are_named_with_their_lines(command: Command, scalars_in_the_graph: None, tmp_path: Path) -> None:
    target = f"{MODELS}:cut_on_a_fake_gpu"
    figures = explained(command, target, "--split", "torch.relu")
    found = cuts(figures)
    for expected in (READ, ON_CPU, SPLIT):
        assert named(found, expected), (expected, found)
    unproved = [cause for graph in figures["graphs"] for size in graph["sizes"] for cause in size["not_proved"]]
    assert named([(cause["op"], cause["where"]) for cause in unproved], MEAN), unproved

    file = tmp_path / "explain.html"
    finished = command("explain", target, "--split", "torch.relu", "--html", file)
    assert finished.exit_code == 0, finished.output
    page = Page(file.read_text(encoding="utf-8"))
    code = (Path(__file__).parent / "models.py").read_text(encoding="utf-8").splitlines()
    for cause, line in (READ, ON_CPU, SPLIT, MEAN):
        (number,) = [number for number, text in enumerate(code, start=1) if text.strip() == line]
        assert cause in page.text
        assert f"models.py:{number}: {line}" in page.text.replace("`", "")
        assert cause in finished.stdout
        assert f"models.py:{number}:" in finished.stdout  # the code after it may be folded
    assert {reference.removeprefix("#") for reference in page.references if reference != "data:,"} <= set(page.ids)


def test_json_has_these_keys(command: Command) -> None:
    figures = explained(command, f"{MODELS}:cut", "--split", "torch.relu")
    assert sorted(figures) == [
        "captured_regions",
        "command",
        "device",
        "eager_regions",
        "failure",
        "graphs",
        "model",
        "notes",
        "torch",
        "unique_regions",
    ]
    graph = figures["graphs"][0]
    assert sorted(graph) == ["assumptions", "compile_s", "ends", "mode", "name", "never_captured", "regions", "sizes"]
    assert sorted(graph["regions"][0]) == ["kind", "name", "nodes", "reasons", "same_as"]
    assert sorted(graph["sizes"][0]) == [
        "field",
        "greatest",
        "least",
        "not_proved",
        "padded",
        "remedy",
        "symbol",
        "traced",
        "verdict",
    ]
    assert sorted(graph["ends"]) == sorted(graph["regions"][1]["reasons"][0]) == ["remedy", "where", "why"]
    assert graph["ends"]["where"].endswith("limit = x.sum().item()")
    (cause,) = figures["graphs"][1]["sizes"][1]["not_proved"]
    assert sorted(cause) == ["op", "target", "verdict", "where", "why"]
    assert [region["kind"] for region in graph["regions"]] == ["captured", "eager", "captured"]
    size = graph["sizes"][0]
    assert (size["field"], size["traced"], size["least"], size["greatest"]) == ("x[0]", 6, 2, None)
    assert (figures["captured_regions"], figures["eager_regions"]) == (3, 1)


def test_equal_layers_are_compiled_once_and_shown_once(command: Command) -> None:
    arguments = (f"{MODELS}:layers", "--split", "torch.relu")
    figures = explained(command, *arguments)
    assert (figures["captured_regions"], figures["eager_regions"], figures["unique_regions"]) == (4, 3, 3)
    (graph,) = figures["graphs"]
    assert [region["same_as"] for region in graph["regions"]].count("g0.r2") == 1
    shown = command("explain", *arguments).stdout
    assert "g0.r3, g0.r5" in shown  # the rows of the first eager region and of the middle layer name the others
    assert shown.count("return torch.relu(self.linear(x)) * 2") == 1


def test_a_configuration_gives_a_model_and_inputs(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 3}
    content = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 99, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(content))
    program = load(str(tmp_path), config=["num_hidden_layers=1"], device=torch.device("cpu"))
    assert type(program.model).__name__ == "BertForMaskedLM"
    assert len(program.model.bert.encoder.layer) == 1  # type: ignore[attr-defined]
    assert {name: tuple(tensor.shape) for name, tensor in program.kwargs.items()} == {
        "input_ids": (3, 11),
        "attention_mask": (3, 11),
    }


@pytest.mark.soak
def test_a_model_type_is_explained(command: Command) -> None:
    arguments = (
        "bert",
        *("--config", "num_hidden_layers=3", "--config", "hidden_size=32", "--config", "intermediate_size=48"),
        *("--config", "num_attention_heads=2", "--config", "vocab_size=99"),
        *("--split", "torch.nn.functional.scaled_dot_product_attention"),
    )
    figures = explained(command, *arguments)
    assert (figures["captured_regions"], figures["eager_regions"], figures["unique_regions"]) == (4, 3, 3)
    (graph,) = figures["graphs"]
    assert [region["same_as"] for region in graph["regions"]].count("g0.r2") == 1
    assert {size["field"]: size["verdict"] for size in graph["sizes"]}["input_ids[0]"] == "proved"


def test_arguments_by_name(command: Command) -> None:
    figures = explained(command, f"{MODELS}:named")
    assert {size["field"] for graph in figures["graphs"] for size in graph["sizes"]} == {"x[0]", "x[1]"}


def test_inputs_of_shapes_and_a_file(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text("import torch\n\ndef build():\n    return torch.nn.Embedding(10, 4)\n")
    figures = explained(command, f"{file}:build", "--input", "input=5x7:int64<10")
    assert [size["traced"] for size in figures["graphs"][0]["sizes"]] == [5, 7]


def test_stdout_is_json_alone(command: Command) -> None:
    finished = command("explain", f"{MODELS}:talking", "--json")
    assert json.loads(finished.stdout)["captured_regions"] == 1
    assert "this goes to stdout" in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((f"{MODELS}:raising",), ("raising failed", "KeyError: 'no weights here' at models.py:", "raise KeyError")),
        ((f"{MODELS}:rasing",), ("does not exist", "'raising'")),
        (("no_such_module:build",), ("there is no such module",)),
        ((f"{MODELS}:wrong_length",), ("4 values",)),
        ((f"{MODELS}:number",), ("gives no model",)),
        ((f"{MODELS}:Cut",), ("no example inputs", "--input")),
        ((f"{MODELS}:Cut", "--input", "6by16"), ("an input cannot be read", "'6by16'")),
        ((f"{MODELS}:Cut", "--input", "6x16:float99"), ("unknown dtype", "float99")),
        ((f"{MODELS}:Cut", "--input", "6x17"), ("mat1 and mat2 shapes cannot be multiplied", "models.py:")),
        ((f"{MODELS}:leaving",), ("SystemExit: 7",)),
        (("bert", "--config", "num_hiden_layers=2"), ("no such setting", "'num_hidden_layers'")),
        (("bert", "--config", "num_hidden_layers=two"), ("num_hidden_layers", "expected int")),
        ((f"{MODELS}:cut", "--device", "tpu"), ("the device cannot be used",)),
        ((f"{MODELS}:cut", "--option", "paddin={}"), ("unknown option 'paddin'", "padding")),
        ((f"{MODELS}:cut", "--option", "padding"), ("an option cannot be read",)),
        ((f"{MODELS}:cut", "--config", "a=1"), ("--config is for configurations",)),
        ((f"{MODELS}:cut", "--split", "aten::relo"), ("aten::relu",)),
        (("bertt",), ("no model type 'bertt'", "'bert'")),
        (("none.json",), ("none.json cannot be read",)),
        (("bert", "--config", "layers"), ("NAME=VALUE",)),
    ],
    ids=lambda value: "_".join(value)[-40:],
)
def test_invalid_input_is_explained(command: Command, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    finished = command("explain", *arguments, "--json")
    assert finished.exit_code == 2, finished.output
    assert finished.stdout == ""
    assert "Traceback" not in finished.stderr
    for part in ("graphpass: ", "\n  expected: ", "\n  found: ", "\n  remedy: ", *words):
        assert part in finished.stderr
