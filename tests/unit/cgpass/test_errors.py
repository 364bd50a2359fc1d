"""What is refused, how: the type, what was expected, what was found, and a remedy that names the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import cgpass
import graphpass as gp
from graphpass import BatchDescriptor, CUDAGraphMode, GraphpassError
from graphpass.errors import CaptureError, OptionError, ShapeError
from tests.unit.cgpass.attended import ATTEND, Make, attended
from tests.unit.compiled import agrees
from tests.unit.models import module


def refused_at_compile(compiled: Callable[..., Any], *args: Any) -> GraphpassError:
    with pytest.raises(BackendCompilerFailed) as raised:
        compiled(*args)
    inner = raised.value.inner_exception
    assert isinstance(inner, GraphpassError)
    return inner


BAD_OPTIONS = [
    ({"spliting_ops": []}, "spliting_ops", "'splitting_ops'"),
    ({"capture_size": [1]}, "capture_size", "'capture_sizes'"),
    ({"runtimes": None}, "runtimes", "'runtime'"),
    ({"zzzzqqqq": 1}, "zzzzqqqq", "leave it out"),
    ({"triton.cudagraphs": True}, "triton.cudagraphs", ""),
    ({"max_autotune": True}, "max_autotune", ""),
    ({"compiler": "nvcc"}, "nvcc", ""),
    ({"mode": "SOMETIMES"}, "SOMETIMES", ""),
    ({"outputs": "copy"}, "copy", "'clone'"),
    ({"on_moved_input": "ignore"}, "ignore", "'copy'"),
    ({"on_fallback": "explode"}, "explode", ""),
    ({"runtime": "mine"}, "mine", ""),
    ({"splitting_ops": "aten::add"}, "aten::add", ""),
    ({"capture_sizes": []}, "[]", ""),
    ({"capture_sizes": [0, 4]}, "[0, 4]", ""),
    ({"capture_sizes": [True]}, "[True]", ""),
    ({"capture_sizes": {"seq": "12"}}, "12", ""),
    ({"dynamic_dims": ["x"]}, "['x']", ""),
    ({"dynamic_dims": {"x": "rows"}}, "rows", ""),
    ({"compile_sizes": []}, "[]", ""),
    ({"compile_sizes": [0]}, "[0]", ""),
    ({"compile_sizes": 8}, "8", ""),
    ({"compile_ranges": [8]}, "[8]", ""),
    ({"compile_ranges": [(8, 4)]}, "(8, 4)", ""),
    ({"compile_ranges": [(1, 8), (8, 16)]}, "(8, 16)", ""),
    ({"compile_ranges": [(1, 8, 16)]}, "(1, 8, 16)", ""),
    ({"compile_sizes": {"num_reqs": [8], "seq_len": [16]}}, "seq_len", ""),
    ({"compile_sizes": {"num_reqs": [8]}, "compile_ranges": {"seq_len": [(1, 8)]}}, "seq_len", ""),
]


@pytest.mark.parametrize(("given", "found", "remedy"), BAD_OPTIONS, ids=[str(case[0]) for case in BAD_OPTIONS])
def test_a_bad_option_is_refused_early(given: dict[str, Any], found: str, remedy: str) -> None:
    with pytest.raises(OptionError) as raised:
        cgpass.options(**given)
    assert found in raised.value.found
    assert next(iter(given)) in f"{raised.value.problem}: {raised.value.found}"
    assert remedy in raised.value.remedy
    assert raised.value.expected


@pytest.mark.parametrize("preset", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_presets_of_inductor_are_refused_by_name(preset: str) -> None:
    inner = refused_at_compile(torch.compile(attended, backend="cgpass", mode=preset), torch.randn(4, 6))
    assert isinstance(inner, OptionError)
    assert inner.found == f"mode={preset!r}"
    assert "options" in inner.expected


def test_two_key_fields_are_each_checked(keyed: Make) -> None:
    fast = keyed(
        lambda x: x.softmax(1) * 2,
        make=lambda size: (torch.randn(*size),),
        key=lambda size: BatchDescriptor(size[0] * size[1], num_reqs=size[0], extra=(("seq_len", size[1]),)),
        dynamic=True,
        capture_sizes={"num_reqs": [2, 3], "seq_len": [5, 7]},
        dynamic_dims={"x": {0: "num_reqs", 1: "seq_len"}},
    )
    keys = [(2, 5), (2, 7), (3, 5), (3, 7)]
    fast.capture("FULL", sizes=keys)
    fast.check("FULL", sizes=keys)
    assert fast.captured == 4
    for shape, expected in (((2, 7), "seq_len=5 in dimension 1"), ((3, 5), "num_reqs=2 in dimension 0")):
        with pytest.raises(ShapeError) as raised:
            fast.at("FULL", (2, 5), torch.randn(*shape))
        assert expected in raised.value.expected


# An op of a compiled region that fails while it is captured: the error names it, with the user's line.


@torch.library.custom_op("cgpasstest::fails", mutates_args=())
def fails(x: torch.Tensor) -> torch.Tensor:
    _fail("fails")
    return x.clone()


@torch.library.custom_op("cgpasstest::fails_eagerly", mutates_args=())
def fails_eagerly(x: torch.Tensor) -> torch.Tensor:
    _fail("fails_eagerly")
    return x.clone()


def _fail(name: str) -> None:
    if gp.is_forward_context_available() and gp.get_forward_context().extra == name:
        raise ValueError(f"{name} has failed")


for op in (fails, fails_eagerly):
    op.register_fake(torch.empty_like)


def failing(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = fails_eagerly(self.inner(x)).relu()
    return fails(y + 1) * 2


def failure(keyed: Make, compiler: str, mode: str, op_name: str) -> Exception:
    model = module(failing, inner=nn.Linear(6, 6))
    fast = keyed(model, compiler=compiler, splitting_ops=[ATTEND, "cgpasstest::fails_eagerly"])
    x = torch.randn(4, 6)
    with torch.no_grad(), fast.rt.capturing():
        fast(x)
        context = {"runtime_mode": CUDAGraphMode.parse(mode), "batch_descriptor": BatchDescriptor(4)}
        with gp.set_forward_context(**context, extra=op_name), pytest.raises((CaptureError, ValueError)) as raised:
            fast(x)
        with gp.set_forward_context(**context):
            agrees(fast(x), fast(x))
    return raised.value


FULL_FAILED, R2_FAILED = "g0.full failed at FULL 4 tokens, in g0.", "g0.r2 failed at PIECEWISE 4 tokens"
FAILS, FAILS_EAGERLY = "return fails(y + 1) * 2", "y = fails_eagerly(self.inner(x))"


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("mode", "op_name", "region", "line", "remedy"),
    [
        ("FULL", "fails", FULL_FAILED + "r2", FAILS, "splitting_ops, and set mode='PIECEWISE'"),
        ("FULL", "fails_eagerly", FULL_FAILED + "r1", FAILS_EAGERLY, "set mode='PIECEWISE', which leaves it out"),
        ("PIECEWISE", "fails", R2_FAILED, FAILS, "in splitting_ops"),
    ],
    ids=["captured op, FULL", "splitting op, FULL", "captured op, PIECEWISE"],
)
def test_the_error_names_op_and_line(
    keyed: Make, compiler: str, mode: str, op_name: str, region: str, line: str, remedy: str
) -> None:
    error: Any = failure(keyed, compiler, mode, op_name)
    assert isinstance(error, CaptureError)
    for text in (region, f"cgpasstest.{op_name}.default at test_errors.py:", line, f"{op_name} has failed"):
        assert text in error.problem + error.found
    assert isinstance(error.__cause__, ValueError)
    assert remedy in error.remedy
    assert ("mode=" in error.remedy) == (mode == "FULL")


def test_an_eager_region_s_own_error_stays_what_it_is(keyed: Make) -> None:
    assert type(failure(keyed, "eager", "PIECEWISE", "fails_eagerly")) is ValueError
