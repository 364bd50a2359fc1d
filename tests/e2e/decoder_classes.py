"""Which causal language models of Transformers :class:`graphpass.text.CausalLM` serves, and which it refuses.

``python -m tests.e2e.decoder_classes`` tries every class and writes the table of docs/models.md; with names of classes
it tries those and replaces their rows.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from graphpass.errors import GraphpassError
from graphpass.text import CausalLM
from tests.e2e.greedy import Reference, continued
from tests.e2e.small_decoders import VOCABULARY, decoder_classes, small_decoder

PAGE = Path(__file__).parent.parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- decoders: begin -->", "<!-- decoders: end -->"
BUILT = ("equal", "refused", "different", "untyped", "not given back")
NOT_BUILT, BLIND, NO_ANSWER = "not built", "blind", "no answer"
SIZES: dict[str, Any] = {
    "max_num_reqs": 4,
    "max_num_tokens": 24,
    "max_seq_len": 48,
    "page_size": 4,
    "capture_sizes": [4, 8, 24],
    "seq_len_buckets": [24],
    "compiler": "eager",
}
LENGTHS = ((9, 5), (1, 6), (17, 4), (4, 6), (30, 5), (12, 3), (2, 6), (21, 4))
"""Tokens of each prompt and of its continuation: more prompts than run at once, and one longer than a step."""
COUNTS = [count for _, count in LENGTHS]
FIRST_TOKEN = 3
"""Tokens below may be special ones."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one class."""

    name: str  #: the class
    #: ``equal``, ``refused``, ``not built``, or a failure of the test: ``different``, ``untyped``, ``not given back``,
    #: ``blind`` (equal, but wrong attention would not be seen), ``no answer`` (out of time)
    outcome: str
    sentence: str = ""  #: the problem, as the error or the test states it


def prompts() -> list[list[int]]:
    """Seeded prompts of the lengths above."""
    seeded = random.Random(0)
    return [[seeded.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(length)] for length, _ in LENGTHS]


def seen_of(model: Any, references: Sequence[Reference]) -> str:
    """Why a wrong attention would not show in these texts; empty if it would.

    The tokens of another prompt, in front of a prompt, must change the next token of several prompts: so a model would
    differ whose requests see each other.
    """
    texts = prompts()
    joined = [continued(model, [*other, *text], 1) for other, text in zip([texts[-1], *texts], texts, strict=False)]
    changed = sum(with_other.tokens != of.tokens[:1] for with_other, of in zip(joined, references, strict=True))
    distinct = len({token for reference in references for token in reference.tokens})
    if changed >= 2 and distinct >= 4:
        return ""
    return f"{distinct} distinct tokens; {changed} prompts continue differently behind another one"


def tried(name: str) -> Outcome:
    """Serve a class over packed batches and compare the texts with those of its own ``generate``."""
    torch.manual_seed(0)
    torch.compiler.reset()
    try:
        model = small_decoder(name)
    except Exception as error:
        return Outcome(name, NOT_BUILT, _first_line(error))
    try:
        references = [continued(model, text, count) for text, count in zip(prompts(), COUNTS, strict=True)]
        blind = seen_of(model, references)
    except Exception as error:
        return Outcome(name, NOT_BUILT, f"its own generate() fails: {_first_line(error)}")
    before = _configs(model)
    outcome = _served(name, model, references)
    if _configs(model) != before or not references[0].accepts(continued(model, prompts()[0], COUNTS[0]).tokens):
        return Outcome(name, "not given back", f"after: {outcome.outcome} {outcome.sentence}")
    return Outcome(name, BLIND, blind) if blind and outcome.outcome == "equal" else outcome


def _served(name: str, model: Any, references: Sequence[Reference]) -> Outcome:
    lm = None
    try:
        lm = CausalLM(model, **SIZES)
        found = lm.generate(prompts(), max_new_tokens=COUNTS, progress=False)
    except GraphpassError as error:
        return Outcome(name, "refused", error.problem)
    except Exception as error:
        return Outcome(name, "untyped", _first_line(error))
    finally:
        if lm is not None:
            lm.close()
    wrong = [at for at, reference in enumerate(references) if not reference.accepts(found[at])]
    if not wrong:
        return Outcome(name, "equal")
    at = wrong[0]
    sentence = f"{len(wrong)} of {len(references)} texts; the first is {found[at]}, not {references[at].tokens}"
    return Outcome(name, "different", sentence)


