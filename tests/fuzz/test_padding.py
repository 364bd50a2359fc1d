"""Random aten graphs under the padding pass, with brute force as the oracle: what is PROVED never differs.

Default runs take a few hundred programs, always the same; ``tox run -e fuzz`` searches ten thousand.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from graphpass.padding import PaddingProof, Verdict, padding_of
from tests.fuzz.made import differs
from tests.fuzz.padding import KINDS, Program, padded_input, real_input, walk
from tests.fuzz.padding_ops import OPS

# Sizes at run time: real ones, and what is added where a key field is padded. Equal sizes show what is mixed up.
SIZES = (
    ({"b": 3, "s": 5}, {"b": 2, "s": 3}),
    ({"b": 4, "s": 4}, {"b": 1, "s": 4}),
    ({"b": 2, "s": 3}, {"b": 4, "s": 1}),
)
SCALES = (1.0, 1e4)
_LARGE, _MASKS, _ROUNDING = 1e8, 1e30, 1e-16
TOLERANCE = 1e-8
NUM_CONTENTS = 8

FINITE = "padding is finite"


@dataclass(slots=True)
class Tally:
    """What the search found."""

    programs: int = 0
    fields: Counter[Verdict] = field(default_factory=Counter)  #: the verdicts of all key fields of all programs
    #: differences that only contents beyond a proof's stated assumptions make
    excused: Counter[str] = field(default_factory=Counter)
    #: programs with a proved field whose proof states an assumption: padding was neutral to some operator
    rested: int = 0
    precise: int = 0  #: fields that are not proved, and really differ
    reasons: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  #: programs that are proved and differ, with what differs

    @property
    def share_proved(self) -> float:
        return self.fields[Verdict.PROVED] / max(1, self.fields.total())

    def __str__(self) -> str:
        verdicts = ", ".join(f"{count} {verdict.name}" for verdict, count in self.fields.items())
        lines = [
            f"{self.programs} programs; fields: {verdicts} ({self.share_proved:.0%} proved); "
            f"{self.rested} programs rest on assumptions; {self.precise} unproved fields differ; "
            f"excused: {dict(self.excused)}",
            *(f"{count:6} {reason}" for reason, count in self.reasons.most_common(40)),
        ]
        return "\n    ".join([*lines, *self.wrong])


def make_program(seed: int) -> tuple[Program, fx.GraphModule]:
    """The program of a seed: a few operators over a few inputs."""
    choose = random.Random(seed)
    program = Program(choose)
    names = choose.sample(
        ["x", "y", "g", "v", "u", "l", "zeros", "blank", "low", "ids", "ids0", "codes", "hide"], choose.randint(2, 4)
    )
    extra = [name for name in ("mask", "weight", "table", "state", "count") if choose.random() < 0.5]
    names = [name for name in KINDS if name in {*names, *extra}]
    if not any(KINDS[name].shape[0] in ("b", "s") for name in names):
        names.append("x")
    for name in names:
        program.add_input(name)
    wanted = choose.randint(3, 12)
    for _ in range(6 * wanted):
        op = choose.choices(list(OPS), list(OPS.values()))[0]
        before = len(program.values)
        op(program)
        wanted -= len(program.values) > before
        if wanted <= 0:
            break
    return program, program.finish()


@dataclass(frozen=True, slots=True)
class Runs:
    """One graph at real sizes and at padded ones."""

    program: Program
    graph: fx.Graph

    def of(self, inputs: Iterable[Tensor]) -> list[Tensor]:
        """The outputs, and the inputs as the graph leaves them."""
        given = [value.clone() for value in inputs]
        torch.default_generator.manual_seed(0)
        return [*walk(self.graph, given), *given]

    def tried(
        self, fields: Collection[str], scales: Iterable[float]
    ) -> Iterator[tuple[list[Tensor], list[Tensor], str]]:
        """Inputs at real sizes, the same ones padded, and a description."""
        for at, (real, more) in enumerate(SIZES):
            sizes = {name: real[name] + more[name] * (name in fields) for name in real}
            generator = torch.Generator().manual_seed(at)
            inputs = [real_input(name, real, generator) for name in self.program.inputs]
            if not self._runs(inputs):  # a graph of other sizes has guards against these
                continue
            for scale in scales:
                padded = [
                    padded_input(name, value, sizes, scale, generator)
                    for name, value in zip(self.program.inputs, inputs, strict=True)
                ]
                yield inputs, padded, f"{real} padded to {sizes}, contents x{scale:g}"

    def _runs(self, inputs: Iterable[Tensor]) -> bool:
        try:
            self.of(inputs)
        except RuntimeError:
            return False
        return True

    def difference(
        self, fields: Collection[str], scales: Iterable[float], assumed: str = ""
    ) -> tuple[str, bool] | None:
        """The first difference, and whether an assumption of the proof excuses it."""
        found = None
        for inputs, padded, text in self.tried(fields, scales):
            wrong = self._differing(inputs, padded)
            if not wrong:
                continue
            if self._rounds(inputs, padded, wrong):
                found = found or ("large values cancel", True)
                continue
            if excuse := self._excuse(inputs, padded, assumed):
                found = found or (excuse, True)
                continue
            return f"{fields}: results {wrong} at {text}", False
        return found

    def _differing(self, inputs: Iterable[Tensor], padded: Iterable[Tensor]) -> list[int]:
        """The results whose real entries differ."""
        return [at for at, (a, b) in enumerate(zip(self.of(inputs), self.of(padded), strict=True)) if not _same(a, b)]

    def _rounds(self, inputs: list[Tensor], padded: list[Tensor], wrong: list[int]) -> bool:
        """Whether the difference is what float64 leaves of products of the largest finite values, which cancel."""
        largest = 1.0

        def see(_: fx.Node, __: Any, result: Any) -> None:
            nonlocal largest
            for value in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                    sizes = value.nan_to_num(0.0, 0.0, 0.0).abs()
                    largest = max(largest, float(sizes[sizes < _MASKS].max())) if (sizes < _MASKS).any() else largest

        walk(self.graph, [value.clone() for value in inputs], see)
        real, larger = self.of(inputs), self.of(padded)
        for at in wrong:
            if not real[at].is_floating_point() or largest < _LARGE:
                return False
            cut = larger[at][tuple(slice(size) for size in real[at].shape)]
            if not (real[at] - cut).abs().max() <= _ROUNDING * largest**2:
                return False
        return True

    def _excuse(self, inputs: list[Tensor], padded: list[Tensor], assumed: str) -> str:
        """The stated assumption that these contents break."""
        if FINITE in assumed and self._infinite(inputs, padded) and self._may_be_finite(inputs, padded):
            return FINITE
        return ""

    def _infinite(self, inputs: list[Tensor], padded: list[Tensor]) -> bool:
        """Whether the padding of some intermediate result is NaN or infinite."""
        counts: list[list[int]] = []
        for given in (inputs, padded):
            counts.append([])

            def see(_: fx.Node, __: Any, result: Any, to: list[int] = counts[-1]) -> None:
                values = result if isinstance(result, (tuple, list)) else [result]
                floats = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
                to.extend(int((value.isnan() | (value == float("inf"))).sum()) for value in floats)

            walk(self.graph, [value.clone() for value in given], see)
        return any(more > real for real, more in zip(*counts, strict=True))

    def _may_be_finite(self, inputs: list[Tensor], padded: list[Tensor]) -> bool:
        """Whether any contents keep the padding finite: an assumption that none meets excuses nothing."""
        named = list(zip(self.program.inputs, padded, strict=True))
        sizes = {size: n for name, value in named for size, n in zip(KINDS[name].shape, value.shape, strict=True)}
        generator = torch.Generator().manual_seed(0)
        for _ in range(NUM_CONTENTS):
            scales = (torch.randn(len(inputs), generator=generator).sign() * 2).tolist()
            tried = [
                padded_input(name, value, sizes, scale, generator, least=0.5)
                for name, value, scale in zip(self.program.inputs, inputs, scales, strict=True)
            ]
            if not self._infinite(inputs, tried):
                return True
        return False


def _same(real: Any, padded: Any) -> bool:
    if not isinstance(real, Tensor):
        return bool(real == padded)
    return not differs(real, padded, TOLERANCE)


def proved_fields(proof: PaddingProof) -> tuple[str, ...]:
    return tuple(name for name, verdict in proof.verdicts.items() if verdict is Verdict.PROVED)


def judge(seed: int, tally: Tally, measure: bool) -> None:
    """Prove one program and try its proof."""
    program, module = make_program(seed)
    proof = padding_of(module, program.symbols, program.declared)
    proved, assumed = proved_fields(proof), "; ".join(proof.assumptions)
    runs = Runs(program, module.graph)
    tally.programs += 1
    tally.fields.update(proof.verdicts.values())
    tally.rested += bool(proved and assumed)
    tally.reasons.update({f"{finding.op}: {finding.why}" for finding in proof.findings})
    for fields in sorted({proved, *((name,) for name in proved)} - {()}):
        found = runs.difference(fields, SCALES, assumed)
        if found is not None and found[1]:
            tally.excused[found[0]] += 1
        elif found is not None:
            tally.wrong.append(f"seed {seed}: {found[0]}\n{module.code}\nassumed: {assumed}")
            return
    if measure:
        left = proof.verdicts.keys() - set(proved)
        tally.precise += sum(runs.difference((name,), SCALES) is not None for name in left)


def search(seeds: Iterable[int], measure: bool = False) -> Tally:
    tally = Tally()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            for seed in seeds:
                judge(seed, tally, measure)
                if len(tally.wrong) >= 3:
                    break
    finally:
        torch.set_num_threads(threads)
    return tally


def check(tally: Tally) -> None:
    """Nothing wrong, and nothing vacuous: many fields are proved, many are not, and few need an excuse."""
    assert tally.wrong == [], str(tally)
    assert 0.4 <= tally.share_proved <= 0.9, str(tally)
    assert tally.rested >= 0.05 * tally.programs, str(tally)
    assert tally.excused.total() <= 0.05 * tally.programs, str(tally)


def test_proved_programs_never_differ() -> None:
    tally = search(range(200), measure=True)
    check(tally)
    unproved = tally.fields.total() - tally.fields[Verdict.PROVED]
    assert tally.precise >= 0.4 * unproved, str(tally)


@pytest.mark.fuzz
def test_ten_thousand_proved_programs_never_differ() -> None:
    tally = search(range(1_000_000, 1_010_000))
    check(tally)
