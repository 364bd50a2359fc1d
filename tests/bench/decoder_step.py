"""One decode step of a 28-layer decoder, in every form a user could run it: ``python -m tests.bench.decoder_step``.

All forms run in one process, over one model and the same input tensors, in interleaved rounds; each is compiled for the
static batch. Before anything is timed, every form's result is compared with eager's, with NaN in the cache slots that a
step has to write, and the replay counts of graphpass are checked. Step time is that of host and device together, host
time that of enqueueing a step on an idle device (see :mod:`tests.bench.timing`). Results of ``reduce-overhead``, of the
hand-captured graphs and of ``view`` lie in graph memory and are not copied.

``--smoke`` runs tiny sizes on a CPU: the code, not the figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import cgpass
import graphpass as gp
from graphpass.capture.modelstate import entry_of
from tests.bench.decoder import SPLITTING_OP, Decoder, DecoderSizes, SixInputs, make_decoder
from tests.bench.timing import (
    HandCapture,
    Timing,
    environment,
    gpu_or_cpu,
    interleaved,
    is_skipped,
    listed,
    parser_of,
    plain_compiled,
    table_of,
    write_json,
)

EAGER = "eager"
REDUCE_OVERHEAD = "torch.compile, reduce-overhead"
FULL_FLOOR = "one hand-captured graph, raw replay"
BARE_LIST = "bare list of replays and ops"
FULL, PIECEWISE = gp.CUDAGraphMode.FULL, gp.CUDAGraphMode.PIECEWISE
TOLERANCE = 2e-2
EAGER_TOLERANCE = 5e-2
"""Plain Inductor rounds to bfloat16 less often than eager; over 28 layers of random weights that adds up."""
STEPS_A_ROUND, HOST_CALLS = 10, 10
Step = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Setup:
    """What one run measures."""

    sizes: DecoderSizes  #: of the decoder
    device: torch.device  #: where it runs
    dtype: torch.dtype  #: of weights, cache and hidden states
    compiler: str  #: for torch.compile and for regions
    rounds: int  #: values behind each median


@dataclass(frozen=True, slots=True)
class Form:
    """One way to run a step."""

    name: str  #: what tables call it
    step: Step  #: one step; what is timed
    output: torch.Tensor | None = None  #: where the result lies after a step; None when the step returns it
    #: whose replay count has to grow by ``replays`` a step; None where graphpass has no part
    runtime: gp.GraphRuntime | None = None
    replays: int = 0  #: replays of one step
    floor: str = ""  #: name of the form that this one is held against
    num_regions: int = 1  #: calls of regions and splitting ops in a step

    def result(self) -> torch.Tensor:
        """Run a step and return its result, independent of later ones."""
        returned = self.step()
        return (returned if self.output is None else self.output).clone()


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one form at one batch size; ratios are of medians, None where there is nothing to divide by."""

    batch: int
    form: str
    step_us: dict[str, float]
    host_us: dict[str, float]
    over_floor: float | None
    over_reduce_overhead: float | None
    host_above_floor_us: float | None
    host_above_floor_us_a_region: float | None
    num_regions: int
    replays: int
    difference: float | None
    timing: Timing = field(repr=False, compare=False)


class Engine:
    """A model compiled with ``backend="cgpass"`` for one static batch, run as an engine does: under a forward context.

    Every step has the same tensors as inputs. With PIECEWISE in its mode the model is split at the attention op.
    """

    def __init__(
        self, model: Decoder, inputs: Sequence[torch.Tensor], *, mode: str, outputs: str = "view", compiler: str
    ) -> None:
        self.runtime = gp.GraphRuntime()
        splits = gp.CUDAGraphMode.parse(mode).requires_piecewise_compilation()
        options = cgpass.options(
            mode=mode,
            splitting_ops=[SPLITTING_OP] if splits else [],
            outputs=outputs,
            compiler=compiler,
            runtime=self.runtime,
        )
        self._inputs = tuple(inputs)
        self._key = gp.BatchDescriptor(len(inputs[0]))
        self._compiled = torch.compile(entry_of(model), backend="cgpass", dynamic=False, options=options)

    def step(self, mode: gp.CUDAGraphMode) -> Any:
        """One step at a runtime mode."""
        with gp.set_forward_context(runtime_mode=mode, batch_descriptor=self._key):
            return self._compiled(*self._inputs)

    def capture(self, *modes: gp.CUDAGraphMode) -> None:
        """Compile, where that has not happened, and capture at each mode."""
        with self.runtime.capturing():
            for mode in modes:
                self.step(mode)

    def compile_only(self) -> None:
        """Run once without graphs."""
        with gp.set_forward_context():
            self._compiled(*self._inputs)

    def form(self, name: str, mode: gp.CUDAGraphMode, floor: str) -> Form:
        """A captured mode as a form: FULL replays once, PIECEWISE once for each captured region."""
        kinds = [region.kind for region in self.runtime.callables()[0].regions]
        replays = kinds.count("captured") if mode is PIECEWISE else 1
        num_regions = len(kinds) if mode is PIECEWISE else 1
        return Form(name, partial(self.step, mode), None, self.runtime, replays, floor, num_regions)


def reduce_overhead(model: Decoder, inputs: Sequence[torch.Tensor]) -> Step:
    """torch.compile with its own CUDA graphs; a result is valid until the next step. Captured in its second step."""
    compiled = torch.compile(entry_of(model), mode="reduce-overhead", dynamic=False)

    def step() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*inputs)

    return step


def full_floor(name: str, compiled: Callable[..., Any], inputs: Sequence[torch.Tensor], capture: HandCapture) -> Form:
    """One graph of the compiled model over inputs in place: the floor of FULL."""
    replay, (output,) = capture.capture(lambda: (compiled(*inputs),))
    return Form(name, replay, output=output)


