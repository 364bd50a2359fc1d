"""Rules: what cannot be captured, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from graphpass import partition
from graphpass.errors import DeviceError
from graphpass.regions import DEFAULT_RULES, Partition, SplitReason

# Fake tensors may claim any device where there is none; where there is one GPU, a second one does not exist.
two_devices = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="fake tensors cannot be on a missing device")

Split = Callable[..., Partition]
SCALARS = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}


def reasons(split: Partition) -> list[str | None]:
    return [region.why for region in split.regions]


def test_a_reason_reads_as_kind_and_detail() -> None:
    assert str(SplitReason("host read", "Tensor.item")) == "host read: Tensor.item"


def test_an_unsafe_tag_is_a_reason(dynamo_split: Split) -> None:
    @torch.library.custom_op("graphpass_rules::unsafe", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
    def unsafe(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @unsafe.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    split = dynamo_split(lambda x: unsafe(x * 2) * 2, torch.ones(3))
    tagged = "unsafe tag: graphpass_rules::unsafe.default is tagged cudagraph_unsafe"
    assert reasons(split) == [None, tagged, None]


def test_a_host_read_and_its_consumers_run_eagerly(dynamo_split: Split) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        scale = x.sum().item()
        y = x.sin() * scale
        return y.cos()

    split = dynamo_split(function, torch.ones(3), **SCALARS)
    assert [region.kind for region in split.regions] == ["captured", "eager", "captured", "eager", "captured"]
    assert split.regions[1].why == "host read: Tensor.item"
    assert split.regions[3].why == "host scalar: operator.mul uses what Tensor.item read"
    captured = [region for region in split.regions if region.kind == "captured"]
    assert not any("item" in name for region in captured for name in region.inputs)


def test_a_size_that_was_read_stays_out_of_captured_regions(dynamo_split: Split) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.sum().to(torch.int64).item()
        torch._check(rows >= 2)
        return torch.zeros(rows) + 1, x + 1

    split = dynamo_split(function, torch.ones(3), **SCALARS)
    captured = [node for r in split.regions if r.kind == "captured" for node in r.graph_module.graph.nodes]
    assert all("u0" not in str(node.meta.get("example_value")) for node in captured)


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x: torch.nonzero(x) + 1, "torch.nonzero"),
        (lambda x: torch.unique(x) + 1, "torch.unique"),
        (lambda x: x.masked_select(x > 0) + 1, "Tensor.masked_select"),
        (lambda x: x[x > 0] + 1, "operator.getitem"),
        (lambda x: torch.argwhere(x) + 1, "torch.argwhere"),
        (lambda x: x.repeat_interleave(x.long()) + 1, "Tensor.repeat_interleave"),
    ],
)
def test_data_dependent_shapes_run_eagerly(dynamo_split: Split, function: Callable[..., Any], op: str) -> None:
    split = dynamo_split(function, torch.tensor([1.0, 2.0, 3.0]), **SCALARS)
    assert f"data-dependent shape: {op}" in str(split.regions[-1].why)
    assert split.regions[-1].kind == "eager"


def assign(x: torch.Tensor, index: Any, y: Any) -> torch.Tensor:
    x[index] = y
    return x


@pytest.mark.parametrize(
    ("function", "is_masked"),
    [
        (lambda x, y: assign(x, x > 1, y), True),
        (lambda x, y: assign(x[None], (0, x > 1), y), True),
        (lambda x, y: assign(x, (x > 1).to(torch.uint8), y), True),
        (lambda x, y: x.index_put_((x > 1,), y), True),
        (lambda x, y: torch.ops.aten.index_put(x, [x > 1], y), True),
        (lambda x, y: torch.index_put(x, indices=[x > 1], values=y), True),
        (lambda x, y: x.index_put((x > 1,), y[0], accumulate=True), True),
        (lambda x, y: assign(x, x > 1, 0), False),
        (lambda x, y: assign(x, x > 1, y[0]), False),
        (lambda x, y: x.index_put((x > 1,), y[:1]), False),
        (lambda x, y: assign(x, y.long(), y), False),
        (lambda x, y: assign(x, slice(0, 2), y), False),
        (lambda x, y: x.masked_scatter(x > 1, y), False),
    ],
)
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8:UserWarning")
def test_the_host_counts_the_mask_of_many_values(
    dynamo_split: Split, function: Callable[..., torch.Tensor], is_masked: bool
) -> None:
    """``x[mask] = values`` waits on a GPU for the number of elements under the mask; one value is a masked fill."""
    y = torch.tensor([0.0, 1.0])
    split = dynamo_split(lambda x: function(x * 2, y) + 1, torch.tensor([0.25, 1.0, 2.0]))
    assert [region.kind for region in split.regions] == (
        ["captured", "eager", "captured"] if is_masked else ["captured"]
    )
    assert not is_masked or "data-dependent shape: " in str(split.regions[1].why)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[torch.tensor([0, 1])] + 1,
        lambda x: F.one_hot(x.long(), 5) + 1,
        lambda x: x.repeat_interleave(2) + 1,
        lambda x: torch.where(x > 0, x, 0.0) + 1,
    ],
)
def test_fixed_shapes_are_captured(dynamo_split: Split, function: Callable[..., Any]) -> None:
    assert reasons(dynamo_split(function, torch.tensor([1.0, 2.0]))) == [None]


def on_cuda(function: Callable[..., Any], *devices: str) -> Partition:
    """Partition a traced function with a fake tensor of three floats on each device."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return function(x, y)

    with FakeTensorMode():
        examples = [torch.empty(3, device=device) for device in devices]
    return partition(fx.symbolic_trace(Model()), example_inputs=examples)


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x, y: (x + 1).cpu(), "host read"),
        (lambda x, y: (x + 1).to("cpu"), "host read"),
        (lambda x, y: (x + 1, torch.zeros_like(x, device="cpu")), "cpu tensor"),
        (lambda x, y: (x + 1) * torch.tensor(2.0), "cpu tensor"),
        pytest.param(lambda x, y: (x + 1).to("cuda:1"), "second device", marks=two_devices),
    ],
)
def test_other_devices_run_eagerly(function: Callable[..., Any], kind: str) -> None:
    split = on_cuda(function, "cuda:0", "cuda:0")
    assert [region.kind for region in split.regions][:1] == ["captured"]
    assert kind in str(split.regions[-1].why)


