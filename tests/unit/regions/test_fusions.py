"""Fusions that a cut costs: the criterion against models with and without one, and against the code of Inductor."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch._inductor.fx_passes import post_grad
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import cgpass
import graphpass as gp
from graphpass import partition
from graphpass.compat.operators import adds_computed_sums_in_products
from graphpass.regions import fusions
from graphpass.regions.fusions import lost_fusions

ATTEND = "graphpasstest_fusions::attend"


@torch.library.custom_op(ATTEND, mutates_args=())
def attend(x: torch.Tensor) -> torch.Tensor:
    return x * 2


attend.register_fake(torch.empty_like)


@torch.library.custom_op("graphpasstest_fusions::refused", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def refused(x: torch.Tensor) -> torch.Tensor:
    return x * 2


refused.register_fake(torch.empty_like)

Norm = Callable[[torch.Tensor], torch.Tensor]


def norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, [8])


def spelled_out(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(torch.float32)


def layer_norm(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, [8])


def decoder(x: torch.Tensor, w: torch.Tensor, norm: Norm = norm, bias: torch.Tensor | None = None) -> torch.Tensor:
    for _ in range(3):
        x = x + F.linear(attend(F.linear(norm(x), w)), w)
        x = x + F.linear(F.silu(F.linear(norm(x), w)), w, bias)
    return norm(x)


def post_norms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = norm(x + F.linear(attend(x), w))
    return x


def lost(function: Callable[..., Any], *shapes: tuple[int, ...], device: str, ops: tuple[str, ...]) -> list[str]:
    """Regions and reasons for a traced function with fake inputs."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return function(x, y)

    with FakeTensorMode():
        examples = [torch.empty(shape, device=device) for shape in shapes]
    parts = partition(fx.symbolic_trace(Model()), ops, example_inputs=examples)
    return [f"{region}: {reason.why}" for region, reason in lost_fusions(parts, serves_full=True)]


# What a decoder adds to a product is computed but for the first sum, whose reader is the second.
IN_A_DECODER = 0 if adds_computed_sums_in_products() else 2
SUM = f"the cut at {ATTEND}.default costs a fusion: the result of operator.add leaves its region"
FLAT, DEEP, SQUARE = (4, 8), (2, 4, 8), (8, 8)


@pytest.mark.parametrize(
    ("function", "x", "device", "num_lost"),
    [
        (decoder, FLAT, "cuda", IN_A_DECODER),
        (lambda x, w: decoder(x, w, spelled_out), FLAT, "cuda", IN_A_DECODER),
        (lambda x, w: decoder(x, w, layer_norm), FLAT, "cuda", 0),  # reads the mean first: there is an addmm anyway
        (lambda x, w: decoder(x, w, bias=w.sum(0)), FLAT, "cuda", 0),  # the product has its bias already
        (decoder, DEEP, "cuda", 0),
        (decoder, FLAT, "cpu", 0),  # addmm is always preferred
        (post_norms, FLAT, "cuda", 0),  # no sum passes by
        (lambda x, w: attend(x + F.linear(x, w)), FLAT, "cuda", 0),  # the splitting op is the sum's one user
        (lambda x, w: (y := x + F.linear(x, w), attend(x) * y), FLAT, "cuda", 0),  # the caller reads the sum
        (lambda x, w: attend(x) * (1 + F.linear(x, w)), FLAT, "cuda", 0),
        (lambda x, w: (y := x + x @ w, attend(x) * y)[1], FLAT, "cuda", 1),
        (lambda x, w: (y := w.sum(0) + x @ w, attend(x) * y)[1], FLAT, "cuda", 0),  # a bias is not copied
    ],
)
def test_a_sum_that_passes_by_a_cut(function: Any, x: tuple[int, ...], device: str, num_lost: int) -> None:
    found = lost(function, x, SQUARE, device=device, ops=(ATTEND,))
    assert len(found) == num_lost
    assert all(SUM in reason for reason in found)


BOTH = f"the cut at {ATTEND}.default costs a fusion: torch.sigmoid and operator.mul would be one kernel"


@pytest.mark.parametrize(
    ("function", "ops", "expected"),
    [
        (lambda x, w: attend(x @ w) * torch.sigmoid(w @ w), ATTEND, []),  # computed after the cut
        (lambda x, w: (gate := torch.sigmoid(w @ w), attend(w @ w) * gate)[1], ATTEND, [f"r0: {BOTH}"]),
        # in a kernel with what the op itself reads
        (lambda x, w: (y := w @ w, gate := torch.sigmoid(y), attend(torch.relu(y)) * gate)[2], ATTEND, []),
        (lambda x, w: (gate := torch.sigmoid(w), attend(gate) * gate)[1], ATTEND, []),  # the op reads it
        (lambda x, w: (gate := torch.sigmoid(w), attend(w @ w) @ gate)[1], ATTEND, []),  # a product reads it
        (lambda x, w: (gate := torch.sigmoid(w), attend(w @ gate) * gate)[1], ATTEND, []),  # so does its own region
        (lambda x, w: (gate := torch.sigmoid(w[:1]), attend(w @ w) * gate)[1], ATTEND, []),  # another shape
        (lambda x, w: (w @ w + attend(w @ w)).relu(), ATTEND, []),  # a product
        (
            lambda x, w: torch.relu(w @ w + 1) * 2,
            "aten::relu",
            [
                "r0: the cut at torch.relu costs a fusion: operator.add and torch.relu would be one kernel",
                "r2: the cut at torch.relu costs a fusion: torch.relu and operator.mul would be one kernel",
            ],
        ),
        (lambda x, w: torch.relu(w @ w) @ w, "aten::relu", []),
        # a CPU adds inside the product in any case
        (lambda x, w: (y := x + x @ w, attend(w @ w) * y)[1], ATTEND, []),
    ],
)
def test_two_operators_that_a_cut_keeps_apart(function: Any, ops: str, expected: list[str]) -> None:
    assert lost(function, SQUARE, SQUARE, device="cpu", ops=(ops,)) == expected


