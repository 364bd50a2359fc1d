"""Whether the entries of a packed batch stay apart in a partitioned graph: each token's, each request's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import sympy

from graphpass.regions.padding.compose import PartitionRun, RegionGraph
from graphpass.regions.padding.interpreter import Interpretation
from graphpass.regions.padding.proof import findings_of_results
from graphpass.regions.padding.sizes import Sizes
from graphpass.regions.padding.values import PaddedValue, PaddingFinding, Verdict
from graphpass.regions.split import Partition

__all__ = ["mixing_of"]

_RANDOM = "random numbers"


def mixing_of(
    parts: Partition,
    graphs: Mapping[str, RegionGraph],
    symbols: Mapping[sympy.Symbol, str],
    trusted: Collection[str] = (),
) -> tuple[PaddingFinding, ...]:
    """What makes an entry along one size depend on other entries along it, real or padded, or on how many there are.

    An output without that size may hold entries that data name: the logits of each request's last token. Random numbers
    depend on how many are drawn and count as apart.

    Args:
        parts: the partition.
        graphs: region name -> its aten graph, for captured and eager regions alike.
        symbols: the symbols of one key field -> that field.
        trusted: qualified names of operators that keep entries apart, whatever their rule says.

    Returns:
        One finding for each operator and line; none where all entries stay apart.
    """
    found = [*_mixed(parts, graphs, symbols, frozenset(trusted)), *_counted(parts, graphs, symbols, frozenset(trusted))]
    first: dict[tuple[str, str], PaddingFinding] = {}
    for finding in found:
        first.setdefault((finding.op, finding.where), finding)
    return tuple(first.values())


def _mixed(
    parts: Partition, graphs: Mapping[str, RegionGraph], symbols: Mapping[sympy.Symbol, str], trusted: frozenset[str]
) -> list[PaddingFinding]:
    """Entries that depend on other indices along the size."""
    run = PartitionRun(parts, graphs, {}, ordered=False, trusted=trusted)
    sizes = Sizes(symbols, ordered=False)
    made = run.interpretation(symbols)
    found = [finding for finding in made.findings if finding.target != _RANDOM]
    for target, value in _results(parts, made):
        places = sizes.places(value)
        by_data = not places and not target.startswith("written")
        found += [f.reaching(target) for f in value.findings if not (by_data and f.verdict is Verdict.RUNTIME)]
        if len(places) > 1:
            along = [value.factors[dim][at] for dim, at in places]
            found += _along_several(symbols, f"its entries stand along {along}", target)
    return sorted(set(found), key=str)


def _along_several(symbols: Mapping[sympy.Symbol, str], why: str, target: str) -> Iterator[PaddingFinding]:
    for field in dict.fromkeys(symbols.values()):
        yield PaddingFinding(field, "result", why, target=target)


def _counted(
    parts: Partition, graphs: Mapping[str, RegionGraph], symbols: Mapping[sympy.Symbol, str], trusted: frozenset[str]
) -> Iterable[PaddingFinding]:
    """A size that is used as a number mixes no entries, but makes each depend on how many there are."""
    run = PartitionRun(parts, graphs, {}, trusted=trusted)
    sizes = Sizes(symbols)
    made, before = run.interpretation(symbols), run.inputs(sizes)
    into = {p: value for p in made.written if isinstance(value := before[p], PaddedValue)}
    targets = {position: _name_of(parts, position) for position in into}
    for finding in findings_of_results(made, sizes, into, targets):
        if finding.verdict is Verdict.UNPROVED and finding.target != _RANDOM:
            yield finding


def _results(parts: Partition, made: Interpretation) -> Iterator[tuple[str, PaddedValue]]:
    for position, value in enumerate(made.outputs):
        if isinstance(value, PaddedValue):
            yield f"output {position}", value
    for position, value in made.written.items():
        yield _name_of(parts, position), value


def _name_of(parts: Partition, position: int) -> str:
    given = parts.inputs[position]
    return f"written input '{given.source_name or given.name}'"
