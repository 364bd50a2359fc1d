# ruff: noqa: E501  (golden text is as wide as a dump)
"""Golden dumps of whole models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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
        split.source,
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


class Block(nn.Module):
    """One layer of an encoder as BERT has it: separate projections, two heads, norms after the sums."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.project = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        query, key, value = (
            part(hidden).view(batch, length, 2, 8).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        mixed = mixed.transpose(1, 2).reshape(batch, length, 16)
        hidden = self.norms[0](self.project(mixed) + hidden)
        return self.norms[1](self.down(F.gelu(self.up(hidden))) + hidden)


class Encoder(nn.Module):
    """Embeddings, a mask that all layers share, and two layers; it returns a dict, as stock models do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(50, 16), nn.Embedding(20, 16)
        self.norm = nn.LayerNorm(16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        batch, length = input_ids.shape
        hidden = self.norm(self.words(input_ids) + self.positions(torch.arange(length)))
        mask = attention_mask[:, None, None, :].expand(batch, 1, length, length).bool()
        for block in self.blocks:
            hidden = block(hidden, mask)
        return {"last_hidden_state": hidden}


def test_encoder_with_two_layers() -> None:
    ids = torch.arange(14).view(2, 7)
    split = split_of(
        Encoder().eval(), ids, torch.ones_like(ids), ops=["torch.nn.functional.scaled_dot_product_attention"]
    )
    assert_expected_inline(
        split.dump(),
        """\
inputs:
  v0: Sym(s0)
  v1: Sym(s1)
  v2: i64[s0, s1]
  v3: f32[50, 16] static
  v4: f32[20, 16] static
  v5: f32[16] static
  v6: f32[16] static
  v7: i64[s0, s1]
  v8: f32[16, 16] static
  v9: f32[16] static
  v10: f32[16, 16] static
  v11: f32[16] static
  v12: f32[16, 16] static
  v13: f32[16] static
  v14: f32[16, 16] static
  v15: f32[16] static
  v16: f32[16] static
  v17: f32[16] static
  v18: f32[32, 16] static
  v19: f32[32] static
  v20: f32[16, 32] static
  v21: f32[16] static
  v22: f32[16] static
  v23: f32[16] static
  v24: f32[16, 16] static
  v25: f32[16] static
  v26: f32[16, 16] static
  v27: f32[16] static
  v28: f32[16, 16] static
  v29: f32[16] static
  v30: f32[16, 16] static
  v31: f32[16] static
  v32: f32[16] static
  v33: f32[16] static
  v34: f32[32, 16] static
  v35: f32[32] static
  v36: f32[16, 32] static
  v37: f32[16] static
  v38: f32[16] static
  v39: f32[16] static
r0 captured(v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13):
  v40: f32[s0, s1, 16] = torch.nn.functional.embedding(v2, v3, None, None, 2.0, False, False)
  v41: i64[s1] = torch.arange(v1)
  v42: f32[s1, 16] = torch.nn.functional.embedding(v41, v4, None, None, 2.0, False, False)
  v43: f32[s0, s1, 16] = operator.add(v40, v42)
  v44: f32[s0, s1, 16] = torch.nn.functional.layer_norm(v43, (16,), v5, v6, 1e-05)
  v45: i64[s0, 1, 1, s1] = operator.getitem(v7, (:, None, None, :))
  v46: i64[s0, 1, s1, s1] strides [s1, s1, 0, 1] = Tensor.expand(v45, v0, 1, v1, v1)
  v47: bool[s0, 1, s1, s1] = Tensor.bool(v46)
  v48: f32[s0, s1, 16] = torch.nn.functional.linear(v44, v8, v9)
  v49: f32[s0, s1, 2, 8] = Tensor.view(v48, v0, v1, 2, 8)
  v50: f32[s0, 2, s1, 8] strides [16*s1, 8, 16, 1] = Tensor.transpose(v49, 1, 2)
  v51: f32[s0, s1, 16] = torch.nn.functional.linear(v44, v10, v11)
  v52: f32[s0, s1, 2, 8] = Tensor.view(v51, v0, v1, 2, 8)
  v53: f32[s0, 2, s1, 8] strides [16*s1, 8, 16, 1] = Tensor.transpose(v52, 1, 2)
  v54: f32[s0, s1, 16] = torch.nn.functional.linear(v44, v12, v13)
  v55: f32[s0, s1, 2, 8] = Tensor.view(v54, v0, v1, 2, 8)
  v56: f32[s0, 2, s1, 8] strides [16*s1, 8, 16, 1] = Tensor.transpose(v55, 1, 2)
  -> v44, v47, v50, v53, v56
r1 eager(v0, v1, v50, v53, v56, v47):
  reason: splitting op: torch.nn.functional.scaled_dot_product_attention
  v57: f32[s0, 2, s1, 8] strides [16*s1, 8, 16, 1] = torch.nn.functional.scaled_dot_product_attention(v50, v53, v56, attn_mask=v47)
  -> v57
