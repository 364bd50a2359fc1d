"""Tensors that wrap tensors: weights, arguments and results of such classes are captured as what is in them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphpass as gp
from cgpass.pipeline import CallableCache
from graphpass.compat.subclasses import rebuild_of
from graphpass.errors import DeviceError, GraphpassError, PartitionError
from graphpass.saved.fingerprint import implementations
from tests.unit.models import module
from tests.unit.scaled import Other, Scaled, plain, quantised

COMPILERS = pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
SIZES = (5, 7, 6, 5, 8, 7)


@pytest.fixture(autouse=True)
def _without_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def mlp(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    return quantised(nn.Sequential(*layers).eval(), **options)


def compiled(model: Any, **options: Any) -> Any:
    """The model as one argument runs it, with its runtime as an attribute."""
    runtime = gp.GraphRuntime()
    given = {"compiler": "eager", "dispatch": "auto", "runtime": runtime, **options}
    fast: Any = torch.compile(model, backend="cgpass", dynamic=True, options=given)
    fast.its_runtime = runtime
    return fast


def rows(sizes: Sequence[int] = SIZES, width: int = 6) -> list[torch.Tensor]:
    return [torch.randn(size, width) for size in sizes]


def agrees(fast: Callable[..., Any], model: Callable[..., Any], given: Sequence[Any]) -> None:
    for x in given:
        want, got = model(x), fast(x)
        pairs = zip(want, got, strict=True) if isinstance(want, tuple) else [(want, got)]
        for one, other in pairs:
            assert type(one) is type(other)
            torch.testing.assert_close(plain(other), plain(one))


def only_graph(fast: Any) -> Any:
    """The only graphed callable of a compiled model."""
    (made,) = fast.its_runtime.owned(CallableCache).values()
    return made


def replays(fast: Any) -> int:
    return sum(record.replayed for record in fast.its_runtime.counts().values())


@COMPILERS
@pytest.mark.parametrize("nested", [False, True])
def test_weights_are_inputs_by_their_path_and_padded(compiler: str, nested: bool) -> None:
    model = mlp(nested=nested, shift=0.5)
    fast = compiled(model, compiler=compiler)
    agrees(fast, model, rows())
    assert replays(fast) == len(SIZES) - 2
    (graph,) = fast.its_runtime.callables()
    assert len(graph.regions) == 1
    names = [given.shown for given in only_graph(fast).partition.inputs]
    inner = ["codes.codes", "codes.scale"] if nested else ["codes"]
    assert [name for name in names if ".0.weight" in name] == [f"fn.0.weight.{part}" for part in [*inner, "scale"]]


@COMPILERS
@pytest.mark.parametrize("op", ["torch.nn.functional.linear", "torch.tanh"])
def test_no_wrapper_passes_from_region_to_region(compiler: str, op: str) -> None:
    inner = quantised(nn.Linear(6, 6))

    def forward(self: Any, x: torch.Tensor) -> Any:
        negative = -self.inner.weight
        return torch.tanh(self.inner(x)) @ negative, negative

    model = module(forward, inner=inner)
    fast = compiled(model, compiler=compiler, splitting_ops=[op])
    agrees(fast, model, rows())
    regions = only_graph(fast).partition.regions
    assert len(regions) > 1
    for region in regions:
        nodes = region.graph_module.graph.find_nodes(op="placeholder")
        assert not any(isinstance(node.meta["example_value"], Scaled) for node in nodes)
    assert replays(fast)


@COMPILERS
def test_arguments_and_results(compiler: str) -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return -x, x.sin().sum(1), x + 1

    fast = compiled(model, compiler=compiler)
    agrees(fast, model, [Scaled.of(x) for x in rows()])
    assert replays(fast) == len(SIZES) - 2


@COMPILERS
def test_writes_reach_the_tensors_in_it(compiler: str) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.weight.mul_(0.5)
        return x @ self.weight

    ours, eager = (module(forward, weight=Scaled.of(torch.ones(6, 6))) for _ in range(2))
    agrees(compiled(ours, compiler=compiler), eager, rows())


class Replacing(Scaled):
    """In-place operators put another tensor into it."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mul_.Tensor:
            args[0].scale = args[0].scale * args[1]
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_an_operator_that_puts_another_tensor_into_it_is_refused() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.weight.mul_(0.5)
        return x @ self.weight

    model = module(forward, weight=Replacing.of(torch.ones(6, 6)))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        compiled(model)(torch.randn(5, 6))
    assert isinstance(raised.value.inner_exception, PartitionError)
    assert "Replacing" in str(raised.value.inner_exception)


def test_metadata_tells_regions_apart() -> None:
    torch.manual_seed(0)
    layers = [quantised(nn.Linear(6, 6), shift=shift) for shift in (0.0, 0.5, 0.0)]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))
    fast = compiled(model, splitting_ops=["torch.tanh"], compiler="aot_eager")
    agrees(fast, model, rows())
    assert fast.its_runtime.compiled() == 2, "equal layers share an artifact, other metadata does not"


