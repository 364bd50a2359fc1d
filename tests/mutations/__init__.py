"""Mutations: each takes one guard out of graphpass, and the tests it names must fail then.

A comment ``# guard: NAME`` marks the line that holds a guard, and ``guards.toml`` says what becomes of the line::

    [static_addresses]
    guarantee = "static_addresses"
    removes = "the comparison of a static input's address with the captured one"
    replace = "address != found"
    by = "False"
    tests = ["tests/unit/capture/test_addresses.py::test_each_set_of_static_inputs_has_its_graph"]

``guarantee`` is an entry of ``guarantees.toml``; one failure among the tests is enough; ``device = "cuda"`` marks a
guard that only a GPU can show. Without ``replace``, the statement that begins on the marked line is dropped; within a
statement, the line. A mark on a line of its own is about the next line.

A guard of several lines has a patch instead: a unified diff below the header lines ``Guarantee``, ``Removes``, ``Test``
and ``Device``. Hunks are found by their text and not by their line numbers.
"""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

__all__ = ["GUARANTEES", "ROOT", "Guarantee", "Mutation", "MutationError", "functions_of", "guarantees", "mutations"]

ROOT = Path(__file__).parent.parent.parent
GUARANTEES = Path(__file__).parent / "guarantees.toml"
SOURCES = ("graphpass", "backends")
_HERE = Path(__file__).parent
_HEADER = re.compile(r"^(Guarantee|Removes|Test|Device): (.+)$")
_MARK = re.compile(r"\s*# guard: (\w+(?:, \w+)*)$")

Edit = Callable[[str], str]


