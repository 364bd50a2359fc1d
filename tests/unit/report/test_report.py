"""The report: its figures, its problems, its page."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import graphpass as gp
from graphpass import BatchDescriptor, CudagraphDispatcher, CudaGraphManager, CUDAGraphMode, InputSpec
from graphpass.capture import CallableRecord, Counts, RegionId, RegionRecord, RegionUse, RuntimeStats, SizeRecord
from graphpass.ledger import Row
from graphpass.report import CountedReason, KeyUse, Reason, Report, ReportFigures
from graphpass.report.drawing import Heading, Picture, Table, bar_chart, html_page, print_parts, size_chart
from graphpass.report.figures import saved_s
from tests.pages import Page
from tests.unit.report.models import ATTENTION, HOSTILE, call, encoder, hostile_figures

MOST_LINES = 70
Deep = tuple[Report, RuntimeStats]


def figures_of(report: Report) -> dict[str, Any]:
    """The figures after a round trip through JSON."""
    figures: dict[str, Any] = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    return figures


def kinds_of(value: Any) -> set[type]:
    if isinstance(value, dict):
        return set().union(*map(kinds_of, value.values())) if value else set()
    if isinstance(value, list):
        return set().union(*map(kinds_of, value)) if value else set()
    return {type(value)}


def in_pieces(depth: int) -> tuple[Report, RuntimeStats]:
    """Report and statistics of equal layers in pieces: two keys that replay, and a size that was called once."""
    fast = encoder(depth, mode="PIECEWISE", splitting_ops=[ATTENTION])
    call(fast, 4, 8, times=3)
    call(fast, 3, 5, times=4)
    call(fast, 2, 30)
    assert fast.runtime.suggested_sizes() == fast.report().suggested_sizes()
    return fast.report(), fast.runtime.stats()


@pytest.fixture(scope="module")
def deep() -> Deep:
    return in_pieces(12)


def test_the_numbers_are_those_of_the_statistics(deep: Deep) -> None:
    report, stats = deep
    figures = figures_of(report)
    assert kinds_of(figures) <= {bool, int, float, str, type(None)}
    keys, cost = figures["replays"]["keys"], figures["cost"]
    assert sum(key["replays"] for key in keys) == stats.replayed == cost["replays"] == 13 * 5
    assert sum(key["graphs"] for key in keys) == stats.captured == cost["graphs"] == 13 * 2
    assert sum(key["copied"] for key in keys) == stats.copied
    assert sum(key["capture_s"] for key in keys) == pytest.approx(cost["capture_s"])
    assert (cost["pool_bytes"], cost["buffer_bytes"]) == (stats.pool_bytes, stats.buffer_bytes)
    assert (cost["artifacts"], cost["callables"], cost["saved_s"]) == (stats.artifacts, stats.callables, None)
    assert cost["compile_s"]["compile"] > 0
    assert cost["compile_s"]["proof"] > 0
    assert [(key["sizes"], key["calls"], key["real"], key["padded"]) for key in keys] == [
        ({"batch": 4, "seq": 8}, 2, 2 * 32, 2 * 32),
        ({"batch": 3, "seq": 6}, 3, 3 * 15, 3 * 18),
    ]
    assert [key["padding"] for key in keys] == [0, pytest.approx(1 - 15 / 18)]
    assert [(calls["reason"], calls["calls"]) for calls in figures["replays"]["without_graph"]] == [
        ("first calls of a key", 3)
    ]
    seen = {traffic["field"]: dict(traffic["histogram"]) for traffic in figures["padding"]}
    assert seen == {field: dict(sizes) for field, sizes in stats.histograms.items()}
    assert seen == {"batch": {4: 3, 3: 4, 2: 1}, "seq": {8: 3, 5: 4, 30: 1}}


def test_the_padding_of_one_set_of_calls_is_one_figure() -> None:
    """Captures ahead are no calls: the keys and the traffic count the same ones."""
    fast = gp.graphed(nn.Linear(6, 6).eval(), [4, 8], {"input": 0}, compiler="eager", progress=False)
    fast.capture(torch.randn(3, 6))
    for size in (3, 5, 6, 3):
        fast(torch.randn(size, 6))
    figures = fast.report().figures
    real, padded = (sum(getattr(key, name) for key in figures.keys) for name in ("real", "padded"))
    (seen,) = figures.traffic
    assert (real, padded) == (17, 24)
    assert seen.waste(seen.captured) == pytest.approx(1 - real / padded)
    assert sum(key.calls for key in figures.keys) == 4


def test_sizes_are_suggested_for_each_field_that_is_padded(deep: Deep) -> None:
    report, _ = deep
    assert report.suggested_sizes() == {"batch": [2, 3, 4], "seq": [5, 8, 30]}
    assert report.suggested_sizes(2)["seq"] == [8, 30]
    (seq,) = [traffic for traffic in figures_of(report)["padding"] if traffic["field"] == "seq"]
    assert (seq["captured"], seq["waste"], seq["suggested_waste"]) == ([6, 8], None, 0)
    assert "Suggested for this traffic: capture_sizes={" in str(report)


def test_equal_layers_are_folded(deep: Deep) -> None:
    report, _ = deep
    lines = str(report).splitlines()
    assert len(lines) <= MOST_LINES
    shallow, _ = in_pieces(4)
    assert len(str(shallow).splitlines()) == len(lines)
    regions = report["Regions"].rows
    assert [(row[1], row[3]) for row in regions] == [
        ("captured", ""),
        ("eager", "g0.r3, g0.r5, g0.r7, g0.r9 and 7 more"),
        ("captured", "g0.r4, g0.r6, g0.r8, g0.r10 and 6 more"),
        ("captured", ""),
    ]
    assert len(figures_of(report)["replays"]["graphs"][0]["regions"]) == 25


def test_equal_graphs_are_folded() -> None:
    """A model with a graph break in each layer has a graph for each; a graph with another end is not one of them."""
    ends = Reason("print", "leave the print out", "model.py:7: print(x)")
    regions = (RegionRecord("r0", "captured", 5), RegionRecord("r1", "eager", 1, (Reason("host read"),)))
    names = [f"g{number}" for number in range(12)]
    records = [CallableRecord(name, regions, 0, ends=ends) for name in names]
    last = CallableRecord("g12", regions, 1)
    keys = [KeyUse(name, "FULL", {"batch": 4}, 1, 3, 3, real=9, padded=12) for name in (*names, last.name)]
    report = Report(ReportFigures("a model", callables=(*records, last), keys=tuple(keys)))
    assert report["Keys"].rows == (
        ("g0 and 11 more alike", "FULL", "batch=4", "12", "36", "36", "25.0%"),
        ("g12", "FULL", "batch=4", "1", "3", "3", "25.0%"),
    )
    assert [row[0] for row in report["Regions"].rows] == ["g0.r0", "g0.r1", "g0.end", "g12.r0", "g12.r1"]
    (broken,) = [problem for problem in report.problems if problem.kind == "graph break"]
    assert (broken.what, broken.where, broken.remedy) == ("print", "model.py:7: print(x)", "leave the print out")
    assert broken.places == tuple(names)
    assert "g0, g1 and 10 more" in " ".join(report["Problems"].rows[0])
    assert [key["graph"] for key in report.to_dict()["replays"]["keys"]] == [*names, "g12"]


def test_equal_reasons_and_equal_sizes_share_a_line() -> None:
    sizes = tuple(SizeRecord("batch", symbol, 4, 2, None, True, "proved") for symbol in ("s1", "s7"))
    first = Reason("first calls of a key", is_expected=True)
    calls = [CountedReason(graph, first, 2) for graph in ("g0", "g1")]
    records = (CallableRecord("g0", (), 0, sizes=sizes),)
    report = Report(ReportFigures("a model", callables=records, uncaptured=tuple(calls)))
    assert "4 ran without a graph (first calls of a key: 4)." in str(report)
    assert report["Sizes"].rows == (("g0", "batch", "s1, s7", "4", "2 to any", "proved", "yes"),)
    assert [size["symbol"] for size in report.to_dict()["replays"]["graphs"][0]["sizes"]] == ["s1", "s7"]


def test_long_tables_are_cut_in_the_text_only() -> None:
    keys = tuple(KeyUse("decode", "FULL", {"num_tokens": size}, 1, 0, 0) for size in range(60))
    report = Report(ReportFigures("an engine", keys=keys))
    assert "and 36 more rows" in str(report)
    assert Page(report.to_html()).text.count("num_tokens=") == 60
    assert len(report.to_dict()["replays"]["keys"]) == 60


def test_a_problem_names_its_cause_its_line_and_a_remedy() -> None:
    def pooled(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).mean(0)

    fast = gp.graphed(pooled, {"width": [4]}, {"x": {1: "width"}}, compiler="eager")
    for width in (9, 11, 10, 9):
        fast(torch.randn(3, width))
    large, unpadded = fast.report().problems
    assert (large.kind, large.what) == ("no graph", "width is above the largest capture size 4")
    assert (large.times, large.places) == (4, ("g0 width=11", "g0 width=10", "g0 width=9")), "the largest first"
    assert "capture_sizes" in large.remedy
    assert unpadded.kind == "not padded"
    assert unpadded.what.startswith("x[0] is not padded, each of its sizes is captured: aten.mean.dim")
    assert unpadded.where.endswith("return (x * 2).mean(0)")
    assert "padding={'mask': 0}" in unpadded.remedy


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_a_managers_numbers_are_those_of_its_statistics() -> None:
    dispatcher = CudagraphDispatcher("FULL_AND_PIECEWISE", [2, 4], max_num_reqs=4)
    manager = CudaGraphManager(Doubled().eval(), dispatcher, [InputSpec("x", (8, 3), torch.float32)], compiler="eager")
    manager.capture()
    for num_tokens, uniform in ((3, False), (4, False), (3, True), (7, False), (7, False), (0, False)):
        manager.run(
            gp.Batch(num_tokens, num_reqs=num_tokens, inputs={"x": torch.randn(num_tokens, 3)}, uniform_decode=uniform)
        )
    figures, stats = figures_of(manager.report()), manager.stats()
    keys = figures["replays"]["keys"]
    assert figures["subject"] == "Doubled"
    assert {(key["graph"], key["mode"]) for key in keys} == {("mixed", "PIECEWISE"), ("decode", "FULL")}
    assert [(key["calls"], key["real"], key["padded"], key["padding"]) for key in keys] == [
        (key.replays, key.real_tokens, key.padded_tokens, key.padding) for key in stats.keys
    ]
    assert [key["capture_s"] for key in keys] == [key.captured.seconds for key in stats.keys]
    assert sum(key["calls"] for key in keys) == stats.replays == 3
    assert {calls["reason"]: calls["calls"] for calls in figures["replays"]["without_graph"]} == {
        reason.explanation: times for reason, times in stats.fallbacks.items()
    }
    (large,) = [problem for problem in figures["problems"] if problem["kind"] == "no graph"]
    assert (large["what"], large["times"]) == ("the batch is above the largest key", 2)
    assert "capture size" in large["remedy"]
    (traffic,) = figures["padding"]
    assert dict(traffic["histogram"]) == stats.histogram == {3: 2, 4: 1, 7: 2}
    assert (traffic["captured"], traffic["suggested"]) == ([2, 4], [3, 4, 7])
    assert [(group["name"], group["keys"]) for group in figures["cost"]["groups"]] == [
        (group.name, group.num_keys) for group in stats.groups
    ]
    assert (figures["cost"]["pool_bytes"], figures["cost"]["buffer_bytes"]) == (stats.pool_bytes, stats.buffer_bytes)


def test_the_time_saved_is_the_host_time_of_a_run_less_that_of_a_replay() -> None:
    def use(region: str, key: int, replayed: int, launch_s: float, replay_s: float) -> RegionUse:
        rows = Counts(1, 1, replayed, 0, 1), Row(1, seconds=9.0, least_s=launch_s), Row(replayed, least_s=replay_s)
        return RegionUse(RegionId("g0", region), CUDAGraphMode.PIECEWISE, BatchDescriptor(key), *rows)

    never = float("inf")
    assert saved_s([]) is None
    assert saved_s([use("r0", 8, 3, never, never)]) is None
    # The first run also loads kernels; the least time of a region's keys counts.
    uses = [use("r0", 8, 100, 5.0, 0.5), use("r0", 4, 300, 1.0, 0.75), use("r2", 4, 10, 3.0, 1.0)]
    assert saved_s(uses) == (1.0 - 0.5) * 400 + (3.0 - 1.0) * 10
    assert saved_s([use("r0", 8, 100, 0.5, 0.75)]) == 0


# The pages: every part is drawn, every name is text, and nothing refers to anything outside.


EVERY_PART = (
    Heading(HOSTILE),
    HOSTILE,
    Table(HOSTILE, ("region", HOSTILE), (("g0.r0", HOSTILE), (HOSTILE, "b"))),
    Table("empty", ("a",), ()),
    bar_chart(HOSTILE, ((HOSTILE, 2.0, HOSTILE), ("zero", 0.0, "0"))),
    bar_chart("no bars", ()),
    size_chart(HOSTILE, ((1, 3.0), (90, 1.0)), {HOSTILE: (8, 90)}),
    Picture(HOSTILE, (f"g0.r0 │ {HOSTILE} eager",)),
)


def test_hostile_names_are_text_in_every_part_of_a_page() -> None:
    """Such a page runs no script, and asks the network for nothing: not by its style, either."""
    parts, report = html_page(HOSTILE, EVERY_PART, failure=HOSTILE), Report(hostile_figures()).to_html()
    for page in map(Page, (parts, report)):
        assert set(page.tags) == {"html", "head", "meta", "style", "body", "pre", "code", "span"}
        assert page.handlers == page.references == []
    assert "url(" not in parts + report
    assert "@import" not in parts + report
    assert Page(parts).text.count(HOSTILE) >= 10
    # A name that is folded within a cell of one column is whole again without spaces and rules of tables.
    unfolded = re.sub(r"[\s│]", "", Page(report).text)
    assert unfolded.count(HOSTILE.replace(" ", "")) >= 10
    assert "█" in Page(parts).text


def test_text_shows_every_name_as_it_is() -> None:
    file = io.StringIO()
    print_parts(EVERY_PART, Console(file=file, width=400), failure=HOSTILE)
    assert file.getvalue().count(HOSTILE) >= 10
    assert "█" in file.getvalue()
