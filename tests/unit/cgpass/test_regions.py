"""One bad op in the middle costs one split, named with its reason; the report, the dump and explain() show it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cgpass
import graphpass as gp
from graphpass import GraphRuntime
from graphpass.errors import CaptureError
from tests.observed import reported_regions

# Not on every machine that runs the GPU tests.
assert_expected_inline = pytest.importorskip("expecttest").assert_expected_inline

ATTEND = "cgpasstest::attend"
Run = Callable[..., Any]


def reads_the_host(x: torch.Tensor) -> torch.Tensor:
    count = (x * 2).relu().sum().item()
    return x.cos() * count + 1


def has_a_data_dependent_shape(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = (x * 2).relu().nonzero().sum(0)
    return x.cos() + 1, rows * 2


@pytest.mark.parametrize(
    ("model", "reason"),
    [(reads_the_host, "host read: Tensor.item"), (has_a_data_dependent_shape, "data-dependent shape: Tensor.nonzero")],
)
def test_one_bad_op_costs_one_split(rt: GraphRuntime, at_key: Run, model: Callable[..., Any], reason: str) -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(
            model, backend="cgpass", dynamic=True, fullgraph=True, options={"compiler": "eager", "runtime": rt}
        )
        for capture in (rt, None, None):
            x = torch.randn(4, 6)
            torch.testing.assert_close(at_key(compiled, "PIECEWISE", 4, x, capture=capture), model(x))
        with pytest.raises(CaptureError) as raised:
            at_key(compiled, "FULL", 4, x, capture=rt)
    rows = reported_regions(rt)
    eager = [(name, why) for name, kind, why in rows if kind == "eager"]
    assert eager[0][1].startswith(reason)
    assert [why for _, why in eager if why.startswith(reason)] == [eager[0][1]]
    assert raised.value.found == f"{eager[0][0].removeprefix('g0.')}: {reason}"
    assert "PIECEWISE" in raised.value.remedy
    counts = rt.counts()
    captured = [name for name, kind, *_ in rows if kind == "captured"]
    assert {(region, c.captured, c.replayed) for (region, _, _), c in counts.items()} == {(r, 1, 3) for r in captured}


def test_without_fullgraph_a_host_read_is_a_graph_break(rt: GraphRuntime, at_key: Run, tally: Run) -> None:
    compiled = torch.compile(
        reads_the_host, backend="cgpass", dynamic=True, options={"compiler": "eager", "runtime": rt}
    )
    with rt.capturing():
        at_key(compiled, "FULL", 4, torch.ones(4, 6))
        for factor in (2.0, 3.0, 4.0):
            x = torch.ones(4, 6) * factor
            torch.testing.assert_close(at_key(compiled, "FULL", 4, x), reads_the_host(x))
    (reason,) = {row[-1] for row in reported_regions(rt) if row[0] == "g0.end"}
    assert "item" in reason
    assert f"test_regions.py:{reads_the_host.__code__.co_firstlineno + 1}" in reason
    assert tally(rt, "FULL")["g0.full", 4] == (1, 4)


def two_layers(x: torch.Tensor) -> torch.Tensor:
    x = torch.ops.cgpasstest.attend(x + 1)
    return torch.ops.cgpasstest.attend(x * 2) - 3


def test_the_dump_has_one_file_a_graph(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    options = {"compiler": "eager", "splitting_ops": [ATTEND], "dump_dir": str(folder)}
    compiled = torch.compile(two_layers, backend="cgpass", dynamic=True, options=options)
    compiled(torch.randn(4, 6))
    compiled(torch.randn(1, 6))
    assert sorted(path.name for path in folder.iterdir()) == ["g0.txt", "g1.txt"]
    text = (folder / "g0.txt").read_text(encoding="utf-8")
    assert text.count("splitting op: cgpasstest::attend") == 2
    assert str(tmp_path) not in text
    assert text != (folder / "g1.txt").read_text(encoding="utf-8")


def test_explain_says_what_would_be_captured() -> None:
    report = cgpass.explain(two_layers, torch.randn(4, 6), options={"splitting_ops": [ATTEND]}, dynamic=False)
    (record,) = report.figures.callables
    assert_expected_inline(
        "\n".join(
            " | ".join((region.name, region.kind, str(region.num_ops), *dict.fromkeys(r.why for r in region.reasons)))
            for region in record.regions
        ),
        """\
