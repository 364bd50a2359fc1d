"""Saved starts: a directory of artifacts, and what has to be equal for one to be used. See Note [Saved starts]."""

from graphpass.saved.directory import CALL, GRAPH, NOT_SAVED, RESULT, SavedFile, SavedFiles, UsedKeys, file_name
from graphpass.saved.fingerprint import (
    Parts,
    UnstableError,
    contents_of,
    difference,
    digest,
    environment,
    implementations,
    modules,
    sources,
    text_of,
)
from graphpass.saved.reads import assumed, guarded, names_of

__all__ = [
    "CALL",
    "GRAPH",
    "NOT_SAVED",
    "RESULT",
    "Parts",
    "SavedFile",
    "SavedFiles",
    "UnstableError",
    "UsedKeys",
    "assumed",
    "contents_of",
    "difference",
    "digest",
    "environment",
    "file_name",
    "guarded",
    "implementations",
    "modules",
    "names_of",
    "sources",
    "text_of",
]
