"""A report answers four questions: what is slow or missing, what replays, where padding goes, and what it cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, replace
from typing import Any

from graphpass.report.drawing import (
    Heading,
    Part,
    Picture,
    Table,
    bar_chart,
    counted,
    html_page,
    listed,
    size_chart,
    text_of,
)
from graphpass.report.figures import Costs, KeyUse, Problem, ReportFigures, SizeTraffic, graph_figures, padding_share
from graphpass.report.problems import problems_of
from graphpass.report.records import CallableRecord, RegionRecord

QUESTIONS = (
    "What is slow or missing, and what to do about it",
    "What replays",
    "Where padding goes",
    "What it cost",
)
_MIB = 1 << 20
_MOST_ROWS = 24
_NOTHING_COMPILED = (
    "Nothing was compiled or captured: it was not called yet, or its operations stand in functions that torch.compile"
    " leaves to Python (TORCH_LOGS=graph_breaks names them)."
)


class Report:
    """What is slow or missing, what replays, where padding goes, and what it cost, in this order.

    ``print(report)`` shows text, at most 24 rows of a table; :meth:`to_dict` has everything as numbers, and
    :meth:`to_html` is a page.

    Args:
        figures: what it shows.
    """

    __slots__ = ("figures",)

    def __init__(self, figures: ReportFigures) -> None:
        self.figures = figures

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is slow or missing, the gravest first."""
        return problems_of(self.figures)

    def _parts(self) -> Iterator[Part]:
        figures = self.figures
        yield from problem_parts(
            self.problems, is_empty=not (figures.keys or figures.costs.artifacts or figures.kernels)
        )
        yield from replay_parts(figures)
        yield from padding_parts(figures)
        yield from cost_parts(figures.costs)

    def suggested_sizes(self, limit: int | None = None) -> dict[str, list[int]]:
        """The sizes with the least padding for the calls so far: ``capture_sizes``, or an encoder's ``token_budgets``.

        Args:
            limit: the most sizes of a key field; by default 16, and fewer where fields multiply.

        Returns:
            {key field: sizes}; without fields that are not padded, or that no call had.
        """
        planned = [replace(seen, limit=limit or seen.limit) for seen in self.figures.traffic]
        return {seen.field: list(seen.suggested) for seen in planned if seen.suggested}

    def __str__(self) -> str:
        parts = (part for part in self._parts() if not isinstance(part, Picture))
        return text_of(parts, most_rows=_MOST_ROWS)

    def __repr__(self) -> str:
        problems, keys = counted(len(self.problems), "problem"), counted(len(self.figures.keys), "key")
        return f"<report on {self.figures.subject}: {problems}, {keys}>"

    def __getitem__(self, title: str) -> Table:
        """The table of this title, as it is printed."""
        for part in self._parts():
            if isinstance(part, Table) and part.title == title:
                return part
        raise KeyError(title)

    def to_html(self) -> str:
        """One page that needs nothing else, no script and no network: the text with all rows, and pictures."""
        return html_page(f"graphpass: {self.figures.subject}", self._parts())

    def to_dict(self) -> dict[str, Any]:
        """The figures as dicts, lists, strings, numbers, booleans and None: ready for ``json.dumps``.

        The keys ``problems``, ``replays``, ``padding`` and ``cost`` are in the order of the questions. Seconds are
        floats, bytes and counts ints, shares 0 to 1; what was not measured is None.
        """
        figures, costs = self.figures, asdict(self.figures.costs)
        return {
            "subject": figures.subject,
            "problems": [{**asdict(problem), "places": list(problem.places)} for problem in self.problems],
            "replays": {
                "keys": [{**asdict(key), "sizes": dict(key.sizes), "padding": key.padding} for key in figures.keys],
                "without_graph": [
                    {
                        "graph": calls.subject,
                        "reason": calls.reason.why,
                        "calls": calls.n,
                        "is_expected": calls.reason.is_expected,
                        "remedy": calls.reason.remedy,
                        "sizes": list(calls.sizes()),
                    }
                    for calls in figures.uncaptured
                ],
                "graphs": list(map(graph_figures, figures.callables)),
                "attention": [asdict(use) for use in figures.kernels],
            },
            "padding": [
                {
                    "field": seen.field,
                    "option": seen.option,
                    "histogram": [list(pair) for pair in sorted(seen.histogram.items())],
                    "captured": list(seen.captured),
                    "waste": seen.waste(seen.captured),
                    "suggested": list(seen.suggested),
                    "suggested_waste": seen.waste(seen.suggested),
                }
                for seen in figures.traffic
            ],
            "cost": {
                **costs,
                "groups": [
                    {"name": group.name, "keys": group.num_keys, "seconds": group.seconds, **asdict(group.memory)}
                    for group in figures.costs.groups
                ],
                "tuned": [{**asdict(tuned), "gain": tuned.gain} for tuned in figures.costs.tuned],
            },
        }


