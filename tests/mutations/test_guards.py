"""Every mutation applies to the tree as it is and names tests that exist; `tox run -e mutate` runs them."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from tests.mutations import ROOT, Mutation, MutationError, functions_of, guarantees, mutations, without_marked

GUARDS = mutations()


@functools.cache
def code_of(file: Path) -> CodeType:
    return compile(file.read_text(encoding="utf-8"), file, "exec")


@pytest.mark.parametrize("mutation", GUARDS, ids=lambda mutation: mutation.name)
def test_a_mutation_applies_and_its_tests_exist(mutation: Mutation) -> None:
    for file, text in mutation.mutated(ROOT).items():
        assert compile(text, file, "exec") != code_of(file)
    for test in mutation.tests:
        file_name, _, function = test.partition("::")
        assert function.partition("[")[0] in functions_of(ROOT / file_name), test


def test_each_guard_holds_a_guarantee_and_each_guarantee_has_tests_that_exist() -> None:
    promised = guarantees(GUARDS)
    assert {mutation.guarantee for mutation in GUARDS} <= {guarantee.name for guarantee in promised}
    assert len({guarantee.name for guarantee in promised}) == len(promised)
    for guarantee in promised:
        assert guarantee.tests, guarantee.name
        for test in guarantee.tests:
            file_name, _, function = test.partition("::")
            assert function in functions_of(ROOT / file_name), test


def test_each_section_has_guards() -> None:
    promised = guarantees(GUARDS)
    assert {g.section for g in promised} == {g.section for g in promised if g.num_guards}


CODE = """\
def checked(x):
    if x > 0 and x < 9:  # guard: bounds, sign
        return x
    # guard: loud
    raise ValueError(
        x,
        "bad",  # guard: told
    )
"""


@pytest.mark.parametrize(
    ("name", "replaced", "by", "line", "becomes"),
    [
        ("bounds", " and x < 9", "", 1, "    if x > 0:"),
        ("sign", "x > 0 and ", "", 1, "    if x < 9:"),
        ("sign", None, "", 1, "    pass"),
        ("loud", None, "", 4, "    pass"),
        ("loud", "ValueError", "TypeError", 4, "    raise TypeError("),
        ("told", None, "", 6, ""),
    ],
)
def test_a_marked_line_is_changed_or_its_statement_dropped(
    name: str, replaced: str | None, by: str, line: int, becomes: str
) -> None:
    mutated = without_marked(name, replaced, by, CODE)
    ast.parse(mutated)
    assert mutated.splitlines()[line].partition("  # guard")[0] == becomes
    assert mutated.count(name) == CODE.count(name), "the mark stays"
    assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(CODE))


@pytest.mark.parametrize(
    ("name", "replaced", "code", "problem"),
    [
        ("lost", None, CODE, "0 lines are marked"),
        ("sign", None, CODE * 2, "2 lines are marked"),
        ("sign", "x", CODE, "does not contain 'x' once"),
        ("sign", "guard", CODE, "does not contain 'guard' once"),
    ],
)
def test_a_mark_must_say_one_place(name: str, replaced: str | None, code: str, problem: str) -> None:
    with pytest.raises(MutationError, match=problem):
        without_marked(name, replaced, "", code)


ENTRY = {"guarantee": "7.2", "removes": "a check", "tests": ["tests/test_x.py::test_x"]}


@pytest.mark.parametrize(
    ("entry", "path"),
    [
        ({**ENTRY, "by": "True"}, "x.py"),
        ({**ENTRY, "reason": ""}, "x.py"),
        ({"removes": "a check", "tests": []}, "x.py"),
        (ENTRY, None),
    ],
)
def test_an_entry_that_does_not_fit_is_refused(entry: dict[str, Any], path: str | None) -> None:
    with pytest.raises(MutationError, match="lost: "):
        Mutation.of_mark("lost", entry, path)


def write(folder: Path, text: str) -> Path:
    path = folder / "removed.patch"
    path.write_text(text, encoding="utf-8")
    return path


HEADER = "Guarantee: 7.2\nRemoves: a check.\nTest: tests/test_x.py::test_x\n"
DIFF = "--- a/code.py\n+++ b/code.py\n@@ -2,3 +2,2 @@\n first\n-check\n last\n"


def test_a_hunk_applies_wherever_its_text_is(tmp_path: Path) -> None:
    mutation = Mutation.of_patch(write(tmp_path, HEADER + DIFF))
    for above in ("", "new\n" * 7):
        (tmp_path / "code.py").write_text(f"{above}first\ncheck\nlast\n", encoding="utf-8")
        assert list(mutation.mutated(tmp_path).values()) == [f"{above}first\nlast\n"]


@pytest.mark.parametrize("code", ["first\nlast\n", "first\ncheck\nlast\n" * 2, "x first\ncheck\nlast\n"])
def test_a_hunk_that_is_not_there_once_does_not_apply(tmp_path: Path, code: str) -> None:
    (tmp_path / "code.py").write_text(code, encoding="utf-8")
    with pytest.raises(MutationError, match=r"places read like this"):
        Mutation.of_patch(write(tmp_path, HEADER + DIFF)).mutated(tmp_path)


@pytest.mark.parametrize(
    "text", [HEADER, DIFF, HEADER.replace("Test", "Tests") + DIFF, HEADER.replace("Guarantee: 7.2\n", "") + DIFF]
)
def test_a_patch_without_its_headers_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(MutationError):
        Mutation.of_patch(write(tmp_path, text))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(MutationError, match="no mutation is named nothing"):
        mutations("nothing")
