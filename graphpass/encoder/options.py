"""Options of encoder graphs, and the keys that follow from the options and the encoder's configuration."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from graphpass.checks import is_integer
from graphpass.compile import COMPILERS
from graphpass.encoder.budgets import checked_budgets, fine_budgets
from graphpass.encoder.planner import PackingCosts
from graphpass.encoder.protocol import EncoderCudaGraphConfig, EncoderGraphKey
from graphpass.errors import EncoderConfigError
from graphpass.padrules import is_rule

__all__ = ["EncoderOptions", "checked_config", "keys_of"]

_USUAL_ITEMS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderOptions:
    """Options for capture and packing. None means: inferred from the model.

    Attributes:
        enable: False: capture no graphs and run everything eagerly.
        token_budgets: output tokens of each graph. None: the finest ladder of ``max_graphs`` graphs over the model's
            range. From 16 to 4096 tokens, the default pads no batch by more than 12.5 %.
        max_graphs: maximum number of graphs of an inferred ladder. One graph takes about 0.1 s to capture.
        max_pool_bytes: limit on the size of the graph pool; keys that would exceed it get no graph. None: no limit.
        max_items_per_batch: maximum number of items in one replay, at most the smallest items that the largest budget
            holds, and at most the tokens of the smallest of ``token_budgets``. None: the model's limit, or 32. Each
            budget has room for at most as many items as it holds of the smallest items.
        max_frames_per_batch: maximum number of frames in one replay, for models that count frames. None: the model's
            limit; below the largest budget also at most as many frames as the budget has room for smallest items.
        compile: compile the encoder before the capture. None: compile if the model can be compiled.
        compiler: ``inductor``, ``aot_eager`` or ``eager``. None: ``inductor`` on a GPU, else ``aot_eager``.
        costs: ``measured``: time replays and eager calls after the capture and run the cheapest plan. None: pack
            greedily. :class:`PackingCosts`: costs for each budget, in seconds.
        max_eager_tokens: maximum output tokens of one eager call over several items. None: the largest budget.
        log_every: the statistics are logged every this many requests.
        progress: whether a capture shows a progress bar. None: where stderr is a terminal, unless TQDM_DISABLE is set.

    Raises:
        EncoderConfigError: a value that is wrong for every model. The manager checks values that depend on the model.
    """

    enable: bool = True
    token_budgets: Sequence[int] | None = None
    max_graphs: int = 50
    max_pool_bytes: int | None = None
    max_items_per_batch: int | None = None
    max_frames_per_batch: int | None = None
    compile: bool | None = None
    compiler: str | None = None
    costs: PackingCosts | Literal["measured"] | None = "measured"
    max_eager_tokens: int | None = None
    log_every: int = 1000
    progress: bool | None = None

    def __post_init__(self) -> None:
        for name in ("max_pool_bytes", "max_items_per_batch", "max_frames_per_batch", "max_eager_tokens"):
            if getattr(self, name) is not None:
                self._refuse_below_one(name)
        self._refuse_below_one("max_graphs")
        self._refuse_below_one("log_every")
        if type(self.enable) is not bool:
            raise _unusable("enable", "True or False", self.enable)
        if not (self.compile is None or type(self.compile) is bool):
            raise _unusable("compile", "True, False or None", self.compile)
        if not (self.progress is None or type(self.progress) is bool):
            raise _unusable("progress", "True, False or None", self.progress)
        if self.compiler is not None and self.compiler not in COMPILERS:
            raise _unusable("compiler", f"one of {', '.join(COMPILERS)}", self.compiler)
        if self.compiler is not None and self.compile is False:
            raise _unusable("compiler", "none, since compile=False", self.compiler)
        if self.costs not in ("measured", None) and not isinstance(self.costs, PackingCosts):
            raise _unusable("costs", "'measured', None or PackingCosts", self.costs)
        if self.token_budgets is not None:
            budgets = checked_budgets(self.token_budgets, 1)
            _refuse_more_items(self.max_items_per_batch, budgets, 0, 1)

    def _refuse_below_one(self, name: str) -> None:
        value = getattr(self, name)
        if not is_integer(value, at_least=1):
            raise _unusable(name, "an integer of at least 1", value)


def _refuse_more_items(max_items: int | None, budgets: Sequence[int], which: int, of_tokens: int) -> None:
    """Refuse a user's ``max_items`` above the number of items of ``of_tokens`` tokens that ``budgets[which]`` holds."""
    most = max(1, budgets[which] // of_tokens)
    if max_items is not None and max_items > most:
        raise EncoderConfigError(
            f"max_items_per_batch is larger than the {'smallest' if which == 0 else 'largest'} budget",
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
    """Return ``config`` if it is consistent.

    Raises:
        EncoderConfigError: a list is empty or has duplicates, a count is not positive, a padding rule names an unknown
            buffer, or the values of an axis that rounds up are not ascending integers.
    """
    for name in ("modalities", "buffer_keys", "paths"):
        _refuse_repeated(name, getattr(config, name))
    for axis in config.axes:
        _refuse_repeated(f"values of axis {axis.name!r}", axis.values)
        if axis.rounds_up and not (
            all(type(v) is int for v in axis.values) and list(axis.values) == _sorted(axis.values)
        ):
            raise _contradiction(f"axis {axis.name!r} rounds up", "ascending integers", axis.values)
    if config.axes:
        _refuse_repeated("axes", [axis.name for axis in config.axes])
    counts: dict[str, int | None] = {
        name: getattr(config, name) for name in ("patches_per_token", "token_multiple", "max_frames", "max_items")
    }
    counts |= {f"output_width {index}": width for index, width in enumerate(config.output_widths)}
    for name, count in counts.items():
        if count is not None and count < 1:
            raise _contradiction(name, "at least 1", count)
    unknown = sorted(set(config.padding) - set(config.buffer_keys))
    if unknown:
        raise _contradiction(f"padding of {unknown[0]!r}", f"one of the buffers {list(config.buffer_keys)}", unknown[0])
    for key, rule in config.padding.items():
        if not (rule is None or is_rule(rule)):
            raise _contradiction(f"padding of {key!r}", "a number, 'repeat', a function or None", rule)
    return config


def _sorted(values: Sequence[object]) -> list[object]:
    return sorted(values)  # type: ignore[type-var]  # integers: checked by the caller


def _refuse_repeated(name: str, values: Sequence[object]) -> None:
    if not values or len(set(values)) != len(values):
        raise _contradiction(name, "at least one value, without duplicates", list(values))


def _contradiction(name: str, expected: str, found: object) -> EncoderConfigError:
    return EncoderConfigError(
        f"the encoder's configuration is wrong: {name}",
        expected=expected,
        found=repr(found),
        remedy="correct what get_encoder_cudagraph_config returns",
    )


def keys_of(
    options: EncoderOptions, config: EncoderCudaGraphConfig, budget_range: tuple[int, int]
) -> tuple[EncoderGraphKey, ...]:
    """The key of every graph, the largest budget first.

    Args:
        options: validated.
        config: validated.
        budget_range: output tokens of the smallest item, and of the largest batch for which a graph is worthwhile.

    Raises:
        EncoderConfigError: an option contradicts the model.
    """
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
    most_frames = _frames_of(options, config)
    keys = []
    for budget in reversed(budgets):
        most_smallest = max(1, budget // minimum)  # as many of the smallest items fit
        # Frames of a clip may be smaller than the smallest item, so the largest budget allows all frames.
        frames = most_frames
        if most_frames is not None and options.max_frames_per_batch is None and budget != budgets[-1]:
            frames = min(most_frames, most_smallest)
        sizes = (budget, budget * config.patches_per_token, min(most_items, most_smallest), frames)
        keys += [EncoderGraphKey(*sizes, path, axes) for path, axes in combinations]
    return tuple(keys)


def _frames_of(options: EncoderOptions, config: EncoderCudaGraphConfig) -> int | None:
    max_frames = options.max_frames_per_batch
    if max_frames is None:
        return config.max_frames
    if config.max_frames is None or max_frames > config.max_frames:
        raise EncoderConfigError(
            "max_frames_per_batch is not possible with this model",
            expected="None, because the model does not count frames"
            if config.max_frames is None
            else f"at most {config.max_frames}",
            found=f"max_frames_per_batch={max_frames}",
            remedy="omit the option",
        )
    return max_frames
