"""``graphpass bench``: one model eagerly, compiled, with reduce-overhead, with graphpass, and as one graph by hand."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch

from graphpass.capture.compare import in_double, largest_difference
from graphpass.capture.modelstate import entry_of
from graphpass.cli.explain import quiet_compiler
from graphpass.cli.usermodel import Program, Result, users_code
from graphpass.errors import CommandError
from graphpass.report.drawing import Picture, Table, bar_chart, counted

Step = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of a figure over the rounds, in microseconds."""

    median: float
    q1: float
    q3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, q1, q3)

    def __str__(self) -> str:
        digits = 0 if self.median >= 1000 else 1
        return f"{self.median:.{digits}f} ({self.q1:.{digits}f} to {self.q3:.{digits}f})"


def in_rounds(
    steps: Mapping[str, Step], figures: Mapping[str, Callable[[Step], float]], rounds: int
) -> dict[str, dict[str, Spread]]:
    """Measure every variant once a round, each round starting with another one, so that a slow moment falls on all."""
    values: dict[str, dict[str, list[float]]] = {name: {figure: [] for figure in figures} for name in steps}
    names = list(steps)
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                steps[name]()  # the caches of host and device hold another variant's data
                for figure, measure in figures.items():
                    values[name][figure].append(measure(steps[name]))
    finally:
        gc.enable()
    return {name: {figure: Spread.of(found) for figure, found in of.items()} for name, of in values.items()}


def host_us(step: Step, device: torch.device, calls: int) -> float:
    """Median time of a call on an idle device until it returns; what the device then does is not included."""
    taken = []
    for _ in range(calls):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start_s = time.perf_counter()
        step()
        taken.append((time.perf_counter() - start_s) * 1e6)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return statistics.median(taken)


Contents = tuple[tuple[Any, ...], dict[str, Any]]

# Of the largest magnitude of an output. Compilers fuse and reorder, so results differ by a few roundings.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_WARM_UP_CALLS = 4
_BUSY_SIZE = 4096


_NEEDS_GPU = "needs a GPU"


def bench(program: Program, options: Mapping[str, Any], compiler: str, *, rounds: int, calls: int) -> Result:
    """Compare and time all variants."""
    if "compiler" in options:
        raise CommandError(
            "the compiler is no option of graphpass alone here",
            expected="--compiler, for all variants",
            found=f"--option compiler={options['compiler']}",
            remedy=f"pass --compiler {options['compiler']}",
        )
    contents = _contents(program)
    expected = "a model that runs eagerly and under torch.compile with its example inputs"
    with (
        users_code(program.name, expected=expected, remedy="run the model eagerly with these inputs first"),
        torch.no_grad(),
        quiet_compiler(),
    ):
        outputs = [list(_tensors(_copied(program.model(*args, **kwargs)))) for args, kwargs in contents]
        ways = _variants(program, options, compiler)
        tried = {name: _tried(name, call, contents, outputs) for name, call in ways.items()}
        running = {name: call for name, call in ways.items() if callable(call) and not isinstance(tried[name], str)}
        times = _interleaved(program, running, rounds, calls)
    figures = {
        "model": program.name,
        "device": str(program.device),
        "torch": torch.__version__,
        "compiler": compiler,
        "rounds": rounds,
        "calls": calls,
        "variants": [_figures(name, found, times.get(name)) for name, found in tried.items()],
    }
    wrong = [name for name, found in tried.items() if not isinstance(found, str) and not found[1] <= 1]
    failure = f"the output differs from eager: {', '.join(wrong)}" if wrong else None
    return Result("bench", program.name, figures, tuple(_parts(figures)), failure)


# -- variants ------------------------------------------------------------------------------------------------------


def _variants(program: Program, options: Mapping[str, Any], compiler: str) -> dict[str, Callable[..., Any] | str]:
    on_gpu = program.device.type == "cuda"
    compiled = torch.compile(entry_of(program.model), backend=compiler)
    used = {"compiler": compiler, **options}
    return {
        "eager": program.model,
        "compile": compiled,
        "reduce-overhead": torch.compile(entry_of(program.model), mode="reduce-overhead") if on_gpu else _NEEDS_GPU,
        "graphpass": torch.compile(entry_of(program.model), backend="cgpass", options=used),
        "raw replay": _RawReplay(compiled, program) if on_gpu else _NEEDS_GPU,
    }


