"""Run the mutations: ``python -m tests.mutations [NAME...]``; exits with 1 unless every one is killed."""

from __future__ import annotations

import itertools
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.mutations import ROOT, Mutation, MutationError, mutations

TIMEOUT_S, UNMUTATED_TIMEOUT_S = 600, 3600
KILLED = "killed"
NEEDS_CUDA = "needs a GPU"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one mutation; ``output`` is pytest's where it explains more."""

    mutation: Mutation
    text: str
    elapsed_s: float
    output: str = ""


def copy_tree(destination: Path) -> None:
    """A copy of the sources as they are now: tracked and new files in a checkout, else what a run of tests needs."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        files = [ROOT / name for name in listed.split("\0") if name]
    else:
        folders = [path for name in ("graphpass", "backends", "tests") for path in (ROOT / name).rglob("*")]
        files = [*ROOT.glob("*.toml"), *ROOT.glob("*.md"), *(f for f in folders if "__pycache__" not in f.parts)]
    for file in files:
        if file.is_file():
            copy = destination / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)


def run_tests(
    tree: Path, tests: Collection[str], *options: str, timeout_s: float = TIMEOUT_S
) -> tuple[int | None, str]:
    """Pytest's exit status and output in a copy of the sources; None where it took too long."""
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "backends")]),
        # Mutated within a second and to the same length, a file would be taken for the compiled one.
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    plugins_off = ("-p", "no:cacheprovider", "-p", "no:xdist")
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short", *plugins_off, *options, *tests]
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout + done.stderr


@contextmanager
def applied(mutation: Mutation, tree: Path) -> Iterator[None]:
    """The mutation in ``tree``, taken back afterwards."""
    mutated = mutation.mutated(tree)
    originals = {file: file.read_text(encoding="utf-8") for file in mutated}
    try:
        for file, text in mutated.items():
            file.write_text(text, encoding="utf-8")
        yield
    finally:
        for file, text in originals.items():
            file.write_text(text, encoding="utf-8")


def shares(chosen: Sequence[Mutation], count: int) -> list[list[str]]:
    """The tests of all mutations in as many shares, whole files together."""
    by_file: dict[str, dict[str, None]] = {}
    for test in (test for mutation in chosen for test in mutation.tests):
        by_file.setdefault(test.partition("::")[0], {})[test] = None
    files = [list(tests) for tests in by_file.values()]
    return [list(itertools.chain(*files[number::count])) for number in range(min(count, len(files)))]


def in_free_copy(tests: Collection[str], trees: queue.SimpleQueue[Path]) -> tuple[int | None, str]:
    """Pytest's exit status and output without a mutation."""
    tree = trees.get()
    try:
        return run_tests(tree, tests, timeout_s=UNMUTATED_TIMEOUT_S)
    finally:
        trees.put(tree)


def judge(mutation: Mutation, trees: queue.SimpleQueue[Path]) -> Verdict:
    """Run one mutation's tests in a free copy."""
    tree = trees.get()
    start_s = time.perf_counter()
    try:
        with applied(mutation, tree):
            status, output = run_tests(tree, mutation.tests, "-x")
        text = _verdict(status, output)
    except MutationError as error:
        text, output = "does not apply", str(error)
    finally:
        trees.put(tree)
    return Verdict(mutation, text, time.perf_counter() - start_s, "" if text == KILLED else output)


def _verdict(status: int | None, output: str) -> str:
    if status is None:
        return f"no end within {TIMEOUT_S} s"
    if status == 0:
        return "SURVIVED"
    # A test that cannot be collected or set up says nothing about the guard.
    return KILLED if status == 1 and re.search(r"^FAILED ", output, re.MULTILINE) else "BROKEN"


def judged(chosen: Sequence[Mutation], console: Console) -> list[Verdict]:
    """The verdicts on ``chosen``, several at a time, each in a copy of its own; printed as they come.

    Raises:
        MutationError: a named test does not pass without any mutation.
    """
    if not chosen:
        return []
    with tempfile.TemporaryDirectory(prefix="mutations-", ignore_cleanup_errors=True) as folder:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        num_trees = min(os.cpu_count() or 1, len(chosen))
        for number in range(num_trees):
            copy_tree(Path(folder, str(number)))
            trees.put(Path(folder, str(number)))
        verdicts = []
        with ThreadPoolExecutor(num_trees) as pool, Progress(console=console, transient=True) as progress:
            for status, output in pool.map(lambda tests: in_free_copy(tests, trees), shares(chosen, num_trees)):
                if status != 0:
                    raise MutationError(f"the tests do not pass without a mutation:\n{output}")
            bar = progress.add_task("mutations", total=len(chosen))
            for finished in as_completed([pool.submit(judge, mutation, trees) for mutation in chosen]):
                verdicts.append(finished.result())
                progress.advance(bar)
                console.print(f"{verdicts[-1].mutation.name}: {verdicts[-1].text}", highlight=False)
        return sorted(verdicts, key=lambda verdict: verdict.mutation.name)


def table_of(verdicts: Sequence[Verdict]) -> Table:
    """One row a mutation."""
    table = Table("mutation", "guarantee", "verdict", "seconds", title="Guards and the tests that miss them")
    for verdict in verdicts:
        style = None if verdict.text in (KILLED, NEEDS_CUDA) else "bold red"
        cells = (verdict.mutation.name, verdict.mutation.guarantee, verdict.text, f"{verdict.elapsed_s:.1f}")
        table.add_row(*cells, style=style)
    return table


def has_cuda() -> bool:
    """Whether tests marked ``cuda`` run here."""
    import torch

    return torch.cuda.is_available()


def main(names: Sequence[str]) -> int:
    """Judge the mutations of these names, or all; the exit status."""
    console = Console()
    try:
        chosen = mutations(*names)
        on_gpu = has_cuda() if any(mutation.needs_cuda for mutation in chosen) else False
        left_out = [Verdict(m, NEEDS_CUDA, 0.0) for m in chosen if m.needs_cuda and not on_gpu]
        verdicts = [*judged([m for m in chosen if on_gpu or not m.needs_cuda], console), *left_out]
    except MutationError as error:
        console.print(str(error), markup=False)
        return 1
    bad = [verdict for verdict in verdicts if verdict.text not in (KILLED, NEEDS_CUDA)]
    for verdict in bad:
        console.rule(f"{verdict.mutation.name}: {verdict.text}")
        console.print(verdict.output, markup=False, highlight=False)
    console.print(table_of(verdicts))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
