"""Tuning by measurement: variants of a region are timed inside graphs, and the fastest that agrees is kept.

A variant is compiled with another setting of Inductor, beside those that were kept before it. A region is tuned in the
warm-up of a capture, on the arguments of that call, once for each range of sizes; regions of one structure share what
was found.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import sympy
import torch
from torch import fx

from graphpass.compat import configuration, symbolic
from graphpass.compile.compilers import summary
from graphpass.compile.structure import sharing_of, symbols_of
from graphpass.ledger import Ledger, Reason, Row
from graphpass.progress import progress_bar
from graphpass.report.records import TUNED, UNTUNED, RegionId

SETTINGS = ("triton.enable_pdl", "coordinate_descent_tuning", "combo_kernels", "max_autotune")
"""The settings of Inductor that are tried, in this order."""

_RANGES: tuple[tuple[int, int | None], ...] = ((1, 1), (2, 8), (9, None))
_NAMES = ("1", "2 to 8", "9 and more")
_STATIC = "size 1 alone"
_NUM_REPLAYS = 1000  # that have to give equal bits
_ALLOWED_ERROR = 1.5  # as a multiple of the untuned region's
_LEAST_GAIN = 0.002  # of the time of a replay; medians of one graph differ by less
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WITHOUT_CONTENTS = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
_OUT_OF_TIME = Reason("tuning ended before all variants were tried: tune_seconds is spent", "raise tune_seconds")
_OTHER_SETTINGS = Reason(
    "not tuned: autocast, a precision or a setting of the compiler is another one than when it was compiled",
    "call the model under the settings that it was compiled under",
)
_LOADED = Reason(
    "not tuned: the process that saved the graph chose no variant for these sizes", "remove its file to tune them again"
)


@dataclass(frozen=True, slots=True, eq=False)
class SizedArtifact:
    """An artifact for a range of sizes of each of some symbols."""

    function: Callable[..., Any]
    places: tuple[tuple[int, int | None], ...]  #: (input, dimension) that has each symbol; None for a number
    bounds: tuple[tuple[int | None, int | None], ...]  #: least and greatest size of each symbol; None for any
    symbols: tuple[sympy.Basic, ...]  #: the symbols in ``guards``; a number for a range of one size
    guards: tuple[sympy.Basic, ...]  #: conditions on the sizes that the compilation added besides the ranges
    _served: dict[tuple[int, ...], bool] = field(default_factory=dict)

    def serves(self, args: Sequence[Any]) -> bool:
        """Whether the artifact is valid for arguments of these sizes; known from the second time on."""
        sizes = symbolic.sizes_at(self.places, args)
        if sizes not in self._served:
            numbers = {symbol: sympy.Integer(size) for symbol, size in zip(self.symbols, sizes, strict=True)}
            self._served[sizes] = all(
                (least is None or least <= size) and (greatest is None or size <= greatest)
                for size, (least, greatest) in zip(sizes, self.bounds, strict=True)
            ) and all(guard.xreplace(numbers) == sympy.true for guard in self.guards)
        return self._served[sizes]


class Run(Protocol):
    """A function that was captured alone."""

    #: where each replay writes the results; they are valid until another run is replayed
    results: Sequence[torch.Tensor]

    def replay(self) -> object:
        """Launch the graph."""

    def close(self) -> None:
        """Free the graph."""


class Measurement(Protocol):
    """Captures functions alone and times their replays; the capture that is warming up provides it."""

    def now(self) -> float:
        """Seconds on the clock that bounds the tuning."""

    def capture(self, name: str, body: Callable[[], Sequence[torch.Tensor]]) -> Run:
        """Call ``body`` until it has compiled, loaded and chosen all its kernels, then capture it."""

    def seconds(self, runs: Sequence[Run]) -> list[float]:
        """The device's seconds of a replay of each run: medians over rounds in which all runs take turns."""

    def close(self) -> None:
        """Free all memory; the measurement can be used again."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the regions of one callable are tuned."""

    callable: str  #: the callable's name
    ledger: Ledger
    seconds: float  #: no variant is begun that would not end within so many, by the longest of its region so far
    progress: bool | None  #: see :func:`graphpass.progress.progress_bar`
    #: (region, arguments) -> tensors that the region returns, then its written inputs, as computed in a wide type on
    #: copies of the written inputs
    reference: Callable[[Any, Sequence[Any]], Sequence[torch.Tensor]]
    compiling: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext  #: entered for variants
    chosen: Callable[[TunedRegion], None] = lambda region: None  #: called when a region has been tuned for a range