@dataclass(frozen=True)
class Specification:
    """Metadata with sizes in it, which torch sees only as a whole; the class compares the rest."""

    shape: Any
    shift: float


class Specified(Scaled):
    """As DTensor of torch 2.11 keeps its sizes."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], Specification(self.shape, self.shift)

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, metadata: Any, size: Any, stride: Any) -> Scaled:
        return cls(inner["codes"], inner["scale"], metadata.shift)

    @classmethod
    def __metadata_guard__(cls, one: Specification, other: Specification) -> bool:
        return one.shift == other.shift


@COMPILERS
def test_symbolic_sizes_in_metadata_are_not_compared(compiler: str) -> None:
    runtime = gp.GraphRuntime()
    for model in (lambda x: (x @ x.t()).sin(), lambda y: (y @ y.t()).sin()):  # whose symbols have other names
        agrees(compiled(model, compiler=compiler, runtime=runtime), model, list(map(Specified.of, rows())))
    assert runtime.compiled() == 1


# What may happen to a weight between calls.


def weight_of(kind: type[Scaled]) -> nn.Parameter:
    return nn.Parameter(kind.of(torch.randn(6, 6)), requires_grad=False)


def loaded(model: Any) -> None:
    model.load_state_dict(mlp(shift=0.0, nested=False).state_dict())
    model[0].weight.scale.mul_(2)


CHANGES: dict[str, Callable[[Any], object]] = {
    "loaded": loaded,
    "of_another_class": lambda model: setattr(model[0], "weight", weight_of(Other)),
    "unwrapped": lambda model: setattr(model[0], "weight", nn.Parameter(model[0].weight.dequantize() * 2)),
    "with_another_part": lambda model: setattr(model[2].weight, "scale", model[2].weight.scale * 2),
    "with_a_part_of_another_type": lambda model: setattr(model[2].weight, "codes", model[2].weight.codes.short()),
    "with_other_metadata": lambda model: setattr(model[2].weight, "shift", 1.5),
    "with_other_data": lambda model: setattr(model[2].weight.scale, "data", torch.full((6, 1), 0.01)),
    "swapped": lambda model: torch.utils.swap_tensors(model[0].weight, weight_of(Scaled)),
    "in_double": lambda model: model.to(torch.float64).to(torch.float32),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", ["argument", "graphed", "manager"])
def test_a_changed_weight_is_right_or_refused_by_name(change: str, way: str) -> None:
    model = mlp()
    run = WAYS[way](model)
    agrees(run, model, rows())
    CHANGES[change](model)
    may_refuse = contextlib.suppress(GraphpassError) if way == "manager" else contextlib.nullcontext()
    with may_refuse:
        agrees(run, model, rows())


def by_manager(model: nn.Module, **options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    dispatcher = gp.CudagraphDispatcher("FULL_AND_PIECEWISE", [2, 4, 8], max_num_reqs=8)
    inputs = [gp.InputSpec("input" if isinstance(model, nn.Sequential) else "x", (8, 6), torch.float32)]
    given = {"compiler": "eager", "progress": False, "on_fallback": "silent", **options}
    manager = gp.CudaGraphManager(model, dispatcher, inputs, **given)
    manager.capture()

    def run(x: torch.Tensor) -> torch.Tensor:
        return manager.run(gp.Batch(len(x), inputs={inputs[0].name: x})).clone()

    run.its_runtime = manager.runtime  # type: ignore[attr-defined]
    return run


def by_graphed(model: nn.Module, **options: Any) -> Any:
    fast = gp.graphed(model, [2, 4, 8], {"input": 0}, **{"compiler": "eager", **options})
    fast.capture(torch.randn(4, 6))
    return fast


WAYS: dict[str, Callable[..., Any]] = {"argument": compiled, "graphed": by_graphed, "manager": by_manager}


@pytest.mark.parametrize("way", ["graphed", "manager"])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.soak)])
def test_a_saved_start_is_of_class_and_metadata(way: str, compiler: str, tmp_path: Path) -> None:
    for shift, loads in ((0.0, 0), (0.0, 1), (0.5, 0)):
        torch._dynamo.reset()
        model = mlp(shift=shift)
        run = WAYS[way](model, compiler=compiler, warm_start=tmp_path)
        agrees(run, model, rows())
        runtime = run.runtime if way == "graphed" else run.its_runtime
        assert (runtime.report().figures.costs.loaded, runtime.compiled()) == (loads, 1 - loads)
        runtime.close()


def test_a_saved_start_is_of_the_code_of_the_class() -> None:
    parts = implementations([rebuild_of(Scaled.of(torch.ones(2, 2), nested=True), [])])
    assert [name.rpartition(" ")[2] for name in parts] == ["tests"]


def test_a_nested_tensor_is_refused_by_its_class() -> None:
    given = torch.nested.nested_tensor([torch.randn(2, 6), torch.randn(3, 6)], layout=torch.jagged)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        compiled(torch.sin)(given)
    assert isinstance(raised.value.inner_exception, DeviceError)
    assert raised.value.inner_exception.found == "NestedTensor"
