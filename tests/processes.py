"""What a process that a test starts finds: the packages of this checkout, and what the test itself has on its path."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment(*folders: Path, **settings: str) -> dict[str, str]:
    """This process's environment with these settings; ``folders`` come on Python's path, too."""
    path = [*map(str, (ROOT, ROOT / "backends", *folders)), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **settings}
