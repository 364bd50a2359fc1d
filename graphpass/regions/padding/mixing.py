"""Whether the entries of a packed batch (tokens, requests) are independent of each other in a partitioned graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import sympy

from graphpass.regions.padding.compose import PartitionRun, RegionGraph
from graphpass.regions.padding.interpreter import Interpretation
from graphpass.regions.padding.proof import findings_of_results
from graphpass.regions.padding.sizes import Sizes
from graphpass.regions.padding.values import PaddedValue, PaddingFinding
from graphpass.regions.split import Partition

__all__ = ["mixing_of"]

_RANDOM = "random numbers"


def mixing_of(
    parts: Partition,
    graphs: Mapping[str, RegionGraph],
    symbols: Mapping[sympy.Symbol, str],
    trusted: Collection[str] = (),
) -> tuple[PaddingFinding, ...]:
    """The operators through which an entry along a size depends on other entries along it, or on their number.

    Stricter than a proof of padding: any entries may be the real ones, not only the first, so causal order, masks,
    windows and zero padding do not help. An output without that size may contain entries selected by data, such as the
    logits of each request's last token. The index of an entry depends on the entries before it, so it may only select
    that same entry. Random numbers depend on how many are drawn, but do not count as dependence.

    Args:
        parts: the partition.
        graphs: region name -> its aten graph, for captured and eager regions.
        symbols: the symbols of one key field -> that field.
        trusted: qualified names of operators that do not mix entries, even if their rule says so.

    Returns:
        One finding for each operator and line; empty if all entries are independent.
    """
    trusted = frozenset(trusted)
    # guard: manager_mixing_counts
    findings = [*_mixed(parts, graphs, symbols, trusted), *_counted(parts, graphs, symbols, trusted)]
    first: dict[tuple[str, str], PaddingFinding] = {}
    for finding in findings:
        first.setdefault((finding.op, finding.where), finding)
    return tuple(first.values())


def _mixed(
    parts: Partition, graphs: Mapping[str, RegionGraph], symbols: Mapping[sympy.Symbol, str], trusted: frozenset[str]
) -> list[PaddingFinding]:
    """Findings for entries that depend on other indices along the size."""
    run = PartitionRun(parts, graphs, {}, ordered=False, trusted=trusted)
    sizes = Sizes(symbols, ordered=False)
    interpreted = run.interpretation(symbols)
    findings = [finding for finding in interpreted.findings if finding.target != _RANDOM]
    for target, value in _results(parts, interpreted):
        places = sizes.places(value)
        by_data = not places and not target.startswith("written")
        findings += [f.reaching(target) for f in value.findings if not (by_data and f.is_by_contents)]
        findings += [f.reaching(target) for f in value.by_position]  # guard: manager_mixing_positions
        if len(places) > 1:
            along = [value.factors[dim][at] for dim, at in places]
            findings += _along_several(symbols, f"its entries stand along {along}", target)
    return sorted(set(findings), key=str)


def _along_several(symbols: Mapping[sympy.Symbol, str], why: str, target: str) -> Iterator[PaddingFinding]:
    for field in dict.fromkeys(symbols.values()):
        yield PaddingFinding(field, "result", why, target=target)


def _counted(
    parts: Partition, graphs: Mapping[str, RegionGraph], symbols: Mapping[sympy.Symbol, str], trusted: frozenset[str]
) -> Iterable[PaddingFinding]:
    """Findings for uses of the size as a number: they mix no entries, but depend on the number of entries."""
    run = PartitionRun(parts, graphs, {}, trusted=trusted)
    sizes = Sizes(symbols)
    interpreted, before = run.interpretation(symbols), run.inputs(sizes)
    into = {p: value for p in interpreted.written if isinstance(value := before[p], PaddedValue)}
    targets = {position: _name_of(parts, position) for position in into}
    for finding in findings_of_results(interpreted, sizes, into, targets):
        if not finding.is_by_contents and finding.target != _RANDOM:
            yield finding


def _results(parts: Partition, interpreted: Interpretation) -> Iterator[tuple[str, PaddedValue]]:
    for position, value in enumerate(interpreted.outputs):
        if isinstance(value, PaddedValue):
            yield f"output {position}", value
    for position, value in interpreted.written.items():
        yield _name_of(parts, position), value


def _name_of(parts: Partition, position: int) -> str:
    graph_input = parts.inputs[position]
    return f"written input '{graph_input.shown}'"
