"""The errors of a manager, with their remedies."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from graphpass.dispatch.keys import Dispatch, DispatchReason
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
    """``capture()`` was called although every key has a graph, or there are no keys."""
    again, none = "call recapture() to capture them again", "create the dispatcher with a mode and sizes"
    return CaptureError(
        "there is nothing to capture",
        expected="a key without a graph (needs_capture())",
        found=f"{num_captured} keys, all captured" if num_captured else "a dispatcher without keys",
        remedy=again if num_captured else none,
    )


def nothing_captured(num_keys: int) -> CaptureError:
    """A batch or a step of the ranks came before the first capture."""
    return CaptureError(
        "nothing has been captured yet",
        expected="capture() before the first run",
        found=f"{num_keys} keys without a graph",
        remedy="call capture(), or create the dispatcher with lazy=True to capture each key at its first use",
    )


def nothing_reached(key: str) -> CaptureError:
    """A call of the model during a capture entered no compiled graph."""
    return CaptureError(
        f"nothing was captured for {key}",
        expected="a call that enters a compiled graph",
        found="none: the model returns its inputs as they are, Dynamo skips it, or Dynamo reached its recompile limit",
        remedy="let the model compute something; do not loop over a size that varies, or raise "
        "torch._dynamo.config.recompile_limit",
    )


def inside_transform(transform: str) -> CaptureError:
    """A manager was called inside ``vmap``, ``grad`` or forward-mode AD."""
    return CaptureError(
        f"a manager was called inside {transform}",
        expected="a call outside of function transforms and forward-mode AD: a graph computes plain values",
        found=transform,
        remedy="transform the model itself, or create the manager with a model that applies the transform",
    )


def moved_weights(key: tuple[CUDAGraphMode, BatchDescriptor], remedy: str) -> StaticInputError:
    """The graph of a key reads weights that have been replaced or moved."""
    return StaticInputError(
        f"the graph of {key[0]} {key[1]} reads weights that were replaced or moved since its capture",
        expected="the parameters and buffers of the capture, updated in place",
        found="other tensors, or other addresses",
        remedy=remedy,
    )


def no_graph(step: Dispatch, why: str) -> CaptureError:
    """A batch has no graph, and ``on_fallback`` is ``"error"``."""
    return CaptureError(
        "this batch has no graph, and on_fallback is 'error'",
        expected="a batch that fits a captured key",
        found=f"{step.descriptor} ({step.reason}): {why}",
        remedy=step.reason.remedy or DispatchReason.AGREED.remedy,
    )


def too_large(field: str, size: object, largest: int) -> ShapeError:
    """A batch is larger than the buffers, or its size is not a count."""
    return ShapeError(
        "the batch does not fit the buffers",
        expected=f"{field} from 0 to {largest}",
        found=f"{field}={size!r}",
        remedy="split the batch, or declare larger inputs (InputSpec.shape)",
    )


def too_large_key(key: BatchDescriptor, sizes: Mapping[str, int], largest: Mapping[str, int]) -> OptionError:
    """A key of the dispatcher is larger than the buffers."""
    return OptionError(
        f"the key {key} does not fit the buffers",
        expected=f"at most {largest}",
        found=str(sizes),
        remedy="declare the inputs for the dispatcher's largest size (InputSpec.shape)",
    )


def not_with_offloading(found: str, expected: str) -> OptionError:
    """A model or option that cannot be combined with an offloader."""
    return OptionError(
        "the offloader cannot copy weights in time for this model or option",
        expected=expected,
        found=found,
        remedy="use the expected model or option, or run the model without an offloader",
    )


def refuse_options(options: Mapping[str, Any], own: Collection[str]) -> None:
    """Refuse options that the manager sets itself.

    Args:
        options: the user's options.
        own: names of the options that the manager sets.

    Raises:
        OptionError: the user has passed one; the error names it.
    """
    refused = sorted(set(own).intersection(options))
    if refused:
        raise OptionError(
            f"option {refused[0]!r} is set by the manager",
            expected="other options of the backend: compiler, splitting_ops, on_fallback, on_moved_input, debug, "
            "compare, ...",
            found=f"{refused[0]}={options[refused[0]]!r}",
            remedy="leave it out: the dispatcher sets mode and sizes, and outputs are views of the manager's buffers",
        )
