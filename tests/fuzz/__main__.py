"""Random programs from a seed on: ``python -m tests.fuzz python 5000 --first 100000``."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

from tests.fuzz import test_fuzz, test_padding, test_python
from tests.fuzz.python_programs import choose_wrapping_program

AT_ONCE = 100
FUZZERS = {
    "python": test_python.fuzzer_of("torch.compile"),
    "graphed": test_python.fuzzer_of("graphed"),
    "wrapped": test_python.fuzzer_of("torch.compile", choose_wrapping_program),
    "wrapped graphed": test_python.fuzzer_of("graphed", choose_wrapping_program),
    "graphs": test_fuzz.fuzzer_of("eager"),
}


def main(arguments: Sequence[str]) -> int:
    """Run programs, say after each hundred what came of them, and end with 1 if any differs from eager."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("fuzzer", choices=[*FUZZERS, "padding"])
    parser.add_argument("count", type=int, help="programs")
    parser.add_argument("--first", type=int, default=100_000, help="the first seed")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    started, last, wrong = time.monotonic(), options.first + options.count, 0
    for first in range(options.first, last, AT_ONCE):
        seeds = range(first, min(first + AT_ONCE, last))
        tally: Any
        if options.fuzzer == "padding":
            tally = test_padding.search(seeds)
            problems = "\n".join(tally.wrong)
        else:
            tally = FUZZERS[options.fuzzer].search(seeds)
            problems = FUZZERS[options.fuzzer].explained(tally)
        wrong += bool(problems)
        seconds = time.monotonic() - started
        sys.stdout.write(f"seeds {seeds.start} to {seeds.stop - 1}, {seconds:.0f} s: {tally}\n{problems}")
        sys.stdout.flush()
    sys.stdout.write(f"{options.count} programs: {wrong} of the hundreds hold a difference\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