class MutationError(Exception):
    """A mutation that cannot be read, or that does not apply."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """One guard and how it is taken out.

    Attributes:
        name: the mark's or the patch's.
        guarantee: the entry of guarantees.toml that the guard holds.
        removes: what is taken out, in a sentence.
        tests: node ids, of which at least one must fail.
        needs_cuda: whether only a GPU shows the difference.
        edits: (path below the root, what becomes of its text).
    """

    name: str
    guarantee: str
    removes: str
    tests: tuple[str, ...]
    needs_cuda: bool
    edits: tuple[tuple[str, Edit], ...]

    @classmethod
    def of_mark(cls, name: str, entry: dict[str, Any], path: str | None) -> Mutation:
        """The mutation of a table's entry, whose mark is in the file at ``path``.

        Raises:
            MutationError: a key is missing or unknown, or no line is marked.
        """
        keys = {"guarantee", "removes", "tests"}
        if not keys <= entry.keys() <= keys | {"replace", "by", "device"} or ("by" in entry and "replace" not in entry):
            raise MutationError(f"{name}: has {', '.join(entry)}; needs guarantee, removes, tests; may replace by")
        if path is None:
            raise MutationError(f"{name}: no line is marked `# guard: {name}`")
        edit = partial(without_marked, name, entry.get("replace"), entry.get("by", ""))
        return cls(
            name=name,
            guarantee=entry["guarantee"],
            removes=entry["removes"],
            tests=tuple(entry["tests"]),
            needs_cuda=entry.get("device") == "cuda",
            edits=((path, edit),),
        )

    @classmethod
    def of_patch(cls, path: Path) -> Mutation:
        """The mutation in a patch file.

        Raises:
            MutationError: a header line is missing, or there is no hunk.
        """
        header, separator, diff = path.read_text(encoding="utf-8").partition("\n--- ")
        found: dict[str, list[str]] = {}
        for line in header.splitlines():
            match = _HEADER.match(line)
            if match is None:
                raise MutationError(f"{path.name}: header line {line!r} is none of Guarantee, Removes, Test, Device")
            found.setdefault(match[1], []).append(match[2])
        edits = tuple(_hunks((separator + diff).lstrip("\n").splitlines()))
        if not edits or not {"Guarantee", "Removes", "Test"} <= found.keys():
            raise MutationError(f"{path.name}: needs Guarantee, Removes, Test and a unified diff")
        return cls(
            name=path.stem,
            guarantee=" ".join(found["Guarantee"]),
            removes=" ".join(found["Removes"]),
            tests=tuple(found["Test"]),
            needs_cuda=found.get("Device") == ["cuda"],
            edits=edits,
        )

    def mutated(self, root: Path) -> dict[Path, str]:
        """{file: its text with the guard taken out}; writes nothing.

        Raises:
            MutationError: the guard is not in the file exactly once.
        """
        texts: dict[Path, str] = {}
        for name, edit in self.edits:
            path = root / name
            if path not in texts and not path.is_file():
                raise MutationError(f"{self.name}: no file {name}")
            try:
                texts[path] = edit(texts.get(path) or path.read_text(encoding="utf-8"))
            except MutationError as error:
                raise MutationError(f"{self.name}: {name}: {error}") from error
        return texts


def without_marked(name: str, replaced: str | None, by: str, text: str) -> str:
    """``text`` with ``by`` for ``replaced`` on the line marked ``name``, or without its statement if that is None.

    Raises:
        MutationError: the line is not there once, or does not contain ``replaced`` once.
    """
    lines = text.splitlines(keepends=True)
    marked = [number for number, line in enumerate(lines) if name in _names_on(line)]
    if len(marked) != 1:
        raise MutationError(f"{len(marked)} lines are marked, not one")
    at = marked[0] + bool(re.fullmatch(_MARK, lines[marked[0]].rstrip("\n")))
    line = lines[at].rstrip("\n")
    code = _MARK.sub("", line)
    mark, end = line[len(code) :], at + 1  # the mark stays, for tests that read the table
    if replaced is not None:
        if code.count(replaced) != 1:
            raise MutationError(f"the marked line does not contain {replaced!r} once: {code.strip()}")
        code = code.replace(replaced, by)
    else:
        begun = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.stmt) and n.lineno == at + 1]
        code = "".join([code[: n.col_offset] + "pass" for n in begun])
        end = max((n.end_lineno or end for n in begun), default=end)
    return "".join([*lines[:at], f"{code}{mark}\n", *lines[end:]])


def _names_on(line: str) -> list[str]:
    match = _MARK.search(line.rstrip("\n"))
    return match[1].split(", ") if match else []


def _hunks(lines: list[str]) -> Iterator[tuple[str, Edit]]:
    path = ""
    before: list[str] = []
    after: list[str] = []
    for line in [*lines, "@@"]:
        if line.startswith(("@@", "--- ", "+++ ")):
            if before or after:
                yield path, partial(_exchanged, "".join(before), "".join(after))
            before, after = [], []
            if line.startswith("+++ "):
                path = line.removeprefix("+++ ").removeprefix("b/").split("\t")[0]
        elif line[:1] in (" ", "-", "+"):
            if line[:1] != "+":
                before.append(line[1:] + "\n")
            if line[:1] != "-":
                after.append(line[1:] + "\n")


def _exchanged(before: str, after: str, text: str) -> str:
    # A hunk holds whole lines, so it is looked for after the end of a line. Neighbours share a line's end.
    times = len(re.findall(f"(?={re.escape(chr(10) + before)})", "\n" + text))
    if times != 1:
        raise MutationError(f"{times} places read like this, not one:\n{before}")
    return ("\n" + text).replace("\n" + before, "\n" + after)[1:]


def marks(root: Path = ROOT) -> dict[str, str]:
    """{name of each mark in the sources: path of its file below the root}."""
    files = [path for folder in SOURCES for path in sorted((root / folder).rglob("*.py"))]
    return {
        name: str(path.relative_to(root))
        for path in files
        for line in path.read_text(encoding="utf-8").splitlines()
        for name in _names_on(line)
    }


def mutations(*names: str) -> list[Mutation]:
    """All mutations, or those with these names.

    Raises:
        MutationError: there is none of such a name, a mark is not in the table, or an entry has no mark.
    """
    entries = tomllib.loads((_HERE / "guards.toml").read_text(encoding="utf-8"))
    marked = marks()
    untold = marked.keys() - entries.keys()
    if untold:
        raise MutationError(f"guards.toml does not have {', '.join(sorted(untold))}")
    found = {path.stem: Mutation.of_patch(path) for path in _HERE.glob("*.patch")}
    twice = found.keys() & entries.keys()
    if twice:
        raise MutationError(f"{', '.join(sorted(twice))}: a mark and a patch")
    found |= {name: Mutation.of_mark(name, entry, marked.get(name)) for name, entry in entries.items()}
    unknown = [name for name in names if name.removesuffix(".patch") not in found]
    if unknown:
        raise MutationError(f"no mutation is named {', '.join(unknown)}; there are {', '.join(sorted(found))}")
    return [found[name.removesuffix(".patch")] for name in names or sorted(found)]


@dataclass(frozen=True, slots=True)
class Guarantee:
    """One promise to users; its tests are those that the table names and those of its guards."""

    name: str
    section: str
    text: str
    tests: tuple[str, ...]
    num_guards: int


def guarantees(guards: Sequence[Mutation]) -> list[Guarantee]:
    """The guarantees in the order of their table."""
    found = []
    for section, entries in tomllib.loads(GUARANTEES.read_text(encoding="utf-8")).items():
        for name, entry in entries.items():
            if isinstance(entry, dict):
                own = [guard for guard in guards if guard.guarantee == name]
                tests = [*entry.get("tests", ()), *(test.partition("[")[0] for guard in own for test in guard.tests)]
                found.append(Guarantee(name, section, entry["text"], tuple(dict.fromkeys(tests)), len(own)))
    return found


@functools.cache
def functions_of(path: Path) -> set[str]:
    """Names of the functions of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