class TunedRegion:
    """The choice among the variants of one region structure, for each range of sizes.

    A saved one has the choices of the process that saved it, and makes no others. ``compile_within(bounds, sizes,
    settings=...)`` makes a variant; None if it cannot be compiled by itself.
    """

    def __init__(
        self, tuning: Tuning, region: Any, examples: Sequence[Any], compile_within: Callable[..., SizedArtifact | None]
    ) -> None:
        self._tuning: Tuning | None = tuning
        self._ledger, self._region, self._compile_within = tuning.ledger, region, compile_within
        self._id = RegionId(tuning.callable, region.name)
        shape_env = symbolic.shape_env_of(examples)
        places = symbolic.places_of(examples)
        self._symbols = {symbol: places.get(symbol) for symbol in symbols_of(examples)}
        self._bounds = {symbol: symbolic.bounds_of(shape_env, symbol) for symbol in self._symbols}
        self._settings = _ambient_settings()
        self._chosen: dict[tuple[int, ...], SizedArtifact | None] = {}  # for each range; None: the untuned artifact
        self._longest_s = 0.0  # of all variants, for any range
        self._is_readable = None not in self._symbols.values()
        if not self._is_readable:
            tuning.ledger.note(Reason("not tuned: no argument has one of its sizes"), at=str(self._id), is_problem=True)

    def __getstate__(self) -> dict[str, Any]:
        rows = [(*key, row.n, row.least_s) for key, row in self._ledger.rows(self._id, TUNED).items()]
        chosen = {ranges: made for ranges, made in self._chosen.items() if made is not None}  # guard: saved_variants
        kept = {"_id": self._id, "_symbols": self._symbols, "_is_readable": self._is_readable}
        return {**kept, "_chosen": chosen, "_rows": rows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _tuning=None)

    def load(self, callable_: str, ledger: Ledger) -> None:
        """Report the saved choices as those of ``callable_``."""
        self._id, self._ledger = replace(self._id, callable=callable_), ledger
        for sizes, settings, n, least_s in vars(self).pop("_rows"):
            ledger.rows(self._id, TUNED)[sizes, settings] = Row(n, least_s=least_s)

    def choose(self, untuned: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any]:
        """The function for a call with ``args``; ``untuned`` is the artifact that serves it without tuning."""
        if not self._chosen:
            return untuned
        chosen = self._chosen.get(self._ranges_of(args))
        return chosen.function if chosen is not None and chosen.serves(args) else untuned

    def tune(self, untuned: Callable[..., Any], args: Sequence[Any], measurement: Measurement) -> float:
        """Choose for the range of these sizes, once; returns the seconds that it took. Written inputs are restored."""
        if not self._is_readable:
            return 0.0
        ranges = self._ranges_of(args)
        if ranges in self._chosen:
            return 0.0
        if self._tuning is None:
            self._chosen[ranges] = None
            self._ledger.note(_LOADED, at=self._where(ranges))
            return 0.0
        start_s = measurement.now()
        try:
            with self._tuning.compiling():  # guard: tuned_as_compiled
                self._tune(self._tuning, ranges, untuned, args, measurement)
        finally:
            spent_s = measurement.now() - start_s
            self._ledger.tuning_s += spent_s
            self._tuning.chosen(self)  # also what an interrupt leaves
        return spent_s

    def _ranges_of(self, args: Sequence[Any]) -> tuple[int, ...]:
        sizes = symbolic.sizes_at(filter(None, self._symbols.values()), args)
        return tuple(map(_range_of, sizes))  # guard: tuned_by_range

    def _where(self, ranges: tuple[int, ...]) -> str:
        return f"{self._id} {_named(ranges)}".rstrip()

    def _tune(
        self,
        tuning: Tuning,
        ranges: tuple[int, ...],
        untuned: Callable[..., Any],
        args: Sequence[Any],
        measurement: Measurement,
    ) -> None:
        where, ledger = self._where(ranges), self._ledger
        named, spent_s = _named(ranges), ledger.tuning_s - measurement.now()
        self._chosen[ranges] = None
        if self._settings != _ambient_settings():  # guard: tuning_settings
            ledger.note(_OTHER_SETTINGS, at=where, is_problem=True)
            return
        rows, kept = ledger.rows(self._id, TUNED), dict[str, Any]()
        before = rows[named, UNTUNED]
        try:
            with contextlib.closing(_Contest(measurement, args, self._region, tuning.reference)) as contest:
                for name, settings in _tried(ranges, where, tuning.progress):
                    began_s = measurement.now()
                    left_s = tuning.seconds - spent_s - began_s
                    if left_s <= 0 or left_s < self._longest_s:  # guard: tuning_time
                        ledger.note(_OUT_OF_TIME, at=where, is_problem=True)
                        break
                    before.least_s = contest.begun(untuned)
                    try:
                        made = self._compiled(ranges, args, {**kept, **settings})
                        refused = contest.against(name, made.function)
                    except Exception as error:
                        refused = f"it failed: {summary(error)}"
                    self._longest_s = max(self._longest_s, measurement.now() - began_s)
                    if refused is not None:
                        ledger.note(Reason(f"tuned without {name}: {refused}"), at=where)
                        continue
                    kept, self._chosen[ranges] = {**kept, **settings}, made  # guard: tuning_greedy
                    for (of_ranges, _), row in rows.items():
                        row.n = 0 if of_ranges == named else row.n
                    rows[named, " + ".join(kept) or name] = Row(1, least_s=contest.best_s)
        except Exception as error:
            ledger.note(Reason(f"not tuned: {summary(error)}"), at=where, is_problem=True)
        finally:
            before.seconds += spent_s + measurement.now() - ledger.tuning_s

    def _compiled(self, ranges: tuple[int, ...], args: Sequence[Any], settings: Mapping[str, Any]) -> SizedArtifact:
        bounds = {
            symbol: _within(_RANGES[number], self._bounds[symbol])
            for symbol, number in zip(self._symbols, ranges, strict=True)
        }
        sizes = symbolic.sizes_at(filter(None, self._symbols.values()), args)
        with torch.inference_mode(False), torch.no_grad():
            made = self._compile_within(bounds, dict(zip(bounds, sizes, strict=True)), settings=settings)
        if made is None or not made.serves(args):
            raise ValueError("the region cannot be compiled for these sizes alone")
        return made