r2 captured(v0, v1, v57, v14, v15, v44, v16, v17, v18, v19, v20, v21, v22, v23, v24, v25, v26, v27, v28, v29):
  v58: f32[s0, s1, 2, 8] = Tensor.transpose(v57, 1, 2)
  v59: f32[s0, s1, 16] = Tensor.reshape(v58, v0, v1, 16)
  v60: f32[s0, s1, 16] = torch.nn.functional.linear(v59, v14, v15)
  v61: f32[s0, s1, 16] = operator.add(v60, v44)
  v62: f32[s0, s1, 16] = torch.nn.functional.layer_norm(v61, (16,), v16, v17, 1e-05)
  v63: f32[s0, s1, 32] = torch.nn.functional.linear(v62, v18, v19)
  v64: f32[s0, s1, 32] = torch.nn.functional.gelu(v63)
  v65: f32[s0, s1, 16] = torch.nn.functional.linear(v64, v20, v21)
  v66: f32[s0, s1, 16] = operator.add(v65, v62)
  v67: f32[s0, s1, 16] = torch.nn.functional.layer_norm(v66, (16,), v22, v23, 1e-05)
  v68: f32[s0, s1, 16] = torch.nn.functional.linear(v67, v24, v25)
  v69: f32[s0, s1, 2, 8] = Tensor.view(v68, v0, v1, 2, 8)
  v70: f32[s0, 2, s1, 8] strides [16*s1, 8, 16, 1] = Tensor.transpose(v69, 1, 2)
  v71: f32[s0, s1, 16] = torch.nn.functional.linear(v67, v26, v27)
  v72: f32[s0, s1, 2, 8] = Tensor.view(v71, v0, v1, 2, 8)
  v73: f32[s0, 2, s1, 8] strides [16*s1, 8, 16, 1] = Tensor.transpose(v72, 1, 2)
  v74: f32[s0, s1, 16] = torch.nn.functional.linear(v67, v28, v29)
  v75: f32[s0, s1, 2, 8] = Tensor.view(v74, v0, v1, 2, 8)
  v76: f32[s0, 2, s1, 8] strides [16*s1, 8, 16, 1] = Tensor.transpose(v75, 1, 2)
  -> v67, v70, v73, v76
r3 eager(v0, v1, v70, v73, v76, v47):
  reason: splitting op: torch.nn.functional.scaled_dot_product_attention
  v77: f32[s0, 2, s1, 8] strides [16*s1, 8, 16, 1] = torch.nn.functional.scaled_dot_product_attention(v70, v73, v76, attn_mask=v47)
  -> v77
r4 captured(v0, v1, v77, v30, v31, v67, v32, v33, v34, v35, v36, v37, v38, v39):
  v78: f32[s0, s1, 2, 8] = Tensor.transpose(v77, 1, 2)
  v79: f32[s0, s1, 16] = Tensor.reshape(v78, v0, v1, 16)
  v80: f32[s0, s1, 16] = torch.nn.functional.linear(v79, v30, v31)
  v81: f32[s0, s1, 16] = operator.add(v80, v67)
  v82: f32[s0, s1, 16] = torch.nn.functional.layer_norm(v81, (16,), v32, v33, 1e-05)
  v83: f32[s0, s1, 32] = torch.nn.functional.linear(v82, v34, v35)
  v84: f32[s0, s1, 32] = torch.nn.functional.gelu(v83)
  v85: f32[s0, s1, 16] = torch.nn.functional.linear(v84, v36, v37)
  v86: f32[s0, s1, 16] = operator.add(v85, v82)
  v87: f32[s0, s1, 16] = torch.nn.functional.layer_norm(v86, (16,), v38, v39, 1e-05)
  -> v87
return (v87,)
""",
    )


class Mixed(nn.Module):
    """Autocast around one block with a splitting op and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.first(x).relu()
        x = x.float().softmax(-1)
        with torch.autocast("cpu", torch.bfloat16):
            x = self.second(x).softmax(-1) + 1
        return x * 2


def test_model_with_autocast() -> None:
    assert_expected_inline(
        split_of(Mixed(), torch.rand(3, 4), ops=["aten::softmax"]).dump(),
        """\
inputs:
  v0: f32[4, 4] static
  v1: f32[4] static
  v2: Sym(s0)
  v3: f32[s0, 4]
  v4: f32[4, 4] static
  v5: f32[4] static
r0 captured(v2, v3, v0, v1):
  torch.amp.autocast_mode._enter_autocast('cpu', bfloat16, True, None)
  v7: bf16[s0, 4] = torch.nn.functional.linear(v3, v0, v1)
  v8: bf16[s0, 4] = Tensor.relu(v7)
  torch.amp.autocast_mode._exit_autocast(v6)
  v10: f32[s0, 4] = Tensor.float(v8)
  -> v10
r1 eager(v2, v10, v4, v5):
  reason: splitting op: Tensor.softmax; mode pair: Tensor.softmax inside torch.amp.autocast_mode._enter_autocast ... torch.amp.autocast_mode._exit_autocast
  v11: f32[s0, 4] = Tensor.softmax(v10, -1)
  torch.amp.autocast_mode._enter_autocast('cpu', bfloat16, True, None)
  v13: bf16[s0, 4] = torch.nn.functional.linear(v11, v4, v5)
  v14: bf16[s0, 4] = Tensor.softmax(v13, -1)
  v15: bf16[s0, 4] = operator.add(v14, 1)
  torch.amp.autocast_mode._exit_autocast(v12)
  -> v15
r2 captured(v2, v15):
  v17: bf16[s0, 4] = operator.mul(v15, 2)
  -> v17
return (v17,)
""",
    )
