"""Views and shared memory across regions and plans: results equal those of eager calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cgpass
import graphpass as gp
from graphpass.compile.once import WrittenInputs
from graphpass.errors import CaptureError, StaticInputError
from tests.unit.models import module

KEY = gp.BatchDescriptor(4)
MODES = pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL"])
COMPILERS = pytest.mark.parametrize("compiler", ["eager", "aot_eager"])


def compiled(model: Any, rt: gp.GraphRuntime, compiler: str = "eager", *, dynamic: bool = True, **options: Any) -> Any:
    given = cgpass.options(compiler=compiler, runtime=rt, lazy_capture=True, **options)
    return torch.compile(model, backend="cgpass", dynamic=dynamic, options=given)


def run(model: Any, mode: str, *args: Any) -> Any:
    with torch.no_grad(), gp.set_forward_context(runtime_mode=gp.CUDAGraphMode.parse(mode), batch_descriptor=KEY):
        return model(*args)


def agree_in_turn(model: Any, fast: Any, mode: str, calls: list[Callable[[], tuple[torch.Tensor, ...]]]) -> None:
    """Results and everything the model wrote to, call after call."""
    for number, make in enumerate(calls):
        torch.manual_seed(number)
        mine = make()
        torch.manual_seed(number)
        theirs = make()
        found, expected = run(fast, mode, *mine), model(*theirs)
        pairs = [*zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(expected), strict=True)]
        for one, other in (*pairs, *zip(mine, theirs, strict=True)):
            torch.testing.assert_close(one, other, msg=lambda text, number=number: f"call {number}: {text}")


@MODES
@pytest.mark.parametrize("writes", [False, True])
def test_inputs_that_share_memory_at_other_strides_have_a_graph_of_their_own(
    mode: str, writes: bool, rt: gp.GraphRuntime
) -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> Any:
        return (x.add_(1) if writes else x + 1), y * 2

    def strided(stride: int, offset: int) -> Callable[[], tuple[torch.Tensor, ...]]:
        def make() -> tuple[torch.Tensor, ...]:
            memory = torch.randn(40)
            return memory.as_strided((4,), (stride,), 0), memory.as_strided((4,), (stride,), offset)

        return make

    calls = [strided(2, 3), strided(3, 3), strided(3, 6), strided(4, 6), strided(2, 3)]
    agree_in_turn(model, compiled(model, rt), mode, calls)


@pytest.mark.parametrize(
    ("views", "overlap"),
    [
        (lambda m: (m[:, :4], m[:, 4:]), False),
        (lambda m: (m[:, :5], m[:, 4:]), True),
        (lambda m: (m[:4], m[4:]), False),
        (lambda m: (m[::2], m[1:]), True),
        (lambda m: (m[:, :4], m[1:, :4]), True),
        (lambda m: (m, m.t()), True),
        (lambda m: (m[:0], m), False),
    ],
    ids=["columns", "crossing columns", "rows", "every other row", "shifted rows", "transposed", "empty"],
)
def test_overlapping_views_share_memory_and_blocks_of_columns_do_not(views: Any, overlap: bool) -> None:
    args = list(views(torch.zeros(8, 8)))
    assert WrittenInputs(tensors=(0, 1), written=frozenset({0})).overlap(args) is overlap


def test_views_of_two_storages_over_one_memory_overlap() -> None:
    """As outputs in a graph pool are handed out: each in a storage of its own over the same memory."""
    array = torch.zeros(8).numpy()
    args = [torch.from_numpy(array), torch.from_numpy(array)]
    assert WrittenInputs(tensors=(0, 1), written=frozenset({0})).overlap(args)


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_a_view_output_fed_back_into_an_input_that_is_written(mode: str, rt: gp.GraphRuntime) -> None:
    def model(y: torch.Tensor) -> torch.Tensor:
        y.mul_(0.5)
        return y + 1

    fast, found = compiled(model, rt, outputs="view"), torch.randn(4)
    expected = found.clone()
    for _ in range(4):
        found, expected = run(fast, mode, found), model(expected)
        torch.testing.assert_close(found, expected)


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a view": lambda x: x.as_strided((4, 4), (4, 1), 1) * 2,
    "a copy": lambda x: torch.as_strided_copy(x, (4, 4), (4, 1), 1) * 2,
}


@COMPILERS
@pytest.mark.parametrize("strided", STRIDED.values(), ids=STRIDED)
def test_as_strided_of_an_input_reads_the_callers_memory(
    strided: Callable[[torch.Tensor], torch.Tensor], compiler: str, rt: gp.GraphRuntime
) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return strided(x)

    calls = [lambda: (torch.randn(16, 4)[1:3],)] * 3
    fast = compiled(model, rt, compiler, dynamic=False)
    agree_in_turn(model, fast, "PIECEWISE", calls)
    with pytest.raises(CaptureError, match="beyond an input"):
        run(fast, "FULL", torch.randn(16, 4)[1:3])


@COMPILERS
@MODES
@pytest.mark.parametrize("splits", [["aten::sin", "aten::slice"], ["aten::cos"]], ids=["eager", "captured"])
@pytest.mark.parametrize("strided", STRIDED.values(), ids=STRIDED)
def test_as_strided_of_what_an_earlier_region_hands_over(
    strided: Callable[[torch.Tensor], torch.Tensor], splits: list[str], mode: str, compiler: str, rt: gp.GraphRuntime
) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        rows = x.sin()[1:]
        mean = x.cos().mean()
        return strided(rows) + mean

    fast = compiled(model, rt, compiler, dynamic=False, splitting_ops=splits)
    agree_in_turn(model, fast, mode, [lambda: (torch.randn(8, 4),)] * 3)
    assert mode == "NONE" or rt.stats().replayed


def test_an_argument_that_moves_through_a_static_buffer_is_refused_in_the_end(rt: gp.GraphRuntime) -> None:
    model: Any = module(lambda self, x, v: x + v + self.cache[:4], cache=torch.randn(64))
    fast = compiled(model, rt)
    views = [model.cache[2 * i + 2 : 2 * i + 6] for i in range(5)]
    for v in (*views[:4], *views[:4]):
        torch.testing.assert_close(run(fast, "FULL", torch.ones(4), v), model(torch.ones(4), v))
    with pytest.raises(StaticInputError, match=r"'v' .* keeps moving inside a static input"):
        run(fast, "FULL", torch.ones(4), views[4])
    assert rt.stats().captured == 4
