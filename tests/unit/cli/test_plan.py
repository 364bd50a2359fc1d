"""``graphpass plan``: files of traffic, the ladders beside each other, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from graphpass import plan_sizes
from graphpass.cli.plan import read_sizes
from graphpass.errors import CommandError
from tests.pages import Page

Command = Callable[..., Result]
TRAFFIC = {1: 40, 2: 10, 5: 30, 17: 8, 33: 4, 100: 1}


def planned(command: Command, *arguments: Any) -> dict[str, Any]:
    finished = command("plan", *arguments, "--json")
    assert finished.exit_code == 0, finished.output
    figures: dict[str, Any] = json.loads(finished.stdout)
    return figures


@pytest.fixture
def traffic(tmp_path: Path) -> Path:
    file = tmp_path / "sizes.json"
    file.write_text(json.dumps(TRAFFIC))
    return file


def test_json_has_these_keys(command: Command, traffic: Path) -> None:
    figures = planned(command, traffic, "--max-graphs", 3, "--stride", 8)
    assert sorted(figures) == ["command", "failure", "ladders", "seconds", "traffic"]
    assert figures["traffic"] == {"file": str(traffic), "sizes": 6, "batches": 93, "largest": 100}
    names = ["planned, at most 3", "doubling", "stride 8"]
    assert [ladder["name"] for ladder in figures["ladders"]] == names
    for ladder in figures["ladders"]:
        assert sorted(ladder) == ["bytes", "graphs", "name", "rows_a_batch", "sizes", "waste"]
        assert ladder["graphs"] == len(ladder["sizes"])
        assert ladder["sizes"][-1] == 100
        assert ladder["bytes"] is None
        assert all(isinstance(ladder[name], float) for name in ("waste", "rows_a_batch"))


def test_the_plan_is_that_of_plan_sizes(command: Command, traffic: Path) -> None:
    ours, doubling, strided = planned(command, traffic, "--max-graphs", 4)["ladders"]
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
    by_name = {
        ladder["name"]: ladder for ladder in planned(command, traffic, "--bytes", known, "--stride", 15)["ladders"]
    }
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
    assert page.tags.count("svg") == 2
    assert command("plan", file, "--html", tmp_path / "no" / "folder.html").exit_code == 2


def test_python_dash_m_is_the_same_app() -> None:
    from graphpass import __main__
    from graphpass.cli.app import main

    assert __main__.main is main


@pytest.mark.parametrize("name", ["explain", "doctor", "bench", "plan"])
def test_help_has_examples(command: Command, name: str) -> None:
    finished = command(name, "--help")
    assert finished.exit_code == 0
    assert f"\n    graphpass {name}" in finished.stdout
    assert "--json" in finished.stdout
    assert "--html" in finished.stdout
