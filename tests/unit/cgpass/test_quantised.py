"""Models with quantised weights, torchao's and those of other quantisers, are captured as models with plain ones are.

torchao is imported inside of the tests: other tests do not need it, and its import takes seconds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphpass as gp
from graphpass.text import CausalLM
from tests.e2e.small_decoders import small_decoder
from tests.unit.models import module

pytestmark = pytest.mark.filterwarnings("ignore")
PROMPTS = [[1, 2, 3, 4], [5, 6, 7]]
FORMS = {
    "bf16": None,
    "int8_weight_only": "Int8WeightOnlyConfig",
    "int8_dynamic": "Int8DynamicActivationInt8WeightConfig",
    "fp8_weight_only": "Float8WeightOnlyConfig",
}


@pytest.fixture(autouse=True)
def _without_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def quantised(model: nn.Module, form: str = "int8_weight_only") -> nn.Module:
    """The model with torchao's weights of a form."""
    pytest.importorskip("torchao")
    from torchao import quantization

    if FORMS[form] is not None:
        quantization.quantize_(model, getattr(quantization, FORMS[form])(set_inductor_config=False))
    return model


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 16)).eval()


def compiled(model: Any, **options: Any) -> tuple[Any, gp.GraphRuntime]:
    runtime = gp.GraphRuntime()
    given = {"compiler": "aot_eager", "dispatch": "auto", "runtime": runtime, **options}
    return torch.compile(model, backend="cgpass", dynamic=True, options=given), runtime


def is_right_and_replayed(model: Any, given: list[torch.Tensor], **options: Any) -> gp.GraphRuntime:
    fast, runtime = compiled(model, **options)
    for x in given:
        torch.testing.assert_close(fast(x), model(x))
    assert sum(record.replayed for record in runtime.counts().values()) >= len(given) - 2
    return runtime


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.soak)])
def test_a_form_has_the_graphs_of_plain_weights_and_is_padded(form: str, compiler: str) -> None:
    model = quantised(mlp(), form)
    given = [torch.randn(rows, 32) for rows in (5, 7, 6, 5, 8, 7)]
    runtime = is_right_and_replayed(model, given, compiler=compiler)
    (graph,) = runtime.callables()
    assert [region.why for region in graph.regions] == [""]
    assert {descriptor.num_tokens for _, _, descriptor in runtime.counts()} == {6, 8}


def generated(model: Any, **options: Any) -> tuple[list[list[int]], list[list[int]]]:
    """The tokens of the model's own ``generate`` and those of a :class:`CausalLM` of it."""
    given = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    want = [model.generate(torch.tensor([prompt]), **given)[0, len(prompt) :].tolist() for prompt in PROMPTS]
    text = CausalLM(model, max_num_reqs=2, max_num_tokens=8, max_seq_len=32, progress=False, capture_sizes=[2, 8])
    text.capture()
    got = text.generate(PROMPTS, max_new_tokens=5)
    assert not text.manager.runtime.report().figures.problems
    text.close()
    return want, got


@pytest.mark.soak
def test_a_causal_lm_generates_the_tokens_of_the_quantised_model() -> None:
    want, got = generated(quantised(small_decoder("LlamaForCausalLM")))
    assert got == want


@pytest.mark.soak
def test_adapters_over_a_quantised_base() -> None:
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        adapted = peft.get_peft_model(quantised(small_decoder("LlamaForCausalLM")), config).eval()
    want, got = generated(adapted.base_model.model)
    assert got == want


# Quantisers whose weights are plain tensors, with an operator of their own: packed integers, zero points, blocks.


