"""The directory of saved starts. Its files are pickles, so that it is trusted like code."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graphpass.errors import OptionError
from graphpass.ledger import Reason
from graphpass.saved.fingerprint import Parts, difference, digest

_MAGIC = b"graphpass saved start 1\n"
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_UNFINISHED = ".writing-"
GRAPH, CALL, RESULT, KEYS = KINDS = (".graph", ".call", ".result", ".keys")
"""The suffixes of the files: partition and artifacts of a graph, Dynamo's work for calls, a digest of a result, and the
keys of a graph that traffic used."""

NOT_SAVED = Reason("nothing was saved for it", is_expected=True)
SEE_SAVED = "see docs/guides/starting.md for what can be saved"
"""A remedy."""


@dataclass(frozen=True, slots=True, eq=False)
class SavedFile:
    """One file, for ``graphpass cache``."""

    path: Path
    num_bytes: int
    modified_s: float  #: seconds since the epoch
    parts: Parts  #: what must be equal where it is loaded; empty if it cannot be used
    problem: Reason | None  #: why it cannot be used


class SavedFiles:
    """Reads and writes the files of one directory.

    Args:
        path: the directory; it is made at the first write, for its owner alone.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        problem = self._problem() if path.exists() else None
        if problem is not None:
            raise OptionError(
                "option warm_start cannot be used",
                expected="a directory of your own that nobody else can write to: what is in it runs as code",
                found=problem.why,
                remedy=problem.remedy,
            )

    def _problem(self) -> Reason | None:
        return _distrusted(self.path, stat.S_ISDIR, "directory")

    def find(self, name: str, parts: Parts, kind: str) -> bytes | Reason:
        """What was written with equal parts, or the first part that differs from what was written last."""
        contents = self.read(file_name(name, parts, kind))
        if isinstance(contents, Reason) and contents.is_expected:
            for other in self._named(name[:32], kind):
                header, _ = self._checked(other)
                if isinstance(header, dict):
                    return difference(header["parts"], parts) or contents
        return contents

    def read(self, name: str) -> bytes | Reason:
        """The contents of a file, or why there are none that can be used."""
        header, contents = self._checked(name)
        return header if isinstance(header, Reason) else contents

    def parts_of(self, name: str) -> Parts:
        """The parts that a file was written with; none if it cannot be used."""
        header, _ = self._checked(name)
        return {} if isinstance(header, Reason) else header["parts"]

    def _checked(self, name: str) -> tuple[dict[str, Any] | Reason, bytes]:
        path = self.path / name
        try:
            problem = self._problem() or _distrusted(path, stat.S_ISREG, "file")
            if problem is not None:
                return problem, b""
            data = path.read_bytes()
        except FileNotFoundError:
            return NOT_SAVED, b""
        except OSError as error:
            remedy = "see to the directory's file system and rights"
            return Reason(f"{name} cannot be read: {error.strerror}", remedy), b""
        header, contents = _parsed(data)
        if not header or header["sha256"] != hashlib.sha256(contents).hexdigest():  # guard: saved_whole
            remedy = "graphpass cache prune removes it; the next start writes it anew"
            return Reason(f"{name} is damaged", remedy), b""
        return header, contents

    def write(self, name: str, parts: Parts, kind: str, contents: bytes) -> str | Reason:
        """Write contents, whole or not at all; returns the file's name, or why it could not."""
        file_for = file_name(name, parts, kind)
        header = {"sha256": hashlib.sha256(contents).hexdigest(), "parts": parts}
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            problem = self._problem()
            if problem is not None:
                return problem
            descriptor, temporary = tempfile.mkstemp(dir=self.path, prefix=_UNFINISHED)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(_MAGIC + json.dumps(header).encode() + b"\n" + contents)
                os.replace(temporary, self.path / file_for)  # guard: saved_atomically
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError as error:
            return Reason(f"{self.path} cannot be written: {error.strerror}", "name a directory that you can write to")
        return file_for

    def remove(self, *names: str) -> None:
        """Remove files, so that the next start writes them anew; those that it may not remove stay."""
        for name in names:
            with contextlib.suppress(OSError):
                (self.path / name).unlink()

    def _named(self, prefix: str, suffix: str) -> list[str]:
        with contextlib.suppress(OSError):
            found = [(path.stat().st_mtime, path.name) for path in self.path.glob(f"{prefix}*{suffix}")]
            return [name for _, name in sorted(found, reverse=True)]
        return []

    def files(self) -> Iterator[SavedFile]:
        """All files, whether they can be used or not."""
        for path in sorted(self.path.iterdir() if self.path.is_dir() else ()):
            if path.suffix in KINDS or path.name.startswith(_UNFINISHED):
                header, _ = self._checked(path.name)
                problem, parts = (header, {}) if isinstance(header, Reason) else (None, header["parts"])
                yield SavedFile(path, path.lstat().st_size, path.lstat().st_mtime, parts, problem)


class UsedKeys:
    """The undeclared keys of one graph that served calls of an earlier process: it had time to find out which recur."""

    def __init__(self, files: SavedFiles, name: str, parts: Parts) -> None:
        self._files, self._name, self._parts = files, name, parts
        contents = files.read(file_name(name, parts, KEYS))
        #: (sizes, whether the graph is for exactly these sizes though padding serves them) of each.
        self.keys: list[tuple[tuple[int, ...], bool]] = (
            [] if isinstance(contents, Reason) else [(tuple(sizes), exact) for sizes, exact in json.loads(contents)]
        )

    def write(self, keys: Sequence[tuple[tuple[int, ...], bool]]) -> Reason | None:
        """Replace the keys; returns why it could not. A process that served no calls leaves what is there."""
        if not keys:
            return None
        written = self._files.write(self._name, self._parts, KEYS, json.dumps(keys).encode())
        if isinstance(written, Reason):
            return replace(written, why=f"the keys that traffic used are not saved: {written.why}")
        return None


def file_name(name: str, parts: Parts, kind: str) -> str:
    """The name of the file of ``name`` that is right for ``parts``."""
    return f"{name[:32]}-{digest(parts)[:16]}{kind}"


def _distrusted(path: Path, is_kind: Any, kind: str) -> Reason | None:
    """Why what a path names cannot be trusted; None if only this user can have written it."""
    status = path.lstat() if kind == "file" else path.stat()
    if not is_kind(status.st_mode):
        return Reason(f"{path} is no {kind}", "remove it, or name another directory")
    if status.st_uid not in (os.geteuid(), 0):  # guard: saved_owner
        return Reason(f"{path} belongs to user {status.st_uid}", "copy it into a directory of your own")
    if status.st_mode & _WRITABLE_BY_OTHERS:  # guard: saved_mode
        return Reason(f"{path} can be written by others ({stat.filemode(status.st_mode)})", f"chmod go-w {path}")
    return None


def _parsed(data: bytes) -> tuple[dict[str, Any], bytes]:
    header, _, contents = data.removeprefix(_MAGIC).partition(b"\n")
    try:
        parsed = json.loads(header) if data.startswith(_MAGIC) else {}
    except ValueError:
        parsed = {}
    return (parsed, contents) if isinstance(parsed, dict) and "sha256" in parsed else ({}, b"")
