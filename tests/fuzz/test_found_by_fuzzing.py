"""Programs that once gave wrong answers or failed over graphs, made small: one entry for each cause."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fuzz.oracle import check
from tests.fuzz.programs import Call, Program
from tests.fuzz.python_programs import PythonProgram
from tests.fuzz.test_python import ROUTES
from tests.fuzz.test_python import check as check_python

TURNED = ("t0 = x.clone()", "t0.t_()")
SPLIT_THEN_TURNED = ("t0 = fresh(x)", "t0.t_()", "t1 = t0 * 2")

FOUND: dict[str, tuple[str, Program]] = {
    "a result that is turned in place after it was made": ("eager",
        Program(TURNED, ("t0",), (Call("FULL", 4),), dynamic=False, route="dynamo")),
    "a result that is turned in place and no square": ("eager",
        Program(TURNED, ("t0",), (Call("FULL", 3),), dynamic=False, route="dynamo")),
    "what an eager region returned is turned in place by the next": ("eager", Program(SPLIT_THEN_TURNED, ("t1",),
        (Call("PIECEWISE", 4),) * 2, splitting_ops=("graphpassfuzz::fresh",), dynamic=False, route="dynamo")),
    "what is turned in place behind a split is returned": ("aot_eager", Program(SPLIT_THEN_TURNED, ("t0",),
        (Call("PIECEWISE", 4),) * 2, splitting_ops=("graphpassfuzz::fresh",), dynamic=False, route="dynamo")),
    "a view of a fed back result": ("eager", Program(("t0 = x.unsqueeze(0).expand(2, -1, -1)", "t1 = y * 2"),
        ("t1", "t0"), (Call("FULL", 6), Call("FULL", 6, "feedback")), outputs="view", dynamic=False)),
    "what a region returned while it was captured is turned in place by an eager one": ("eager",
        Program(("t5 = y.sigmoid()", "u5 = t5.t_()", "t6 = torch.cat([t5, u5], 1)"), ("t5",),
        (Call("PIECEWISE", 4),) * 2, splitting_ops=("aten::cat",), dynamic=False)),
    "what an eager region hands over shares memory in another way in a later step": ("eager",
        Program((*("t0 = x.reshape(x.shape[1], x.shape[0])", "t2 = x.as_strided((2, 2), (2, 1), 1)"),
        *("t6 = t0 + t0.mean()", "t8 = t2.index_select(0, i)")), ("t6",), (Call("PIECEWISE", 3),
        Call("PIECEWISE", 3, "offset")), dynamic=False)),
    "an input of a padded call that lies in a buffer which the model writes": ("eager",
        Program(("t0 = x + 1", "self.b.mul_(0.5)", "t1 = x * 2"), ("t0", "t1"), (Call("FULL", 3, "buffer"),),
        route="graphed")),
    "a written input of a padded call that lies in a buffer": ("eager",
        Program(("x.add_(1)", "self.b.mul_(0.5)"), ("x",), (Call("FULL", 3, "buffer"),), route="graphed")),
    "a cut makes a block of columns an input that the region writes to and returns": ("aot_eager",
        Program(("t0 = y[:, :2]", "t0.mul_(0.5)", "t0.add_(0.25)", "t1 = t0.view(t0.size())"), ("t1",),
        (Call("PIECEWISE", 3), Call("FULL", 3), Call("NONE", 3)), splitting_ops=("aten::mul_",))),
    "a cut makes two blocks of columns inputs of a region that writes to one": ("aot_eager",
        Program((*("u0 = y.chunk(2, 1)", "t0 = u0[0]", "v0 = u0[1]", "y.mul_(0.5)"),
        *("v0.add_(t0.mean())", "t1 = v0.view(t0.size())", "t1.mul_(0.5)")), ("y",), (Call("PIECEWISE", 3),
        Call("FULL", 3), Call("NONE", 3)), splitting_ops=("aten::mul_",))),
    "a view of a buffer comes back from a call that writes to it": ("eager", Program(("write(x, y)",), ("x",),
        (Call("NONE", 4, "buffer"), Call("NONE", 4, "feedback")), outputs="view", dynamic=False, route="graphed")),
    "a padded call writes to an input that is its last result": ("eager", Program(("x.clamp_(-1, 1)", "t0 = x * y"),
        ("t0",), (Call("FULL", 6), Call("FULL", 6), Call("FULL", 6, "feedback")), outputs="view", route="graphed")),
    "a padded call returns an input that is its last result": ("eager", Program(("t0 = y @ self.w",), ("t0", "x"),
        (Call("FULL", 4), Call("FULL", 4), Call("FULL", 4, "feedback")), outputs="view", route="graphed")),
    "a masked assignment to a tensor without dimensions, where Dynamo ends its graph": ("aot_eager",
        Program(("t0 = x.max(0)[0]", "t1 = t0.select(0, 1)", "t1[t1 > 0.4] = 0.2", "t2 = y + t0"), ("t1", "t2"),
        (Call("NONE", 3), Call("FULL", 3), Call("PIECEWISE", 3)), dynamic=False, route="dynamo")),
    "a view that another region made is read by its place in the storage": ("eager",
        Program((*("u0 = self.w.split([1, 3], 1)", "t0 = u0[1]", "t1 = F.relu(self.w, inplace=True)"),
        *("t0 = operator.iadd(t0, 1.5)", "t3 = t0.as_strided((2, 2), (2, 1), 1)")), ("t3",), (Call("PIECEWISE", 3),
        ), splitting_ops=("aten::relu",), dynamic=False)),
    "compiling one region fixes a size that a later region was keyed without": ("aot_eager",
        Program((*("t2 = torch.take_along_dim(x, i.unsqueeze(1), 1)", "write(self.w[1:], self.w[:1])"),
        *("t6 = t2.flatten()", "t7 = t6 + 1")), ("t6", "t7"), (Call("NONE", 3), Call("NONE", 4)),
        splitting_ops=("graphpassfuzz::write",))),
    "a diagonal that nothing reads crosses a cut, and Inductor warns as it lowers one": ("inductor",
        Program((*("t0 = torch.maximum(self.c, self.c)", "t1 = self.b.diagonal()"),
        *("t2 = y.as_strided((2, 2), (2, 1), 1)", "t3 = torch.maximum(t1, t1)")), ("x",), (Call("NONE", 3),),
        dynamic=False)),
}  # fmt: skip


@pytest.mark.parametrize(("compiler", "program"), FOUND.values(), ids=FOUND)
def test_a_program_that_once_failed(compiler: str, program: Program) -> None:
    assert check(program, compiler).mismatch is None


@pytest.mark.parametrize("line", ["write(x, y)", "t0 = mixed(x)"])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_an_op_that_writes_to_its_argument_is_captured_by_aot_eager(line: str, mode: str) -> None:
    program = Program((line, "t1 = x + 1"), ("t1",), (Call(mode, 3),) * 2)
    outcome = check(program, "aot_eager")
    assert outcome.mismatch is None
    assert outcome.refusal is None
    assert outcome.replays


def plain(rows: tuple[int, ...] = (3,) * 5, index: tuple[str, ...] = ("torch.tensor(-1)",) * 5) -> tuple[Any, ...]:
    """Calls that differ in their rows and indices alone."""
    of_all = ("None", "True", "1", "'first'")
    return tuple((f"rows({n})", f"rows({n})", *of_all, at) for n, at in zip(rows, index, strict=True))


def between(statement: str, calls: int = 5) -> tuple[tuple[int, str], ...]:
    return tuple((call, statement) for call in range(1, calls))


NEGATIVE_LATER = plain((5, 7) * 6, ("torch.tensor([0, 1])",) * 5 + ("torch.tensor([-2, -1])",) * 7)

FOUND_IN_PYTHON: dict[str, PythonProgram] = {
    "the data of an argument is replaced": PythonProgram(("x.data = x * 2",), "x", plain()),
    "an argument takes the storage of another one": PythonProgram(("x.data = y",), "x", plain()),
    "the data of a buffer is replaced": PythonProgram(
        ("self.total.data = self.total * 0.5 + x.sum(0)",), "x", plain(), compiler="aot_eager"
    ),
    "the data of a parameter is replaced": PythonProgram(
        ("self.inner.weight.data = self.inner.weight * 0.5",), "self.inner(x)", plain()
    ),
    "SGD steps inside": PythonProgram(("self._sgd.step()",), "self.inner(x)", plain()),
    "Adam steps inside": PythonProgram(("self._adam.step()",), "self.inner(x)", plain()),
    "a compiled step of SGD between the calls": PythonProgram(
        (), "self.inner(x)", plain(), between("compiled(model._sgd.step)()")
    ),
    "a compiled step of Adam between the calls": PythonProgram(
        (), "self.inner(x)", plain(), between("compiled(model._adam.step)()")
    ),
    "a parameter and a buffer are swapped after a replay": PythonProgram(
        (), "self.inner(x) + self.total", plain(), ((3, "torch.utils.swap_tensors(model.inner.bias, model.total)"),)
    ),
    "an index from data becomes negative where the size is declared": PythonProgram(
        ("t0 = x * 2",), "t0[i]", NEGATIVE_LATER, declared=True
    ),
    "an index that is written to becomes negative where the size is declared": PythonProgram(
        ("t0 = x * 2", "t0[i] = 0.25"), "t0", NEGATIVE_LATER, declared=True
    ),
    "an index of an argument that is written to becomes negative where the size is declared": PythonProgram(
        ("x[i] = 0.25",), "x", NEGATIVE_LATER, declared=True
    ),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("program", FOUND_IN_PYTHON.values(), ids=FOUND_IN_PYTHON)
def test_python_that_once_failed(program: PythonProgram, route: str) -> None:
    outcome = check_python(program, ROUTES[route])
    assert outcome.mismatch is None
    assert outcome.refusal is None
    assert outcome.calls == len(program.calls)
