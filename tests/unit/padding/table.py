"""One row of the tables of programs: a function and, by hand, what padding does to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from graphpass.padding import Verdict

_VERDICTS = {
    "+": Verdict.PROVED,
    "-": Verdict.UNPROVED,
    "~": Verdict.UNPROVED,
    "!": Verdict.UNPROVED,
}


@dataclass(frozen=True, slots=True)
class Program:
    """A small program with its verdicts by hand."""

    name: str  #: what it shows
    verdicts: dict[str, Verdict]  #: of each key field that it has
    cautious: frozenset[str]  #: the fields that are UNPROVED although no contents of the padding change anything
    by_kernel: frozenset[str]  #: the fields that are UNPROVED and change results with some kernels only
    function: Callable[..., Any]  #: the names of its parameters say what its inputs are
    scales: tuple[float, ...]  #: magnitudes of the padding; large ones overflow where it takes an exponential


def program(name: str, verdicts: str, function: Callable[..., Any], scales: tuple[float, ...] = (1.0, 1e4)) -> Program:
    """Verdicts are words such as ``b+``.

    + proved, - unproved and seen to differ, ~ unproved by caution, ! unproved and up to the CPU's kernel.
    """
    words = verdicts.split()
    cautious, by_kernel = (frozenset(word[0] for word in words if word[1] == mark) for mark in "~!")
    return Program(name, {word[0]: _VERDICTS[word[1]] for word in words}, cautious, by_kernel, function, scales)
