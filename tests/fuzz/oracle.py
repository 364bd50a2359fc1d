"""Run a program eagerly and over graphs, call by call, and compare everything that a caller could see."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import cgpass
import graphpass as gp
from graphpass.dispatch import owngraphs
from tests.fuzz.inputs import Feed
from tests.fuzz.programs import STATE, Call, Program, module_class
from tests.fuzz.search import Outcome
from tests.fuzz.tracing import DirectlyCompiled

_GRAPHED_SIZES = (4, 8)
_ROUNDS = 4
_RECOMPILES = 256


def check(
    program: Program,
    compiler: str = "eager",
    device: torch.device | str = "cpu",
    *,
    stock: bool = False,
    **options: Any,
) -> Outcome:
    """Compare ``program`` over graphs with eager, or ``torch.compile(backend=compiler)`` without graphpass.

    ``options`` are further options of the backend.
    """
    device = torch.device(device)
    made = module_class(program, device)
    with gp.GraphRuntime() as runtime, torch.no_grad(), _roomy_dynamo(), _exact_soon():
        given = _options(program, compiler=compiler, runtime=runtime, **options)
        under_test = _stock(program, compiler) if stock else _ROUTES[program.route](program, given, device)
        sides = [_Side([made(seed).to(device) for seed in (0, 1)], Feed(device)) for _ in range(2)]
        outcome = _compare(program, sides, under_test)
        if outcome.mismatch or stock:
            return outcome
        return Outcome(outcome.calls, runtime.stats().replayed, outcome.refusal)


@dataclass(slots=True)
class _Side:
    """One side of the comparison: its modules, its inputs, and the results that its caller kept."""

    modules: list[Any]
    feed: Feed


def _compare(program: Program, sides: Sequence[_Side], under_test: Callable[..., Any]) -> Outcome:
    eager, ours = sides
    kept: list[tuple[int, Any, Any]] = []
    whole = program.route == "graphed"
    device = eager.modules[0].b.device
    for step, call in enumerate(_calls(program)):
        given = [side.feed.inputs(call, step, side.modules[call.instance]) for side in sides]
        _seed(step, device)
        try:
            wanted = _named(eager.modules[call.instance](*given[0]))
        except RuntimeError:  # eager cannot run it on inputs that lie so
            return Outcome(step)
        state = _random_state(device)
        _seed(step, device)
        try:
            found = _named(under_test(call, ours.modules[call.instance], *given[1]))
        except Exception as error:
            refusal = getattr(error, "inner_exception", None) or error
            if isinstance(refusal, gp.GraphpassError):
                return Outcome(step, refusal=_reason(refusal))
            return Outcome(step, mismatch=f"call {step}: {type(refusal).__name__}: {refusal}")
        if not whole and not all(map(torch.equal, state, _random_state(device))):
            return Outcome(step, mismatch=f"call {step}: the generator is not where eager leaves it")
        # A view that was fed back has had its last use when the next replay overwrites it.
        ended = "x" if program.outputs == "view" and call.layout == "feedback" else ""
        lasting = [name for name, value in wanted.items() if not ended or value is not given[0][0]]
        seen = [_seen(s, g, r, lasting, ended) for s, g, r in zip(sides, given, (wanted, found), strict=True)]
        difference = _difference(*seen, with_aliases=not whole)
        if difference is None and program.outputs == "clone":
            differing = (s for s, old, now in kept if _difference(old, now, with_aliases=False))
            earlier = next(differing, None)
            difference = None if earlier is None else f"a result of call {earlier} that was kept has changed"
        if difference is not None:
            return Outcome(step, mismatch=f"call {step} ({call}): {difference}")
        # What graphed returns of an input is a copy of it.
        alike = {name for name, value in wanted.items() if whole and _lies_in(value, given[0])}
        kept.append((step, *({n: v for n, v in side.items() if n not in alike} for side in (wanted, found))))
        for side, results in zip(sides, (wanted, found), strict=True):
            side.feed.returned(list(results.values()))
    return Outcome(len(program.calls))


def _reason(error: gp.GraphpassError) -> str:
    """A typed error without the names and sizes of one program."""
    text = f"{type(error).__name__}: {error.problem}: found {error.found}"
    return re.sub(r"'[^']*'|\d+ tokens|\b[grtuv]\d+\b|\bg\d+\.\w+|\d+", "_", text)[:150]


def _calls(program: Program) -> Sequence[Call]:
    """The program's calls; a padded one is called at every real size besides, so often that it has its own graph."""
    if program.route != "graphed":
        return program.calls
    rows = [rows for _ in range(_ROUNDS) for rows in range(1, max(_GRAPHED_SIZES) + 1)]
    return (*program.calls, *(Call(program.calls[0].mode, size) for size in rows))


def _seen(
    side: _Side, given: Sequence[torch.Tensor], results: dict[str, Any], lasting: Sequence[str], ended: str
) -> dict[str, Any]:
    """All that a caller can look at after a call: arguments but ``ended``, both modules' state, ``lasting`` results.

    A result that is an argument whose memory has ended does not last.
    """
    state = {
        f"{name} of module {index}": getattr(module, name)
        for index, module in enumerate(side.modules)
        for name in STATE
    }
    arguments = {name: value for name, value in zip("xyi", given, strict=True) if name != ended}
    return {**arguments, **state, **{name: value for name, value in results.items() if name in lasting}}