r0 | captured | 3
r1 | eager | 3 | splitting op: cgpasstest::attend
r2 | captured | 3
r3 | eager | 3 | splitting op: cgpasstest::attend
r4 | captured | 3""",
    )
    assert report["Keys"].rows == ()


def test_explain_says_what_may_be_padded_and_what_not() -> None:
    def pooled(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * 2).mean(1)

    (record,) = cgpass.explain(pooled, torch.randn(4, 6, 8)).figures.callables
    sizes = {size.field: size for size in record.sizes}
    assert {field: size.verdict for field, size in sizes.items()} == {
        "x[0]": "proved",
        "x[1]": "unproved",
        "x[2]": "proved",
    }
    (cause,) = sizes["x[1]"].causes
    line = pooled.__code__.co_firstlineno + 1
    assert (cause.target, cause.verdict) == ("output 0", "unproved")
    assert cause.op.startswith("aten.mean")
    assert cause.where == f"test_regions.py:{line}: return torch.relu(x * 2).mean(1)"


def test_explain_names_sizes_as_the_options_do() -> None:
    options = {"dynamic_dims": {"x": {0: "num_reqs"}}, "splitting_ops": [ATTEND]}
    (record,) = cgpass.explain(two_layers, torch.randn(4, 6), options=options).figures.callables
    (cause, *_) = [cause for size in record.sizes if size.field == "num_reqs" for cause in size.causes]
    assert "cgpasstest.attend" in cause.op
    assert "no padding rule" in cause.why


def test_explain_checks_its_options() -> None:
    with pytest.raises(ValueError, match="splitting_ops"):
        cgpass.explain(two_layers, torch.randn(4, 6), options={"splitting_op": [ATTEND]})


@pytest.mark.parametrize("op", [ATTEND, "torch.ops.cgpasstest.attend", "cgpasstest::attend.default"])
def test_splitting_ops_by_any_name_cut_alike(rt: GraphRuntime, op: str) -> None:
    options = {"compiler": "eager", "splitting_ops": [op], "runtime": rt}
    torch.compile(two_layers, backend="cgpass", options=options)(torch.randn(4, 6))
    kinds = [kind for _, kind, _ in reported_regions(rt)]
    assert kinds == ["captured", "eager", "captured", "eager", "captured"]


def test_an_input_that_nothing_reads_is_not_copied(rt: GraphRuntime, at_key: Run) -> None:
    def model(unread: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + unread.shape[1]

    compiled = torch.compile(model, backend="cgpass", dynamic=True, options={"compiler": "eager", "runtime": rt})
    x = torch.randn(4, 6)
    at_key(compiled, "FULL", 4, torch.randn(9, 5), x, capture=rt)
    torch.testing.assert_close(at_key(compiled, "FULL", 4, torch.randn(9, 5), x), model(torch.randn(9, 5), x))
    ((counts),) = rt.counts().values()
    assert counts.copied == counts.replayed == 2


def test_a_layer_called_twice_compiles_each_region_once_a_graph(rt: GraphRuntime) -> None:
    options = {"compiler": "eager", "splitting_ops": [ATTEND], "runtime": rt}
    compiled = torch.compile(two_layers, backend="cgpass", dynamic=True, options=options)
    compiled(torch.randn(4, 6))
    compiled(torch.randn(5, 6))
    assert rt.stats().callables == 1
    assert rt.compiled() <= 3


STATE: dict[str, Any] = {"calls": 0, "seen": []}


@torch.library.custom_op("cgpasstest::stateful", mutates_args=())
def stateful(x: torch.Tensor) -> torch.Tensor:
    STATE["calls"] += 1
    STATE["seen"].append(time.monotonic_ns())
    return x * STATE["calls"]


stateful.register_fake(torch.empty_like)


def counting(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.cgpasstest.stateful(x + 1).relu()


@pytest.mark.parametrize("compiled_by", ["graphed", "torch.compile"])
@pytest.mark.parametrize(
    ("mode", "is_frozen"), [(None, False), ("PIECEWISE", False), ("FULL_AND_PIECEWISE", True), ("FULL", True)]
)
def test_a_splitting_op_runs_in_each_call_unless_full_was_asked_for(
    rt: GraphRuntime, mode: str | None, is_frozen: bool, compiled_by: str
) -> None:
    STATE.update(calls=0, seen=[])
    options = {"compiler": "eager", "splitting_ops": ["cgpasstest::stateful"], "runtime": rt, "dispatch": "auto"}
    options |= {} if mode is None else {"mode": mode}
    if compiled_by == "graphed":
        fast: Any = gp.graphed(counting, **options)
    else:
        fast = torch.compile(counting, backend="cgpass", options=options)
    x, right = torch.ones(4, 6), []
    with torch.no_grad():
        for number in range(1, 11):
            right.append(torch.equal(fast(x), (x + 1) * number))
    assert rt.stats().captured > 0
    assert all(right) is not is_frozen
    assert (STATE["calls"] == len(set(STATE["seen"])) == 10) is not is_frozen


def test_a_context_still_gets_full_graphs_of_splitting_ops(rt: GraphRuntime, at_key: Run) -> None:
    STATE.update(calls=0, seen=[])
    options = {"compiler": "eager", "splitting_ops": ["cgpasstest::stateful"], "runtime": rt, "dispatch": "auto"}
    fast = torch.compile(counting, backend="cgpass", options=options)
    x = torch.ones(4, 6)
    at_key(fast, "FULL", 4, x, capture=rt)
    frozen = STATE["calls"]
    for _ in range(3):
        at_key(fast, "FULL", 4, x)
    assert STATE["calls"] == frozen
    assert {mode for _, mode, _ in rt.counts()} == {gp.CUDAGraphMode.FULL}
