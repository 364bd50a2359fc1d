"""The options of the backend, validated by their constructor, and the reaction that ``on_fallback`` selects."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from graphpass.capture import CapturePolicy
from graphpass.capture.runtime import GraphRuntime
from graphpass.compile import COMPILERS
from graphpass.errors import CaptureError, OptionError, is_integer, is_seconds, one_of
from graphpass.keys import CUDAGraphMode
from graphpass.ledger import UNCOMPILED, Reason
from graphpass.paddedcalls import PadRule, checked_rule
from graphpass.saved.files import SavedFiles
from graphpass.saved.fingerprint import Parts, text_of

_NO_GRAPH = Reason(
    "a call reached no graph: Dynamo found nothing to compile, or was off",
    "take torch.compiler.disable() off the call and the forward, unset TORCHDYNAMO_DISABLE, and set "
    "torch._dynamo.config.allow_rnn = True for LSTM and GRU, of padded sequences, not packed ones; what computes "
    "nothing on tensors has no graph",
)
NEVER = "never"
"""The value of ``padding`` with which no size is padded."""

DynamicDims = Mapping[str, Mapping[int, str]]


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of ``torch.compile(model, backend="cgpass", options=...)``."""

    #: the mode of the callable or its name: a runtime mode, or a pair. By default ``FULL_AND_PIECEWISE``. Of a pair,
    #: calls without a forward context use only the second mode if ``splitting_ops`` are passed.
    mode: CUDAGraphMode | None = None
    #: operations, functions and module classes that run eagerly between captured regions; a ``FULL`` graph, which a
    #: forward context or ``mode="FULL"`` asks for, holds them
    splitting_ops: tuple[str | Callable[..., Any], ...] = ()
    #: padded sizes to capture: a list, or {key field: list}. By default 1, 2, 3, 4, 6, 8, 12, 16, 24, ... up to the
    #: sizes seen.
    capture_sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    #: the sizes that differ from call to call: {input: dimension}, or {input: {dimension: key field}}; a name that no
    #: input has is a warning
    dynamic_dims: DynamicDims = field(default_factory=dict)
    #: the compiler for captured regions: ``inductor``, ``aot_eager``, or ``eager``, which makes no padding neutral
    compiler: str = "inductor"
    #: sizes that are each compiled separately: a list, or {key field: list} of one field
    compile_sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    #: ranges of sizes that are each compiled separately: (least, greatest) pairs, or {key field: pairs} of the same
    #: field
    compile_ranges: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    #: how wrappers return outputs, when they capture, and how they treat moved inputs
    policy: CapturePolicy = field(default_factory=CapturePolicy)
    #: the reaction if a call should replay a graph but cannot: ``warn`` once for each reason, ``error``, ``silent``. It
    #: applies above the largest capture size, where a call compiles after ``capture()`` or ``precapture``, and at
    #: Dynamo's recompile limit of a graphed model or a manager (``torch.compile`` does not ask graphpass there); not
    #: under autograd.
    on_fallback: Literal["warn", "error", "silent"] = "warn"
    #: the choice of a graph for calls without a forward context. ``auto``: the callable chooses. ``context``: such
    #: calls run without graphs. By default ``context`` if ``runtime`` is set, else ``auto``.
    dispatch: Literal["auto", "context"] | None = None
    #: {input: what fills its padding}: a number, a function ``f(real, padded_shape)`` that returns the padded tensor,
    #: or ``repeat``, the last real slice, as for all other inputs. ``never``: no size is padded.
    padding: Mapping[str, PadRule] = field(default_factory=dict)
    #: whether sizes are padded; passed as ``padding="never"``
    pads: bool = True
    #: ``prove``: a size whose padding is not proved harmless runs unpadded, with a warning. ``strict``: such a size is
    #: an error if it is declared, and so is a call without a graph.
    padding_check: Literal["prove", "strict"] = "prove"
    #: ``measure``: at a capture on a GPU, compile each distinct region in variants of Inductor's settings, time them in
    #: CUDA graphs, and keep the fastest one that agrees with the untuned region, for each range of sizes: 1, 2 to 8, 9
    #: and more. Without a GPU, and for another compiler, it changes nothing. None: off.
    tune: Literal["measure"] | None = None
    #: seconds that tuning may take in a runtime; a variant that has been begun is finished
    tune_seconds: float = 120.0
    #: ``lockstep``: every rank makes the same calls in the same order, as with tensor parallelism. Then a graph with
    #: collectives gets keys, padding and captures as others do, chosen by the calls and their sizes alone. None: only a
    #: forward context chooses such a graph.
    ranks: Literal["lockstep"] | None = None
    max_graphs: int = 64  #: the maximum number of keys that a callable captures besides those of ``capture_sizes``
    #: the most bytes, on a device and in this process, of graphs for sizes that recur although padding serves them; 0:
    #: none, so that equal calls have equal bits for ever. By default 1 % of the device's memory, at least 64 MiB, and
    #: none beside ``capture_sizes``.
    graph_bytes: int | None = None
    #: captures show a progress bar; by default where stderr is a terminal and TQDM_DISABLE is not set
    progress: bool | None = None
    #: a directory of saved artifacts, which is trusted like code: what is compiled is saved there, and loaded where an
    #: equal model starts again
    warm_start: Path | None = None
    dump_dir: Path | None = None  #: a directory for the text of partitions, one file for each graph
    #: the ``GraphRuntime`` that owns memory pool, graphs and statistics; by default each ``torch.compile`` creates one
    runtime: GraphRuntime | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> Settings:
        """Validate a user's options."""
        options = dict(options or {})
        pads = options.get("padding") != NEVER
        if not pads:
            del options["padding"]
        known = _names()
        for name in options:
            one_of(name, known, f"unknown option {name!r}", remedy="leave it out")
        policy = CapturePolicy(**{name: options.pop(name) for name in _POLICY_NAMES if name in options})
        parsed = {name: _PARSERS[name](value) if name in _PARSERS else value for name, value in options.items()}
        return cls(policy=policy, pads=pads, **parsed)

    def __post_init__(self) -> None:
        for name, known in _VALUES.items():
            one_of(getattr(self, name), known, _problem(name), remedy=_SEE_OPTIONS)
        if self.graph_bytes is not None and not is_integer(self.graph_bytes, at_least=0):
            raise _bad_value("graph_bytes", "bytes, an integer of at least 0, or None", self.graph_bytes)
        if not is_integer(self.max_graphs, at_least=0):
            raise _bad_value("max_graphs", "an integer of at least 0", self.max_graphs)
        if not is_seconds(self.tune_seconds):
            raise _bad_value("tune_seconds", "a number of seconds above 0", self.tune_seconds)
        if self.ranks is not None and self.tune is not None:  # guard: lockstep_untuned
            raise _bad_value("tune", "None beside ranks='lockstep': each rank would keep another variant", self.tune)
        if self.runtime is not None and not isinstance(self.runtime, GraphRuntime):
            raise _bad_value("runtime", "a graphpass.GraphRuntime or None", self.runtime)
        if len({*self.compile_sizes, *self.compile_ranges}) > 1:
            fields = sorted({*self.compile_sizes, *self.compile_ranges})
            raise _bad_value("compile_sizes", "one key field in compile_sizes and compile_ranges", fields)
        named = {field for dims in self.dynamic_dims.values() for field in dims.values()}
        for option in ("capture_sizes", "compile_sizes", "compile_ranges") if named else ():
            for name in getattr(self, option):
                if "[" not in name and name != "num_tokens":  # input_ids[0] is a dimension that has no name
                    problem = f"{option} has a key field that no dimension in dynamic_dims has"
                    one_of(name, sorted(named), problem, remedy="name the dimension in dynamic_dims, too")

    def with_names(self, aliases: Mapping[str, str]) -> Settings:
        """These options with the inputs under the names that a graph has for them."""
        if aliases.keys().isdisjoint({*self.dynamic_dims, *self.padding}):
            return self
        return replace(
            self,
            dynamic_dims={aliases.get(name, name): dims for name, dims in self.dynamic_dims.items()},
            padding={aliases.get(name, name): rule for name, rule in self.padding.items()},
        )

    def parts(self) -> Parts:
        """The options on which what is compiled may depend."""
        return {
            f"option {f.name}": text_of(getattr(self, f.name)) for f in fields(self) if f.name not in _OF_THE_PROCESS
        }

    def makes_padding(self) -> bool:
        """Whether padding is made neutral where no proof says that it is; a compiler without an AOT step cannot."""
        return self.pads and self.dispatches_itself() and self.compiler != "eager"

    def dispatches_itself(self) -> bool:
        """Whether the callable chooses a graph for calls without a forward context."""
        return self.dispatch == "auto" or (self.dispatch is None and self.runtime is None)

    def size_ranges(self) -> tuple[str, tuple[tuple[int, int], ...]] | None:
        """The key field with separate artifacts and its ranges, single sizes first; None if there is no such field."""
        for name in (*self.compile_sizes, *self.compile_ranges):
            single = tuple((size, size) for size in self.compile_sizes.get(name, ()))
            return name, single + self.compile_ranges.get(name, ())
        return None

    def runtime_modes(self) -> frozenset[CUDAGraphMode]:
        """The runtime modes that a forward context may have for a callable with these settings."""
        mode = CUDAGraphMode.FULL_AND_PIECEWISE if self.mode is None else self.mode
        return frozenset({mode.decode_mode(), mode.mixed_mode()}) - {CUDAGraphMode.NONE}

    def undirected_modes(self) -> frozenset[CUDAGraphMode]:
        """The runtime modes of calls without a forward context: those of a pair hold no splitting ops."""
        mode = CUDAGraphMode.FULL_AND_PIECEWISE if self.mode is None else self.mode
        if self.splitting_ops and mode.separate_routine():  # guard: listed_ops_run_in_each_call
            return frozenset({mode.mixed_mode()}) - {CUDAGraphMode.NONE}
        return self.runtime_modes()


