"""Which causal language models of Transformers :class:`graphpass.text.CausalLM` serves, and which it refuses.

``python -m tests.e2e.decoder_classes`` tries every class and writes the table of docs/models.md; with names of classes
it tries those and replaces their rows.
"""

from __future__ import annotations

import logging
import multiprocessing
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpass.errors import GraphpassError
from graphpass.text import CausalLM
from tests.e2e.greedy import Reference, continued
from tests.e2e.pagetable import PageTable
from tests.e2e.small_decoders import VOCABULARY, decoder_classes, small_decoder

TABLE = PageTable("models.md", "decoders", ("classes", "outcome", "why"))
THE_CLASS = "*the class*"
"""Stands for its name in the sentence of a row, so that classes with one sentence share a row."""
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


# -- the page ---------------------------------------------------------------------------------------------------------


def row_of(found: Outcome) -> str:
    """The row of one class, after its name; of what is equal or not built without a sentence."""
    why = found.sentence.replace(found.name, THE_CLASS).replace("|", "\\|")
    return f"{found.outcome} | {'' if found.outcome in ('equal', NOT_BUILT) else why} |"


def main(names: Sequence[str]) -> None:
    """Try ``names``, or all classes, and write their rows."""
    rows = TABLE.rows()
    for outcome in outcomes(names or list(decoder_classes())):
        rows[outcome.name] = row_of(outcome)
        TABLE.write(dict(sorted(rows.items())))
        sys.stdout.write(f"{outcome.name}: {outcome.outcome} {outcome.sentence}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
