"""The commands: plan, explain, doctor and bench."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

import graphpass
from graphpass import plan_sizes
from graphpass.__main__ import main
from graphpass.cli import benchmark, doctor
from graphpass.cli.plan import read_sizes
from graphpass.cli.usermodel import load
from graphpass.errors import CommandError
from tests.pages import Page

# ``graphpass plan``: files of traffic, the ladders beside each other, and what is refused.


Command = Callable[..., Result]
TRAFFIC = {1: 40, 2: 10, 5: 30, 17: 8, 33: 4, 100: 1}


def figures_of(command: Command, name: str, *arguments: Any) -> dict[str, Any]:
    """What a command prints with ``--json``."""
    finished = command(name, *arguments, "--json")
    assert finished.exit_code == 0, finished.output
    figures: dict[str, Any] = json.loads(finished.stdout)
    return figures


@pytest.fixture
def traffic(tmp_path: Path) -> Path:
    file = tmp_path / "sizes.json"
    file.write_text(json.dumps(TRAFFIC))
    return file


def test_the_plan_is_that_of_plan_sizes(command: Command, traffic: Path) -> None:
    figures = figures_of(command, "plan", traffic, "--max-graphs", 4, "--stride", 25)
    assert sorted(figures) == ["command", "failure", "ladders", "seconds", "traffic"]
    assert figures["traffic"] == {"file": str(traffic), "sizes": 6, "batches": 93, "largest": 100}
    ours, doubling, strided = figures["ladders"]
    assert [ladder["name"] for ladder in figures["ladders"]] == ["planned, at most 4", "doubling", "stride 25"]
    for ladder in figures["ladders"]:
        assert sorted(ladder) == ["bytes", "graphs", "name", "rows_a_batch", "sizes", "waste"]
        assert (ladder["graphs"], ladder["bytes"]) == (len(ladder["sizes"]), None)
    best = plan_sizes(TRAFFIC, 4)
    assert tuple(ours["sizes"]) == best.sizes
    assert ours["rows_a_batch"] == pytest.approx(best.expected_cost)
    assert ours["waste"] == pytest.approx(best.waste)
    assert ours["waste"] < strided["waste"]
    assert doubling["sizes"] == [1, 2, 4, 8, 16, 32, 64, 100]
    assert strided["sizes"] == [25, 50, 75, 100]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"histogram": TRAFFIC}),
        json.dumps([[size, count] for size, count in TRAFFIC.items()]),
        json.dumps([size for size, count in TRAFFIC.items() for _ in range(count)]),
        "size,count\n" + "".join(f"{size},{count}\n" for size, count in TRAFFIC.items()),
        "".join(f"{size}, {count}\n\n" for size, count in TRAFFIC.items()),
        "\n".join(str(size) for size, count in TRAFFIC.items() for _ in range(count)),
    ],
    ids=["histogram", "pairs", "list", "csv with names", "csv", "one size a line"],
)
def test_forms_of_traffic(tmp_path: Path, text: str) -> None:
    file = tmp_path / "traffic"
    file.write_text(text)
    assert read_sizes(file) == TRAFFIC


@pytest.mark.parametrize(
    "text", ["{", "[1, [2, 3, 4]]", '{"histogram": 3}', "size,count\n4,many\n", '{"2.5": 1}', '{"2": true}']
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "traffic"
    file.write_text(text)
    with pytest.raises(CommandError, match="cannot be read"):
        read_sizes(file)


def test_bytes_are_interpolated(command: Command, traffic: Path, tmp_path: Path) -> None:
    known = tmp_path / "bytes.csv"
    known.write_text("size,bytes\n10,1000\n20,3000\n")
    ladders = figures_of(command, "plan", traffic, "--bytes", known, "--stride", 15)["ladders"]
    by_name = {ladder["name"]: ladder for ladder in ladders}
    # 15 lies between 10 and 20; beyond 20 bytes grow with the size.
    assert by_name["stride 15"]["sizes"] == [15, 30, 45, 60, 75, 90, 100]
    assert by_name["stride 15"]["bytes"] == pytest.approx(2000 + 150 * (30 + 45 + 60 + 75 + 90 + 100))
    assert by_name["doubling"]["bytes"] == pytest.approx(100 * (1 + 2 + 4 + 8) + 2200 + 150 * (32 + 64 + 100))


def test_text_draws_the_ladders(command: Command, traffic: Path) -> None:
    finished = command("plan", traffic)
    assert finished.exit_code == 0
    for expected in ("planned, at most 16", "doubling", "█", "capture_sizes=[1, 2, 5, 17, 33, 100]"):
        assert expected in finished.stdout


def test_errors_have_no_traceback(command: Command, tmp_path: Path) -> None:
    finished = command("plan", tmp_path / "none.json", "--json")
    assert finished.exit_code == 2
    assert finished.stdout == ""
    lines = [line.split(":")[0].strip() for line in finished.stderr.splitlines()]
    assert lines == ["graphpass", "expected", "found", "remedy"]
    empty = tmp_path / "empty.json"
    empty.write_text("{}")
    assert command("plan", empty).exit_code == 2
    assert command("plan", empty, "--max-graphs", 0).exit_code == 2


def test_a_hostile_file_name_is_text(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "<img src=x onerror=alert(1)>&[bold].json"
    file.write_text(json.dumps(TRAFFIC))
    page_file = tmp_path / "plan.html"
    finished = command("plan", file, "--html", page_file)
    assert finished.exit_code == 0
    page = Page(page_file.read_text(encoding="utf-8"))
    assert "<img src=x onerror=alert(1)>&[bold].json" in page.text
    assert {"img", "script"} & set(page.tags) == set()
    assert page.handlers == []
    assert "█" in page.text
    assert command("plan", file, "--html", tmp_path / "no" / "folder.html").exit_code == 2


def test_the_version_is_that_of_the_package(command: Command) -> None:
    assert command("--version").stdout == f"graphpass {graphpass.__version__}\n"


def test_without_typer_the_command_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "graphpass.cli.app", None)
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(ModuleNotFoundError, match="halted"):  # another module that is missing stays an error
        main()
    monkeypatch.delitem(sys.modules, "graphpass.cli.app")
    with pytest.raises(SystemExit, match=r"pip install 'graphpass\[cli\]'"):
        main()


@pytest.mark.parametrize("name", ["explain", "doctor", "bench", "plan"])
def test_help_has_examples(command: Command, name: str) -> None:
    finished = command(name, "--help")
    assert finished.exit_code == 0
    assert f"\n    graphpass {name}" in finished.stdout
    assert "--json" in finished.stdout
    assert "--html" in finished.stdout


# ``graphpass explain``: what cuts a model is named with its line in text, JSON and HTML.


MODELS = "tests.unit.cli.models"
# What cuts, and the user's line.
READ = ("host read", "limit = x.sum().item()")
ON_CPU = ("cpu tensor", "x = x * self.temperature")
SPLIT = ("splitting op: torch.relu", "x = torch.relu(self.inner(x))")
MEAN = ("aten.mean.dim", "return x - x.mean(0)")


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
    figures = figures_of(command, "explain", target, "--split", "torch.relu")
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
        assert f"models.py:{number}:" in page.text
        assert cause in finished.stdout
        assert f"models.py:{number}:" in finished.stdout  # the code after it may be folded
    assert page.references == []


def test_a_graph_that_is_never_captured_says_so(command: Command) -> None:
    finished = command("explain", f"{MODELS}:cut", "--option", "mode=NONE")
    assert finished.exit_code == 0, finished.output
    assert " ".join(finished.stdout.split()).count("never captured │ │ │ mode NONE") == 2


def test_json_of_explain_has_these_keys(command: Command) -> None:
    figures = figures_of(command, "explain", f"{MODELS}:cut", "--split", "torch.relu")
    keys = "captured_regions command device eager_regions failure graphs model notes torch unique_regions"
    assert " ".join(sorted(figures)) == keys
    graph = figures["graphs"][0]
    assert sorted(graph) == ["assumptions", "compile_s", "ends", "mode", "name", "never_captured", "regions", "sizes"]
    assert sorted(graph["regions"][0]) == ["kind", "name", "nodes", "reasons", "same_as"]
    of_size = "field greatest least made not_proved padded remedy symbol traced verdict"
    assert " ".join(sorted(graph["sizes"][0])) == of_size
    assert sorted(graph["ends"]) == sorted(graph["regions"][1]["reasons"][0]) == ["remedy", "where", "why"]
    assert graph["ends"]["where"].endswith("limit = x.sum().item()")
    for cause in figures["graphs"][1]["sizes"][1]["made"]:
        assert sorted(cause) == ["op", "target", "verdict", "where", "why"]
        assert (cause["op"], cause["verdict"]) == ("aten.mean.dim", "made")
    assert figures["graphs"][1]["sizes"][1]["made"]
    (cause,) = figures_of(command, "explain", f"{MODELS}:cut", "--option", "compiler=eager")["graphs"][1]["sizes"][1][
        "not_proved"
    ]
    assert sorted(cause) == ["op", "target", "verdict", "where", "why"]
    assert [region["kind"] for region in graph["regions"]] == ["captured", "eager", "captured"]
    size = graph["sizes"][0]
    assert (size["field"], size["traced"], size["least"], size["greatest"]) == ("x[0]", 6, 2, None)
    assert (figures["captured_regions"], figures["eager_regions"]) == (3, 1)


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


def test_arguments_by_name(command: Command) -> None:
    figures = figures_of(command, "explain", f"{MODELS}:named")
    assert {size["field"] for graph in figures["graphs"] for size in graph["sizes"]} == {"x[0]", "x[1]"}


def test_inputs_of_shapes_and_a_file(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text("import torch\n\ndef build():\n    return torch.nn.Embedding(10, 4)\n")
    figures = figures_of(command, "explain", f"{file}:build", "--input", "input=5x7:int64<10")
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


# ``graphpass doctor`` and ``graphpass bench``.


QUICK = ("--compiler", "eager", "--rounds", 2, "--calls", 1, "--device", "cpu")


def test_doctor_says_what_is_slow(command: Command) -> None:
    figures = figures_of(command, "doctor", "--no-try", "--device", "cpu")
    assert sorted(figures) == ["attention", "checks", "command", "compilers", "failure", "machine", "ranks", "slow"]
    assert figures["machine"]["torch"] == torch.__version__
    assert figures["attention"]["math"] is True
    assert "replays" in [row["what"] for row in figures["slow"]]
    assert all(row["remedy"] for row in figures["slow"])
    assert figures["checks"] == []


def test_doctor_says_which_collectives_hang(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"node": "a", "nccl": "2.27.7", "is_warm": True, "is_symmetric": False}
    monkeypatch.setattr(doctor, "facts_of_ranks", lambda device: [facts, facts | {"node": "b", "nccl": "2.28.9"}])
    found = figures_of(command, "doctor", "--no-try", "--device", "cpu")
    (row,) = [row for row in found["slow"] if row["what"] == "collectives in graphs"]
    assert row["why"] == "they hang: the ranks have different versions of NCCL: 2.27.7 on a, 2.28.9 on b"
    assert [rank["node"] for rank in found["ranks"]] == ["a", "b"]


def test_a_failed_check_is_exit_code_1(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> None:
        raise RuntimeError(f"no compiler for {device}")

    monkeypatch.setattr(doctor, "_compiles", fails)
    finished = command("doctor", "--device", "cpu")
    assert finished.exit_code == 1
    assert "RuntimeError: no compiler for cpu" in finished.stdout
    assert "failed checks: inductor compiles" in finished.stdout


def test_variants_are_timed_beside_each_other(command: Command) -> None:
    figures = figures_of(command, "bench", f"{MODELS}:cut", *QUICK)
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
        ([1, 2], [1.0, 2.0], False),
        ([1, 2], [2, 3], False),
        ([1, 2], [1, 2], True),
    ],
)
def test_differences_are_in_tolerances(one: list[float], other: list[float], agrees: bool) -> None:
    assert (benchmark._difference([torch.tensor(one)], [torch.tensor(other)]) <= 1) is agrees
    assert benchmark._difference([torch.tensor(one)], []) == float("inf")


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # of reduce-overhead
def test_all_variants_on_a_gpu(command: Command) -> None:
    for variant in figures_of(command, "bench", "bert", "--config", "num_hidden_layers=2", "--rounds", 3)["variants"]:
        assert variant["missing"] is None
        assert variant["device_us"]["median"] > 0
    torch._C._cuda_clearCublasWorkspaces()  # beside graphs of others, ours leave their workspaces to torch
