# ruff: noqa: E501  (golden text is as wide as a dump)
"""Golden dumps: one small graph for each rule and each way of cutting; a whole layer is in docs/concepts/how_it_works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from graphpass import partition

# Not on every machine that runs the GPU tests.
assert_expected_inline = pytest.importorskip("expecttest").assert_expected_inline

SOFTMAX = ["aten::softmax"]


def dump_of(function: Callable[..., Any], *args: Any, ops: Sequence[object] = (), **config: Any) -> str:
    """The dump of the graph that torch.compile makes with dynamic shapes."""
    dumps: list[str] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        split = partition(gm, ops)
        dumps.append(split.dump())
        return split.stitched

    with torch._dynamo.config.patch(config):
        torch.compile(function, backend=backend, dynamic=True, fullgraph=True)(*args)
    (dump,) = dumps
    return dump


def traced_dump(function: Callable[..., Any], *args: Any) -> str:
    """The dump of a symbolic trace with the given examples."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return function(x)

    return partition(fx.symbolic_trace(Model()), SOFTMAX, example_inputs=args).dump()


def test_listed_op_and_tuple() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        values, indices = torch.sort(x + 1)
        return F.softmax(values, -1) * indices

    assert_expected_inline(
        dump_of(function, torch.rand(3, 4), ops=["aten::sort", *SOFTMAX]),
        """\
inputs:
  v0: Sym(s0)
  v1: Sym(s1)
  v2: f32[s0, s1]
r0 captured(v0, v1, v2):
  v3: f32[s0, s1] = operator.add(v2, 1)
  -> v3
r1 eager(v0, v1, v3):
  reason: splitting op: torch.sort; splitting op: torch.nn.functional.softmax
  v4: (f32[s0, s1], i64[s0, s1]) = torch.sort(v3)
  v5: f32[s0, s1] = operator.getitem(v4, 0)
  v6: i64[s0, s1] = operator.getitem(v4, 1)
  v7: f32[s0, s1] = torch.nn.functional.softmax(v5, -1)
  -> v6, v7
r2 captured(v0, v1, v7, v6):
  v8: f32[s0, s1] = operator.mul(v7, v6)
  -> v8
return (v8,)
""",
    )


