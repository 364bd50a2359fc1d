"""``compare=True``: eager runs of a region beside its graph.

Every replay is compared with an eager run of the same code, on copies of the tensors that it writes.
There are two comparisons, both in the order in which regions run. A compiled region must return what its traced graph
returns for the same inputs; a difference is the compiler's fault. A replay must return what the compiled code returns
without a graph; a difference is the capture's fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True)
class EagerRun:
    """Results and effects of one call without a graph."""

    entry: GraphEntry  #: the graph of the same call
    key: str  #: mode and padded shape, as errors show them
    observed: Sequence[Observed]  #: tensors that the regions inside returned, in order
    outputs: Sequence[Any]  #: flat outputs
    leaves: Sequence[Any]  #: the arguments after the call; copies of those that the call may write to

    @classmethod
    def of(
        cls,
        entry: GraphEntry,
        runnable: Callable[..., Any],
        leaves: Sequence[Any],
        context: ForwardContext,
        device: torch.device,
    ) -> EagerRun:
        """Run the region of ``entry`` on copies of ``leaves``, and leave the random number generators as they are."""
        key = f"{context.runtime_mode} {context.batch_descriptor}"
        copies = clone_pool_tensors(leaves, storage_ids(leaves[position] for position in entry.written))
        observed: list[Observed] = []
        inside = RegionCalls(_plainly, observed, before=partial(_compiler_check, key, device))
        generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
        with restoring([], generators, device), entered(replace(context, capture=inside)), torch.no_grad():
            args, kwargs = trees.unflatten(copies, entry.plan.statics.spec)
            outputs = trees.flatten(inside.call(str(entry.region), runnable, args, kwargs))[0]
        return cls(entry, key, observed, outputs, copies)

    def compare(self, outputs: Sequence[Any], leaves: Sequence[Any]) -> None:
        """Compare with what a replay returned and left."""
        name = str(self.entry.region)
        for found, expected in zip(self.entry.observed, self.observed, strict=True):
            self._refuse(found.region, f"output {found.index}", found.tensor, expected.tensor)
        for index, (result, reference) in enumerate(zip(outputs, self.outputs, strict=True)):
            if isinstance(reference, torch.Tensor):
                self._refuse(name, f"output {index}", result, reference)
            elif result != reference:
                raise _mismatch(name, self.key, f"output {index}", "a replay", repr(result), repr(reference))
        for position in self.entry.written:
            what = f"input {self.entry.plan.inputs.names[position]!r} after the call"
            self._refuse(name, what, leaves[position], self.leaves[position])

    def _refuse(self, region: str, what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        if found.shape != expected.shape or found.dtype != expected.dtype:
            shown = [f"{tuple(t.shape)} {t.dtype}" for t in (found, expected)]
            raise _mismatch(region, self.key, what, "a replay", *shown)
        difference = first_difference(found, expected)
        if difference is not None:
            raise _mismatch(region, self.key, what, "a replay", str(difference), "what the same code returns eagerly")


def _plainly(runnable: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return runnable(*args, **kwargs)


def _compiler_check(
    key: str, device: torch.device, region: str, runnable: Any, args: Sequence[Any]
) -> Callable[[Any], None] | None:
    """What checks that a compiled region has returned what its traced graph returns for the same inputs."""
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
                    raise _mismatch(region, key, f"output {index}", "compiled code", str(difference), as_traced)

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


@dataclass(frozen=True, slots=True)
class Difference:
    """Where and how much two tensors differ."""

    row: int | None  #: the first index along dimension 0 at which they differ; None for tensors without dimensions
    num_rows: int  #: the number of such indices
    magnitude: float  #: the largest absolute difference; NaN if an entry is NaN in only one tensor
    relative: float  #: ``magnitude`` divided by the largest expected magnitude

    def __str__(self) -> str:
        where = "" if self.row is None else f"row {self.row} (of {self.num_rows} rows that differ), "
        return f"{where}largest difference {self.magnitude:.3g}, relative {self.relative:.3g}"


def first_difference(found: torch.Tensor, expected: torch.Tensor) -> Difference | None:
    """The difference of ``found`` from ``expected`` beyond rounding; None if there is none. NaN equals NaN."""
    relative, absolute = _REPLAY.get(_real(expected.dtype), (0.0, 0.0))
    found, expected = _wide(found), _wide(expected)
    if not expected.is_floating_point():
        return _difference(found, expected, found == expected)
    return _difference(found, expected, torch.isclose(found, expected, rtol=relative, atol=absolute, equal_nan=True))


def _compiled_difference(found: torch.Tensor, expected: torch.Tensor) -> Difference | None:
    """:func:`first_difference` between compiled and traced code, with a tolerance relative to each row's norm."""
    share = _COMPILED.get(_real(expected.dtype))
    if share is None or not expected.numel():
        return first_difference(found, expected)
    found, expected = _wide(found), _wide(expected)
    off, norms = row_errors(*(t.reshape(t.shape[0] if t.dim() else 1, -1) for t in (found, expected)))
    close = off <= share * (1 + norms)
    return _difference(found, expected, close if expected.dim() else close[0])


def row_errors(found: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row of two matrices, the norm of their difference, where NaN equals NaN, and that of ``expected``."""
    off = torch.where(_same(found, expected), 0.0, found - expected).norm(dim=1)
    return off, expected.nan_to_num(0.0, 0.0, 0.0).norm(dim=1)


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


def _difference(found: torch.Tensor, expected: torch.Tensor, close: torch.Tensor) -> Difference | None:
    if bool(close.all()):
        return None
    rows = (~close).reshape(close.shape[0], -1).any(dim=1).nonzero().flatten() if close.dim() else None
    wide_found, wide = found.to(torch.float64), expected.to(torch.float64)
    magnitude = float((wide_found - wide).abs().max())
    scale = float(wide.abs().nan_to_num().max())
    return Difference(
        row=None if rows is None else int(rows[0]),
        num_rows=1 if rows is None else len(rows),
        magnitude=magnitude,
        relative=magnitude / scale if scale else float("inf"),
    )


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype
