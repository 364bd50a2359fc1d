"""``graphpass cache``: the saved artifacts of a directory: what is there, what cannot be used, and its removal."""

from __future__ import annotations

import time
from pathlib import Path

from graphpass.cli.usermodel import Result
from graphpass.errors import OptionError
from graphpass.report.drawing import Table
from graphpass.saved.files import SavedFile, SavedFiles
from graphpass.saved.fingerprint import difference, environment


def cache(action: str, directory: Path, days: float | None) -> Result:
    """List the files, verify that each can be used here, or remove those that cannot or are older than ``days``."""
    if not directory.is_dir():
        raise OptionError(
            "there are no saved artifacts",
            expected="the directory that warm_start names, after a start that has saved",
            found=f"{directory}, which is {'no directory' if directory.exists() else 'not there'}",
            remedy="name that directory, or start a model with warm_start first",
        )
    files = list(SavedFiles(directory).files())
    found = {file: _why_unusable(file) for file in files}
    old = [file for file in files if days is not None and time.time() - file.modified_s > days * 86400]
    removed = [file for file in files if found[file] or file in old] if action == "prune" else []
    for file in removed:
        file.path.unlink(missing_ok=True)
    rows = [
        (file.path.name, f"{file.num_bytes:,}", f"{(time.time() - file.modified_s) / 86400:.1f}", found[file] or "")
        for file in files
    ]
    num_bytes = sum(file.num_bytes for file in (removed or files))
    what = f"{len(removed)} files removed" if action == "prune" else f"{len(files)} files"
    unusable = [file.path.name for file in files if found[file]]
    return Result(
        "cache",
        str(directory),
        {
            "files": [
                {"name": file.path.name, "bytes": file.num_bytes, "problem": found[file], "removed": file in removed}
                for file in files
            ]
        },
        (
            f"{what}, {num_bytes:,} bytes, in {directory}",
            Table("Files", ("file", "bytes", "days old", "why it cannot be used here"), tuple(rows)),
        ),
        failure=f"{len(unusable)} files cannot be used here" if unusable and action == "verify" else None,
    )


def _why_unusable(file: SavedFile) -> str | None:
    if file.problem is not None:
        return file.problem.why
    import torch

    now = environment([torch.device("cuda")] if torch.cuda.is_available() and "GPU" in file.parts else [])
    names = ("Python", "torch", "graphpass", "processor", "GPU", "CUDA", "Triton")
    found = difference({n: file.parts[n] for n in names if n in file.parts}, {n: now[n] for n in names if n in now})
    return None if found is None else found.why
