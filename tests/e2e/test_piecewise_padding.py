"""One argument with eager regions in stock models: sizes are padded over what splits the graph, if it has a rule."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import graphpass as gp
from graphpass.regions import OpCall, PaddedValue, register_padding_rule
from tests.e2e.stock_encoders import ENCODERS
from tests.observed import calls_with_graph, reported_regions

SDPA = "aten::scaled_dot_product_attention"
ATTEND = "graphpasstest_stock::attend"
LARGEST, NUM_BATCHES = 17, 20


@torch.library.custom_op(ATTEND, mutates_args=())
def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scale).contiguous()


attend.register_fake(lambda query, key, value, scale: torch.empty_like(query, memory_format=torch.contiguous_format))


def attend_by_row(call: OpCall) -> PaddedValue:
    """A row of the batch attends to its own keys."""
    query = call.tensor("query")
    for name in ("query", "key", "value"):
        tensor = call.tensor(name)
        call.unpadded(tensor, range(1, tensor.rank), "attends over")
    return PaddedValue(query.factors)


register_padding_rule(ATTEND, attend_by_row)


def opaque_attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **given: Any) -> Any:
    scale = given.get("scaling") or query.shape[-1] ** -0.5
    return torch.ops.graphpasstest_stock.attend(query, key, value, scale).transpose(1, 2), None


class Scaled(nn.Module):
    """A stock model whose caller reads a number from the device on the way."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, pixel_values: torch.Tensor) -> Any:
        return self.model(pixel_values * self.scale.item())


@pytest.fixture
def scalars_in_the_graph() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield


def model_that(splits: str) -> tuple[nn.Module, Any, list[str]]:
    encoder = ENCODERS["BertModel" if splits == "masked attention" else "ViTModel"]
    model, inputs = encoder.build(), encoder.inputs
    if splits == "opaque op with a rule":
        from transformers import AttentionInterface

        AttentionInterface.register("graphpasstest_stock", opaque_attention)
        model.set_attn_implementation("graphpasstest_stock")
        return model, inputs, [ATTEND]
    if splits == "host read":
        return Scaled(model), inputs, []
    return model, inputs, [SDPA]


@pytest.mark.usefixtures("scalars_in_the_graph")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize("splits", ["attention", "masked attention", "opaque op with a rule", "host read"])
def test_a_batch_is_padded_over_eager_regions(splits: str) -> None:
    model, inputs, splitting_ops = model_that(splits)
    options = {"compiler": "aot_eager", "splitting_ops": splitting_ops, "mode": "PIECEWISE"}
    fast = torch.compile(model, backend="cgpass", fullgraph=True, options=options)
    rng = random.Random(0)
    sizes = [rng.randint(2, LARGEST) for _ in range(NUM_BATCHES)]
    with torch.no_grad():
        fast(**inputs(sizes[0], 9))
        runtime = gp.runtime_of(fast)
        for _ in range(2):
            before = calls_with_graph(runtime)
            for size in sizes:
                batch = inputs(size, 9)
                found, expected = fast(**batch), model(**batch)
                torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state, atol=2e-5, rtol=1e-4)
            replays = calls_with_graph(runtime) - before
    report = runtime.report()
    verdicts = {size.verdict for record in runtime.callables() for size in record.sizes}
    # BERT's ids come from another region: in their padding they are set to 0, which any embedding has.
    assert verdicts - {None} == {"made" if splits == "masked attention" else "proved"}, report
    kinds = {kind for _, kind, _ in reported_regions(runtime)}
    assert kinds == {"captured", "eager"}, report
    assert replays >= 0.9 * NUM_BATCHES, report
    keys = {key.named for key in report.figures.keys}
    assert len(keys) < len(set(sizes)), "sizes share padded keys"