def _named(results: Sequence[Any]) -> dict[str, Any]:
    return {f"result {index}": value for index, value in enumerate(results)}


def _lies_in(value: Any, given: Sequence[torch.Tensor]) -> bool:
    """Whether it is in memory of ``given``."""
    return isinstance(value, torch.Tensor) and any(_distance(value, tensor) is not None for tensor in given)


def _difference(wanted: dict[str, Any], found: dict[str, Any], *, with_aliases: bool) -> str | None:
    if len(wanted) != len(found):
        return f"{len(found)} values instead of {len(wanted)}"
    for name, value in wanted.items():
        other = found[name]
        if not isinstance(value, torch.Tensor):
            if type(value) is not type(other) or value != other:
                return f"{name} is {other!r} instead of {value!r}"
        elif not isinstance(other, torch.Tensor) or (value.shape, value.dtype) != (other.shape, other.dtype):
            return f"{name} is {_described(other)} instead of {_described(value)}"
        elif not torch.allclose(value, other, rtol=1e-4, atol=1e-5, equal_nan=True):
            return f"{name} is {other.flatten().tolist()[:8]} instead of {value.flatten().tolist()[:8]}"
    return _alias_difference(wanted, found) if with_aliases else None


def _alias_difference(wanted: dict[str, Any], found: dict[str, Any]) -> str | None:
    names = [name for name, value in wanted.items() if isinstance(value, torch.Tensor) and value.numel()]
    for one, other in itertools.combinations(names, 2):
        apart, found_apart = (_distance(side[one], side[other]) for side in (wanted, found))
        if apart != found_apart:
            return f"{one} and {other} share memory {found_apart} bytes apart, and {apart} in eager (None: they do not)"
    return None


def _distance(one: torch.Tensor, other: torch.Tensor) -> int | None:
    """Bytes between the first elements of two tensors of one storage; None for different storages."""
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return None
    return other.data_ptr() - one.data_ptr()


def _described(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _seed(seed: int, device: torch.device) -> None:
    """torch.manual_seed without its bookkeeping for devices that are not here, which takes milliseconds."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def _random_state(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


# -- ways to run a program -----------------------------------------------------------------------------------------


def _options(program: Program, **options: Any) -> dict[str, Any]:
    return cgpass.options(
        splitting_ops=list(program.splitting_ops), outputs=program.outputs, lazy_capture=True, **options
    )


@contextlib.contextmanager
def _at(call: Call) -> Any:
    mode = gp.CUDAGraphMode.parse(call.mode)
    descriptor = gp.BatchDescriptor(call.rows) if mode else None
    with gp.set_forward_context(runtime_mode=mode, batch_descriptor=descriptor):
        yield


def _directly(program: Program, options: dict[str, Any], device: torch.device) -> Callable[..., Any]:
    compiled = DirectlyCompiled(program, options, device)

    def run(call: Call, module: Any, *inputs: torch.Tensor) -> Any:
        with _at(call):
            return compiled(module, *inputs)

    return run


def _through_dynamo(program: Program, options: dict[str, Any], device: torch.device) -> Callable[..., Any]:
    return _compiled_by_instance(program, backend="cgpass", options=options)


def _stock(program: Program, compiler: str) -> Callable[..., Any]:
    return _compiled_by_instance(program, backend=compiler)


def _compiled_by_instance(program: Program, **how: Any) -> Callable[..., Any]:
    torch.compiler.reset()
    compiled: dict[int, Any] = {}

    def run(call: Call, module: Any, *inputs: torch.Tensor) -> Any:
        if id(module) not in compiled:
            compiled[id(module)] = torch.compile(module, dynamic=program.dynamic, **how)
        with _at(call):
            return compiled[id(module)](*inputs)

    return run


def _graphed(program: Program, options: dict[str, Any], device: torch.device) -> Callable[..., Any]:
    torch.compiler.reset()
    fill = float("nan") if program.padding == "nan" else 0.0
    graphed: dict[int, Any] = {}
    options = {name: value for name, value in options.items() if name != "lazy_capture"}

    def run(call: Call, module: Any, *inputs: torch.Tensor) -> Any:
        if id(module) not in graphed:
            graphed[id(module)] = gp.graphed(
                module,
                _GRAPHED_SIZES,
                {"x": 0, "y": 0, "i": 0},
                padding={"x": fill, "y": fill, "i": 0},
                mode="PIECEWISE" if call.mode == "PIECEWISE" else "FULL",
                graph_bytes=1 << 20,
                **options,
            )
        return graphed[id(module)](*inputs)

    return run


_ROUTES = {"direct": _directly, "dynamo": _through_dynamo, "graphed": _graphed}


def _exact_soon() -> Any:
    """Sizes that recur have graphs of their own after few calls."""
    return mock.patch.multiple(owngraphs, CALLS_BETWEEN=0, LEAST_REPLAYS=1, SHARE_OF_TIME=1e9)


def _roomy_dynamo() -> Any:
    """Programs are called in more ways than Dynamo compiles a function by default."""
    return torch._dynamo.config.patch(recompile_limit=_RECOMPILES, accumulated_recompile_limit=_RECOMPILES)
