"""Golden dumps of whole models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

from graphpass import partition
from graphpass.regions import Partition

# Not on every machine that runs the GPU tests.
assert_expected_inline = pytest.importorskip("expecttest").assert_expected_inline


@torch.library.custom_op("graphpass_golden::attention", mutates_args=("out",))
def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor) -> None:
    """Attention that writes its result, as kernels over a paged cache do."""
    out.copy_(torch.softmax(query @ key.t(), -1) @ value)


def split_of(model: Callable[..., Any], *args: Any, ops: Sequence[object]) -> Partition:
    """The partition of the graph that torch.compile makes with dynamic shapes."""
    made: list[Partition] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        made.append(partition(gm, ops))
        return made[-1].stitched

    with torch.no_grad(), torch._dynamo.config.patch(specialize_float=True):
        torch.compile(model, backend=backend, dynamic=True, fullgraph=True)(*args)
    (split,) = made
    return split


class Layer(nn.Module):
    """One decoder layer around the custom attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.project = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(self.norm(hidden)).split(8, -1)
        result = torch.empty_like(query)
        attention(query, key, value, result)
        return hidden + self.out(result.view(-1, 8))


def test_decoder_with_two_layers() -> None:
    model = nn.Sequential(Layer(), Layer())
    split = split_of(model, torch.rand(5, 8), ops=["graphpass_golden::attention"])
    assert_expected_inline(
        split.dump(),
        """\
inputs:
  v0: f32[8] static
  v1: f32[8] static
  v2: Sym(s0)
  v3: f32[s0, 8]
  v4: f32[24, 8] static
  v5: f32[24] static
  v6: f32[8, 8] static
  v7: f32[8] static
  v8: f32[8] static
  v9: f32[8] static
  v10: f32[24, 8] static
  v11: f32[24] static
  v12: f32[8, 8] static
  v13: f32[8] static
r0 captured(v2, v3, v0, v1, v4, v5):
  v14: f32[s0, 8] = torch.nn.functional.layer_norm(v3, (8,), v0, v1, 1e-05)
  v15: f32[s0, 24] = torch.nn.functional.linear(v14, v4, v5)
  v16: (f32[s0, 8] strides [24, 1], f32[s0, 8] strides [24, 1], f32[s0, 8] strides [24, 1]) = Tensor.split(v15, 8, -1)
  v17: f32[s0, 8] strides [24, 1] = operator.getitem(v16, 0)
  v18: f32[s0, 8] strides [24, 1] = operator.getitem(v16, 1)
  v19: f32[s0, 8] strides [24, 1] = operator.getitem(v16, 2)
  v20: f32[s0, 8] = torch.empty_like(v17)
  -> v17, v18, v19, v20
r1 eager(v2, v17, v18, v19, v20):
  reason: splitting op: graphpass_golden::attention.default
  mutates: v20
  graphpass_golden::attention.default(v17, v18, v19, v20)
  -> nothing
r2 captured(v2, v20, v6, v7, v3, v8, v9, v10, v11):
  v22: f32[s0, 8] = Tensor.view(v20, -1, 8)
  v23: f32[s0, 8] = torch.nn.functional.linear(v22, v6, v7)
  v24: f32[s0, 8] = operator.add(v3, v23)
  v25: f32[s0, 8] = torch.nn.functional.layer_norm(v24, (8,), v8, v9, 1e-05)
  v26: f32[s0, 24] = torch.nn.functional.linear(v25, v10, v11)
  v27: (f32[s0, 8] strides [24, 1], f32[s0, 8] strides [24, 1], f32[s0, 8] strides [24, 1]) = Tensor.split(v26, 8, -1)
  v28: f32[s0, 8] strides [24, 1] = operator.getitem(v27, 0)
  v29: f32[s0, 8] strides [24, 1] = operator.getitem(v27, 1)
  v30: f32[s0, 8] strides [24, 1] = operator.getitem(v27, 2)
  v31: f32[s0, 8] = torch.empty_like(v28)
  -> v24, v28, v29, v30, v31
r3 eager(v2, v28, v29, v30, v31):
  reason: splitting op: graphpass_golden::attention.default
  mutates: v31
  graphpass_golden::attention.default(v28, v29, v30, v31)
  -> nothing
r4 captured(v2, v31, v12, v13, v24):
  v33: f32[s0, 8] = Tensor.view(v31, -1, 8)
  v34: f32[s0, 8] = torch.nn.functional.linear(v33, v12, v13)
  v35: f32[s0, 8] = operator.add(v24, v34)
  -> v35
return (v35,)
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

    split = partition(fx.symbolic_trace(Model()), ["aten::softmax"], example_inputs=(torch.rand(4, 4),) * 2)
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
