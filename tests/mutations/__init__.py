"""Mutations: each patch here takes one guard out of graphpass, and the tests it names must fail then.

A patch is a unified diff below three kinds of header lines::

    Guarantee: 7.2
    Removes: the comparison of a static input's address with the captured one.
    Test: tests/unit/capture/test_addresses.py::test_each_set_of_static_inputs_has_its_graph

``Guarantee`` is a section of the specification; ``Test`` may come several times, and one failure among them is enough.
``Device: cuda`` marks a guard that only a GPU can show. Hunks are found by their text and not by their line numbers,
so that edits elsewhere in a file leave a patch valid; a hunk whose text is not there exactly once is an error.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Mutation", "MutationError", "functions_of", "mutations"]

ROOT = Path(__file__).parent.parent.parent
_HEADER = re.compile(r"^(Guarantee|Removes|Test|Device): (.+)$")


class MutationError(Exception):
    """A patch that cannot be read, or that does not apply."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """One patch.

    Attributes:
        name: the file's name without ending.
        guarantee: section of the specification that demands the guard.
        removes: what is taken out, in a sentence.
        tests: node ids, of which at least one must fail.
        needs_cuda: whether only a GPU shows the difference.
        hunks: (path below the root, text before, text after).
    """

    name: str
    guarantee: str
    removes: str
    tests: tuple[str, ...]
    needs_cuda: bool
    hunks: tuple[tuple[str, str, str], ...]

    @classmethod
    def read(cls, path: Path) -> Mutation:
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
        hunks = tuple(_hunks((separator + diff).lstrip("\n").splitlines()))
        if not hunks or not {"Guarantee", "Removes", "Test"} <= found.keys():
            raise MutationError(f"{path.name}: needs Guarantee, Removes, Test and a unified diff")
        return cls(
            name=path.stem,
            guarantee=" ".join(found["Guarantee"]),
            removes=" ".join(found["Removes"]),
            tests=tuple(found["Test"]),
            needs_cuda=found.get("Device") == ["cuda"],
            hunks=hunks,
        )

    def mutated(self, root: Path) -> dict[Path, str]:
        """{file: its text with the guard taken out}; writes nothing.

        Raises:
            MutationError: the text before a hunk is not there exactly once.
        """
        texts: dict[Path, str] = {}
        for name, before, after in self.hunks:
            path = root / name
            if path not in texts and not path.is_file():
                raise MutationError(f"{self.name}: no file {name}")
            # A hunk holds whole lines, so it is looked for behind the end of a line.
            text = texts.get(path) or "\n" + path.read_text(encoding="utf-8")
            # Neighbours share a line's end, so each place is looked for by itself.
            times = len(re.findall(f"(?={re.escape(chr(10) + before)})", text))
            if times != 1:
                raise MutationError(f"{self.name}: {times} places in {name} read like this, not one:\n{before}")
            texts[path] = text.replace("\n" + before, "\n" + after)
        return {path: text[1:] for path, text in texts.items()}


def _hunks(lines: list[str]) -> Iterator[tuple[str, str, str]]:
    path = ""
    before: list[str] = []
    after: list[str] = []
    for line in [*lines, "@@"]:
        if line.startswith(("@@", "--- ", "+++ ")):
            if before or after:
                yield path, "".join(before), "".join(after)
            before, after = [], []
            if line.startswith("+++ "):
                path = line.removeprefix("+++ ").removeprefix("b/").split("\t")[0]
        elif line[:1] in (" ", "-", "+"):
            if line[:1] != "+":
                before.append(line[1:] + "\n")
            if line[:1] != "-":
                after.append(line[1:] + "\n")


def mutations(*names: str) -> list[Mutation]:
    """All mutations, or those with these names.

    Raises:
        MutationError: there is none of such a name.
    """
    found = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.patch"))}
    unknown = [name for name in names if name.removesuffix(".patch") not in found]
    if unknown:
        raise MutationError(f"no mutation is named {', '.join(unknown)}; there are {', '.join(found)}")
    return [Mutation.read(found[name.removesuffix(".patch")]) for name in names or found]


def functions_of(path: Path) -> set[str]:
    """Names of the functions of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
