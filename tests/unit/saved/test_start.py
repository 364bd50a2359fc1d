"""Saved starts of torch.compile, what cannot be saved, and the directory."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from typer.testing import CliRunner

import graphpass as gp
from cgpass.extrainputs import RealSizes
from graphpass.cli.app import app
from graphpass.ledger import Reason
from graphpass.regions.execute import value_of
from graphpass.regions.split import Partition, partition
from graphpass.saved import files, fingerprint
from graphpass.saved.files import GRAPH, SavedFiles
from graphpass.saved.fingerprint import environment
from tests.unit.saved import stack as of
from tests.unit.saved.stack import (
    INPUTS,
    OPTIONS,
    SAVES_AOT_EAGER,
    Broken,
    Plain,
    Stack,
    assert_right,
    compiled,
    example,
    stack,
)
from tests.unit.saved.starts import STARTS, assert_loaded, start, started


def missed(fast: Any) -> str:
    return " ".join(note for note in fast.runtime.notes if "not loaded" in note)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "starts"
    assert_right(compiled(folder))
    assert list(folder.glob("*.graph"))
    return folder


@SAVES_AOT_EAGER
@pytest.mark.parametrize("kinds", [("torch_compile", "manager"), pytest.param(tuple(STARTS), marks=pytest.mark.soak)])
def test_a_process_loads_what_another_one_saved(kinds: Sequence[str], tmp_path: Path) -> None:
    saved, loaded = (started("aot_eager", tmp_path, kinds, PYTHONHASHSEED=seed) for seed in "78")
    for kind in kinds:
        assert_loaded(kind, saved[kind], loaded[kind])


@SAVES_AOT_EAGER
@pytest.mark.parametrize("kind", ["made", "causal_lm", "encoder"])
def test_a_start_in_one_process_loads_what_another_one_saved(kind: str, tmp_path: Path) -> None:
    saved = start(kind, "aot_eager", tmp_path)
    torch.compiler.reset()
    assert_loaded(kind, saved, start(kind, "aot_eager", tmp_path))


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@SAVES_AOT_EAGER
def test_a_loaded_graph_takes_real_sizes_only_where_a_region_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, of = list[RealSizes](), RealSizes.of

    def watched(self: RealSizes, args: Sequence[Any]) -> torch.Tensor:
        sizes.append(self)
        return of(self, args)

    monkeypatch.setattr(RealSizes, "of", watched)
    for is_loaded in (False, True):
        sizes.clear()
        torch.compiler.reset()
        given = {**OPTIONS, "compiler": "aot_eager", "dispatch": "auto", "warm_start": tmp_path}
        fast = torch.compile(doubled, backend="cgpass", dynamic=True, options=given)
        for rows in (4, 3, 2, 3):
            assert fast(example(rows)).equal(doubled(example(rows)))
        assert ("loaded from warm_start" in " ".join(gp.runtime_of(fast).notes)) is is_loaded
        assert sizes
        assert not any(one.is_read for one in sizes)


@pytest.mark.parametrize(
    ("says", "options", "change"),
    [
        ("option mode differs", {"mode": "FULL"}, lambda patch: None),
        ("torch differs", {}, lambda patch: patch.setattr(torch.version, "git_version", "other")),
        ("settings of the compiler", {}, lambda patch: torch.use_deterministic_algorithms(True)),
        ("the implementation of", {}, lambda patch: patch.setattr(of.mixed, "_init_fn", of.bent)),
    ],
)
def test_torch_compile_misses(
    says: str, options: dict[str, Any], change: Any, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    try:
        change(monkeypatch)
        fast = compiled(shutil.copytree(saved, tmp_path / "starts"), **options)
        assert_right(fast)
    finally:
        torch.use_deterministic_algorithms(False)
    assert says in missed(fast)
    assert fast.runtime.compiled() > 0


def test_a_trace_that_loads_its_graph_partitions_nothing(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    for name in ("partition", "RegionCompiler", "dispatched"):
        monkeypatch.setattr(f"cgpass.pipeline.{name}", None)
    fast = compiled(saved)
    assert_right(fast)
    assert fast.runtime.stats().replayed > 0
    report = fast.runtime.report()
    (spent,) = [row for row in report["Costs"].rows if row[0] == "load"]
    assert spent == ("load", f"{report.figures.costs.load_s:.2f} s", "reading warm_start")
    assert report.figures.costs.load_s > 0


class Flipping(Stack):
    is_odd = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.is_odd = not self.is_odd
        return super().forward(x)


class FromEnvironment(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if os.getenv("HOME") else 3)


@pytest.mark.parametrize(
    ("kind", "says"),
    [(Broken, "graph break"), (Flipping, "sets the attribute 'is_odd'"), (FromEnvironment, "os.getenv")],
    ids=["graph break", "state", "environment"],
)
def test_what_cannot_be_saved_is_said(kind: type[Stack], says: str, tmp_path: Path) -> None:
    torch.compiler.reset()
    fast = gp.graphed(stack(kind), **OPTIONS, warm_start=tmp_path / "starts")
    fast.capture(example())
    notes = [note for note in fast.runtime.notes if "is not saved" in note]
    assert any(says in note for note in notes), notes
    assert list((tmp_path / "starts").glob("*.graph"))
    assert not list((tmp_path / "starts").glob("*.call"))


def test_no_tensor_is_saved(tmp_path: Path) -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(INPUTS, INPUTS), nn.ReLU()).eval().requires_grad_(False)
    fast = gp.graphed(model, compiler="eager", warm_start=tmp_path / "starts", progress=False)
    fast.capture(example())
    weight = model[0].weight.numpy().tobytes()
    assert all(weight[:64] not in path.read_bytes() for path in (tmp_path / "starts").iterdir())


class Branching(nn.Module):
    """A graph whose guards admit some sizes only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 5 else x * 3