def options(**values: Any) -> dict[str, Any]:
    """Validate the backend's options now instead of at the first compile, and return them as a dict.

    They are the fields of ``graphpass.options.Settings`` and ``graphpass.capture.CapturePolicy``.

    Raises:
        OptionError: an unknown name or an invalid value.
    """
    Settings.of(values)
    return values


class Fallbacks:
    """Reports fallbacks as ``on_fallback`` says: each in the report, the first of each reason as a WARNING."""

    def __init__(self, runtime: GraphRuntime, on_fallback: Literal["warn", "error", "silent"]) -> None:
        self._runtime = runtime
        self._on_fallback = on_fallback

    def report(
        self, text: str, *, expected: str, found: str, remedy: str, at: str = "", is_recorded: bool = False
    ) -> None:
        """Report one fallback as the option says."""
        if self._on_fallback == "error":
            raise CaptureError(f"{text}, and on_fallback is 'error'", expected=expected, found=found, remedy=remedy)
        is_silent = self._on_fallback == "silent"
        self._runtime.warn(text, remedy, at=at, is_silent=is_silent, is_recorded=is_recorded)

    def report_uncompiled(self, seen: Callable[[], tuple[bool, list[Reason]]]) -> bool:
        """Count and report what Dynamo ran as it is in a call; returns whether the call has entered a graph at all."""
        has_entered, reasons = seen()
        for reason in reasons or [_NO_GRAPH] * (not has_entered):
            self._runtime.ledger.without_graph(UNCOMPILED, reason).count_call(reason)
        if not reasons and not has_entered:
            self._runtime.warn(_NO_GRAPH.why, _NO_GRAPH.remedy, is_recorded=True)
        for reason in reasons:
            self.report(
                f"no graph: {reason}",
                expected="functions that Dynamo traces, and at most torch._dynamo.config.recompile_limit times each",
                found=str(reason),
                remedy=reason.remedy,
                is_recorded=True,
            )
        return has_entered

    def report_late(self, found: str, name: str = "") -> None:
        """Report that a call compiles, although its model was captured ahead; ``name`` is that of the new callable."""
        found = found or "a call of another kind"
        self.report(
            "a call compiles while the model serves: it is of a kind that was not captured ahead",
            expected="calls of the kinds that were captured ahead",
            found=found,
            remedy="add its sizes to capture_sizes, or capture ahead with an example of its kind",
            at=f"{name}, {found}".removeprefix(", "),
        )

    def report_never_full(self, reason: Reason) -> None:
        """Report that ``FULL`` was requested for a model that cannot be captured as a whole."""
        self.report(
            f"FULL is not possible, PIECEWISE instead: {reason}",
            expected="a model that can be captured as a whole, or mode='PIECEWISE'",
            found=str(reason),
            remedy=f"{reason.remedy}, or set mode='PIECEWISE' (in a manager's dispatcher)".removeprefix(", or "),
        )


