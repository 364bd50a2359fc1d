"""Regions as the report shows them: what splits them, Python callables and control flow among that."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import config as dynamo_config

import cgpass
import graphpass as gp
from graphpass import GraphRuntime
from graphpass.errors import CaptureError
from tests.observed import reported_regions
from tests.unit.cgpass.attended import ATTEND, Make
from tests.unit.compiled import Compiled, agrees
from tests.unit.models import linear


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.int32, torch.float32, torch.bool])
@pytest.mark.parametrize("reads", ["number", "size", "both"])
def test_numbers_read_from_the_cpu_are_those_of_each_call(rt: GraphRuntime, dtype: torch.dtype, reads: str) -> None:
    """Fake tensors give the number of an argument without dimensions a hint, as if it were a size."""

    def model(x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        number: Any = step.item()
        y = (x * 2).relu()
        y = y * number + 1 if reads != "size" else y
        return y.sin() if reads == "number" else y.narrow(1, 0, 2 + int(number)).sin()

    if reads != "number" and dtype is not torch.int64:
        pytest.skip("no size")
    with dynamo_config.patch(capture_scalar_outputs=True):
        fast = Compiled(rt, model, dispatch="auto", dynamic=None)
        for number in (1, 2, 3, 0, 1, 1, 1, 1):
            args = torch.randn(4, 6), torch.tensor(number, dtype=dtype)
            agrees(fast(*args), model(*args))
    assert rt.stats().replayed > 0


def two_layers(x: torch.Tensor) -> torch.Tensor:
    x = torch.ops.cgpasstest.attend(x + 1)
    return torch.ops.cgpasstest.attend(x * 2) - 3


CUT_TWICE = ["captured", "eager", "captured", "eager", "captured"]


def test_the_dump_has_one_file_a_graph(keyed: Make, tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    fast = keyed(two_layers, dynamic=True, dump_dir=str(folder))
    fast(torch.randn(4, 6))
    fast(torch.randn(1, 6))
    assert sorted(path.name for path in folder.iterdir()) == ["g0.txt", "g1.txt"]
    text = (folder / "g0.txt").read_text(encoding="utf-8")
    assert text.count("splitting op: cgpasstest::attend") == 2
    assert str(tmp_path) not in text
    assert text != (folder / "g1.txt").read_text(encoding="utf-8")


def test_explain_says_what_would_be_captured() -> None:
    report = cgpass.explain(two_layers, torch.randn(4, 6), options={"splitting_ops": [ATTEND]}, dynamic=False)
    (record,) = report.figures.callables
    split = {"splitting op: cgpasstest::attend"}
    found = [(r.name, r.kind, r.num_ops, {reason.why for reason in r.reasons}) for r in record.regions]
    kinds = itertools.cycle((("captured", set()), ("eager", split)))
    assert found == [(f"r{n}", kind, 3, why) for n, (kind, why) in zip(range(5), kinds, strict=False)]
    assert report["Keys"].rows == ()


def pooled(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * 2).mean(1)


def explained(**options: Any) -> tuple[dict[str, str | None], list[Any]]:
    """The verdicts of ``pooled``, and what is said of its length."""
    (record,) = cgpass.explain(pooled, torch.randn(4, 6, 8), options=options).figures.callables
    sizes = {size.field: size for size in record.sizes}
    line = pooled.__code__.co_firstlineno + 1
    said = [*sizes["x[1]"].causes, *sizes["x[1]"].made]
    for cause in said:
        assert cause.op.startswith("aten.mean")
        assert cause.where == f"test_regions.py:{line}: return torch.relu(x * 2).mean(1)"
    return {field: size.verdict for field, size in sizes.items()}, said


def test_explain_says_what_may_be_padded_and_what_not() -> None:
    verdicts, (cause,) = explained(compiler="eager")
    assert verdicts == {"x[0]": "proved", "x[1]": "unproved", "x[2]": "proved"}
    assert (cause.target, cause.verdict) == ("output 0", "unproved")


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
    ("mode", "is_frozen"), [(None, False), ("PIECEWISE", False), ("FULL_AND_PIECEWISE", False), ("FULL", True)]
)
def test_a_splitting_op_runs_in_each_call_unless_full_was_asked_for(
    rt: GraphRuntime, mode: str | None, is_frozen: bool, compiled_by: str
) -> None:
    STATE.update(calls=0, seen=[])
    options = {"compiler": "eager", "splitting_ops": ["cgpasstest::stateful"], "runtime": rt, "dispatch": "auto"}
    options |= {} if mode is None else {"mode": mode}
    compile_it: Any = {"graphed": gp.graphed, "torch.compile": lambda f, **o: Compiled(rt, f, dynamic=None, **o)}
    fast, x, right = compile_it[compiled_by](counting, **options), torch.ones(4, 6), []
    with torch.no_grad():
        for number in range(1, 11):
            right.append(torch.equal(fast(x), (x + 1) * number))
    assert rt.stats().captured > 0
    assert all(right) is not is_frozen
    assert (STATE["calls"] == len(set(STATE["seen"])) == 10) is not is_frozen


def test_a_pair_without_pieces_runs_listed_ops_without_a_graph_until_it_has_them(rt: GraphRuntime) -> None:
    STATE.update(calls=0, seen=[])
    options = {"splitting_ops": ["cgpasstest::stateful"], "dispatch": "auto", "dynamic": None}
    fast, x, called = Compiled(rt, counting, mode="FULL_DECODE_ONLY", **options), torch.ones(4, 6), 0
    for _ in range(4):
        called += 1
        agrees(fast(x), (x + 1) * called)
    problem = fast.problem("FULL_DECODE_ONLY")
    assert "splitting_ops" in problem.what
    mode = re.search(r"mode='(\w+)'", problem.remedy)
    assert mode is not None
    fast = Compiled(rt, counting, mode=mode[1], **options)
    for _ in range(4):
        called += 1
        agrees(fast(x), (x + 1) * called)
    assert rt.stats().replayed > 0


# Splitting ops named as Python callables: functions that Dynamo inlines, and module classes.


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What a model's author wrote: nothing of this name is left in Dynamo's graph."""
    weights = torch.softmax(query @ key.transpose(-1, -2), -1)
    return weights @ value


