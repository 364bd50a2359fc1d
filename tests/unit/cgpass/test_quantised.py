"""Models with quantised weights, of torchao and packed by torch, are captured as models with plain ones are.

torchao is imported inside of the tests: other tests do not need it, and its import takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import graphpass as gp
from tests.unit.models import module

pytestmark = pytest.mark.filterwarnings("ignore")
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


# Weights that are plain tensors, with an operator of torch of their own.


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
