"""What a manager refuses, and how to mend it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from graphpass.dispatch.dispatcher import Dispatch
from graphpass.errors import CaptureError, OptionError, ShapeError, StaticInputError
from graphpass.keys import BatchDescriptor
from graphpass.modes import CUDAGraphMode

__all__ = [
    "inside_transform",
    "moved_weights",
    "no_graph",
    "not_with_offloading",
    "nothing_captured",
    "nothing_reached",
    "nothing_to_capture",
    "refuse_options",
    "too_large",
    "too_large_key",
]


def nothing_to_capture(num_captured: int) -> CaptureError:
    """Every key has its graph."""
    again, none = "call recapture() to capture them anew", "give the dispatcher a mode and sizes"
    return CaptureError(
        "there is nothing to capture",
        expected="keys without a graph: needs_capture()",
        found=f"{num_captured} keys, all captured" if num_captured else "a dispatcher without keys",
        remedy=again if num_captured else none,
    )


def nothing_captured(num_keys: int) -> CaptureError:
    """No key has its graph."""
    return CaptureError(
        "nothing has been captured yet",
        expected="capture() before the first run",
        found=f"{num_keys} keys without a graph",
        remedy="call capture(), or make the dispatcher with lazy=True to capture each key at its first use",
    )


def nothing_reached(key: str) -> CaptureError:
    """A call in a capture scope entered no compiled graph."""
    return CaptureError(
        f"nothing was captured for {key}",
        expected="a call that enters a compiled graph",
        found="Dynamo ran the model without one: its recompile limit is reached, or it skips the model",
        remedy="let sizes that vary be symbolic (no loops over a size), or raise torch._dynamo.config.recompile_limit",
    )


def inside_transform(transform: str) -> CaptureError:
    """A batch came inside ``vmap``, ``grad`` or forward-mode AD."""
    return CaptureError(
        f"a manager was called inside {transform}",
        expected="a call outside of function transforms and forward-mode AD: graphs compute values alone",
        found=transform,
        remedy="transform the model itself, or give the manager a model that has the transform inside",
    )


def moved_weights(key: tuple[CUDAGraphMode, BatchDescriptor], remedy: str) -> StaticInputError:
    """A graph reads weights that the model does not have any more."""
    return StaticInputError(
        f"the model's weights are not where the graph of {key[0]} {key[1]} reads them",
        expected="the parameters and buffers of the capture, written in place",
        found="others, or at other addresses",
        remedy=remedy,
    )


def no_graph(step: Dispatch, why: str) -> CaptureError:
    """A batch has no graph where each has to have one."""
    return CaptureError(
        "this batch has no graph, and on_fallback is 'error'",
        expected="a batch that fits a captured key",
        found=f"{step.descriptor} ({step.reason}): {why}",
        remedy="add a larger capture size, or set on_fallback='warn'",
    )


def too_large(field: str, size: object, largest: int) -> ShapeError:
    """A batch is larger than the buffers."""
    return ShapeError(
        "the batch does not fit the buffers",
        expected=f"{field} from 0 to {largest}",
        found=f"{field}={size!r}",
        remedy="split the batch, or declare the inputs at a larger batch",
    )


def too_large_key(key: BatchDescriptor, sizes: Mapping[str, int], largest: Mapping[str, int]) -> OptionError:
    """A key of the dispatcher is larger than the buffers."""
    return OptionError(
        f"the key {key} does not fit the buffers",
        expected=f"at most {largest}",
        found=str(sizes),
        remedy="declare the inputs at the dispatcher's largest size",
    )


def not_with_offloading(found: str, expected: str) -> OptionError:
    """An offloader cannot bring the weights of these forwards in time."""
    return OptionError(
        "offloaded weights cannot be brought in time",
        expected=expected,
        found=found,
        remedy="leave it out, or run the model without an offloader",
    )


def refuse_options(options: Mapping[str, Any], own: Collection[str]) -> None:
    """Refuse options that are the manager's own.

    Raises:
        OptionError: naming one.
    """
    found = sorted(set(own).intersection(options))
    if found:
        raise OptionError(
            f"option {found[0]!r} is the manager's own",
            expected="options of compiling: compiler, splitting_ops, on_fallback, on_moved_input, debug, compare, ...",
            found=f"{found[0]}={options[found[0]]!r}",
            remedy="modes and sizes are the dispatcher's; outputs always lie in the manager's buffers",
        )