@functools.wraps(attention)
def decorated(*args: Any) -> Any:
    return attention(*args)


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attention(x, x, x)


class Layers(nn.Module):
    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linear(4) for _ in range(2))
        self.attend = attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.linears:
            y = layer(x)
            x = x + (self.attend(y) if isinstance(self.attend, nn.Module) else self.attend(y, y, y))
        return torch.softmax(x, -1)


def regions_of(model: nn.Module, op: Any, rt: GraphRuntime) -> list[tuple[str, int]]:
    fast = Compiled(rt, model, make=lambda size: (torch.randn(size, 4),), dynamic=None, splitting_ops=[op])
    fast.check("NONE", "PIECEWISE", "FULL", sizes=(3, 3), capture=True)
    return [(region.kind, region.num_ops) for region in rt.callables()[0].regions]


@pytest.mark.parametrize(
    ("attend", "op"),
    [
        (attention, attention),
        (attention, f"{__name__}.attention"),
        (decorated, decorated),
        (Attention(), Attention),
        (Attention(), attention),
        (Attention(), f"{__name__}.Attention"),
    ],
    ids=["function", "dotted name", "decorated", "module class", "function in a module", "dotted class"],
)
def test_what_dynamo_inlined_runs_eagerly_as_a_whole(attend: Any, op: Any, rt: GraphRuntime) -> None:
    found = regions_of(Layers(attend).eval(), op, rt)
    assert [kind for kind, _ in found] == CUT_TWICE
    # Transpose, product, softmax, product, besides inputs and output; the softmax at the end is no part of it.
    eager = [num_ops for kind, num_ops in found if kind == "eager"]
    assert eager[0] == eager[1]
    assert rt.compiled() == 3


def test_a_function_of_the_same_name_elsewhere_is_another_one(rt: GraphRuntime) -> None:
    def attention(*args: torch.Tensor) -> torch.Tensor:
        return torch.relu(args[0])

    assert [kind for kind, _ in regions_of(Layers(attention).eval(), globals()["attention"], rt)] == ["captured"]


# Branches and loops that the data decide, and lists read off a tensor: right, or refused by name; never frozen.


MODES = pytest.mark.parametrize("mode", [None, "NONE", "PIECEWISE", "FULL"])
SIGNS = (1, -1, -1, 1, 1, -1)


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cond(x.sum() > 0, lambda t: self.first(t).tanh(), lambda t: self.second(t) * 3, (x.relu() + x,))
        return self.last(y).tanh()


class BranchOnSize(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.shape[0] > 3, lambda t: t * 2, lambda t: t - 1, (x + 1,)).relu()


class Loop(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def goes_on(t: torch.Tensor) -> torch.Tensor:
            return t.abs().sum() < 90

        def body(t: torch.Tensor) -> tuple[torch.Tensor]:
            return (t * 2,)

        (y,) = torch._higher_order_ops.while_loop(goes_on, body, (x.relu() + 0.5,))
        return y.tanh() + 1


class Directed(Compiled):
    """Under auto dispatch, which a context may direct."""

    def __init__(self, rt: GraphRuntime, model: Callable[..., Any], **options: Any) -> None:
        super().__init__(rt, model, dispatch="auto", **options)

    def call(self, mode: str | None, sign: int, *, is_first: bool) -> None:
        """A call with numbers of one sign, beside the model; the first of all in a scope."""
        x = sign * (torch.rand(4, 6) + 0.5)
        with self.rt.capturing() if is_first else contextlib.nullcontext():
            got = self(x) if mode is None else self.at(mode, 4, x)
        with torch.no_grad():
            agrees(got, self.model(x))


@pytest.mark.parametrize("model", [Branch(), BranchOnSize(), Loop()], ids=lambda model: type(model).__name__)
@MODES
@pytest.mark.parametrize(
    "compiler", ["aot_eager", *(pytest.param(name, marks=pytest.mark.soak) for name in ("eager", "inductor"))]
)
def test_a_branch_runs_between_graphs(model: nn.Module, mode: str | None, compiler: str, rt: GraphRuntime) -> None:
    fast = Directed(rt, model.eval().requires_grad_(False), dynamic=True, fullgraph=True, compiler=compiler)
    if mode == "FULL":
        with rt.capturing(), pytest.raises(CaptureError, match="as a whole") as refused:
            fast.call(mode, 1, is_first=False)
        assert "control flow" in refused.value.found
        return
    for number, sign in enumerate(SIGNS):
        fast.call(mode, sign, is_first=mode == "PIECEWISE" and not number)
    assert "control flow" in " ".join(why for _, _, why in reported_regions(rt))
    if mode != "NONE":
        assert rt.stats().captured == 2, "what lies before the branch, and what lies behind it"
        assert rt.stats().replayed >= 2 * (len(SIGNS) - 1)
