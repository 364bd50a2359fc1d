"""Every patch applies to the tree as it is and names tests that exist; `tox run -e mutate` runs them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutations import ROOT, Mutation, MutationError, functions_of, mutations

PATCHES = sorted(Path(__file__).parent.glob("*.patch"))


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_a_patch_applies_and_its_tests_exist(path: Path) -> None:
    mutation = Mutation.read(path)
    texts = mutation.mutated(ROOT)
    for file, text in texts.items():
        assert text != file.read_text(encoding="utf-8")
        ast.parse(text, filename=str(file))
    for test in mutation.tests:
        file_name, _, function = test.partition("::")
        assert function.partition("[")[0] in functions_of(ROOT / file_name), test


def test_every_guarantee_has_a_mutation() -> None:
    covered = {mutation.guarantee for mutation in mutations()}
    assert {f"7.{number}" for number in (1, 2, 3, 4, 5, 6, 7, 9, 10, 11)} <= covered
    assert {"6", "10"} <= covered, "the pool rule, and encoders"


def write(folder: Path, text: str) -> Path:
    path = folder / "removed.patch"
    path.write_text(text, encoding="utf-8")
    return path


HEADER = "Guarantee: 7.2\nRemoves: a check.\nTest: tests/test_x.py::test_x\n"
DIFF = "--- a/code.py\n+++ b/code.py\n@@ -2,3 +2,2 @@\n first\n-check\n last\n"


def test_a_hunk_applies_wherever_its_text_is(tmp_path: Path) -> None:
    mutation = Mutation.read(write(tmp_path, HEADER + DIFF))
    for above in ("", "new\n" * 7):
        (tmp_path / "code.py").write_text(f"{above}first\ncheck\nlast\n", encoding="utf-8")
        assert list(mutation.mutated(tmp_path).values()) == [f"{above}first\nlast\n"]


@pytest.mark.parametrize("code", ["first\nlast\n", "first\ncheck\nlast\n" * 2, "x first\ncheck\nlast\n"])
def test_a_hunk_that_is_not_there_once_does_not_apply(tmp_path: Path, code: str) -> None:
    (tmp_path / "code.py").write_text(code, encoding="utf-8")
    with pytest.raises(MutationError, match=r"places in code\.py read like this"):
        Mutation.read(write(tmp_path, HEADER + DIFF)).mutated(tmp_path)


@pytest.mark.parametrize(
    "text", [HEADER, DIFF, HEADER.replace("Test", "Tests") + DIFF, HEADER.replace("Guarantee: 7.2\n", "") + DIFF]
)
def test_a_patch_without_its_headers_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(MutationError):
        Mutation.read(write(tmp_path, text))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(MutationError, match="no mutation is named nothing"):
        mutations("nothing")
