"""Fixtures and settings of every test: hypothesis profiles, a clean compiler, the GPU's leak check."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.combinations import each_row_once
from tests.order import costliest_first, left_to_accept, shuffled, write_costs

if TYPE_CHECKING:
    import torch

# Default runs give the same verdict every time; the fuzz profile searches.
settings.register_profile(
    "repeatable",
    max_examples=50,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "fuzz",
    max_examples=1000,
    derandomize=False,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("repeatable")

MANY_MODULES, MANY_OBJECTS = 50, 1 << 20
COUNT_FROZEN = gc.get_freeze_count

passed_key = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Settings of torch, before it reads them; the backend by hand where no distribution is installed.

    Inductor compiles a program for each instruction set of the CPU, to see whether it can: 10 s in every process. And
    torch keeps what each operator makes of fake tensors, which costs more than it saves where few graphs are alike: a
    fifth of the time of tests that compile.
    """
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")
    if any(point.name == "cgpass" for point in entry_points(group="torch_dynamo_backends")):
        return
    try:
        from cgpass import backend
    except ImportError:
        return
    from torch._dynamo import register_backend

    register_backend(backend, name="cgpass")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-combinations", action="store_true", help="run tests with every combination of parameters")
    parser.addoption("--write-costs", action="store_true", help="write down what each file takes")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="files and the tests of each in an order of this seed")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.option.write_costs:
        reports = [report for of_kind in terminalreporter.stats.values() for report in of_kind]
        write_costs(report for report in reports if isinstance(report, pytest.TestReport))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out acceptance tests and combinations of parameters, and skip what needs a GPU where there is none.

    torch is imported only if some test asks. A run that chooses tests, by marks or by name, has all combinations.
    """
    is_default = config.option.markexpr in config.getini("addopts") and not any("::" in name for name in config.args)
    if is_default and not config.option.all_combinations:
        left_out = left_to_accept(items, config.args)
        taken = each_row_once(item for item in items if item not in left_out)
        config.hook.pytest_deselected(items=[item for item in items if item not in taken])
        items[:] = [item for item in items if item in taken]
    seed = config.option.shuffle
    items[:] = costliest_first(items) if seed is None else shuffled(items, seed)
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="no GPU here"))


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """Keep pytest off torch's structured trace, which renders every graph as soon as it has a handler."""
    logging.getLogger("torch.__trace").handlers.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember whether the test's body passed: a failed test's traceback keeps its tensors alive."""
    report = yield
    if call.when == "call":
        item.stash[passed_key] = report.passed
    return report


@pytest.fixture(scope="session", autouse=True)
def compiler_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A compiler cache of this session's own: what an earlier run compiled must not change what this one counts."""
    folder = tmp_path_factory.mktemp("inductor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        patch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
        yield folder


@dataclass
class Frozen:
    """What the garbage collector no longer looks at: the objects of these modules, and of tests before this file."""

    modules: set[str] = field(default_factory=set)
    file: Path | None = None


@pytest.fixture(scope="session")
def frozen() -> Iterator[Frozen]:
    """Nor are frozen objects counted, which takes as long as looking at them, and is asked for before every capture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", lambda: MANY_OBJECTS)
        yield Frozen()


@pytest.fixture
def frozen_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what the library itself freezes."""
    monkeypatch.setattr(gc, "get_freeze_count", COUNT_FROZEN)


@pytest.fixture(autouse=True)
def quick_collections(request: pytest.FixtureRequest, frozen: Frozen) -> None:
    """Freeze what earlier tests imported and left: each capture collects garbage, and torch alone is a million objects.

    A test's own objects are made afterwards, so they are collected as ever.
    """
    if request.path != frozen.file or len(sys.modules.keys() - frozen.modules) > MANY_MODULES:
        gc.collect()
        gc.freeze()
        frozen.file = request.path
        frozen.modules.update(sys.modules)


@pytest.fixture(autouse=True)
def clean_compiler() -> Iterator[None]:
    """Forget compiled code after each test; costs nothing where torch.compile was never used.

    Dynamo times the guards of each compilation, for its log, after it has flushed the CPU's caches: not here.
    """
    yield
    if "torch._dynamo" in sys.modules:
        import torch

        torch.compiler.reset()
        # torch 2.11 patches this for a compilation with dynamic=True, and threads that do so at once leave it off.
        torch._dynamo.config.assume_static_by_default = True
    guards = sys.modules.get("torch._dynamo.guards")
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *_: 0.0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Fixtures that tests share draw the same numbers, whichever test asks for them first."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Each test draws the same numbers, whichever ran before it, and whether or not it made a shared fixture."""
    pytest_runtest_setup()


@pytest.fixture
def cuda() -> torch.device:
    """The GPU under test; a test that asks for it carries ``pytest.mark.cuda``."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def no_pool_left_behind(request: pytest.FixtureRequest, clean_compiler: None) -> Iterator[None]:
    """After a test marked ``cuda`` that passed, no segment of a private pool is left that was not there before."""
    if request.node.get_closest_marker("cuda") is None:
        yield
        return
    before = private_segments()
    yield
    if not request.node.stash.get(passed_key, False):
        return
    left = private_segments() - before
    assert not left, f"segments left in private pools (pool, address): {sorted(left)}"


@pytest.fixture
def closed_runtimes(no_pool_left_behind: None) -> Iterator[None]:
    """Closes the runtimes that torch.compile made, as a user closes them, before segments are counted.

    A runtime that is collected without being closed leaves torch's workspaces of its capture stream behind.
    """
    from graphpass import GraphRuntime

    yield
    for found in gc.get_objects():
        if type(found) is GraphRuntime:
            found.close()


def private_segments() -> set[tuple[tuple[int, int], int]]:
    """(pool, address) of every segment that the caching allocator holds for a private pool, after a collection."""
    import torch

    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return {
        (tuple(segment["segment_pool_id"]), segment["address"])
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) != (0, 0)
    }


def pytest_report_header() -> str:
    """The versions and the device a reader of a failure needs first."""
    from importlib.metadata import version

    return f"torch {version('torch')}, {os.cpu_count()} cores"