def packed_by_group(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """GPTQ's form: eight codes of 4 bits in each integer along the inputs, a scale and a zero for groups of inputs."""
    codes = (packed.unsqueeze(1) >> (4 * torch.arange(8)).view(1, 8, 1)) & 15
    codes = codes.flatten(0, 1)
    group = torch.arange(len(codes)) // (len(codes) // len(scales))
    return x @ ((codes - zeros[group]) * scales[group])


def packed_by_output(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """AWQ's form: the codes packed along the outputs, in an order of its own."""
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    codes = ((packed.unsqueeze(-1) >> (4 * order)) & 15).flatten(1)
    group = torch.arange(len(codes)) // (len(codes) // len(scales))
    return x @ ((codes - zeros[group]) * scales[group])


def in_blocks(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """GGUF's form: the bytes of blocks, each with its scale, one after another."""
    blocks = packed.view(torch.int8).unflatten(-1, (-1, 8))
    return F.linear(x, ((blocks - zeros.view(-1, 1, 1)) * scales.view(len(packed), -1, 1)).flatten(1))


def weights(form: Callable[..., Any]) -> dict[str, torch.Tensor]:
    groups, per_output = (2, 16), {"scales": torch.rand(16, 2) / 8, "zeros": torch.ones(16)}
    packed = {packed_by_group: (2, 16), packed_by_output: (16, 2)}
    if form is in_blocks:
        return {"packed": torch.randint(0, 255, (16, 16), dtype=torch.uint8), **per_output}
    given = {"scales": torch.rand(groups) / 8, "zeros": torch.randint(0, 15, groups)}
    return {"packed": torch.randint(-(2**31), 2**31, packed[form]).to(torch.int32), **given}


@pytest.mark.parametrize("form", [packed_by_group, packed_by_output, in_blocks])
def test_other_quantisers(form: Callable[..., Any]) -> None:
    name = f"quantised_test::{form.__name__}"
    op = torch.library.custom_op(name, form, mutates_args=())
    op.register_fake(lambda x, packed, scales, zeros: x.new_empty(x.shape[0], 16))
    torch.manual_seed(0)
    model = module(lambda self, x: op(x.tanh(), self.packed, self.scales, self.zeros).relu(), **weights(form))
    is_right_and_replayed(model, [torch.randn(rows, 16) for rows in (5, 5, 5, 5)])


def test_weights_that_torch_packs() -> None:
    """Rows are apart; features are summed, so a padded number of them has graphs of its own."""
    weight = {"packed": torch.randint(-100, 100, (32, 64), dtype=torch.int8), "scales": torch.rand(32).bfloat16() / 64}
    model = module(lambda self, x: torch.ops.aten._weight_int8pack_mm(x, self.packed, self.scales).relu(), **weight)
    fast, runtime = compiled(model, compiler="aot_eager")
    for rows in (5, 7, 6, 5, 8, 7):
        x = torch.randn(rows, 64, dtype=torch.bfloat16)
        torch.testing.assert_close(fast(x), model(x))
    assert sum(record.replayed for record in runtime.counts().values()) >= 4
    narrow = module(
        lambda self, x: torch.ops.aten._weight_int8pack_mm(x, self.packed[:, : x.shape[1]].contiguous(), self.scales),
        **weight,
    )
    fast, runtime = compiled(narrow, compiler="aot_eager")
    for features in (32, 64):
        x = torch.randn(4, features, dtype=torch.bfloat16)
        torch.testing.assert_close(fast(x), narrow(x))
    assert "sums products over" in str(runtime.report())


# What needs a GPU: fp8 and int4 products, memory.

ON_A_GPU = {
    **{form: (name, {}) for form, name in FORMS.items() if name is not None},
    "fp8_dynamic": ("Float8DynamicActivationFloat8WeightConfig", {}),
    "int4": ("Int4WeightOnlyConfig", {"int4_packing_format": "tile_packed_to_4d"}),
}


@pytest.mark.cuda
@pytest.mark.usefixtures("closed_runtimes")
@pytest.mark.parametrize("form", ON_A_GPU)
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_form_on_a_gpu(form: str, compiler: str) -> None:
    pytest.importorskip("torchao")
    from torchao import quantization

    name, given = ON_A_GPU[form]
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024)]
    model = nn.Sequential(*layers).eval().to("cuda", torch.bfloat16)
    quantization.quantize_(model, getattr(quantization, name)(**given, set_inductor_config=False))
    fast, runtime = compiled(model, compiler=compiler)
    for rows in (37, 39, 38, 37, 40, 39):  # the kernel of int8 products takes no fewer than 17
        x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
        torch.testing.assert_close(fast(x), model(x), rtol=4e-2, atol=4e-2)
    assert sum(record.replayed for record in runtime.counts().values()) >= 4
    (graph,) = runtime.callables()
    assert [region.why for region in graph.regions] == [""], "no region is eager for its weight's sake"