def _names() -> list[str]:
    return sorted({f.name for f in fields(Settings)} - {"policy", "pads"} | set(_POLICY_NAMES))


def _bad_value(name: str, expected: str, found: Any) -> OptionError:
    return OptionError(_problem(name), expected=expected, found=repr(found), remedy=_SEE_OPTIONS)


def _problem(name: str) -> str:
    return f"option {name} cannot be used"


def _splitting_ops(value: Any) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _bad_value("splitting_ops", "a list of op names, op objects or callables", value)
    return tuple(value)


def _sizes(option: str, value: Any) -> dict[str, tuple[int, ...]]:
    ladders = _lists_by_field(option, "a list of sizes, or {key field: list of sizes}", value)
    for name, sizes in ladders.items():
        if not all(map(_is_size, sizes)):
            raise _bad_value(option, f"integers of at least 1 for {name}", value)
    return {name: tuple(sorted(set(sizes))) for name, sizes in ladders.items()}


def _compile_ranges(value: Any) -> dict[str, tuple[tuple[int, int], ...]]:
    expected = "a list of pairs (least, greatest), both included, that do not overlap"
    ranges = {}
    for name, of_field in _lists_by_field("compile_ranges", expected, value).items():
        if not all(isinstance(pair, Sequence) and len(pair) == 2 and all(map(_is_size, pair)) for pair in of_field):
            raise _bad_value("compile_ranges", expected, value)
        pairs = sorted((least, greatest) for least, greatest in of_field)
        overlapping = any(one[1] >= following[0] for one, following in itertools.pairwise(pairs))
        if overlapping or any(least > greatest for least, greatest in pairs):
            raise _bad_value("compile_ranges", expected, value)
        ranges[name] = tuple(pairs)
    return ranges


