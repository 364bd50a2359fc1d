"""The CPU tape: what is recorded, what is frozen, and what it refuses because a GPU would."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

import graphpass as gp
from graphpass import CUDAGraphWrapper
from graphpass.capture.tape import call_compiled
from graphpass.compat import processgroups
from graphpass.errors import CaptureError

X = torch.arange(8.0)


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda x: x.sum().item(), "aten::item"),
        (lambda x: x.sum().tolist(), "Tensor.tolist"),
        (lambda x: float(x.detach().numpy().sum()), "Tensor.numpy"),
        (lambda x: float(np.asarray(x).sum()), "numpy.array"),
    ],
    ids=["item", "tolist", "numpy", "array"],
)
def test_a_python_op_that_reads_the_host_is_refused(rig: Any, read: Callable[[Any], float], name: str) -> None:
    with torch.library._scoped_library("graphpass_tape_host", "FRAGMENT") as library:
        library.define("reads(Tensor x) -> Tensor")
        library.impl("reads", lambda x: x * read(x), "CompositeExplicitAutograd")
        wrapper = rig.wrap(torch.ops.graphpass_tape_host.reads)
        with pytest.raises(CaptureError, match=f"{re.escape(name)} cannot be captured"):
            rig.capture(wrapper, X)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def reduced_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    distributed.all_reduce(y)
    return y


def reduced(x: torch.Tensor) -> torch.Tensor:
    group = distributed.group.WORLD
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x + 1, "sum", group.group_name))


def test_a_collective_on_its_argument_is_refused(rig: Any, one_rank: None) -> None:
    """Who waits for it is Python, which no replay runs."""
    wrapper = rig.wrap(reduced_in_place)
    with pytest.raises(CaptureError, match=r"op \S*allreduce\S* cannot be captured on the CPU tape"):
        rig.capture(wrapper, X)


def test_a_collective_that_returns_its_result_is_a_step_that_waits(
    rig: Any, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished, ran = processgroups.finished, list[str]()

    def noted(collective: Any, *args: Any, **kwargs: Any) -> Any:
        ran.append(str(collective))
        return finished(collective, *args, **kwargs)

    monkeypatch.setattr(processgroups, "finished", noted)
    wrapper = rig.wrap(reduced)
    rig.capture(wrapper, X)
    recorded = ["_c10d_functional.all_reduce.default", "_c10d_functional.wait_tensor.default"]
    assert ran == [*recorded, recorded[0]], "recorded, and replayed once"
    for step in range(3):
        assert torch.equal(rig.call(wrapper, X * step), X * step + 1)
    assert ran[3:] == recorded[:1] * 3
    assert wrapper.unwrap().calls == 2


# -- opaque artifacts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["function", "module"])
def test_a_compiled_callable_is_refused(rig: Any, form: str) -> None:
    target = (lambda x: x + 1) if form == "function" else torch.nn.ReLU()
    compiled = torch.compile(target, backend="eager")
    wrapper = CUDAGraphWrapper(compiled, "FULL", runtime=rig.runtime, name="compiled")
    with pytest.raises(CaptureError, match=r"(?s)compiled callable cannot be captured on the CPU tape.*cgpass"):
        rig.capture(wrapper, X)
    assert torch.equal(rig.call(wrapper, X, at_mode="NONE"), target(X))


# -- views and in-place ops --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "region", [lambda x: torch.tensor(0.5), lambda x: torch.tensor([0.5]).add_(x.sum())], ids=["as it is", "written"]
)
@pytest.mark.parametrize("outputs", ["clone", "view"])
def test_a_tensor_of_python_data_is_new_in_every_replay(rig: Any, region: Any, outputs: str) -> None:
    wrapper = rig.wrap(region, outputs=outputs)
    for step in range(3):
        assert torch.equal((rig.capture if step == 0 else rig.call)(wrapper, X + step), region(X + step))


@pytest.mark.parametrize(
    "result", [lambda: torch.from_numpy(np.ones(3)), lambda: torch.frombuffer(bytearray(8), dtype=torch.int8)]
)
def test_a_result_that_no_op_made_is_refused(rig: Any, result: Any) -> None:
    wrapper = rig.wrap(lambda x: (x + 1, result()))
    with pytest.raises(CaptureError, match="a result of the region cannot be captured"):
        rig.capture(wrapper, X)


def ran_in_python(x: torch.Tensor) -> None:
    """Told of calls that nothing compiled."""


def double(x: torch.Tensor) -> torch.Tensor:
    if not torch.compiler.is_compiling():
        ran_in_python(x)
    return (x * 2).sin()


def breaks(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    torch._dynamo.graph_break()
    return x.sin()


def capture_around(compiled: Callable[..., Any], runtime: gp.GraphRuntime) -> gp.CUDAGraphWrapper:
    def around(x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = call_compiled(compiled, x + 1)
        return inner.cos()

    wrapper = gp.CUDAGraphWrapper(around, gp.CUDAGraphMode.FULL, runtime=runtime, name="around")
    with runtime.capturing():
        run(wrapper, torch.ones(4, 3))
    return wrapper


def run(wrapper: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    with (
        torch.no_grad(),
        gp.set_forward_context(runtime_mode=gp.CUDAGraphMode.FULL, batch_descriptor=gp.BatchDescriptor(4)),
    ):
        result: torch.Tensor = wrapper(x)
    return result


def compiled_by(function: Callable[..., Any], compiler: str) -> Callable[..., Any]:
    torch.compiler.reset()
    options = {"compiler": compiler, "runtime": gp.GraphRuntime(), "mode": "NONE"}
    compiled: Callable[..., Any] = torch.compile(function, backend="cgpass", options=options)
    with torch.no_grad(), gp.set_forward_context():
        compiled(torch.ones(4, 3))
    return compiled


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_compiled_callable_is_captured_by_its_graph(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compiled_by(double, compiler)
    seen: list[torch.Tensor] = []
    monkeypatch.setitem(globals(), "ran_in_python", seen.append)
    with gp.GraphRuntime(device="cpu") as runtime:
        wrapper = capture_around(compiled, runtime)
        for seed in range(3):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
            torch.testing.assert_close(run(wrapper, x), ((x + 1) * 2).sin().cos())
        assert wrapper.counts()[gp.BatchDescriptor(4)].replayed == 4
        with torch.no_grad(), gp.set_forward_context():
            compiled(torch.ones(4, 3))
    assert seen == [], "it was skipped while it was recorded, or is ever after"


@pytest.mark.parametrize(
    "compiled",
    [lambda: compiled_by(breaks, "eager"), lambda: torch.compile(double, backend="eager")],
    ids=["graph break", "another backend"],
)
def test_what_is_not_one_graph_is_refused(compiled: Callable[[], Callable[..., Any]]) -> None:
    """Ops between two graphs, or of somebody else's, would not be recorded."""
    with (
        gp.GraphRuntime(device="cpu") as runtime,
        pytest.raises(gp.errors.CaptureError, match="compiled callable cannot be captured on the CPU tape"),
    ):
        capture_around(compiled(), runtime)
