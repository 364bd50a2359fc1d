"""What imports what: the layers of pyproject.toml, and how little ``import graphpass`` loads."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import graphpass
from tests.processes import ROOT, environment

MODULES = {
    ".".join(source.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"): source
    for folder, package in ((ROOT, "graphpass"), (ROOT / "backends", "cgpass"))
    for source in (folder / package).rglob("*.py")
}


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that finds the checkout's packages."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def loaded_by(statement: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after ``statement``."""
    finished = run_python(f"import sys; {statement}; print(*sys.modules)")
    assert finished.returncode == 0, finished.stderr
    return set(finished.stdout.split())


def own(modules: set[str]) -> list[str]:
    return sorted(name for name in modules if name.split(".")[0] in ("graphpass", "cgpass"))


def test_imports_run_downwards() -> None:
    pytest.importorskip("importlinter")
    finished = run_python("from importlinter.cli import lint_imports_command as check; check()", "--no-cache")
    assert finished.returncode == 0, finished.stdout + finished.stderr


def imported_by(source: Path) -> set[str]:
    """The modules of graphpass and cgpass that import statements name, also those inside functions or TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{source}: imports name the whole path"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(name if name in MODULES else node.module for name in names)
    return found & MODULES.keys()


def test_no_modules_import_each_other() -> None:
    graph = {name: imported_by(source) for name, source in MODULES.items()}
    assert "graphpass.capture.runtime" in graph["graphpass"], "that import is for type checkers alone"
    graphlib.TopologicalSorter(graph).prepare()  # raises a CycleError that names the circle


@pytest.mark.parametrize(
    ("program", "most"),
    [("import graphpass", 1), ("from graphpass import CudagraphDispatcher, plan_sizes, set_forward_context", 20)],
)
def test_imports_load_few_modules_and_no_torch(program: str, most: int) -> None:
    modules = loaded_by(program)
    assert 1 <= len(own(modules)) <= most, f"{len(own(modules))} modules: {own(modules)}"
    assert "torch" not in modules


def test_all_public_names_load_neither_dynamo_nor_the_backend() -> None:
    modules = loaded_by("import graphpass; [getattr(graphpass, name) for name in graphpass.__all__]")
    assert {"torch._dynamo", "torch._inductor", "cgpass"} & modules == set()


@pytest.mark.parametrize("name", sorted(graphpass.__all__))
def test_a_name_is_what_its_module_defines(name: str) -> None:
    """A submodule of the same name would take its place as soon as somebody imports that."""
    module = graphpass._MODULE_OF[name]
    value = getattr(__import__(module, fromlist=[name]), name)
    assert getattr(graphpass, name) is value
    assert not (Path(graphpass.__file__).parent / f"{name}.py").exists()


def test_type_checkers_see_what_is_loaded_lazily() -> None:
    tree = ast.parse(Path(graphpass.__file__).read_text(encoding="utf-8"))
    checked = {
        alias.name: node.module
        for block in ast.walk(tree)
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    submodules = dict.fromkeys(graphpass._SUBMODULES, "graphpass")
    assert checked == {**graphpass._MODULE_OF, **submodules}
    assert sorted(graphpass._MODULE_OF) == sorted(graphpass.__all__)


def test_submodules_load_at_first_use() -> None:
    modules = loaded_by("import graphpass; graphpass.errors.CaptureError")
    assert own(modules) == ["graphpass", "graphpass.errors"]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="module 'graphpass' has no attribute 'of_no_such_name'"):
        _ = graphpass.of_no_such_name
    assert {*graphpass.__all__, "errors", "regions"} <= set(dir(graphpass))