def test_a_saved_call_has_the_guards_of_its_compilation(tmp_path: Path) -> None:
    for _ in range(2):
        torch.compiler.reset()
        counters.clear()
        model = Branching()
        fast = gp.graphed(
            model, dynamic_dims={"x": 0}, compiler="eager", warm_start=tmp_path / "starts", progress=False
        )
        fast.capture(example(8))
        for rows in (8, 6, 3, 2):
            torch.testing.assert_close(fast(example(rows)), model(example(rows)))


def test_a_saved_call_has_the_guards_of_its_artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def assuming(graph_module: torch.fx.GraphModule, *splitting_ops: Any) -> Partition:
        *_, given = graph_module.graph.find_nodes(op="placeholder")
        assert value_of(given).shape[0] > 5
        return partition(graph_module, *splitting_ops)

    monkeypatch.setattr("cgpass.pipeline.partition", assuming)
    for _ in range(2):
        torch.compiler.reset()
        counters.clear()
        options = {"compiler": "eager", "progress": False, "warm_start": tmp_path / "starts"}
        fast = gp.graphed(of.bent, [6, 12], {"x": 0}, **options)
        fast.capture(example(12))
    for rows in (12, 9):
        torch.testing.assert_close(fast(example(rows)), of.bent(example(rows)))
    assert not counters["frames"]
    monkeypatch.undo()
    torch.testing.assert_close(fast(example(3)), of.bent(example(3)))
    assert counters["frames"], "the saved call ran with a size for which its artifact was not compiled"


def test_only_a_compilation_of_the_loaded_function_is_late(tmp_path: Path) -> None:
    for _ in range(2):
        torch.compiler.reset()
        runtime, model = gp.GraphRuntime(), stack()
        strict = {"runtime": runtime, "on_fallback": "error"}
        fast = gp.graphed(model, **{**OPTIONS, **strict}, warm_start=tmp_path / "starts")
        fast.capture(example())
    assert runtime.compiled() == 0
    other = gp.graphed(model.layers[0].act, compiler="eager", **strict)
    torch.testing.assert_close(other(example()), example().relu())
    model.layers[0].scale = 7.0
    with pytest.raises(gp.GraphpassError, match="captured ahead"):
        fast(example())