def alike(callables: Iterable[CallableRecord]) -> list[list[CallableRecord]]:
    """Callables in groups of equal regions, sizes and reasons, as the layers of a model that breaks in each."""
    groups: dict[Hashable, list[CallableRecord]] = {}
    for record in callables:
        regions = tuple((r.kind, r.num_ops, r.reasons, r.like) for r in record.regions)
        sizes = tuple((s.field, s.is_padded, s.verdict, s.causes, s.made) for s in record.sizes)
        groups.setdefault((record.mode, record.off, record.ends, regions, sizes), []).append(record)
    return list(groups.values())


# -- what is slow or missing -------------------------------------------------------------------------------------------


def problem_parts(problems: Sequence[Problem], *, is_empty: bool) -> Iterator[Part]:
    """The first question: one row for each problem; ``is_empty`` if nothing has been compiled or captured."""
    yield Heading(QUESTIONS[0])
    if not problems:
        yield _NOTHING_COMPILED if is_empty else "Nothing that is known."
    rows = tuple(
        (
            f"{problem.kind}: {problem.what}" if problem.kind != "note" else problem.what,
            listed(problem.places, most=2),
            problem.where,
            "" if problem.times is None else str(problem.times),
            problem.remedy,
        )
        for problem in problems
    )
    yield Table("Problems", ("what", "graph", "line", "times", "what to do"), rows)


# -- what replays ------------------------------------------------------------------------------------------------------


def replay_parts(figures: ReportFigures) -> Iterator[Part]:
    """The second question: a row for each key, and the regions; equal layers share a row."""
    yield Heading(QUESTIONS[1])
    groups = alike(figures.callables)
    names = {record.name: _group_name(group) for group in groups for record in group}
    calls, without = sum(key.calls for key in figures.keys), sum(use.n for use in figures.uncaptured)
    expected: Counter[str] = Counter()
    for use in figures.uncaptured:
        expected[use.reason.why] += use.n if use.reason.is_expected else 0
    why = listed(f"{reason}: {count}" for reason, count in (+expected).items())
    yield f"{counted(calls, 'call')} replayed graphs, {without} ran without a graph{f' ({why})' if why else ''}."
    yield Table("Keys", ("graph", "mode", "key", "graphs", "calls", "replays", "padding"), _key_rows(figures, names))
    memory = ("graph", "key", "pool", "executables", "padding before, s")
    yield Table("Memory of graphs", memory, _memory_rows(figures.keys))
    firsts = [group[0] for group in groups]
    if any(len(record.regions) > 1 or record.ends is not None for record in firsts):
        yield from regions_parts(firsts)
    kernels = tuple((use.kernel, use.serves, use.why) for use in figures.kernels)
    yield Table("Attention", ("kernel", "serves", "why"), kernels)


def _group_name(group: Sequence[CallableRecord]) -> str:
    return group[0].name if len(group) == 1 else f"{group[0].name} and {len(group) - 1} more alike"


def _key_rows(figures: ReportFigures, names: dict[str, str]) -> tuple[tuple[str, ...], ...]:
    folded: dict[tuple[str, str, str], list[KeyUse]] = {}
    for key in figures.keys:
        folded.setdefault((names.get(key.graph, key.graph), key.mode, key.named), []).append(key)
    return tuple(
        (
            *name,
            str(sum(key.graphs for key in keys)),
            str(sum(key.calls for key in keys)),
            str(sum(key.replays for key in keys)),
            _share(_padding(keys)),
        )
        for name, keys in folded.items()
    )


def _memory_rows(keys: Sequence[KeyUse]) -> tuple[tuple[str, ...], ...]:
    """A row for each key whose memory was measured; the driver takes memory for several executables at a time."""
    if not any(key.driver_bytes or key.pool_bytes for key in keys):  # on the CPU
        return ()
    return tuple(
        (
            key.graph,
            key.named,
            _mib(key.pool_bytes or 0),
            _mib(key.driver_bytes),
            "" if key.padding_s is None else f"{key.padding_s:.3f}",
        )
        for key in keys
        if key.driver_bytes is not None
    )