def test_a_cut_that_stays_in_any_case_costs_nothing() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(w @ w)
        return attend(x + refused(w @ w)) * gate

    assert lost(function, SQUARE, SQUARE, device="cpu", ops=(ATTEND,)) == []


class Decoder(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return decoder(x, self.weight, spelled_out)


class Sum(Decoder):
    """Its one sum is of an input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + F.linear(x, self.weight)
        return attend(x) * y


def inductor(model: nn.Module, x: torch.Tensor, ops: list[str], mode: str) -> tuple[gp.GraphRuntime, str]:
    """The runtime after one call, and the code of all regions."""
    torch.compiler.reset()
    runtime = gp.GraphRuntime()
    options = cgpass.options(mode=mode, splitting_ops=ops, compiler="inductor", runtime=runtime)
    uncached = torch._inductor.config.patch(fx_graph_cache=False)  # a cached graph shows no code
    with torch.no_grad(), uncached, functorch_config.patch(enable_autograd_cache=False):
        codes = run_and_get_code(torch.compile(model, backend="cgpass", dynamic=False, options=options), x)[1]
    return runtime, "\n".join(codes)


def notes(runtime: gp.GraphRuntime) -> list[dict[str, Any]]:
    return [problem for problem in runtime.report().to_dict()["problems"] if "costs a fusion" in problem["what"]]


def test_inductor_and_the_report_agree_on_the_sums_of_a_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post_grad, "is_gpu", lambda device: True)
    monkeypatch.setattr(fusions, "is_accelerator", lambda device: True)
    whole, code = inductor(Decoder(), torch.randn(*FLAT), [], "FULL")
    in_whole = code.count("extern_kernels.addmm(")
    assert (in_whole, notes(whole)) == (6 if adds_computed_sums_in_products() else 0, [])
    split, code = inductor(Decoder(), torch.randn(*FLAT), [ATTEND], "FULL_AND_PIECEWISE")
    # The code of two layers is one; the sum before an addmm, which reads it, becomes one too.
    assert code.count("extern_kernels.addmm(") == (4 if in_whole else 2)
    if in_whole:
        assert notes(split) == []
        return
    [note] = notes(split)
    assert note["what"].startswith(SUM)
    assert note["where"].startswith("test_fusions.py:")
    assert note["where"].endswith("x = x + F.linear(F.silu(F.linear(norm(x), w)), w, bias)")
    assert (note["times"], note["places"]) == (2, ["g0.r2", "g0.r4"])
    assert "mode='FULL', without splitting_ops" in note["remedy"]
    deep, code = inductor(Decoder(), torch.randn(*DEEP), [ATTEND], "FULL_AND_PIECEWISE")
    assert (code.count("extern_kernels.addmm("), notes(deep)) == (0, [])


def test_inductor_and_the_report_agree_on_a_sum_of_an_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post_grad, "is_gpu", lambda device: True)
    monkeypatch.setattr(fusions, "is_accelerator", lambda device: True)
    found = {}
    for ops, mode in (((), "FULL"), ((ATTEND,), "FULL_AND_PIECEWISE")):
        runtime, code = inductor(Sum(), torch.randn(*SQUARE), list(ops), mode)
        found[mode] = (code.count("extern_kernels.addmm("), len(notes(runtime)))
    assert found == {"FULL": (0, 0), "FULL_AND_PIECEWISE": (1, 1)}


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*SQUARE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            gate = torch.sigmoid(x @ self.weight)
            x = attend(x @ self.weight) * gate
        return x


def test_inductor_and_the_report_agree_on_the_kernels_of_a_gate() -> None:
    def num_kernels(code: str) -> int:
        return len(re.findall(r"^ +cpp_fused\w*\(", code, re.MULTILINE))

    whole, code = inductor(Gated(), torch.randn(*SQUARE), [], "FULL")
    assert (num_kernels(code), notes(whole)) == (2, [])
    split, code = inductor(Gated(), torch.randn(*SQUARE), [ATTEND], "PIECEWISE")
    assert num_kernels(code) == 4
    [note] = notes(split)
    assert (note["what"], note["times"], note["remedy"]) == (BOTH, 2, "call torch.sigmoid after the cut")
