"""What is refused, how: the type, what was expected, what was found, and a remedy that names the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.testing._internal.two_tensor import TwoTensor

import cgpass
import graphpass as gp
from graphpass import BatchDescriptor, CUDAGraphMode, GraphpassError, GraphRuntime
from graphpass.errors import CaptureError, ContextError, DeviceError, OptionError, PartitionError, ShapeError

ATTEND = "cgpasstest::attend"
Run = Callable[..., Any]


def attended(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.cgpasstest.attend(x + 1) * 2


def compiled_with(model: Callable[..., Any] = attended, *, fullgraph: bool = False, **options: Any) -> Any:
    given = {"compiler": "eager", "splitting_ops": [ATTEND], **options}
    return torch.compile(model, backend="cgpass", dynamic=True, fullgraph=fullgraph, options=given)


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
]


@pytest.mark.parametrize(("given", "found", "remedy"), BAD_OPTIONS, ids=[str(case[0]) for case in BAD_OPTIONS])
def test_a_bad_option_is_refused_early_and_by_the_backend(given: dict[str, Any], found: str, remedy: str) -> None:
    with pytest.raises(OptionError) as early:
        cgpass.options(**given)
    inner = refused_at_compile(torch.compile(attended, backend="cgpass", options=given), torch.randn(3, 6))
    assert isinstance(inner, OptionError)
    for error in (early.value, inner):
        assert found in error.found
        assert remedy in error.remedy
        assert error.expected


def test_valid_options_are_returned_unchanged() -> None:
    given: dict[str, Any] = {"mode": "full", "capture_sizes": (4, 2), "dynamic_dims": {"x": 0}, "outputs": "view"}
    assert cgpass.options(**given) == given


def test_an_unknown_splitting_op_names_its_nearest() -> None:
    inner = refused_at_compile(compiled_with(splitting_ops=["cgpasstest::attent"]), torch.randn(3, 6))
    assert isinstance(inner, PartitionError)
    assert "cgpasstest::attent" in str(inner)
    assert "'cgpasstest::attend'" in inner.remedy


def test_inductor_presets_are_refused() -> None:
    compiled = torch.compile(attended, backend="cgpass", mode="reduce-overhead")
    inner = refused_at_compile(compiled, torch.randn(3, 6))
    assert isinstance(inner, OptionError)
    assert inner.found == "mode='reduce-overhead'"


def test_a_tensor_subclass_is_refused() -> None:
    pair = TwoTensor(torch.randn(3, 6), torch.randn(3, 6))
    inner = refused_at_compile(torch.compile(lambda x: x + 1, backend="cgpass"), pair)
    assert isinstance(inner, DeviceError)
    assert inner.found == "TwoTensor"


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"])
def test_a_composite_mode_is_no_runtime_mode(mode: str) -> None:
    with (
        pytest.raises(ContextError, match=mode),
        gp.set_forward_context(runtime_mode=CUDAGraphMode.parse(mode), batch_descriptor=BatchDescriptor(4)),
    ):
        pass


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE])
def test_a_graph_needs_a_descriptor(mode: CUDAGraphMode) -> None:
    with pytest.raises(ContextError, match="batch_descriptor"), gp.set_forward_context(runtime_mode=mode):
        pass


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_key_that_was_not_captured_is_refused(rt: GraphRuntime, at_key: Run, mode: str) -> None:
    compiled = compiled_with(runtime=rt)
    at_key(compiled, mode, 4, torch.randn(4, 6), capture=rt)
    with pytest.raises(CaptureError, match="has no graph") as raised:
        at_key(compiled, mode, 8, torch.randn(8, 6))
    assert "8 tokens" in raised.value.problem
    assert "4 tokens" in raised.value.found
    assert "capturing()" in raised.value.remedy
    assert rt.stats().captured == (1 if mode == "FULL" else 2)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_an_input_of_another_size_than_its_key_is_refused(rt: GraphRuntime, at_key: Run, mode: str) -> None:
    compiled = compiled_with(runtime=rt, capture_sizes=[4, 8], dynamic_dims={"x": 0})
    for captured in (False, True):
        with pytest.raises(ShapeError, match="'x'") as raised:
            at_key(compiled, mode, 8, torch.randn(5, 6), capture=None if captured else rt)
        assert "num_tokens=8 in dimension 0" in raised.value.expected
        assert raised.value.found == "5"
        at_key(compiled, mode, 8, torch.randn(8, 6), capture=rt)


def test_without_declared_dims_a_wrong_size_does_not_fit_the_graph(rt: GraphRuntime, at_key: Run) -> None:
    compiled = compiled_with(runtime=rt)
    at_key(compiled, "FULL", 8, torch.randn(8, 6), capture=rt)
    with pytest.raises((ShapeError, CaptureError)) as raised:
        at_key(compiled, "FULL", 8, torch.randn(5, 6))
    assert "5" in raised.value.found


def test_two_key_fields_are_each_checked(rt: GraphRuntime, at_key: Run) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x.softmax(1) * 2

    compiled = compiled_with(
        model,
        runtime=rt,
        capture_sizes={"num_reqs": [2, 3], "seq_len": [5, 7]},
        dynamic_dims={"x": {0: "num_reqs", 1: "seq_len"}},
    )
    keys = {
        (reqs, length): BatchDescriptor(reqs * length, num_reqs=reqs, extra=(("seq_len", length),))
        for reqs in (2, 3)
        for length in (5, 7)
    }
    with rt.capturing():
        for (reqs, length), key in keys.items():
            at_key(compiled, "FULL", key, torch.randn(reqs, length))
    for (reqs, length), key in keys.items():
        x = torch.randn(reqs, length)
        torch.testing.assert_close(at_key(compiled, "FULL", key, x), model(x))
    assert rt.stats().captured == 4
    with pytest.raises(ShapeError) as raised:
        at_key(compiled, "FULL", keys[2, 5], torch.randn(2, 7))
    assert "seq_len=5 in dimension 1" in raised.value.expected
    with pytest.raises(ShapeError) as raised:
        at_key(compiled, "FULL", keys[2, 5], torch.randn(3, 5))
    assert "num_reqs=2 in dimension 0" in raised.value.expected


def test_capture_sizes_outside_the_guards_are_listed_with_their_constraint(rt: GraphRuntime, at_key: Run) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] <= 8)
        return x * 2

    compiled = compiled_with(model, runtime=rt, capture_sizes=[1, 4, 16], dynamic_dims={"x": 0})
    at_key(compiled, "FULL", 4, torch.randn(4, 6), capture=rt)
    notes = list(rt.notes)
    assert any("num_tokens=16 is outside this graph's guards" in note and "<= 8" in note for note in notes)
    assert any("num_tokens=1 is outside this graph's guards" in note and ">= 2" in note for note in notes)
    assert not any("num_tokens=4 " in note for note in notes)
    with pytest.raises(RuntimeError):
        at_key(compiled, "FULL", 16, torch.randn(16, 6), capture=rt)


def test_a_size_outside_the_guards_is_captured_by_the_graph_that_admits_it(
    rt: GraphRuntime, at_key: Run, tally: Run
) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 8 else x + 1

    compiled = compiled_with(model, runtime=rt, capture_sizes=[4, 16], dynamic_dims={"x": 0})
    with rt.capturing():
        for size in (16, 4):
            at_key(compiled, "FULL", size, torch.randn(size, 6))
    for size in (4, 16):
        x = torch.randn(size, 6)
        torch.testing.assert_close(at_key(compiled, "FULL", size, x), model(x))
    assert tally(rt, "FULL") == {("g0.full", 16): (1, 2), ("g1.full", 4): (1, 2)}


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_second_device_is_refused(at_key: Run, mode: str) -> None:
    runtime = GraphRuntime(device="cpu")
    compiled = compiled_with(lambda x, y: (x + 1, y * 2), runtime=runtime)
    with pytest.raises(DeviceError) as raised:
        at_key(compiled, mode, 4, torch.randn(4, 6), torch.randn(4, 6, device="meta"), capture=runtime)
    assert "meta" in raised.value.found
    assert "cpu" in raised.value.expected
    assert runtime.stats().captured == 0


def test_a_failed_capture_leaves_eager_and_the_next_capture_working(rt: GraphRuntime, at_key: Run) -> None:
    fails = [True]

    @torch.library.custom_op("cgpasstest::moody", mutates_args=())
    def moody(x: torch.Tensor) -> torch.Tensor:
        if fails[0]:
            raise RuntimeError("out of sorts")
        return x + 1

    moody.register_fake(torch.empty_like)
    compiled = compiled_with(lambda x: moody(x * 2), runtime=rt)
    x = torch.randn(4, 6)
    with pytest.raises(CaptureError, match="out of sorts") as raised:
        at_key(compiled, "FULL", 4, x, capture=rt)
    assert "FULL 4 tokens" in raised.value.problem
    assert rt.stats().captured == 0
    fails[0] = False
    torch.testing.assert_close(compiled(x), x * 2 + 1)
    torch.testing.assert_close(at_key(compiled, "FULL", 4, x, capture=rt), x * 2 + 1)
    assert rt.stats().captured == 1


def test_grad_mode_in_a_graph_context_is_refused(rt: GraphRuntime) -> None:
    model = torch.nn.Linear(6, 6)
    compiled = compiled_with(model, runtime=rt)
    x = torch.randn(4, 6)
    with torch.no_grad():
        compiled(x)
    with rt.capturing(), gp.set_forward_context(runtime_mode=CUDAGraphMode.FULL, batch_descriptor=BatchDescriptor(4)):
        got = compiled(x)
    assert got.requires_grad, "compiled anew for autograd"
    assert rt.counts() == {}
