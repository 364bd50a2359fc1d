"""Weights that are replaced, merged, moved, freed: a graph reads the model's weights of now, or there is an error.

Each change runs through ``torch.compile(backend="cgpass")`` at both levels and through ``graphpass.graphed``; after
every step results are those of the model called eagerly.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

import graphpass as gp
from graphpass import GraphRuntime
from graphpass.errors import CaptureError, StaticInputError
from tests.unit.compiled import Compiled
from tests.unit.models import module

MIX = "graphpasstest_weights::mix"
WAYS = pytest.mark.parametrize("way", ["FULL", "PIECEWISE", "graphed"])
Call = Callable[[torch.Tensor], torch.Tensor]


@torch.library.custom_op(MIX, mutates_args=())
def mix(x: torch.Tensor) -> torch.Tensor:
    return x.flip(-1) * 2


mix.register_fake(torch.empty_like)


def two_regions(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Two regions around a splitting op; the last reads a buffer."""
    return self.second(torch.ops.graphpasstest_weights.mix(self.first(x))) * self.scale


def lora(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A low-rank update beside the first weight, or merged into it."""
    update = 0 if self.merged else x @ self.down.t() @ self.up.t()
    return two_regions(self, x + update)


def of_regions(forward: Callable[..., Any] = two_regions, **parts: Any) -> Any:
    torch.manual_seed(0)
    given = {"first": nn.Linear(6, 6), "second": nn.Linear(6, 6), "scale": torch.randn(6), **parts}
    return module(forward, **given).eval()


def tied() -> Any:
    model = of_regions()
    model.second.weight = model.first.weight
    return model


def graphs_of(model: nn.Module, way: str, rt: GraphRuntime, **options: Any) -> Call:
    """The captured model as a function of four rows.

    Where a graph went with a weight, or a weight moved, and capture is closed, the call is refused; it is captured once
    more then, as an engine would.
    """
    options = {"compiler": "eager", "splitting_ops": [MIX], **options}
    if way == "graphed":
        graphed = gp.graphed(model, [4], {"x": 0}, runtime=rt, **options)
        graphed.capture(torch.randn(4, 6))
        return graphed
    fast = Compiled(rt, model, **options)

    def call_or_capture(x: torch.Tensor) -> torch.Tensor:
        try:
            return fast.at(way, 4, x)
        except (CaptureError, StaticInputError) as error:
            if isinstance(error, CaptureError) and "capture is closed" not in str(error):
                raise
            return fast.at(way, 4, x, capture=True)

    fast.capture(way)
    return call_or_capture


def agrees(fast: Call, model: nn.Module) -> None:
    """Two calls each, so that one at least replays what is there."""
    dtype = next(model.parameters()).dtype
    for _ in range(2):
        x = torch.randn(4, 6, dtype=dtype)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)


def captured_and_live(rt: GraphRuntime) -> tuple[int, int]:
    """Graphs captured so far, and the most that live at one key of one region."""
    return rt.stats().captured, max((counts.static_sets for counts in rt.counts().values()), default=0)


# -- what happens to weights


def load(model: nn.Module, *, assign: bool = False) -> None:
    model.load_state_dict({name: torch.randn_like(t) for name, t in model.state_dict().items()}, assign=assign)


def swap_two_weights(model: Any) -> None:
    model.first.weight, model.second.weight = model.second.weight, model.first.weight


def free_and_allocate(model: Any) -> None:
    """As sharding and offloading do: the parameter stays, its memory goes and comes back elsewhere."""
    storage = model.first.weight.untyped_storage()
    num_bytes = storage.nbytes()
    storage.resize_(0)
    in_its_place = [torch.randn(6, 6) for _ in range(8)]
    storage.resize_(num_bytes)
    model.first.weight.data.copy_(in_its_place[-1])


def offload(model: Any) -> None:
    kept = model.first.weight.data.clone()
    model.first.weight.data = torch.empty(0)
    model.first.weight.data = kept


def swap_tensors(model: Any) -> None:
    torch.utils.swap_tensors(model.first.weight, nn.Parameter(torch.randn(6, 6)))
    torch.utils.swap_tensors(model.scale, torch.randn(6))


@contextlib.contextmanager
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


CHANGES: dict[str, Callable[[Any], object]] = {
    "replace": lambda model: setattr(model.first, "weight", nn.Parameter(torch.randn(6, 6))),
    "load": load,
    "load_assigned": lambda model: load(model, assign=True),
    "write": lambda model: model.first.weight.data.add_(torch.randn(6, 6)),
    "swap_memory": lambda model: setattr(model.first.weight, "data", torch.randn(6, 6)),
    "swap_for_a_view": lambda model: setattr(model.first.weight, "data", torch.randn(4, 6, 6)[2]),
    "swap_layout": lambda model: setattr(model.first.weight, "data", torch.randn(6, 6).t()),
    "replace_buffer": lambda model: setattr(model, "scale", torch.randn(6)),
    "write_buffer": lambda model: model.scale.mul_(3),
    "swap_submodule": lambda model: setattr(model, "second", nn.Linear(6, 6)),
    "swap_two_weights": swap_two_weights,
    "free_and_allocate": free_and_allocate,
    "offload": offload,
    "freeze": lambda model: model.first.weight.requires_grad_(False),
    "swap_tensors": swap_tensors,
    "swap_tensors_of_two": lambda model: torch.utils.swap_tensors(model.first.weight, model.second.weight),
    "load_by_swapping": swapping()(load),
    "convert_by_swapping": swapping()(lambda model: model.to(torch.float64).to(torch.float32)),
}


@WAYS
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_each_time(way: str, change: str, rt: GraphRuntime) -> None:
    model = of_regions()
    fast = graphs_of(model, way, rt)
    agrees(fast, model)
    for _ in range(3):
        CHANGES[change](model)
        agrees(fast, model)


def doubled(model: Any) -> Any:
    twice = module(lambda self, weight: weight * 2)
    parametrize.register_parametrization(model.first, "weight", twice)
    return model


def undone(model: Any, *, keeps_value: bool = True) -> None:
    parametrize.remove_parametrizations(model.first, "weight", leave_parametrized=keeps_value)


def untied(model: Any) -> None:
    model.second.weight = nn.Parameter(model.first.weight.detach().clone())


STEPS: dict[str, tuple[Callable[[], Any], list[Callable[[Any], object]]]] = {
    "tied weights are untied and tied again": (
        tied,
        [
            lambda model: model.first.weight.data.mul_(2),
            untied,
            lambda model: model.second.weight.data.add_(1),
            lambda model: setattr(model.first, "weight", model.second.weight),
        ],
    ),
    # Tied by memory and not by parameter: a write to one is a write to both.
    "memory of two weights is joined": (
        of_regions,
        [
            lambda model: setattr(model.second.weight, "data", model.first.weight.data),
            lambda model: model.first.weight.data.mul_(-2),
        ],
    ),
    "parametrizations come and go": (
        of_regions,
        [
            doubled,
            undone,
            lambda model: weight_norm(model.first),
            undone,
            doubled,
            lambda model: undone(model, keeps_value=False),
        ],
    ),
    "a parametrization of the capture goes": (lambda: doubled(of_regions()), [undone]),
}


@WAYS
@pytest.mark.parametrize("name", STEPS)
def test_changes_one_after_another_are_seen(way: str, name: str, rt: GraphRuntime) -> None:
    make, changes = STEPS[name]
    model = make()
    fast = graphs_of(model, way, rt)
    for change in changes:
        change(model)
        agrees(fast, model)


@WAYS
def test_lora_is_merged_and_unmerged(way: str, rt: GraphRuntime) -> None:
    torch.manual_seed(1)
    low_rank = {"down": nn.Parameter(torch.randn(2, 6) / 5), "up": nn.Parameter(torch.randn(6, 2) / 5)}
    model = of_regions(lora, **low_rank, merged=False)
    fast = graphs_of(model, way, rt)
    weight, update = model.first.weight.data, model.up.data @ model.down.data
    x = torch.randn(4, 6)
    apart = fast(x)
    for merged in (True, False) * 2:
        if merged:
            weight.add_(weight @ update)
        else:
            weight.copy_(weight @ torch.linalg.inv(torch.eye(6) + update))
        model.merged = merged
        agrees(fast, model)
        torch.testing.assert_close(fast(x), apart, rtol=1e-3, atol=1e-3)


# -- how many graphs live


@WAYS
@pytest.mark.parametrize(("change", "most"), [("load_assigned", 1), ("replace", 1), ("swap_memory", 5)])
def test_reloading_ten_times_keeps_few_graphs(way: str, change: str, most: int, rt: GraphRuntime) -> None:
    model = of_regions()
    fast = graphs_of(model, way, rt, lazy_capture=True)
    bytes_before = rt.buffer_bytes()
    lasting = []
    for _ in range(10):
        CHANGES[change](model)
        if change == "swap_memory":
            lasting.append(model.first.weight.data)  # so that no address comes twice
        agrees(fast, model)
        assert captured_and_live(rt)[1] <= most
    gc.collect()
    assert captured_and_live(rt)[1] <= most
    most_bytes = bytes_before + 256 * len(model.state_dict())
    assert rt.buffer_bytes() <= most_bytes, "each tensor that keeps moving is copied into one buffer"


@WAYS
def test_graphs_go_with_the_model(way: str, rt: GraphRuntime) -> None:
    model = of_regions()
    fast = graphs_of(model, way, rt)
    agrees(fast, model)
    weights = [weakref.ref(parameter) for parameter in model.parameters()]
    assert captured_and_live(rt)[1] == 1
    del model, fast
    torch.compiler.reset()
    gc.collect()
    assert [weight() for weight in weights] == [None] * 4
    assert captured_and_live(rt)[1] == 0
    assert rt.buffer_bytes() == 0
    other = of_regions()
    agrees(graphs_of(other, way, rt), other)