def test_unsafe_tag() -> None:
    @torch.library.custom_op("graphpass_golden::unsafe", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
    def unsafe(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @unsafe.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    assert_expected_inline(
        dump_of(lambda x: unsafe(x * 2) * 2, torch.rand(3)),
        """\
inputs:
  v0: Sym(s0)
  v1: f32[s0]
r0 captured(v0, v1):
  v2: f32[s0] = operator.mul(v1, 2)
  -> v2
r1 eager(v0, v2):
  reason: unsafe tag: graphpass_golden::unsafe.default is tagged cudagraph_unsafe
  v3: f32[s0] = graphpass_golden::unsafe.default(v2)
  -> v3
r2 captured(v0, v3):
  v4: f32[s0] = operator.mul(v3, 2)
  -> v4
return (v4,)
""",
    )


def test_data_dependent_shape() -> None:
    dump = dump_of(lambda x: (x + 1)[x > 0].sum() * 2, torch.rand(3), capture_dynamic_output_shape_ops=True)
    assert_expected_inline(
        dump,
        """\
inputs:
  v0: Sym(s0)
  v1: f32[s0]
r0 captured(v0, v1):
  v2: f32[s0] = operator.add(v1, 1)
  v3: bool[s0] = operator.gt(v1, 0)
  -> v2, v3
r1 eager(v0, v2, v3):
  reason: data-dependent shape: operator.getitem; host scalar: aten::sym_size.int uses what operator.getitem read; host scalar: operator.ge uses what operator.getitem read; host scalar: aten::_assert_scalar.default uses what operator.getitem read; host scalar: Tensor.sum uses what operator.getitem read
  v4: f32[u0] = operator.getitem(v2, v3)
  v5: Sym(u0) = aten::sym_size.int(v4, 0)
  v6: Sym(u0 >= 0) = operator.ge(v5, 0)
  aten::_assert_scalar.default(v6, "Runtime assertion failed for expression u0 >= 0 on node 'ge'")
  v8: f32[] = Tensor.sum(v4)
  -> v8
r2 captured(v8):
  v9: f32[] = operator.mul(v8, 2)
  -> v9
return (v9,)
""",
    )


def test_cpu_tensor_amid_a_gpu_graph() -> None:
    with FakeTensorMode():
        example = torch.empty(3, device="cuda")
    assert_expected_inline(
        traced_dump(lambda x: (x + 1).cpu() * 2, example),
        """\
inputs:
  v0: f32[3] cuda:0
r0 captured(v0):
  v1: f32[3] cuda:0 = operator.add(v0, 1)
  -> v1
r1 eager(v1):
  reason: host read: Tensor.cpu; cpu tensor: Tensor.cpu has a tensor on the CPU in a graph on cuda:0; cpu tensor: operator.mul has a tensor on the CPU in a graph on cuda:0
  v2: f32[3] = Tensor.cpu(v1)
  v3: f32[3] = operator.mul(v2, 2)
  -> v3
return v3
""",
    )


def test_grad_mode_pair() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        with torch.no_grad():
            y = F.softmax(y * 2, -1)
        return y * 3

    assert_expected_inline(
        dump_of(function, torch.rand(3), ops=SOFTMAX),
        """\
inputs:
  v0: Sym(s0)
  v1: f32[s0]
r0 captured(v0, v1):
  v2: f32[s0] = operator.add(v1, 1)
  -> v2
r1 eager(v0, v2):
  reason: mode pair: torch.nn.functional.softmax inside torch._C._set_grad_enabled ... torch._C._set_grad_enabled; splitting op: torch.nn.functional.softmax
  torch._C._set_grad_enabled(False)
  v4: f32[s0] = operator.mul(v2, 2)
  v5: f32[s0] = torch.nn.functional.softmax(v4, -1)
  torch._C._set_grad_enabled(True)
  -> v5
r2 captured(v0, v5):
  v7: f32[s0] = operator.mul(v5, 3)
  -> v7
return (v7,)
""",
    )


def test_sizes_across_a_cut() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        z = torch.cat([x, x])
        return F.softmax(z, -1).reshape(z.size()) + torch.zeros(z.size())

    assert_expected_inline(
        dump_of(function, torch.rand(3, 4), ops=SOFTMAX),
        """\
inputs:
  v0: Sym(s0)
  v1: Sym(s1)
  v2: f32[s0, s1]
r0 captured(v0, v1, v2):
  v3: f32[2*s0, s1] = torch.cat([v2, v2])
  -> v3
r1 eager(v0, v1, v3):
  reason: splitting op: torch.nn.functional.softmax
  v4: f32[2*s0, s1] = torch.nn.functional.softmax(v3, -1)
  -> v4
r2 captured(v0, v1, v3, v4):
  v5: Sym(2*s0) = aten::sym_size.int(v3, 0)
  v6: f32[2*s0, s1] = Tensor.reshape(v4, (v5, v1))
  v7: Sym(2*s0) = aten::sym_size.int(v3, 0)
  v8: f32[2*s0, s1] = torch.zeros((v7, v1))
  v9: f32[2*s0, s1] = operator.add(v6, v8)
  -> v9
return (v9,)
""",
    )


def test_allocations_fold_and_views_run_eagerly() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        a = F.softmax(y, -1)
        out = torch.empty_like(y)
        return torch.add(F.softmax(a.view(-1, 4), -1), 1, out=out)

    assert_expected_inline(
        dump_of(function, torch.rand(3, 4), ops=SOFTMAX),
        """\
inputs:
  v0: Sym(s0)
  v1: f32[s0, 4]
r0 captured(v0, v1):
  v2: f32[s0, 4] = operator.add(v1, 1)
  v3: f32[s0, 4] = torch.empty_like(v2)
  -> v2, v3
r1 eager(v0, v2):
  reason: splitting op: torch.nn.functional.softmax; nothing to capture: Tensor.view
  v4: f32[s0, 4] = torch.nn.functional.softmax(v2, -1)
  v5: f32[s0, 4] = Tensor.view(v4, -1, 4)
  v6: f32[s0, 4] = torch.nn.functional.softmax(v5, -1)
  -> v6
r2 captured(v0, v6, v3):
  mutates: v3
  v7: f32[s0, 4] = torch.add(v6, 1, out=v3)
  -> v7
return (v7,)
""",
    )


def test_mutations() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.t().add_(1)
        z = F.softmax(x, -1)
        y[0] = z[0]
        return z * 2

    assert_expected_inline(
        dump_of(function, torch.rand(3, 4), torch.rand(3, 4), ops=SOFTMAX),
        """\
inputs:
  v0: Sym(s0)
  v1: Sym(s1)
  v2: f32[s0, s1] mutated
  v3: f32[s0, s1] mutated
r0 captured(v0, v1, v2):
  mutates: v2
  v4: f32[s1, s0] strides [1, s1] = Tensor.t(v2)
  v5: f32[s1, s0] strides [1, s1] = Tensor.add_(v4, 1)
  -> nothing
r1 eager(v0, v1, v2):
  reason: splitting op: torch.nn.functional.softmax
  v6: f32[s0, s1] = torch.nn.functional.softmax(v2, -1)
  -> v6
r2 captured(v0, v1, v6, v3):
  mutates: v3
  v7: f32[s1] = operator.getitem(v6, 0)
  operator.setitem(v3, 0, v7)
  v9: f32[s0, s1] = operator.mul(v6, 2)
  -> v9
return (v9,)
""",
    )


def test_stitched_source() -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = x @ weight
        first = torch.softmax(hidden, -1) + x
        return {"first": first, "second": torch.softmax(first @ weight, -1)}

    class Model(nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
            return function(x, weight)

    split = partition(fx.symbolic_trace(Model()), SOFTMAX, example_inputs=(torch.rand(4, 4),) * 2)
    assert_expected_inline(
        split._stitching.source(),
        """\
def stitched(x, weight):
    matmul, = r0(x, weight)
    softmax, = r1(matmul)
    del matmul
    add, matmul_1 = r2(softmax, x, weight)
    del x, weight, softmax
    softmax_1, = r3(matmul_1)
    del matmul_1
    return {'first': add, 'second': softmax_1}
""",
    )