class _RawReplay:
    """The compiled model in one CUDA graph, captured by hand: what a replay costs with nothing around it."""

    def __init__(self, compiled: Callable[..., Any], program: Program) -> None:
        self._compiled, self._device = compiled, program.device
        self._inputs: Contents = _copied((program.args, dict(program.kwargs)))
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay for new contents: they are copied first, which :attr:`replay` leaves out."""
        if self._graph is None:
            self._capture()
        for own, new in zip(_tensors(self._inputs), _tensors((args, kwargs)), strict=True):
            own.copy_(new)
        self.replay()
        return self._outputs

    def replay(self) -> None:
        assert self._graph is not None
        self._graph.replay()

    def _capture(self) -> None:
        args, kwargs = self._inputs
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._compiled(*args, **kwargs)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self._outputs = self._compiled(*args, **kwargs)
        self._graph = graph


def _tried(
    name: str, call: Callable[..., Any] | str, contents: list[Contents], outputs: list[list[torch.Tensor]]
) -> tuple[float, float] | str:
    """Seconds of the first calls, and the largest difference from eager as a share of the tolerance; or why not."""
    if isinstance(call, str):
        return call
    difference, start_s = 0.0, time.perf_counter()
    try:
        for number in range(_WARM_UP_CALLS * len(contents)):
            args, kwargs = contents[number % len(contents)]
            made = list(_tensors(_copied(call(*args, **kwargs))))
            difference = max(difference, _difference(made, outputs[number % len(contents)]))
    except Exception as error:
        if name != "raw replay":  # a model with host reads cannot be captured by hand
            raise
        return f"cannot be captured: {type(error).__name__}"
    return time.perf_counter() - start_s, difference


# -- contents and outputs ------------------------------------------------------------------------------------------


def _contents(program: Program) -> list[Contents]:
    """The example inputs, and inputs of other contents with the same values in another order."""
    given: Contents = (program.args, dict(program.kwargs))
    return [given, _mapped(given, lambda tensor: tensor.flip(0) if tensor.dim() else tensor)]


def _copied(value: Any) -> Any:
    return _mapped(value, lambda tensor: tensor.detach().clone())


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with its tensors changed; containers of other types than the common ones become plain ones."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _mapped(item, change) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [_mapped(item, change) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _mapped(getattr(value, field.name), change) for field in fields(value)}
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    found: list[torch.Tensor] = []
    _mapped(value, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return iter(found)


def _difference(made: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference as a share of the tolerance of its dtype; infinite for other shapes, dtypes or counts."""
    if len(made) != len(expected):
        return float("inf")
    return max((_of_tensors(one, other) for one, other in zip(made, expected, strict=True)), default=0.0)


def _of_tensors(one: torch.Tensor, other: torch.Tensor) -> float:
    tolerance = _TOLERANCES.get(one.dtype)
    gap = largest_difference(one, other) if one.dtype == other.dtype else math.inf
    if not gap or gap == math.inf or tolerance is None:
        return math.inf if gap else 0.0
    return gap / (float(in_double(other)[other.isfinite()].abs().max().clamp(min=1e-30)) * tolerance)


# -- times ---------------------------------------------------------------------------------------------------------


def _interleaved(
    program: Program, running: Mapping[str, Callable[..., Any]], rounds: int, calls: int
) -> dict[str, dict[str, Any]]:
    steps: dict[str, Step] = {
        name: getattr(call, "replay", None) or partial(call, *program.args, **program.kwargs)
        for name, call in running.items()
    }
    figures: dict[str, Callable[[Step], float]] = {"host_us": partial(host_us, device=program.device, calls=calls)}
    if program.device.type == "cuda":
        figures["device_us"] = _device_timer(program.device, calls)
    times = in_rounds(steps, figures, rounds)
    spread = {name: {figure: asdict(of) for figure, of in found.items()} for name, found in times.items()}
    return {name: {"device_us": None, **found} for name, found in spread.items()}


def _device_timer(device: torch.device, calls: int) -> Callable[[Step], float]:
    """Measures the median device time of calls: the device is busy while the host enqueues each.

    That of a model which reads values on the host contains host time.
    """
    matrix = torch.ones(_BUSY_SIZE, _BUSY_SIZE, device=device)

    def work(products: int) -> None:
        for _ in range(products):
            torch.mm(matrix, matrix)

    def timed(step: Step, products: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        work(products)
        start.record()
        step()
        end.record()
        torch.cuda.synchronize(device)
        return float(start.elapsed_time(end)) * 1e3

    work(1)  # loads the kernel
    product_us = max(timed(partial(work, 10), 0) / 10, 1.0)

    def device_us(step: Step) -> float:
        products = int(3 * host_us(step, device, calls) / product_us) + 1
        return statistics.median(timed(step, products) for _ in range(calls))

    return device_us


# -- figures -------------------------------------------------------------------------------------------------------


def _figures(name: str, tried: tuple[float, float] | str, times: Mapping[str, Any] | None) -> dict[str, Any]:
    if isinstance(tried, str) or times is None:
        names = ("host_us", "device_us", "first_calls_s", "difference_of_tolerance", "agrees")
        return {"name": name, "missing": tried, **dict.fromkeys(names)}
    first_s, difference = tried
    return {
        "name": name,
        "missing": None,
        "host_us": times["host_us"],
        "device_us": times["device_us"],
        "first_calls_s": first_s,
        "difference_of_tolerance": min(difference, 1e30),
        "agrees": difference <= 1,
    }


def _parts(figures: Mapping[str, Any]) -> Iterator[str | Table | Picture]:
    variants = [variant for variant in figures["variants"] if variant["missing"] is None]
    missing = [variant for variant in figures["variants"] if variant["missing"] is not None]
    yield (
        f"{figures['device']}, torch {figures['torch']}, compiler {figures['compiler']}; medians of "
        f"{counted(figures['rounds'], 'round')} of {counted(figures['calls'], 'call')}, quartiles in brackets."
    )
    rows = tuple(
        (
            variant["name"],
            _shown(variant["host_us"]),
            _shown(variant["device_us"]),
            f"{variant['first_calls_s']:.2f}",
            f"{variant['difference_of_tolerance']:.2g}",
        )
        for variant in variants
    )
    columns = ("variant", "host µs", "device µs", "first calls s", "difference / tolerance")
    yield Table("Times", columns, rows)
    for part, title in (("host_us", "Host time of a call, µs"), ("device_us", "Device time of a call, µs")):
        timed = [variant for variant in variants if variant[part] is not None]
        yield bar_chart(title, [(v["name"], v[part]["median"], f"{v[part]['median']:.1f}") for v in timed])
    yield Table("Not measured", ("variant", "why"), tuple((v["name"], v["missing"]) for v in missing))
    if figures["device"] == "cpu":
        yield "On a CPU the host does all the work, and graphpass replays a tape: no faster than eager."


def _shown(spread: Mapping[str, float] | None) -> str:
    return "" if spread is None else str(Spread(**spread))