def test_a_cpu_input_amid_a_gpu_graph_makes_its_consumer_eager() -> None:
    split = on_cuda(lambda x, y: (x + 1, y + 1, x * 2), "cuda:0", "cpu")
    assert [region.kind for region in split.regions] == ["captured", "eager", "captured"]
    assert split.regions[1].why == "cpu tensor: operator.add has a tensor on the CPU in a graph on cuda:0"


def test_a_cpu_graph_has_no_foreign_device() -> None:
    assert reasons(on_cuda(lambda x, y: (x + y).cpu() * 2, "cpu", "cpu")) == [None]


@two_devices
def test_inputs_on_two_devices_are_refused() -> None:
    with pytest.raises(DeviceError, match="'x' on cuda:0, 'y' on cuda:1"):
        on_cuda(lambda x, y: x + 1, "cuda:0", "cuda:1")


def test_users_add_rules(dynamo_split: Split) -> None:
    def no_sine(node: fx.Node) -> SplitReason | None:
        return SplitReason("taste", node.name) if node.target == "sin" else None

    split = dynamo_split(lambda x: (x + 1).sin() + 1, torch.ones(3), rules=(*DEFAULT_RULES, no_sine))
    assert reasons(split) == [None, "taste: sin", None]


def test_without_rules_nothing_is_split(dynamo_split: Split) -> None:
    split = dynamo_split(lambda x: torch.nonzero(x) + 1, torch.ones(3), rules=(), **SCALARS)
    assert reasons(split) == [None]


def test_several_reasons_are_joined(dynamo_split: Split) -> None:
    split = dynamo_split(lambda x: torch.nonzero(x.sin()), torch.ones(3), ops=["aten::nonzero", "aten::sin"], **SCALARS)
    first, *rest = str(split.regions[0].why).split("; ")
    assert first == "splitting op: Tensor.sin"
    assert rest[:2] == ["splitting op: torch.nonzero", "data-dependent shape: torch.nonzero"]
