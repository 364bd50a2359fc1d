"""Host microseconds of asking whether a graph may be replayed, with 300 static inputs.

``python -m tests.bench.guard_cost``; on a GPU where there is one, else on the tape.

*Through the wrapper*: finding the entry and checking the arguments, of a bare wrapper over 300 parameters and two
copied inputs. *Inside a plan*: the same for one step of a model of 150 linear layers and a splitting op. What a whole
step costs with 300 static inputs and with none stands beside them: there everything counts, argument lists too.

The second table holds the ways torch has of comparing addresses or layouts (sizes and strides) of many tensors; those
in the private parts of torch are looked up by name and left out where they are missing.

All rows of a table are timed in interleaved rounds (see :mod:`tests.bench.timing`). ``--smoke`` takes few of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import cgpass
import graphpass as gp
from graphpass.capture.replay import ReplayPlan
from graphpass.compat import memory
from tests.bench.timing import Timing, environment, gpu_or_cpu, interleaved, parser_of, table_of, write_json
from tests.observed import reached

FULL, PIECEWISE = gp.CUDAGraphMode.FULL, gp.CUDAGraphMode.PIECEWISE
NUM_STATIC = 300
WIDTH = 8
KEY = gp.BatchDescriptor(WIDTH)
Check = Callable[[], Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables."""
    options = parser_of("guard_cost", __doc__, "few rounds: the code, not the figures").parse_args(arguments)
    device = gpu_or_cpu()
    with torch.no_grad():
        guards = _measured({**_through_the_wrapper(device), **_inside_a_plan(device)}, device, options.smoke)
        candidates = _measured(_candidates(device), device, options.smoke)
    where = environment(device)
    console = Console(width=120)
    console.print(_table(f"Guards of a step with {NUM_STATIC} static inputs", guards, where))
    console.print(_table(f"Comparing {NUM_STATIC} tensors", candidates, where))
    figures = {name: timing.step.median for name, timing in {**guards, **candidates}.items()}
    write_json(options.json, {"environment": where, "median_us": figures})


def _measured(checks: Mapping[str, Check], device: torch.device, smoke: bool) -> dict[str, Timing]:
    rounds, calls = (3, 5) if smoke else (151, 10)
    return interleaved(checks, device=device, rounds=rounds, steps_a_round=calls, host_calls=1)


def _table(title: str, timings: Mapping[str, Timing], where: Mapping[str, str]) -> Table:
    rows = [(name, timing.step) for name, timing in timings.items()]
    return table_of(f"{title}; {', '.join(where.values())}", "what | µs, median (quartiles)", rows)


# -- the guards themselves -----------------------------------------------------------------------------------------


