"""Functions that Dynamo runs as they are: it could not trace them, or not compile them once more."""

from __future__ import annotations

import inspect
import os
import re
import time
import types
from dataclasses import dataclass
from typing import Any

import torch

from graphpass.compat.nnmodules import where_of

_SOFT = ("Unsupported", "UserError")  # errors that Dynamo keeps to itself; others reach the caller
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)")

Place = tuple[str | None, int | None, str | None]
"""File, first line and name of a function."""
UNKNOWN: Place = (None, None, None)


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A compilation that Dynamo gave up."""

    frame: int  #: id of the function's frame
    place: Place  #: of the function; unknown where it is at its recompile limit
    reason: str  #: Dynamo's, in one line
    where: str  #: the line of the user's code; empty if unknown
    at_us: int  #: when the compilation began, by :func:`now_us`


def place_of(code: types.CodeType) -> Place:
    """Where a function is defined, as Dynamo's records of compilations say it."""
    return code.co_filename, code.co_firstlineno, code.co_name


def shown(place: Place) -> str:
    """A function for a reader: ``forward (model.py:12)``."""
    file, line, name = place
    if file is None or file.startswith(("<", _OWN)):
        return "the model"  # a function that was made to call it
    resumed = _RESUMED.fullmatch(name or "")
    return f"{resumed[1]} from line {resumed[2]} on" if resumed else f"{name} ({os.path.basename(file)}:{line})"


def num_tried() -> int:
    """How many functions Dynamo has tried to compile."""
    return int(torch._dynamo.utils.counters["frames"]["total"])


def now_us() -> int:
    """The clock of :attr:`GivenUp.at_us`."""
    return time.time_ns() // 1000


def given_up() -> list[GivenUp]:
    """Of the last compilations those that Dynamo gave up; torch keeps 64 of both kinds."""
    metrics: list[Any] = torch._dynamo.utils.get_compilation_metrics()
    return [
        GivenUp(
            int(str(one.compile_id).partition("/")[0].rpartition("!")[2]),
            (one.co_filename, one.co_firstlineno, one.co_name),
            str(one.fail_reason).strip().partition("\n")[0],
            f"{os.path.basename(one.fail_user_frame_filename)}:{one.fail_user_frame_lineno}"
            if one.fail_user_frame_filename
            else "",
            int(one.start_time_us or 0),
        )
        for one in metrics
        if one.fail_type in _SOFT and re.search(r"\d+/\d", str(one.compile_id))
    ]


def fixed_at() -> str:
    """The line that has made a constant of a size or number in the function being compiled; empty if none has."""
    shape_env = getattr(getattr(torch._guards.TracingContext.try_get(), "fake_mode", None), "shape_env", None)
    stacks = getattr(shape_env, "specialization_stacks", {}).values()
    return next((where_of("".join(stack.format())) for stack in stacks), "")


def running() -> set[Place]:
    """The functions whose calls are under way inside the call of a ``torch.compile``'d callable."""
    found: set[Place] = set()
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        found.add(place_of(frame.f_code))
        frame = frame.f_back
    return found
