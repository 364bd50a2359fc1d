"""What cannot be captured and why; which symbol a dimension carries, and which sizes the guards admit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from graphpass import partition
from graphpass.errors import DeviceError, PartitionError
from graphpass.regions import DEFAULT_RULES, Partition, SplitReason
from graphpass.regions.symbols import GraphInput, GuardedSymbols, key_symbols

# Fake tensors may claim any device where there is none; where there is one GPU, a second one does not exist.
two_devices = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="fake tensors cannot be on a missing device")

Split = Callable[..., Partition]
SCALARS = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}


def reasons(split: Partition) -> list[str | None]:
    return [region.why for region in split.regions]


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

    with FakeTensorMode():
        examples = [torch.empty(3, device=device) for device in devices]
    return partition(fx.symbolic_trace(function), example_inputs=examples)


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


def test_a_cpu_tensor_without_entries_is_read_by_no_kernel() -> None:
    def attends(x: torch.Tensor, y: torch.Tensor) -> Any:
        """With weights apart torch wants a tensor in the place of the joint ones, as WavLM passes it."""
        q, w, none = x.view(3, 1, 1), y.narrow(0, 0, 1).view(1, 1), torch.empty(0)
        apart = {
            "use_separate_proj_weight": True,
            **dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), w),
        }
        return F.multi_head_attention_forward(q, q, q, 1, 1, none, None, None, None, False, 0.0, w, None, **apart)

    assert reasons(on_cuda(attends, "cuda:0", "cuda:0")) == [None]


@two_devices
def test_inputs_on_two_devices_are_refused() -> None:
    with pytest.raises(DeviceError, match="'x' on cuda:0, 'y' on cuda:1"):
        on_cuda(lambda x, y: x + 1, "cuda:0", "cuda:1")


def test_users_add_rules(dynamo_split: Split) -> None:
    def no_sine(node: fx.Node) -> SplitReason | None:
        return SplitReason("taste", node.name) if node.target == "sin" else None

    split = dynamo_split(lambda x: (x + 1).sin() + 1, torch.ones(3), rules=(*DEFAULT_RULES, no_sine))
    assert reasons(split) == [None, "taste: sin", None]


# Symbols: which one a dimension carries, and which sizes the guards admit.


def traced(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[fx.GraphModule, Partition]:
    """The graph that Dynamo makes with dynamic shapes, and its partition."""
    made: list[tuple[fx.GraphModule, Partition]] = []

    def backend(gm: fx.GraphModule, examples: list[Any]) -> Any:
        made.append((gm, partition(gm)))
        return gm

    torch.compile(function, backend=backend, dynamic=True, fullgraph=True)(*args, **kwargs)
    return made[0]


def symbol_of_dim(inputs: Sequence[GraphInput], name: str, dim: int) -> Any:
    """The size of a declared dimension."""
    return key_symbols(inputs, {name: {dim: "field"}}).get("field")


def test_a_dimension_names_its_symbol() -> None:
    _, split = traced(lambda x, y, k: x @ y + k["z"], torch.rand(3, 4), torch.rand(4, 5), {"z": torch.rand(5)})
    inner = symbol_of_dim(split.inputs, "x", 1)
    assert isinstance(inner, sympy.Symbol)
    assert symbol_of_dim(split.inputs, "y", 0) == inner
    assert symbol_of_dim(split.inputs, "z", 0) == symbol_of_dim(split.inputs, "y", -1)
    assert symbol_of_dim(split.inputs, "x", 0) not in (inner, symbol_of_dim(split.inputs, "y", 1))


def test_an_entry_of_a_model_output_is_shown_as_users_write_it() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def function(encoder_outputs: Any, **kwargs: Any) -> torch.Tensor:
        return encoder_outputs[0] + kwargs["more"].last_hidden_state

    given = outputs.BaseModelOutput(last_hidden_state=torch.rand(3, 4))
    _, split = traced(function, given, more=outputs.BaseModelOutput(last_hidden_state=torch.rand(3, 4)))
    shown = [given.shown for given in split.inputs if isinstance(given.value, torch.Tensor)]
    assert shown == ["encoder_outputs.last_hidden_state", "kwargs['more'].last_hidden_state"]


def test_unknown_inputs_have_no_symbols_and_unknown_dimensions_are_refused() -> None:
    _, split = traced(lambda x: x + 1, torch.rand(3))
    assert symbol_of_dim(split.inputs, "y", 0) is None
    with pytest.raises(PartitionError, match="no dimension 1"):
        symbol_of_dim(split.inputs, "x", 1)


def guards_of(gm: fx.GraphModule) -> GuardedSymbols:
    """Those that were recorded while ``gm`` was traced."""
    return GuardedSymbols.from_values(node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder"))


def test_guards_exclude_sizes_with_the_constraint_as_text() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        assert x.shape[0] % 8 == 0
        return x.view(-1, 8) + 1 if x.shape[0] < 100 else x

    gm, split = traced(function, torch.rand(16))
    symbol = symbol_of_dim(split.inputs, "x", 0)
    guards = guards_of(gm)
    assert guards.ranges[symbol] == (2, 99)
    assert guards.excluded_by({symbol: 24}) is None
    assert guards.excluded_by({symbol: 1}) == f"{symbol} >= 2"
    assert guards.excluded_by({symbol: 12}) == f"Eq(Mod({symbol}, 8), 0)"
    assert guards.excluded_by({symbol: 104}) == f"{symbol} <= 99"


def test_a_guard_over_two_symbols_needs_both() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sum() + y.sum() if x.shape[0] == 2 * y.shape[0] + 1 else x.sum() - y.sum()

    gm, split = traced(function, torch.rand(7), torch.rand(5))
    x, y = (symbol_of_dim(split.inputs, name, 0) for name in "xy")
    guards = guards_of(gm)
    assert guards.excluded_by({x: 11}) is None
    assert guards.excluded_by({x: 11, y: 6}) is None
    assert "Ne(" in str(guards.excluded_by({x: 11, y: 5}))