def _parameters(device: torch.device) -> list[torch.nn.Parameter]:
    shapes = [(WIDTH, WIDTH), (WIDTH,)] * (NUM_STATIC // 2)
    return [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]


def _through_the_wrapper(device: torch.device) -> dict[str, Check]:
    """The checks of a bare wrapper, and its whole step with and without the static inputs."""
    runtime = gp.GraphRuntime()
    wrapper = gp.CUDAGraphWrapper(lambda x, y, *_: x + y, FULL, runtime=runtime, name="guarded")
    bare = gp.CUDAGraphWrapper(lambda x, y: x + y, FULL, runtime=runtime, name="bare")
    staged = [torch.randn(WIDTH, WIDTH, device=device) for _ in range(2)]
    every = [*staged, *_parameters(device)]
    with runtime.capturing():
        _call_flat(wrapper, every)
        _call_flat(bare, staged)
    (captured,) = wrapper.table.at(KEY)
    statics = captured.plan.statics
    context = gp.ForwardContext(None, FULL, KEY, None, None, None, None, None)

    def asked() -> None:
        entry, _ = wrapper.table.find(KEY, every, statics.spec)
        assert entry is captured
        entry.plan.check(every, context)

    return {
        "300 data_ptr() calls": lambda: [leaf.data_ptr() for leaf in every[2:]],
        "addresses, as the wrapper compares them": lambda: memory.data_ptrs_equal(
            every, statics.addresses, statics.positions
        ),
        "through the wrapper: the entry and its checks": asked,
        "a step through the wrapper, 300 static inputs": partial(_call_flat, wrapper, every),
        "a step through the wrapper, none": partial(_call_flat, bare, staged),
    }


def _call_flat(wrapper: gp.CUDAGraphWrapper, args: Sequence[Any]) -> None:
    with gp.set_forward_context(runtime_mode=FULL, batch_descriptor=KEY) as context:
        wrapper.call_flat(context, args)


class Layers(torch.nn.Module):
    """Linear layers, two parameters each, with an op in the middle that runs eagerly."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = (x + y).flip(-1)
        for layer in self.layers:
            x = layer(x)
        return x


def _inside_a_plan(device: torch.device) -> dict[str, Check]:
    """The checks that a step does once for all regions: what is compared ahead of the first replay."""
    runtime = gp.GraphRuntime()
    model = Layers(NUM_STATIC // 2).to(device).eval()
    compiled = torch.compile(
        model,
        backend="cgpass",
        options=cgpass.options(mode="PIECEWISE", splitting_ops=["aten::flip"], compiler="eager", runtime=runtime),
    )
    x, y = (torch.randn(WIDTH, WIDTH, device=device) for _ in range(2))
    with runtime.capturing():
        (call,) = reached(runtime, lambda: compiled(x, y), runtime_mode=PIECEWISE, batch_descriptor=KEY)
    context = gp.set_forward_context(runtime_mode=PIECEWISE, batch_descriptor=KEY)._context
    assert call.plan is not None
    return {"inside a plan: all that is asked ahead of the replays": partial(_ask, call.plan, list(call.args), context)}


def _ask(plan: ReplayPlan, args: list[Any], context: gp.ForwardContext) -> None:
    assert plan.serves(args)
    plan.check(args, context)


# -- what torch has ------------------------------------------------------------------------------------------------


def _candidates(device: torch.device) -> dict[str, Check]:
    tensors = _parameters(device)
    return {**_from_python(tensors), **_native_addresses(tensors), **_native_layouts(tensors)}


def _from_python(tensors: list[torch.nn.Parameter]) -> dict[str, Check]:
    """Comparisons by the public methods of a tensor, looped over in C."""
    addresses = [t.data_ptr() for t in tensors]
    sizes, strides = [t.size() for t in tensors], [t.stride() for t in tensors]
    same = [t.detach() for t in tensors]
    return {
        "address: map(Tensor.data_ptr)": lambda: list(map(torch.Tensor.data_ptr, tensors)) == addresses,
        "strides: map(Tensor.stride)": lambda: list(map(torch.Tensor.stride, tensors)) == strides,
        "sizes: map(Tensor.size)": lambda: list(map(torch.Tensor.size, tensors)) == sizes,
        "whether contiguous: map(Tensor.is_contiguous)": lambda: all(map(torch.Tensor.is_contiguous, tensors)),
        "address and layout: map(Tensor.is_set_to)": lambda: all(map(torch.Tensor.is_set_to, tensors, same)),
    }


def _native_addresses(tensors: list[torch.nn.Parameter]) -> dict[str, Check]:
    equal = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
    if equal is None:
        return {}
    addresses = [t.data_ptr() for t in tensors]
    return {
        "address: _tensors_data_ptrs_at_indices_equal": partial(equal, tensors, addresses, list(range(len(tensors))))
    }


def _native_layouts(tensors: list[torch.nn.Parameter]) -> dict[str, Check]:
    """What Dynamo and Inductor compare tensors with; TensorGuards asks for type, dtype, device, dispatch keys too."""
    guards = torch._C._dynamo.guards
    found: dict[str, Check] = {}
    if hasattr(guards, "TensorGuards"):
        for part in (1, 4):
            some = tensors[: len(tensors) // part]
            check = guards.TensorGuards(*some, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
            assert check(*some)
            found[f"layout: TensorGuards.check, {len(some)} tensors"] = partial(check, *some)
    if hasattr(guards, "assert_size_stride"):
        sizes, strides = [tuple(t.size()) for t in tensors], [t.stride() for t in tensors]
        found["layout: map(assert_size_stride)"] = lambda: all(map(guards.assert_size_stride, tensors, sizes, strides))
    return found


if __name__ == "__main__":
    main()