def _tried(ranges: tuple[int, ...], where: str, progress: bool | None) -> Iterator[tuple[str, dict[str, Any]]]:
    names = [_STATIC] if ranges and not any(ranges) else []
    names += configuration.settings_that_are_off(SETTINGS)
    with progress_bar(names, progress, desc=f"tuning {where}", unit="variant") as bar:
        for name in bar:
            bar.set_postfix_str(name)
            yield name, {} if name is _STATIC else {name: True}


class _Contest:
    def __init__(
        self,
        measurement: Measurement,
        args: Sequence[Any],
        region: Any,
        reference: Callable[[Any, Sequence[Any]], Sequence[torch.Tensor]],
    ) -> None:
        self._measurement, self._args, self._region, self._reference = measurement, args, region, reference
        self._written = [(args[position], args[position].clone()) for position in sorted(region.mutated_inputs)]
        self._is_defined = [*_defined_results(region.graph_module), *(True for _ in self._written)]
        self._exact: Sequence[torch.Tensor] | None = None
        self._runs: dict[str, Run] = {}  # the untuned region's and the best one
        self._copies_s = 0.0
        self.best_s = self._untuned_s = math.inf  #: seconds of a replay of the best, when it was last timed

    def begun(self, untuned: Callable[..., Any]) -> float:
        """Seconds of a replay of the untuned region, which is captured at first and is the first best."""
        if not self._runs:
            run = self._captured(UNTUNED, untuned)
            self._runs = {UNTUNED: run, "best": run}
            self._expected = self._results(run)
            if self._written:  # each replay restores the written inputs first
                copies = self._measurement.capture("copies", self._restored)
                (self._copies_s,) = self._measurement.seconds([copies])
                copies.close()
            (self._untuned_s,) = (self.best_s,) = self._seconds(run)
        return self._untuned_s

    def against(self, name: str, function: Callable[..., Any]) -> str | None:
        """Capture a variant, which becomes the best if it is faster and right; else return what is against it."""
        run = self._captured(name, function)
        try:
            refused = self._refused(run)
            if refused is None:
                run, self._runs["best"] = self._runs["best"], run
        finally:
            if run is not self._runs[UNTUNED]:
                run.close()
        return refused

    def _refused(self, run: Run) -> str | None:
        best_s, run_s, untuned_s = self._seconds(self._runs["best"], run, self._runs[UNTUNED])
        if run_s > (1 - _LEAST_GAIN) * min(best_s, untuned_s):  # guard: tuning_faster
            return "it is no faster"
        disagrees = self._disagrees(run)
        if disagrees is not None:
            return disagrees
        if not self._repeats(run):  # guard: tuning_repeats
            return f"{_NUM_REPLAYS:,} replays over equal inputs did not give equal bits"
        self.best_s, self._untuned_s = run_s, untuned_s
        return None

    def close(self) -> None:
        self._restored()
        for run in {id(run): run for run in self._runs.values()}.values():
            run.close()
        self._measurement.close()

    def _restored(self) -> list[torch.Tensor]:
        for live, saved in self._written:
            live.copy_(saved)  # guard: tuning_restores
        return [live for live, _ in self._written]

    def _captured(self, name: str, function: Callable[..., Any]) -> Run:
        def body() -> list[torch.Tensor]:
            written = self._restored()
            returned = function(*self._args)
            return [*(value for value in returned if isinstance(value, torch.Tensor)), *written]

        return self._measurement.capture(name, body)

    def _seconds(self, *runs: Run) -> list[float]:
        return [max(seconds - self._copies_s, 1e-9) for seconds in self._measurement.seconds(runs)]

    def _results(self, run: Run) -> list[torch.Tensor]:
        run.replay()
        return [result.clone() for result in run.results]

    def _disagrees(self, run: Run) -> str | None:
        found = self._results(run)
        # guard: tuning_layouts
        if _layouts(run.results, self._args) != _layouts(self._runs[UNTUNED].results, self._args):
            return "its results lie in memory in another way"
        if all(_has_equal_bits(*pair) for pair in self._defined(found, self._expected)):
            return None
        if self._exact is None:
            self._restored()  # guard: tuning_reference
            self._exact = self._reference(self._region, self._args)
        for one, expected, exact in self._defined(found, self._expected, self._exact):
            if not _is_as_right(one, expected, exact):  # guard: tuning_agrees
                return "its results are further from those in a wide type"
        return None

    def _defined(self, *results: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
        return itertools.compress(zip(*results, strict=True), self._is_defined)

    def _repeats(self, run: Run) -> bool:
        """Whether many replays over equal inputs give equal bits; dependent launches that race would not."""
        first = self._results(run)
        same = torch.ones((), dtype=torch.bool, device=first[0].device if first else None)
        for _ in range(_NUM_REPLAYS - 1):
            run.replay()
            for found, expected in self._defined(run.results, first):
                same &= (_bits(found) == _bits(expected)).all()
        return bool(same)


def _defined_results(graph_module: fx.GraphModule) -> list[bool]:
    """For each tensor that a region returns whether it has contents; an op after the region fills the others."""
    nodes: Any = graph_module.graph.output_node().args[0]
    tensors = [n for n in nodes if isinstance(n, fx.Node) and isinstance(symbolic.example_value(n), torch.Tensor)]
    # guard: tuning_contents
    return [len(node.users) > 1 or _name_of(node.target) not in _WITHOUT_CONTENTS for node in tensors]


def _name_of(target: Any) -> str:
    return str(target if isinstance(target, str) else getattr(target, "__name__", "")).partition(".")[0]


def _is_as_right(found: torch.Tensor, untuned: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether the error of ``found`` is at most 1.5 times that of ``untuned``, over the entries in which they differ.

    Equal entries do not count: beside a mask of -1e38 any error is small. Few entries of ``untuned`` may be rounded
    well by chance, so one rounding of one entry is allowed beside it.
    """
    if not found.is_floating_point() and not found.is_complex():
        wrong, allowed = ((one != exact).sum() for one in (found, untuned))
        return bool(wrong <= _ALLOWED_ERROR * allowed)
    wide, eps = torch.complex128 if found.is_complex() else torch.float64, torch.finfo(found.dtype).eps
    found, untuned, exact = (tensor.to(wide) for tensor in (found, untuned, exact))
    finite = untuned.isfinite() & exact.isfinite()
    if not _has_equal_bits(found.masked_fill(finite, 0), untuned.masked_fill(finite, 0)):
        return False
    counts = finite & (found != untuned)
    error, allowed, size = (tensor[counts].norm() for tensor in (found - exact, untuned - exact, exact))
    rounding = eps * size / math.sqrt(max(1, int(counts.sum())))
    return bool(error <= _ALLOWED_ERROR * allowed + rounding)


def _has_equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool((_bits(one) == _bits(other)).all())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor.view(_BITS[tensor.element_size()])


def _layouts(results: Sequence[torch.Tensor], args: Sequence[Any]) -> list[Any]:
    """For each result its type, its shape, its strides, and the first tensor whose memory it shares."""
    given = [value for value in args if isinstance(value, torch.Tensor)]
    shared = sharing_of((*given, *results))
    return [
        (result.dtype, result.shape, [d for d, size in zip(result.stride(), result.shape, strict=True) if size > 1], at)
        for result, at in zip(results, shared[len(given) :], strict=True)
    ]


def _ambient_settings() -> tuple[Any, ...]:
    """The settings that a compiler reads, apart from the modes in which variants are always compiled."""
    with torch.inference_mode(False), torch.no_grad():
        return configuration.settings_now()


def _range_of(size: int) -> int:
    return next(number for number, (_, most) in enumerate(_RANGES) if most is None or size <= most)


def _within(wanted: tuple[int, int | None], admitted: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    least, most = max(wanted[0], admitted[0] or 0), [bound for bound in (wanted[1], admitted[1]) if bound is not None]
    return least, min(most, default=None)


def _named(ranges: Sequence[int]) -> str:
    return ", ".join(_NAMES[number] for number in ranges)