def _padding(keys: Sequence[KeyUse]) -> float | None:
    known = [(key.real, key.padded) for key in keys if key.real is not None and key.padded is not None]
    return padding_share(*map(sum, zip(*known, strict=True))) if known else None


def regions_parts(callables: Sequence[CallableRecord]) -> Iterator[Part]:
    """The regions of each callable in program order, and a row for each kind: equal artifacts, or equal reasons."""
    rows, orders = [], []
    for record in callables:
        order = [f"{region.name} eager" if region.kind == "eager" else region.name for region in record.regions]
        for first, regions in _regions(record):
            others = listed(f"{record.name}.{region.name}" for region in regions[1:])
            why = "; ".join(map(str, dict.fromkeys(first.reasons)))
            rows.append((f"{record.name}.{first.name}", first.kind, str(first.num_ops), others, why))
        if record.off is not None:
            rows.append((record.name, "never captured", "", "", str(record.off)))
        if record.ends is not None:
            order.append("end")
            rows.append((f"{record.name}.end", "end", "", "", str(record.ends)))
        orders.append(f"{record.name}: {' │ '.join(order)}")
    yield Picture("Regions in order", tuple(orders))
    yield Table("Regions", ("region", "kind", "nodes", "equal regions", "reason"), tuple(rows))


def _regions(record: CallableRecord) -> list[tuple[RegionRecord, list[RegionRecord]]]:
    groups: dict[Hashable, list[RegionRecord]] = {}
    for region in record.regions:
        key = ("eager", region.reasons) if region.kind == "eager" else ("captured", region.like or region.name)
        groups.setdefault(key, []).append(region)
    return [(group[0], group) for group in groups.values()]


# -- where padding goes ------------------------------------------------------------------------------------------------


def padding_parts(figures: ReportFigures) -> Iterator[Part]:
    """The third question: which sizes are padded, what prevents it, and which sizes would pad less."""
    yield Heading(QUESTIONS[2])
    firsts = [group[0] for group in alike(figures.callables)]
    of_proof, traffic = proof_tables(firsts), _traffic_table(figures.traffic)
    if not of_proof[0].rows and not traffic.rows:
        yield "No size varies, so nothing is padded."
    yield from (*of_proof, traffic)
    yield from _suggestions(figures.traffic)
    for seen in figures.traffic:
        if seen.histogram:
            marks = {"captured": seen.captured, "suggested": seen.suggested}
            marks = {name: sizes for name, sizes in marks.items() if sizes}
            known = {size: 0 for sizes in marks.values() for size in sizes}
            weights = tuple(sorted((size, float(times)) for size, times in {**known, **seen.histogram}.items()))
            yield size_chart(f"Calls by {seen.field}", weights, marks)
    shares = [(f"{key.graph} {key.named}", key.padding, _share(key.padding)) for key in figures.keys if key.padding]
    yield bar_chart("Share of padding by key", shares)


def proof_tables(callables: Sequence[CallableRecord]) -> tuple[Table, ...]:
    """The sizes that distinguish calls, the ops that show padding, what is made of it, and what the proof assumes."""
    symbols: dict[tuple[str, ...], list[str]] = {}
    reached: dict[tuple[str, str, str], dict[str, None]] = {}
    made: Counter[tuple[str, str, str]] = Counter()
    for record in callables:
        for size in record.sizes:
            bounds = f"{_bound(size.least)} to {_bound(size.greatest)}"
            is_padded = "yes" if size.is_padded else "no, captured exactly"
            row = (record.name, size.field, str(size.traced), bounds, size.verdict or "no candidate", is_padded)
            symbols.setdefault(row, []).append(size.symbol)
            for one in size.made:
                made[record.name, size.field, one.through] += 1
            for cause in size.causes:
                reached.setdefault((record.name, size.field, cause.through), {})[cause.target or "a value"] = None
    sizes = tuple((graph, size, listed(names), *rest) for (graph, size, *rest), names in symbols.items())
    not_proved = tuple((*row, ", ".join(targets)) for row, targets in reached.items())
    assumed = tuple((record.name, text) for record in callables for text in record.assumptions)
    return (
        Table("Sizes", ("graph", "size", "symbol", "traced", "admitted", "padding", "padded"), sizes),
        Table("Where padding is not proved", ("graph", "size", "through", "reaches"), not_proved),
        Table(
            "What is made of padding",
            ("graph", "size", "through", "times"),
            tuple((*row, str(times)) for row, times in made.items()),
        ),
        Table("The proof assumes", ("graph", "what"), assumed),
    )


