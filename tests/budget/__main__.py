"""``python -m tests.budget``: check the budgets, ``--update`` them, or print the difference ``--since`` a commit."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from tests.budget import budgets, differences, files_at, files_now, lines_of, problems, write


def main(arguments: Sequence[str]) -> int:
    """The exit status: 1 where a package does not fit its budget."""
    parser = argparse.ArgumentParser(prog="python -m tests.budget", description=__doc__)
    parser.add_argument("--update", action="store_true", help="write the figures of now into the table")
    parser.add_argument("--since", metavar="COMMIT", help="print each package's lines in a commit and now")
    given, now = parser.parse_args(arguments), lines_of(files_now())
    if given.update:
        write(now)
    if given.since is not None:
        try:
            before = lines_of(files_at(given.since))
        except (OSError, subprocess.CalledProcessError):
            print(f"lines: no commit {given.since!r} to compare with; name one in BASE_COMMIT")
            return 0
        print("\n".join([f"lines since {given.since}:", *differences(before, now)]))
        return 0
    found = problems(now, budgets())
    print("\n".join(found or [f"{sum(now.values()):,} lines, all packages within their budgets"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
