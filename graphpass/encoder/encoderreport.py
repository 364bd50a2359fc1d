"""The figures of an encoder's report: budgets, items that ran eagerly, and what the captures cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from graphpass.capture.runtime import GraphRuntime
from graphpass.capture.runtimereport import figures_of
from graphpass.encoder.stats import EncoderStats
from graphpass.ladder.estimate import MemoryGrowth
from graphpass.ladder.traffic import Traffic
from graphpass.ledger import Reason
from graphpass.report import Costs, GroupCost, KeyUse, Problem, SizeTraffic, UncapturedCalls
from graphpass.report.figures import ReportFigures

__all__ = ["encoder_figures"]


def encoder_figures(
    stats: EncoderStats, compiled: GraphRuntime, graphs: GraphRuntime | None, subject: str, *, is_enabled: bool
) -> ReportFigures:
    """The figures of an encoder.

    Args:
        stats: the manager's statistics.
        compiled: the runtime of the compiled encoder.
        graphs: the runtime of the captured graphs; None before the capture.
        subject: the encoder's name.
        is_enabled: whether the options ask for graphs.
    """
    figures = figures_of(compiled, subject)
    captured = None if graphs is None else figures_of(graphs, subject)
    notes = () if captured is None else captured.problems
    budgets = tuple(sorted({budget.captured.descriptor.num_tokens for budget in stats.budgets}))
    sizes = SizeTraffic("tokens", "token_budgets", stats.histogram, budgets, at_least=budgets[-1] if budgets else 0)
    return replace(
        figures,
        problems=(*figures.problems, *notes, *_problems(stats)),
        keys=tuple(map(_key_use, stats.budgets)),
        uncaptured=_eager(stats, is_enabled),
        traffic=(sizes,) if stats.histogram else (),
        costs=_costs(stats, figures.costs, None if captured is None else captured.costs),
    )


def _problems(stats: EncoderStats) -> Iterator[Problem]:
    keys: dict[Reason, list[str]] = {}
    for key, reason in stats.failed:
        keys.setdefault(reason, []).append(f"tokens={key.tokens}")
    for reason, budgets in keys.items():
        yield Problem("not captured", str(reason), tuple(budgets), remedy=reason.remedy)
    for setting, requests in stats.other_settings.items():
        what = f"{setting} changed since the capture, so requests ran eagerly"
        yield Problem("no graph", what, times=requests, remedy="call clear() and capture() under the new setting")


def _eager(stats: EncoderStats, is_enabled: bool) -> tuple[UncapturedCalls, ...]:
    if not stats.eager_calls:
        return ()
    if not is_enabled:
        return (UncapturedCalls("encoder", "enable=False", stats.eager_calls, is_expected=True),)
    if not stats.budgets:
        return (UncapturedCalls("encoder", "nothing is captured", stats.eager_calls, remedy="call capture()"),)
    why = "an eager call was cheaper, or no budget holds the item"
    return (UncapturedCalls("encoder", why, stats.eager_calls, is_expected=True),)


def _key_use(budget: Traffic) -> KeyUse:
    captured = budget.captured
    key = captured.descriptor
    return KeyUse(
        graph="encoder",
        mode=str(captured.mode),
        sizes={
            "tokens": key.num_tokens,
            "items": key.num_reqs,
            **{name: value if isinstance(value, (int, float, str)) else str(value) for name, value in key.extra},
        },
        graphs=1,
        calls=budget.replays,
        replays=budget.replays,
        real=budget.real_tokens,
        padded=budget.padded_tokens,
        capture_s=captured.seconds,
        pool_bytes=captured.pool_bytes,
    )


def _costs(stats: EncoderStats, compiled: Costs, captured: Costs | None) -> Costs:
    memory = MemoryGrowth.sum_of(budget.captured.memory for budget in stats.budgets)
    seconds = sum(budget.captured.seconds for budget in stats.budgets)
    sums = (memory.pool_bytes, memory.cached_bytes, memory.driver_bytes)
    return replace(
        compiled,
        graphs=len(stats.budgets),
        capture_s=seconds,
        pool_bytes=stats.pool_bytes,
        buffer_bytes=stats.buffer_bytes,
        replays=stats.replays,
        saved_s=None if captured is None else captured.saved_s,
        groups=(GroupCost("encoder", len(stats.budgets), seconds, *sums),) if stats.budgets else (),
    )
