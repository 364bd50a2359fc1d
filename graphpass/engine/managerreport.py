"""The figures of a manager's report: its keys, the batches without a graph, and what the captures cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from graphpass.capture.records import RegionUse
from graphpass.capture.runtime import GraphRuntime
from graphpass.capture.runtimereport import captured_sizes, figures_of, key_sizes
from graphpass.dispatch.keys import DispatchReason
from graphpass.engine.stats import ManagerStats
from graphpass.report import GroupCost, KeyUse, Problem, SizeTraffic, UncapturedCalls
from graphpass.report.figures import ReportFigures

__all__ = ["manager_figures"]


def manager_figures(stats: ManagerStats, runtime: GraphRuntime, subject: str) -> ReportFigures:
    """The figures of the runtime, with the keys, batches and captures that the manager counted.

    Args:
        stats: the manager's statistics.
        runtime: its runtime.
        subject: the model's name.
    """
    figures, uses = figures_of(runtime, subject), runtime.uses()
    keys = tuple(_key_uses(stats, uses))
    sizes = SizeTraffic("num_tokens", "capture_sizes", stats.histogram, captured_sizes(keys, "num_tokens"))
    return replace(
        figures,
        problems=(*figures.problems, *_left_out(stats)),
        keys=keys,
        uncaptured=tuple(
            UncapturedCalls("steps", reason.explanation, batches, reason in _EXPECTED, reason.remedy)
            for reason, batches in stats.fallbacks.items()
        ),
        traffic=(sizes,) if stats.histogram else (),
        costs=replace(
            figures.costs,
            capture_s=sum(group.seconds for group in stats.groups),
            buffer_bytes=stats.buffer_bytes,
            groups=tuple(
                GroupCost(
                    group.name,
                    group.num_keys,
                    group.seconds,
                    group.memory.pool_bytes,
                    group.memory.cached_bytes,
                    group.memory.driver_bytes,
                )
                for group in stats.groups
            ),
        ),
    )


_EXPECTED = (DispatchReason.EMPTY, DispatchReason.DISABLED)  # nothing to run, and as the user asked


def _left_out(stats: ManagerStats) -> Iterator[Problem]:
    if stats.left_out:
        places = tuple(f"{mode} {key}" for mode, key in stats.left_out)
        remedy = "raise max_bytes, or leave sizes out of capture_sizes"
        yield Problem("not captured", "the graph pool would exceed max_bytes", places, remedy=remedy)


def _key_uses(stats: ManagerStats, uses: Sequence[RegionUse]) -> Iterator[KeyUse]:
    for key in stats.keys:
        captured = key.captured
        of_key = [use.counts for use in uses if (use.mode, use.key) == captured.key]
        sizes = key_sizes(captured.descriptor)
        yield KeyUse(
            graph="decode" if sizes.pop("uniform", None) is not None else "mixed",
            mode=str(captured.mode),
            sizes=sizes,
            graphs=sum(counts.captured for counts in of_key),
            calls=key.replays,
            replays=sum(counts.replayed for counts in of_key),
            copied=sum(counts.copied for counts in of_key),
            real=key.real_tokens,
            padded=key.padded_tokens,
            capture_s=captured.seconds,
            pool_bytes=captured.pool_bytes,
        )