def _lists_by_field(option: str, expected: str, value: Any) -> dict[str, Sequence[Any]]:
    given = value if isinstance(value, Mapping) else {"num_tokens": value}
    by_field = {str(name): of_field for name, of_field in given.items()}
    for of_field in by_field.values():
        if isinstance(of_field, (str, Mapping)) or not isinstance(of_field, Sequence) or not of_field:
            raise _bad_value(option, expected, value)
    return by_field


def _is_size(value: Any) -> bool:
    return is_integer(value, at_least=1)


def _dynamic_dims(value: Any) -> dict[str, dict[int, str]]:
    if not isinstance(value, Mapping):
        raise _bad_value("dynamic_dims", "{input: dimension} or {input: {dimension: key field}}", value)
    dims = {}
    for name, dims_of_input in value.items():
        of_input = {dims_of_input: "num_tokens"} if isinstance(dims_of_input, int) else dims_of_input
        if not isinstance(of_input, Mapping) or not all(
            isinstance(dim, int) and isinstance(key_field, str) for dim, key_field in of_input.items()
        ):
            raise _bad_value("dynamic_dims", "{input: dimension} or {input: {dimension: key field}}", value)
        dims[str(name)] = dict(of_input)
    return dims


def _folder(name: str, value: Any) -> Any:
    if value is not None and not isinstance(value, (str, os.PathLike)):
        raise _bad_value(name, "a path", value)
    return None if value is None else Path(value)


def _padding(value: Any) -> dict[str, PadRule]:
    if not isinstance(value, Mapping):
        raise _bad_value("padding", "{input: a number, 'repeat' or a function}, or 'never'", value)
    return {str(name): checked_rule(str(name), rule) for name, rule in value.items()}


_OF_THE_PROCESS = frozenset({"runtime", "warm_start", "progress", "dump_dir"})
_SEE_OPTIONS = "see docs/options.md, which lists the options and their values"
_VALUES: Mapping[str, tuple[object, ...]] = {
    "compiler": COMPILERS,
    "on_fallback": ("warn", "error", "silent"),
    "dispatch": ("auto", "context", None),
    "padding_check": ("prove", "strict"),
    "progress": (None, False, True),
    "tune": (None, "measure"),
    "ranks": (None, "lockstep"),
}
_POLICY_NAMES = tuple(f.name for f in fields(CapturePolicy))
_PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "mode": lambda value: None if value is None else CUDAGraphMode.parse(value),
    "splitting_ops": _splitting_ops,
    "capture_sizes": partial(_sizes, "capture_sizes"),
    "compile_sizes": partial(_sizes, "compile_sizes"),
    "compile_ranges": _compile_ranges,
    "dynamic_dims": _dynamic_dims,
    "padding": _padding,
    "dump_dir": partial(_folder, "dump_dir"),
    "warm_start": lambda value: None if value is None else SavedFiles(_folder("warm_start", value)).path,
}