def test_keys_that_traffic_used_are_captured_at_the_next_start(tmp_path: Path) -> None:
    def keys(traffic: Sequence[int]) -> tuple[list[str], list[str]]:
        """The keys that a start captures, and those that it has after traffic."""
        torch.compiler.reset()
        options = {"compiler": "eager", "progress": False, "warm_start": tmp_path / "starts"}
        model = stack(Plain)
        fast = gp.graphed(model, dynamic_dims={"x": 0}, **options)
        fast.capture(example(64))
        ahead = [str(key) for _, _, key in fast.runtime.counts()]
        for rows in traffic:
            torch.testing.assert_close(fast(example(rows)), model(example(rows)))
        after = [str(key) for _, _, key in fast.runtime.counts()]
        fast.close()
        return ahead, after

    assert keys([]) == keys([])
    ahead, after = keys([5, 5, 6, 11, *[49] * 60])
    assert len(ahead) == 2  # 64 and 1
    assert len(after) == 4  # and 6, and 49 exactly: 12 was called once
    assert any("exact" in key for key in after)
    again = keys([6, 49])  # its keys have graphs, the exact one too
    assert sorted(again[0]) == sorted(again[1]) == sorted(after)
    assert sorted(keys([6])[0]) == sorted(after)
    assert len(keys([6])[0]) == 3  # the last start did not use 49


def test_the_gpu_is_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "one GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(fingerprint, "_cuda", dict)
    parts = environment([torch.device("cuda")])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another GPU")
    found = fingerprint.difference(parts, environment([torch.device("cuda")]))
    assert found is not None
    assert "GPU differs" in found.why


# -- the directory ----------------------------------------------------------------------------------------------------


def test_files_of_another_user_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SavedFiles(tmp_path / "starts")
    name = store.write("name", {"a": "1"}, GRAPH, b"contents")
    assert isinstance(name, str)
    assert store.read(name) == b"contents"
    os.chown(tmp_path / "starts" / name, 1234, -1) if os.geteuid() == 0 else monkeypatch.setattr(
        os, "geteuid", lambda: 1
    )
    found = store.read(name)
    assert isinstance(found, Reason)
    assert "belongs to user" in found.why


def test_two_writers_leave_a_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, contents, replaced = SavedFiles(tmp_path / "starts"), [bytes([n]) * 100_000 for n in range(4)], []
    replace = os.replace
    monkeypatch.setattr(files.os, "replace", lambda *paths: (replaced.append(paths), replace(*paths)))
    writers = [threading.Thread(target=store.write, args=("name", {"a": "1"}, GRAPH, data)) for data in contents]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    (path,) = (tmp_path / "starts").iterdir()
    assert store.read(path.name) in contents
    assert len(replaced) == len(contents)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SavedFiles(tmp_path / "starts")

    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", fails)
    found = store.write("name", {}, GRAPH, b"contents")
    assert isinstance(found, Reason)
    assert "No space left" in found.why
    assert not list((tmp_path / "starts").iterdir())


def test_the_command_lists_verifies_and_prunes(tmp_path: Path) -> None:
    store, run = SavedFiles(tmp_path / "starts"), CliRunner().invoke
    good = store.write("good", environment([]), GRAPH, b"contents")
    bad = store.write("bad", environment([]), GRAPH, b"contents")
    other = store.write("other", {**environment([]), "torch": "1.0"}, GRAPH, b"contents")
    (tmp_path / "starts" / str(bad)).write_bytes(b"half")
    assert run(app, ["cache", "list", str(store.path)]).exit_code == 0
    assert run(app, ["cache", "verify", str(store.path)]).exit_code == 1
    shown = run(app, ["cache", "prune", str(store.path), "--json"])
    assert shown.exit_code == 0
    assert [path.name for path in store.path.iterdir()] == [good]
    assert str(other) in shown.stdout
    assert run(app, ["cache", "verify", str(store.path)]).exit_code == 0


@pytest.mark.parametrize("action", ["list", "verify", "prune"])
def test_the_command_refuses_a_directory_that_is_not_there(tmp_path: Path, action: str) -> None:
    (tmp_path / "file").write_text("")
    for name, found in (("nowhere", "not there"), ("file", "no directory")):
        shown = CliRunner().invoke(app, ["cache", action, str(tmp_path / name)])
        assert shown.exit_code == 2
        assert f"{name}, which is {found}" in " ".join(shown.output.split())