def _configs(model: Any) -> list[tuple[int, str | None]]:
    """Each module's config object, and the attention that it sets."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    return [(id(config), getattr(config, "_attn_implementation", None)) for config in configs]


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0].strip()
    return f"{type(error).__name__}: {text}"[:240]


# -- all classes, each few of them in a process -----------------------------------------------------------------------


def outcomes(names: Sequence[str], *, limit: float = 300.0, each: int = 8) -> Iterator[Outcome]:
    """Try classes, ``each`` in a process, which is ended if one of them takes ``limit`` seconds."""
    left, context = list(names), multiprocessing.get_context("spawn")
    while left:
        with context.Pool(1, _quiet, maxtasksperchild=each) as pool:  # which is ended behind an answer that is missing
            while left:
                name = left.pop(0)
                try:
                    yield pool.apply_async(tried, (name,)).get(limit)
                except multiprocessing.TimeoutError:
                    yield Outcome(name, NO_ANSWER, f"not within {limit:.0f} s, or its process has died")
                    break


def _quiet() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


NAMED_ALONE = {"equal": "Equal: ", NOT_BUILT: "Not built: "}
"""Outcomes whose classes are listed without a sentence, and how the list begins."""
THE_CLASS = "*the class*"
"""Stands for its name in the sentence of a row, so that classes with one sentence share a row."""

# -- the page ---------------------------------------------------------------------------------------------------------


def versions() -> str:
    """The versions that the table is about."""
    return f"transformers {version('transformers')}, torch {version('torch').partition('+')[0]}"


def described(found: Sequence[Outcome], of_versions: str) -> str:
    """The versions and counts, the names of classes that are equal or not built, and a table of the others."""
    ordered = sorted(found, key=lambda outcome: outcome.name)
    kinds = dict.fromkeys(outcome.outcome for outcome in ordered)
    counts = ", ".join(f"{sum(other.outcome == kind for other in ordered)} {kind}" for kind in sorted(kinds))
    alike: dict[str, list[str]] = {}
    for outcome in ordered:
        if outcome.outcome not in NAMED_ALONE:
            why = outcome.sentence.replace(outcome.name, THE_CLASS).replace("|", "\\|")
            alike.setdefault(f"{outcome.outcome} | {why}", []).append(outcome.name)
    rows = [f"| {', '.join(names)} | {why} |" for why, names in alike.items()]
    named = [
        f"{says}{', '.join(outcome.name for outcome in ordered if outcome.outcome == kind)}\n"
        for kind, says in NAMED_ALONE.items()
    ]
    head = [f"{of_versions}: {len(ordered)} classes, {counts}.\n", *named]
    return "\n".join([*head, "| classes | outcome | why |", "|---|---|---|", *rows])


def recorded() -> tuple[str, dict[str, Outcome]]:
    """The versions of the page's table, and its rows by class."""
    table = table_of_page()
    return table.partition(":")[0], rows_of(table)


def table_of_page() -> str:
    """The table, as :func:`described` wrote it."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()


def rows_of(table: str) -> dict[str, Outcome]:
    """The outcomes that the table tells, by class."""
    lines = table.splitlines()
    rows = [line[2:-2].split(" | ", 2) for line in lines if line.startswith("| ") and "| outcome |" not in line]
    found = [
        Outcome(name, kind, why.replace("\\|", "|").replace(THE_CLASS, name))
        for names, kind, why in rows
        for name in names.split(", ")
    ]
    for kind, says in NAMED_ALONE.items():
        named = "".join(line.removeprefix(says) for line in lines if line.startswith(says))
        found += [Outcome(name, kind) for name in named.split(", ") if name]
    return {outcome.name: outcome for outcome in sorted(found, key=lambda outcome: outcome.name)}


def _write(found: Sequence[Outcome]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{described(found, versions())}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    """Try classes and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="classes; none: all of them, and the table is written anew")
    options = parser.parse_args(arguments)
    rows = recorded()[1] if options.names else {}
    for outcome in outcomes(options.names or list(decoder_classes())):
        rows[outcome.name] = outcome
        sys.stdout.write(f"{outcome.name}: {outcome.outcome} {outcome.sentence}\n")
        sys.stdout.flush()
        if options.names:
            _write(list(rows.values()))
    _write(list(rows.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
