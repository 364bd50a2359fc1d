"""Random numbers: a padded tensor gets other numbers than the real one, and advances the generator further."""

from __future__ import annotations

from graphpass.regions.padding.calls import OpCall, PaddingReason, PaddingRule
from graphpass.regions.padding.nodes import TensorShape
from graphpass.regions.padding.rules.tables import aten, prims
from graphpass.regions.padding.values import PaddedValue

__all__ = ["RULES", "draws", "random_numbers"]


def draws(call: OpCall) -> None:
    """Add a finding if the number of random numbers that the call draws depends on padding."""
    tensors = [value for value in call.arguments.values() if isinstance(value, PaddedValue)]
    padded = any(call.padded(size) for shape in call.shapes for size in shape.sizes)
    if padded or any(call.places(value) for value in tensors):  # guard: proof_drawn_numbers
        findings = call.findings_for(PaddingReason("it draws random numbers for padded entries"))
        call.everywhere.update(finding.reaching("random numbers") for finding in findings)


def random_numbers(call: OpCall) -> PaddedValue | tuple[PaddedValue | None, ...]:
    """Rule for an operator whose results are random."""
    draws(call)
    results = tuple(call.fresh(shape) if isinstance(shape, TensorShape) else None for shape in _results(call))
    return results if isinstance(call.result, tuple) else results[0]  # type: ignore[return-value]


def _results(call: OpCall) -> tuple[object, ...]:
    return call.result if isinstance(call.result, tuple) else (call.result,)


def _dropout(call: OpCall) -> PaddedValue | tuple[PaddedValue | None, ...]:
    """Dropout; a copy outside of training or with probability zero."""
    value = call.tensor("input", "self")
    trains = call.argument("train", "training", default=True)
    if trains is not False and call.argument("p", default=0.5) != 0:
        draws(call)
    copy = call.carried(PaddedValue(value.factors))
    return tuple(copy for _ in call.result) if isinstance(call.result, tuple) else copy


RULES: dict[str, PaddingRule] = {
    **aten(
        random_numbers,
        "rand randn randint randperm rand_like randn_like randint_like bernoulli normal normal_functional uniform"
        " exponential geometric cauchy log_normal random poisson multinomial binomial rrelu_with_noise_functional",
    ),
    **prims(random_numbers, "inductor_random inductor_randint inductor_random_for_pallas _uniform_helper normal"),
    **aten(_dropout, "native_dropout dropout"),
}
