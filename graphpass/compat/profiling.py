"""Whether a profiler of torch is on, and the names that it shows: of replays and regions."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.profiler

is_on: Callable[[], bool] = functools.partial(operator.attrgetter("_is_profiler_enabled"), torch.autograd.profiler)
"""Whether ``torch.profiler``, ``torch.autograd.profiler`` or ``emit_nvtx`` is on in this process.

One call of C code, about 40 ns: no Python function runs. torch sets the flag for such checks.
"""


def ranged(label: str, launch: Callable[..., Any]) -> Callable[..., Any]:
    """``launch`` within a range that profilers show as ``label``, and ``emit_nvtx`` turns into an NVTX range."""

    def in_range(*args: Any) -> Any:
        with torch.profiler.record_function(label):
            return launch(*args)

    return in_range
