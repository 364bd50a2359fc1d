"""Options of encoder graphs, their budgets, and the keys that follow from these and the encoder's configuration."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from graphpass.compile import COMPILERS
from graphpass.encoder.costs import PackingCosts
from graphpass.encoder.protocol import EncoderCudaGraphConfig, EncoderGraphKey, contradiction
from graphpass.errors import EncoderConfigError, is_integer, is_seconds
from graphpass.paddedcalls import is_rule

_BITS_OF_ROUND_BUDGETS = 5
_USUAL_ITEMS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderOptions:
    """Options for capture and packing. None means: inferred from the model.

    Raises:
        EncoderConfigError: a value that is wrong for every model. The manager checks values that depend on the model.
    """

    enable: bool = True  #: False: capture no graphs and run everything eagerly
    #: output tokens of each graph. None: the finest ladder of ``max_graphs`` graphs over the model's range. From 16 to
    #: 4096 tokens, the default pads no batch by more than 12.5 %.
    token_budgets: Sequence[int] | None = None
    max_graphs: int = 50  #: maximum number of graphs of an inferred ladder. One graph takes about 0.1 s to capture.
    #: limit on the size of the graph pool; keys that would exceed it get no graph. None: no limit.
    max_pool_bytes: int | None = None
    #: maximum number of items in one replay, at most the smallest items that the largest budget holds, and at most the
    #: tokens of the smallest of ``token_budgets``. None: the model's limit, or 32. A budget has room for as many as it
    #: holds of the smallest items.
    max_items_per_batch: int | None = None
    #: maximum number of frames in one replay, for models that count frames. None: the model's limit; below the largest
    #: budget at most as many as it holds of the smallest items.
    max_frames_per_batch: int | None = None
    compile: bool | None = None  #: compile the encoder before the capture. None: compile if the model can be compiled.
    #: ``inductor``, ``aot_eager`` or ``eager``. None: ``inductor`` on a GPU, else ``aot_eager``.
    compiler: str | None = None
    #: ``measured``: time replays and eager calls after the capture and run the cheapest plan. None: pack greedily.
    #: :class:`PackingCosts`: costs for each budget, in seconds.
    costs: PackingCosts | Literal["measured"] | None = "measured"
    #: maximum output tokens of one eager call over several items. None: the largest budget.
    max_eager_tokens: int | None = None
    #: ``measure``: tune the compiled encoder when it is captured, see the option ``tune`` of the backend. None: off.
    tune: Literal["measure"] | None = None
    tune_seconds: float = 120.0  #: seconds that tuning may take
    #: a directory of saved artifacts for the compiled encoder, see the option ``warm_start`` of the backend
    warm_start: str | Path | None = None
    log_every: int = 1000  #: the statistics are logged every this many requests
    #: whether a capture shows a progress bar. None: where stderr is a terminal, unless TQDM_DISABLE is set.
    progress: bool | None = None

    def __post_init__(self) -> None:
        limits = ("max_pool_bytes", "max_items_per_batch", "max_frames_per_batch", "max_eager_tokens")
        counts = ["max_graphs", "log_every", *(name for name in limits if getattr(self, name) is not None)]
        is_valid = {
            **{name: (is_integer(getattr(self, name), at_least=1), "an integer of at least 1") for name in counts},
            "enable": (type(self.enable) is bool, "True or False"),
            "compile": (self.compile is None or type(self.compile) is bool, "True, False or None"),
            "progress": (self.progress is None or type(self.progress) is bool, "True, False or None"),
            "compiler": (self.compiler is None or self.compiler in COMPILERS, f"one of {', '.join(COMPILERS)}"),
            "tune": (self.tune in (None, "measure"), "'measure' or None"),
            "tune_seconds": (is_seconds(self.tune_seconds), "a number of seconds above 0"),
        }
        for name, (holds, expected) in is_valid.items():
            if not holds:
                raise _unusable(name, expected, getattr(self, name))
        for name in ("compiler", "tune"):
            if getattr(self, name) is not None and self.compile is False:
                raise _unusable(name, "none, since compile=False", getattr(self, name))
        if self.costs not in ("measured", None) and not isinstance(self.costs, PackingCosts):
            raise _unusable("costs", "'measured', None or PackingCosts", self.costs)
        if self.token_budgets is not None:
            budgets = checked_budgets(self.token_budgets, 1)
            _refuse_more_items(self.max_items_per_batch, budgets, 0, 1)

    def of_backend(self) -> dict[str, Any]:
        """The options of the backend that are set."""
        saved: dict[str, Any] = {} if self.warm_start is None else {"warm_start": self.warm_start}
        if self.tune is None:
            return saved
        return {**saved, "tune": self.tune, "tune_seconds": self.tune_seconds, "progress": self.progress}


def _refuse_more_items(max_items: int | None, budgets: Sequence[int], which: int, of_tokens: int) -> None:
    most = max(1, budgets[which] // of_tokens)
    if max_items is not None and max_items > most:
        raise EncoderConfigError(
            "max_items_per_batch is larger than a budget allows",
            expected=f"at most {most} items of {of_tokens} {'tokens' if of_tokens > 1 else 'token'} in "
            f"{budgets[which]} tokens",
            found=f"max_items_per_batch={max_items}, and budgets from {budgets[0]} to {budgets[-1]} tokens",
            remedy=f"lower it to {most}, or pass token_budgets that hold {max_items} items",
        )


def _unusable(name: str, expected: str, found: object) -> EncoderConfigError:
    return EncoderConfigError(
        f"option {name} has a wrong value", expected=expected, found=f"{name}={found!r}", remedy="omit the option"
    )


def checked_config(config: EncoderCudaGraphConfig) -> EncoderCudaGraphConfig:
    """``config``, if it is consistent."""
    for name in ("modalities", "buffer_keys", "paths"):
        _refuse_repeated(name, getattr(config, name))
    for axis in config.axes:
        _refuse_repeated(f"values of axis {axis.name!r}", axis.values)
        bounds = [value for value in axis.values if type(value) is int]
        if axis.rounds_up and list(axis.values) != sorted(bounds):
            raise contradiction(f"axis {axis.name!r} rounds up", "ascending integers", axis.values)
    if config.axes:
        _refuse_repeated("axes", [axis.name for axis in config.axes])
    limits = {
        name: getattr(config, name) for name in ("patches_per_token", "token_multiple", "max_frames", "max_items")
    }
    limits |= {f"output_width {index}": width for index, width in enumerate(config.output_widths)}
    for name, limit in limits.items():
        if limit is not None and limit < 1:
            raise contradiction(name, "at least 1", limit)
    for key, rule in config.padding.items():
        if key not in config.buffer_keys:
            raise contradiction(f"padding of {key!r}", f"one of the buffers {list(config.buffer_keys)}", key)
        if not (rule is None or is_rule(rule)):
            raise contradiction(f"padding of {key!r}", "a number, 'repeat', a function or None", rule)
    return config


def _refuse_repeated(name: str, values: Sequence[object]) -> None:
    if not values or len(set(values)) != len(values):
        raise contradiction(name, "at least one value, without duplicates", list(values))


def keys_of(
    options: EncoderOptions,
    config: EncoderCudaGraphConfig,
    budget_range: tuple[int, int],
    more: Collection[int] = (),
) -> tuple[EncoderGraphKey, ...]:
    """The key of every graph, the largest budget first, of the ladder and ``more`` budgets."""
    minimum, maximum = budget_range
    combinations = [
        (path, tuple(zip((axis.name for axis in config.axes), values, strict=True)))
        for path in config.paths
        for values in itertools.product(*(axis.values for axis in config.axes))
    ]
    if options.token_budgets is not None:
        budgets: Sequence[int] = checked_budgets(options.token_budgets, minimum, maximum)
    else:
        budgets = fine_budgets(
            minimum, maximum, max_graphs=options.max_graphs // len(combinations), multiple=config.token_multiple
        )
    _refuse_more_items(options.max_items_per_batch, budgets, -1, minimum)  # guard: encoder_items_clamped
    most_items = options.max_items_per_batch or config.max_items or _USUAL_ITEMS
    most_frames = options.max_frames_per_batch or config.max_frames
    if most_frames is not None and most_frames > (config.max_frames or 0):
        most = config.max_frames or "0, because the model does not count frames"
        raise _unusable("max_frames_per_batch", f"at most {most}", most_frames)
    keys = []
    for budget in sorted({*budgets, *more}, reverse=True):
        most_smallest = max(1, budget // minimum)  # as many of the smallest items fit
        # Frames of a clip may be smaller than the smallest item, so the largest budget allows all frames.
        frames = most_frames
        if most_frames is not None and options.max_frames_per_batch is None and budget != budgets[-1]:
            frames = min(most_frames, most_smallest)
        sizes = (budget, budget * config.patches_per_token, min(most_items, most_smallest), frames)
        keys += [EncoderGraphKey(*sizes, path, axes) for path, axes in combinations]
    return tuple(keys)


def generate_budgets(minimum: int, maximum: int, *, ratio: float = 2) -> list[int]:
    """A geometric ladder of budgets that includes ``minimum`` and ``maximum``, ascending.

    Args:
        minimum: the smallest budget, in output tokens.
        maximum: the largest budget.
        ratio: ratio of neighbouring budgets. Budgets are rounded down and grow by at least one token.

    Raises:
        EncoderConfigError: a bound is not positive, the minimum is above the maximum, or the ratio is not above 1.
    """
    _refuse_bounds(minimum, maximum, ratio)
    budgets = [minimum]
    while (following := max(budgets[-1] + 1, int(budgets[-1] * ratio))) < maximum:
        budgets.append(following)
    return budgets if minimum == maximum else [*budgets, maximum]


def smallest_fitting_budget(budgets: Sequence[int], tokens: int) -> int | None:
    """The smallest of the ascending ``budgets`` that is at least ``tokens``; None if all are smaller."""
    index = bisect_left(budgets, tokens)
    return budgets[index] if index < len(budgets) else None


def fine_budgets(minimum: int, maximum: int, *, max_graphs: int, multiple: int = 1) -> list[int]:
    """The ladder of at most ``max_graphs`` budgets with the least padding in the worst case, ascending.

    If there are enough, it has the largest budget divided by powers of two, and between these multiples of 1/32 of a
    power of two, because most images have round sizes.
    """
    _refuse_bounds(minimum, maximum)
    _refuse_bounds(-(-minimum // multiple), maximum // multiple)
    if max_graphs < 1:
        raise _unusable("max_graphs", "at least 1 graph for each path and axis value", max_graphs)
    minimum, maximum = -(-minimum // multiple), maximum // multiple
    if max_graphs == 1:
        return [maximum * multiple]
    stops = [maximum >> halved for halved in range(maximum.bit_length()) if maximum >> halved > minimum] + [minimum]
    if len(stops) > max_graphs:
        stops = [maximum, minimum]
    ladders = (_ladder_between(stops, steps) for steps in range(1, max_graphs + 1))
    finest = min((ladder for ladder in ladders if len(ladder) <= max_graphs), key=_worst_padding)
    return [budget * multiple for budget in finest]


def _ladder_between(stops: Sequence[int], steps: int) -> list[int]:
    """With ``steps`` geometric steps between ``stops``, which descend."""
    budgets = set(stops)
    for upper, lower in itertools.pairwise(stops):
        for step in range(1, steps):
            budget = round(lower * (upper / lower) ** (step / steps))
            unit = 1 << max(0, budget.bit_length() - 1 - _BITS_OF_ROUND_BUDGETS)
            budgets.add(min(max(lower, round(budget / unit) * unit), upper))
    return sorted(budgets)


def _worst_padding(budgets: Sequence[int]) -> float:
    """Of a batch with one token more than a smaller budget."""
    return max((1 - (smaller + 1) / larger for smaller, larger in itertools.pairwise(budgets)), default=0.0)


def checked_budgets(budgets: Sequence[int], minimum: int, maximum: int | None = None) -> tuple[int, ...]:
    """The user's ``budgets``, ascending."""
    found = list(budgets) if isinstance(budgets, Iterable) else []
    are_integers = found and all(is_integer(budget, at_least=1) for budget in found)
    if not are_integers or len(set(found)) < len(found):
        raise _unusable("token_budgets", "positive integers, each once", budgets)
    if max(found) < minimum or (maximum is not None and max(found) > maximum):
        expected = f"a largest budget from {minimum}, the smallest item, to {maximum}, the largest batch (max_tokens)"
        raise _unusable("token_budgets", expected, max(found))
    return tuple(sorted(found))


def _refuse_bounds(minimum: int, maximum: int, ratio: float = 2) -> None:
    if not (1 <= minimum <= maximum and 1 < ratio < math.inf):
        raise EncoderConfigError(
            "there are no budgets between these bounds",
            expected="1 <= minimum <= maximum, and a finite ratio above 1",
            found=f"minimum={minimum}, maximum={maximum}, ratio={ratio!r}",
            remedy="pass the output tokens of the smallest item and of the largest batch, and omit ratio for 2",
        )