def bare_list(
    name: str, model: Decoder, inputs: Sequence[torch.Tensor], compiler: str, capture: HandCapture
) -> tuple[Form, Form, Form]:
    """A list of raw replays and bare calls of the splitting op, nothing between them: the floor of PIECEWISE.

    Behind it come its replays alone and its op calls alone, which give no result.
    """
    replays: list[Step] = []
    ops: list[Step] = []

    def captured(region: Callable[..., Any], *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        compiled = plain_compiled(region, compiler)
        replay, outputs = capture.capture(lambda: compiled(*args))
        replays.append(replay)
        return outputs

    hidden, positions = inputs
    cos, sin, *regional = captured(model.opening, hidden, positions)
    for index in range(model.sizes.num_layers):
        query, key, value, out = regional
        ops.append(model.call_attention(index, (query, key, value, out)))
        ops[-1]()
        if index + 1 < model.sizes.num_layers:
            hidden, *regional = captured(partial(model.between, index), hidden, out, cos, sin)
    (output,) = captured(lambda *args: (model.closing(*args),), hidden, out)
    mixed = [replays[0], *(call for pair in zip(ops, replays[1:], strict=True) for call in pair)]
    whole = Form(name, partial(_call_all, mixed), output=output, num_regions=len(mixed))
    return (
        whole,
        Form(f"{name}, replays alone", partial(_call_all, replays), num_regions=len(replays)),
        Form(f"{name}, ops alone", partial(_call_all, ops), num_regions=len(ops)),
    )


def _call_all(calls: Sequence[Step]) -> None:
    for call in calls:
        call()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each batch size and print its table."""
    parser = parser_of("decoder_step", __doc__, layers=None, rounds=None)
    parser.add_argument("--batches", type=listed, default=[1, 8, 64])
    options, console = parser.parse_args(arguments), Console(width=160)
    if is_skipped("decoder_step", options):
        return
    setup = _setup(options)
    rows: list[Row] = []
    for batch in options.batches:
        measured = measure(setup, batch, console)
        rows += measured
        console.print(_table(setup, batch, measured))
        write_json(options.json, _payload(setup, rows))


def _setup(options: argparse.Namespace) -> Setup:
    if options.smoke:
        sizes = DecoderSizes.small(options.layers or 3)
        return Setup(sizes, torch.device("cpu"), torch.float32, "eager", options.rounds or 2)
    return Setup(DecoderSizes(options.layers or 28), gpu_or_cpu(), torch.bfloat16, "inductor", options.rounds or 21)


def measure(setup: Setup, batch: int, console: Console) -> list[Row]:
    """Build every form at one batch size, compare results, time them, and drop what was compiled."""
    model, *inputs = make_decoder(setup.sizes, batch, setup.device, dtype=setup.dtype)
    with torch.inference_mode():
        forms = _forms(setup, model, inputs, console)
        eager, compiled, *others = forms
        _agreement(model, compiled, eager, EAGER_TOLERANCE)
        differences = {
            form.name: _agreement(model, form, compiled, TOLERANCE) for form in others if _gives_a_result(form)
        }
        _check_replays(forms)
        timings = interleaved(
            {form.name: form.step for form in forms},
            device=setup.device,
            rounds=setup.rounds,
            steps_a_round=STEPS_A_ROUND,
            host_calls=HOST_CALLS,
        )
    console.print(
        f"batch {batch}: results agree with torch.compile, largest relative difference {max(differences.values()):.1e}"
    )
    for runtime in {id(form.runtime): form.runtime for form in forms if form.runtime is not None}.values():
        runtime.close()
    torch.compiler.reset()
    return [_row(batch, form, timings, differences.get(form.name)) for form in forms]


def _forms(setup: Setup, model: Decoder, inputs: list[torch.Tensor], console: Console) -> list[Form]:
    """Every form, ready to be timed; the first one is eager."""
    compiled = plain_compiled(model, setup.compiler)
    forms = [Form(EAGER, partial(model, *inputs)), Form("torch.compile", partial(compiled, *inputs))]
    if setup.device.type == "cuda":
        step = reduce_overhead(model, inputs)
        for _ in range(3):
            step()
        forms.append(Form(REDUCE_OVERHEAD, step))
    else:
        console.print("reduce-overhead needs a GPU: skipped; hand-captured graphs are called again instead")
    forms.append(full_floor(FULL_FLOOR, compiled, inputs, HandCapture(setup.device)))
    forms += _full_forms(setup, model, inputs)
    forms += _manager_forms(setup, model, inputs)
    forms += bare_list(BARE_LIST, model, inputs, setup.compiler, HandCapture(setup.device))
    forms += _split_forms(setup, model, inputs)
    return forms


def _full_forms(setup: Setup, model: Decoder, inputs: list[torch.Tensor]) -> list[Form]:
    """FULL of a model that is not split: the compiler sees it whole, as in the floor."""
    forms = []
    in_place = [tensor.clone() for tensor in inputs]
    for tensor in in_place:
        torch._dynamo.mark_static_address(tensor, guard=False)
    for given, outputs, where in ((in_place, "view", ", inputs in place"), (inputs, "view", ""), (inputs, "clone", "")):
        engine = Engine(model, given, mode="FULL", outputs=outputs, compiler=setup.compiler)
        engine.capture(FULL)
        forms.append(engine.form(f"cgpass FULL, {outputs}{where}", FULL, FULL_FLOOR))
    for outputs in ("view", "clone"):
        dims = {"hidden": 0, "positions": 0}
        fast = gp.graphed(model, [len(inputs[0])], dims, outputs=outputs, compiler=setup.compiler)
        fast.capture(*inputs)
        step = partial(fast, *inputs)
        forms.append(Form(f"graphed FULL, {outputs}", step, None, fast.runtime, 1, FULL_FLOOR))
    return forms


def _manager_forms(setup: Setup, model: Decoder, inputs: list[torch.Tensor]) -> list[Form]:
    """FULL under the manager: over inputs in its buffers, and copied there in each step, two and six of them."""
    batch = len(inputs[0])
    forms = []
    for names, whole in ((SixInputs.names[:2], model), (SixInputs.names, SixInputs(model))):
        given = dict(zip(names, (*inputs, *(torch.zeros_like(inputs[0][:, 0]) for _ in names[2:])), strict=True))
        specs = [gp.InputSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in given.items()]
        manager = gp.CudaGraphManager(
            whole,
            gp.CudagraphDispatcher("FULL", [batch], max_num_reqs=batch),
            specs,
            compiler=setup.compiler,
        )
        manager.capture()
        staged = partial(manager.run, gp.Batch(batch, inputs=given))
        forms.append(Form(f"manager FULL, {len(given)} staged", staged, None, manager.runtime, 1, FULL_FLOOR))
        if whole is model:
            staged()
            in_place = partial(manager.run, gp.Batch(batch))
            forms.append(Form("manager FULL, inputs in place", in_place, None, manager.runtime, 1, FULL_FLOOR))
    return forms


def _split_forms(setup: Setup, model: Decoder, inputs: list[torch.Tensor]) -> list[Form]:
    """PIECEWISE, and FULL of the same split model: what an engine has that is built for both."""
    forms = []
    for outputs in ("view", "clone"):
        engine = Engine(model, inputs, mode="FULL_AND_PIECEWISE", outputs=outputs, compiler=setup.compiler)
        engine.capture(PIECEWISE, FULL)
        forms.append(engine.form(f"cgpass PIECEWISE, {outputs}", PIECEWISE, BARE_LIST))
        if outputs == "view":
            forms.append(engine.form("cgpass FULL of the split model, view", FULL, FULL_FLOOR))
    return forms


def _gives_a_result(form: Form) -> bool:
    return not form.name.startswith(f"{BARE_LIST},")


def _agreement(model: Decoder, form: Form, reference: Form, tolerance: float) -> float:
    """The relative norm of a form's difference from a reference, which is not above the tolerance."""
    expected = reference.result().float()
    model.poison_slots()
    found = form.result().float()
    difference = float((found - expected).norm() / expected.norm())
    assert difference <= tolerance, f"{form.name}: differs from {reference.name} by {difference:.2e} > {tolerance}"
    return difference


def _check_replays(forms: Sequence[Form]) -> None:
    """Every form of graphpass replays, and as often as it should."""
    for form in forms:
        if form.runtime is None:
            continue
        before = form.runtime.stats().replayed
        form.step()
        replayed = form.runtime.stats().replayed - before
        assert replayed == form.replays, f"{form.name}: {replayed} replays in a step instead of {form.replays}"


def _row(batch: int, form: Form, timings: dict[str, Timing], difference: float | None) -> Row:
    own, floor = timings[form.name], timings.get(form.floor)
    reduced = timings.get(REDUCE_OVERHEAD)
    above = own.host.median - floor.host.median if floor else None
    return Row(
        batch=batch,
        form=form.name,
        step_us=asdict(own.step),
        host_us=asdict(own.host),
        over_floor=own.step.median / floor.step.median if floor else None,
        over_reduce_overhead=own.step.median / reduced.step.median if reduced else None,
        host_above_floor_us=above,
        host_above_floor_us_a_region=above / form.num_regions if above is not None else None,
        num_regions=form.num_regions,
        replays=form.replays,
        difference=difference,
        timing=own,
    )


def _table(setup: Setup, batch: int, rows: Sequence[Row]) -> Table:
    where = environment(setup.device)
    title = (
        f"{setup.sizes.num_layers}-layer decoder step, batch {batch}, {where['device']}, torch {where['torch']}: "
        f"medians (quartiles) of {setup.rounds} rounds, host above floor in µs"
    )
    columns = "form | step µs | ÷ floor | ÷ reduce-overhead | host µs | above floor | a region | difference"
    cells = [
        (
            row.form, row.timing.step, _shown(row.over_floor, ".3f"), _shown(row.over_reduce_overhead, ".3f"),
            row.timing.host, _shown(row.host_above_floor_us, ".1f"),
            _shown(row.host_above_floor_us_a_region if row.num_regions > 1 else None, ".2f"),
            _shown(row.difference, ".1e"),
        )
        for row in rows
    ]  # fmt: skip
    return table_of(title, columns, cells)


def _shown(figure: float | None, form: str) -> str:
    return "" if figure is None else format(figure, form)


def _payload(setup: Setup, rows: Sequence[Row]) -> dict[str, Any]:
    figures = [{name: value for name, value in asdict(row).items() if name != "timing"} for row in rows]
    return {
        "environment": environment(setup.device),
        "sizes": asdict(setup.sizes),
        "rounds": setup.rounds,
        "steps_a_round": STEPS_A_ROUND,
        "rows": figures,
    }


if __name__ == "__main__":
    main()
