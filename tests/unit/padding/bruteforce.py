"""What padding really changes: a graph at its real sizes against padded ones, with several contents of the padding."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor

from graphpass.padding import PaddingProof, Verdict
from tests.unit.padding.tracing import HINTS, INPUTS, Sizes, Traced

# The order in which a kernel sums may change with its size: the last bits of float64, nothing that padding could do.
TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2}
SCALES = (1.0, 1e4)

REAL: tuple[Sizes, ...] = (HINTS, {"b": 4, "s": 4, "t": 3}, {"b": 2, "s": 7, "t": 4})
MORE: tuple[Sizes, ...] = ({"b": 1, "s": 1, "t": 1}, {"b": 3, "s": 4, "t": 2}, {"b": 5, "s": 9, "t": 7})


def same(real: Tensor, padded: Tensor) -> bool:
    """Whether the real entries of a padded result are those of the run without padding."""
    if real.dim() != padded.dim() or any(a > b for a, b in zip(real.shape, padded.shape, strict=True)):
        return False
    cut = padded[tuple(slice(size) for size in real.shape)]
    tolerance = TOLERANCE.get(real.dtype)
    if tolerance is None:
        return torch.equal(real, cut)
    return torch.allclose(real, cut, rtol=tolerance, atol=tolerance, equal_nan=True)


def sizes_tried(traced: Traced, fields: Collection[str]) -> Iterator[tuple[Sizes, Sizes]]:
    """Real sizes, and padded ones in which these key fields are larger; both are admitted by the guards."""
    both = sorted(itertools.product(range(len(REAL)), range(len(MORE))), key=lambda at: (at[0] - at[1]) % len(REAL))
    for real, more in ((REAL[a], MORE[b]) for a, b in both):
        padded = {field: size + more[field] * (field in fields) for field, size in real.items()}
        if traced.admits(real) and traced.admits(padded):
            yield real, padded


def differences(
    traced: Traced, fields: Collection[str], scales: Sequence[float] = SCALES, tried: int | None = None
) -> Iterator[str]:
    """What differs once these key fields are padded, at the first ``tried`` sizes and all contents."""
    for number, (real, padded) in enumerate(itertools.islice(sizes_tried(traced, fields), tried)):
        generator = torch.Generator().manual_seed(number)
        kinds = [INPUTS[name] for name in traced.names]
        inputs = [kind.real(real, generator) for kind in kinds]
        expected, written = traced.run(inputs)
        state = torch.get_rng_state()
        for scale in scales:
            larger = [kind.padded(value, padded, scale, generator) for kind, value in zip(kinds, inputs, strict=True)]
            where = f"at {dict(real)} padded to {dict(padded)} with contents x{scale:g}"
            try:
                found, left = traced.run(larger)
            except (RuntimeError, IndexError) as error:
                yield f"the run fails {where}: {error}"
                continue
            compared = (at for at in range(len(expected)) if not _is_size(traced, at))
            yield from (f"output {at} {where}" for at in compared if not _equal(expected[at], found[at]))
            names = zip(traced.names, written, left, strict=True)
            yield from (f"written input {name!r} {where}" for name, a, b in names if not same(a, b))
            if not torch.equal(state, torch.get_rng_state()):
                yield f"random numbers {where}"


def _is_size(traced: Traced, at: int) -> bool:
    """Whether an output is an expression over sizes: its value for a caller is the one at the real sizes."""
    output = traced.graph.graph.output_node().args[0][at]
    value = output.meta.get("val") if isinstance(output, torch.fx.Node) else None
    return isinstance(value, torch.SymInt) and value.node.expr.free_symbols <= set(traced.symbols)


def _equal(real: Any, padded: Any) -> bool:
    return same(real, padded) if isinstance(real, Tensor) else bool(real == padded)


def wrong_cuts(traced: Traced, proof: PaddingProof, fields: Collection[str]) -> Iterator[str]:
    """Outputs whose shape is not the product of the size factors that the proof names."""
    for real, padded in itertools.islice(sizes_tried(traced, fields), 1):
        for sizes in (real, padded):
            inputs = [INPUTS[name].real(sizes, torch.Generator().manual_seed(0)) for name in traced.names]
            outputs, _ = traced.run(inputs)
            for at, (output, dims) in enumerate(zip(outputs, proof.output_factors, strict=True)):
                if not isinstance(output, Tensor):
                    if dims is not None:
                        yield f"output {at} is no tensor and has factors {dims}"
                    continue
                shape = [sympy.Mul(*factors, sympy.S.One).xreplace(traced.sizes_of(sizes)) for factors in dims or ()]
                decided = [size if size.is_Integer else found for size, found in zip(shape, output.shape, strict=True)]
                if decided != list(output.shape):
                    yield f"output {at} of shape {list(output.shape)} has factors {dims}"


def unsound(
    traced: Traced, proof: PaddingProof, scales: Sequence[float] = SCALES, tried: int | None = None
) -> list[str]:
    """Why a proof is wrong; empty where padding all proved fields together, or each alone, changes nothing."""
    proved = [field for field, verdict in proof.verdicts.items() if verdict is Verdict.PROVED]
    subsets = {tuple(proved), *((field,) for field in proved)} - {()}
    found = [f"{fields}: {text}" for fields in sorted(subsets) for text in differences(traced, fields, scales, tried)]
    return found + list(wrong_cuts(traced, proof, proved))