def _traffic_table(traffic: Iterable[SizeTraffic]) -> Table:
    rows = tuple(
        (
            seen.field,
            str(len(seen.histogram)),
            str(max(seen.histogram)),
            _listed_sizes(seen.captured),
            _share(seen.waste(seen.captured)),
            _listed_sizes(seen.suggested),
            _share(seen.waste(seen.suggested)),
        )
        for seen in traffic
        if seen.histogram
    )
    columns = ("size", "different", "largest", "captured", "padding", "suggested", "padding then")
    return Table("Traffic", columns, rows)


def _suggestions(traffic: Iterable[SizeTraffic]) -> Iterator[str]:
    by_option: dict[str, dict[str, list[int]]] = {}
    otherwise, changed = "", set()
    for seen in traffic:
        if seen.ladder:
            by_option.setdefault(seen.option, {})[seen.field] = list(seen.ladder)
            changed |= {seen.option} if seen.ladder != seen.captured else set()
            otherwise = ", or adapt() between requests" if seen.adapts else ""
    for option, sizes in ((option, by_option[option]) for option in by_option if option in changed):
        # A list serves the field of that name, and an option of one field.
        is_list = option != "capture_sizes" or sizes.keys() == {"num_tokens"}
        value = next(iter(sizes.values())) if is_list else sizes
        yield f"Suggested for this traffic: {option}={value}{otherwise}"


def _listed_sizes(sizes: Sequence[int]) -> str:
    return listed(map(str, sizes), most=16)


def _bound(value: int | None) -> str:
    return "any" if value is None else str(value)


# -- what it cost ------------------------------------------------------------------------------------------------------


def cost_parts(costs: Costs) -> Iterator[Part]:
    """The fourth question: time of compiling and capturing, memory, and time saved."""
    yield Heading(QUESTIONS[3])
    spent = costs.compile_s
    compile_s = spent.partition + spent.key + spent.compile + spent.proof
    num_graphs = counted(costs.callables, "graph") + (f", {costs.loaded} loaded" if costs.loaded else "")
    phases = f"partition {spent.partition:.2f} s, compiler {spent.compile:.2f} s, padding proof {spent.proof:.2f} s"
    rows = [
        (
            "compile",
            f"{compile_s:.2f} s",
            f"{counted(costs.artifacts, 'artifact')} of {num_graphs}; {phases}",
        ),
        *([("load", f"{costs.load_s:.2f} s", "reading warm_start")] if costs.load_s or costs.loaded else []),
        ("capture", f"{costs.capture_s:.2f} s", f"{counted(costs.graphs, 'graph')}, warm-ups included"),
        ("graph pool", _mib(costs.pool_bytes), "shared by all graphs" if costs.pool_bytes else "the CPU has none"),
        ("buffers", _mib(costs.buffer_bytes), "static inputs"),
    ]
    if costs.saved_s is not None:
        estimate = (
            f"host time of {counted(costs.replays, 'replay')}, against launching each kernel; estimated at capture"
        )
        rows.append(("saved", f"{costs.saved_s:.2f} s", estimate))
    yield Table("Costs", ("what", "amount", "of"), tuple(rows))
    if costs.graphs and not costs.pool_bytes:
        yield (
            "On the CPU a tape replays the graphs. It follows the rules of CUDA graphs, and is no faster than eager."
        )
    groups = tuple(
        (
            group.name,
            str(group.num_keys),
            f"{group.seconds:.2f}",
            *map(_mib, astuple(group.memory)),
        )
        for group in costs.groups
    )
    yield Table("Captured", ("group", "keys", "seconds", "pool", "cached", "driver"), groups)
    tuned = tuple(
        (t.region, t.sizes, t.settings, _ms(t.untuned_s), _ms(t.tuned_s), _share(t.gain), f"{t.tuning_s:.1f} s")
        for t in costs.tuned
    )
    yield Table("Tuned", ("region", "sizes", "settings", "untuned", "tuned", "gain", "tuning"), tuned)
    memory = [("graph pool", costs.pool_bytes), ("buffers", costs.buffer_bytes)]
    memory += [(f"{g.name}: driver", g.memory.driver_bytes) for g in costs.groups if g.memory.driver_bytes > 0]
    yield bar_chart("Memory", [(name, float(size), _mib(size)) for name, size in memory if size])


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.2f} MiB"
