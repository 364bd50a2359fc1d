"""``compare=True``: eager runs of a region beside its graph, on copies of the tensors that it writes.

Two comparisons are made in the order of the regions. A compiled region must return what its traced graph returns; a
difference is the compiler's fault. A replay must return what the compiled code returns without a graph; a difference is
the capture's fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from graphpass.capture.outputs import clone_pool_tensors
from graphpass.capture.regioncalls import Observed, RegionCalls
from graphpass.capture.replay import GraphEntry
from graphpass.capture.settings import default_random_state, restoring
from graphpass.capture.staging import storage_ids
from graphpass.compat import trees
from graphpass.context import ForwardContext, entered
from graphpass.errors import MismatchError

# (relative, absolute) tolerance: a replay runs the same kernels in the same order, except that libraries may choose
# another algorithm under capture.
_REPLAY: Mapping[torch.dtype, tuple[float, float]] = MappingProxyType(
    {
        torch.float64: (1e-9, 1e-9),
        torch.float32: (1e-4, 1e-5),
        torch.float16: (1e-2, 1e-3),
        torch.bfloat16: (2e-2, 1e-2),
    }
)
# Tolerance relative to a row's norm: a compiler fuses, reorders and stores intermediate results in wider dtypes.
_COMPILED: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 6e-2}
)


def compared(
    entry: GraphEntry,
    runnable: Callable[..., Any],
    leaves: Sequence[Any],
    context: ForwardContext,
    device: torch.device,
) -> Callable[[Sequence[Any], Sequence[Any]], None]:
    """Run the region of ``entry`` without a graph, on copies of what it writes, and leave the generators as they are.

    Returns what compares with it a replay's outputs, and the arguments after that.
    """
    name, key = str(entry.region), f"{context.runtime_mode} {context.batch_descriptor}"
    copies = clone_pool_tensors(leaves, storage_ids(leaves[position] for position in entry.written))
    observed: list[Observed] = []
    inside = RegionCalls(_plainly, observed, before=partial(_compiler_check, key, device))
    generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
    with restoring([], generators, device), entered(replace(context, capture=inside)), torch.no_grad():
        args, kwargs = trees.unflatten(copies, entry.plan.statics.spec)
        eager = trees.flatten(inside.call(name, runnable, args, kwargs))[0]

    def compare(outputs: Sequence[Any], left: Sequence[Any]) -> None:
        for seen, expected in zip(entry.observed, observed, strict=True):
            _refuse(seen.region, key, f"output {seen.index}", seen.tensor, expected.tensor)
        for index, (result, reference) in enumerate(zip(outputs, eager, strict=True)):
            if isinstance(reference, torch.Tensor):
                _refuse(name, key, f"output {index}", result, reference)
            elif result != reference:
                raise _mismatch(name, key, f"output {index}", "a replay", repr(result), repr(reference))
        for position in entry.written:
            what = f"input {entry.plan.inputs.names[position]!r} after the call"
            _refuse(name, key, what, left[position], copies[position])

    return compare


def _refuse(region: str, key: str, what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        shown = [f"{tuple(t.shape)} {t.dtype}" for t in (found, expected)]
        raise _mismatch(region, key, what, "a replay", *shown)
    difference = first_difference(found, expected)
    if difference is not None:
        raise _mismatch(region, key, what, "a replay", difference, "what the same code returns eagerly")


def _plainly(runnable: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return runnable(*args, **kwargs)


def _compiler_check(
    key: str, device: torch.device, region: str, runnable: Any, args: Sequence[Any]
) -> Callable[[Any], None] | None:
    traced = getattr(runnable, "uncompiled", None)
    if traced is None:
        return None
    copies = clone_pool_tensors(args, storage_ids(args))

    def refuse(result: Any) -> None:
        with restoring([], [], device):
            before = default_random_state(device)
            expected = trees.flatten(traced(*copies))[0]
            draws = not torch.equal(before, default_random_state(device))
        if draws:
            return  # compiled code draws other random numbers than traced code
        for index, (found, reference) in enumerate(zip(trees.flatten(result)[0], expected, strict=True)):
            if isinstance(reference, torch.Tensor):
                difference = _compiled_difference(found, reference)
                if difference is not None:
                    as_traced = "what the region returns as it was traced"
                    raise _mismatch(region, key, f"output {index}", "compiled code", difference, as_traced)

    return refuse


def _mismatch(region: str, key: str, what: str, who: str, found: str, expected: str) -> MismatchError:
    remedy = (
        "try compiler='eager': if the difference disappears, the compiler causes it"
        if who == "compiled code"
        else "pass what changes between calls to the op as an argument; or list the op in splitting_ops, and set "
        "mode='PIECEWISE'"
    )
    return MismatchError(f"{what} of {region} differs in {who} at {key}", expected=expected, found=found, remedy=remedy)


# -- differences of tensors --------------------------------------------------------------------------------------------


def first_difference(found: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Where and how much ``found`` differs from ``expected`` beyond rounding, or None. NaN equals NaN."""
    relative, absolute = _REPLAY.get(_real(expected.dtype), (0.0, 0.0))
    found, expected = _wide(found), _wide(expected)
    if not expected.is_floating_point():
        return _difference(found, expected, found == expected)
    return _difference(found, expected, torch.isclose(found, expected, rtol=relative, atol=absolute, equal_nan=True))


def _compiled_difference(found: torch.Tensor, expected: torch.Tensor) -> str | None:
    """:func:`first_difference` between compiled and traced code, with a tolerance relative to each row's norm."""
    share = _COMPILED.get(_real(expected.dtype))
    if share is None or not expected.numel():
        return first_difference(found, expected)
    found, expected = _wide(found), _wide(expected)
    rows, exact = (t.reshape(t.shape[0] if t.dim() else 1, -1) for t in (found, expected))
    off = torch.where(_same(rows, exact), 0.0, rows - exact).norm(dim=1)
    close = off <= share * (1 + exact.nan_to_num(0.0, 0.0, 0.0).norm(dim=1))
    return _difference(found, expected, close if expected.dim() else close[0])


def largest_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """0 if two tensors are equal, where NaN equals NaN; infinite if a difference is not finite, or not of numbers."""
    if found.shape != expected.shape or not has_fractions(found):
        return 0.0 if torch.equal(found, expected) else float("inf")
    same = _same(found, expected)
    if bool(same.all()):
        return 0.0
    difference = (in_double(found) - in_double(expected)).abs().masked_fill(same, 0.0).max()
    return float(difference) if bool(difference.isfinite()) else float("inf")


def has_fractions(tensor: torch.Tensor) -> bool:
    """Whether entries are floating-point or complex numbers, which round."""
    return tensor.is_floating_point() or tensor.is_complex()


def in_double(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float64 or complex128."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _same(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (found == expected) | (found.isnan() & expected.isnan())


def _difference(found: torch.Tensor, expected: torch.Tensor, close: torch.Tensor) -> str | None:
    if bool(close.all()):
        return None
    rows = (~close).reshape(close.shape[0], -1).any(dim=1).nonzero().flatten() if close.dim() else None
    where = "" if rows is None else f"row {int(rows[0])} (of {len(rows)} rows that differ), "
    wide_found, wide = found.to(torch.float64), expected.to(torch.float64)
    magnitude = float((wide_found - wide).abs().max())
    scale = float(wide.abs().nan_to_num().max())
    relative = magnitude / scale if scale else float("inf")
    return f"{where}largest difference {magnitude:.3g}, relative {relative:.3g}"


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype
