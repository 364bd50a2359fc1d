"""Whether padding changes what real rows get: asked of the model itself, once a key or in every call.

Nothing but the model's answer tells: a mask may be padded with 0 because the model needs it, and a mean over the batch
takes padded rows for real ones without a word. So a key's first padded call is run once more without padding and
without a graph, and the results are compared. In poison mode every padded call is replayed with other contents in the
padding of each input that declares none, and real rows have to stay what they are, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from graphpass import compat
from graphpass.capture.comparison import row_errors
from graphpass.capture.snapshot import default_random_state, state_kept
from graphpass.errors import MismatchError
from graphpass.manager.buffers import KeyInputs
from graphpass.manager.padding import InputBuffer

__all__ = ["PaddedCall", "compare_with_unpadded", "poisoned"]

# Of a row's norm. Other sizes take other kernels; a row that saw padding is off by much more.
_TOLERANCE: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float64: 1e-6, torch.float32: 1e-2, torch.float16: 1e-1, torch.bfloat16: 1e-1}
)


@dataclass(frozen=True, slots=True)
class PaddedCall:
    """A call at a key larger than its real sizes, which can be repeated.

    Attributes:
        key: mode and padded shape, as errors show them.
        inputs: the key's buffers.
        given: the call's arguments by name.
        sizes: the real size of each key field.
        written: arguments that the model writes to.
        state: tensors of the model that it writes to.
        generators: its random number generators.
        returned: its flat result, cut to the real sizes.
        cut_as_told: the leaves of it that were cut as the user declared, whatever the model returns without padding.
        replay: the same of another replay, over what the buffers hold.
    """

    key: str
    inputs: KeyInputs
    given: Mapping[str, Any]
    sizes: Mapping[str, int]
    written: Collection[str]
    state: Sequence[torch.Tensor]
    generators: Sequence[torch.Generator]
    returned: Sequence[Any]
    cut_as_told: Collection[int]
    replay: Callable[[], Sequence[Any]]

    @property
    def device(self) -> torch.device:
        """Where the buffers lie."""
        return self.inputs.is_padding.device

    def replayed(self, poison: Mapping[str, torch.Tensor] | None = None) -> list[Any]:
        """Copies of what a replay returns, which leaves no trace; ``poison`` is padding by argument."""
        self.inputs.fill(self.given, self.sizes)
        for name, contents in (poison or {}).items():
            buffer = self.inputs.buffers[name]
            buffer.tensor.copy_(contents)
            buffer.real(self.sizes).copy_(self.given[name])
        with state_kept(self.state, self.generators, self.device):
            return _copied(self.replay())


def compare_with_unpadded(call: PaddedCall, model: Callable[..., Any]) -> str | None:
    """Compare the call's replay with ``model`` on the real rows alone; why not, where that tells nothing.

    Raises:
        MismatchError: real rows are others than without padding.
    """
    copies = {name: value.clone() if name in call.written else value for name, value in call.given.items()}
    with state_kept(call.state, call.generators, call.device):
        before = default_random_state(call.device)
        try:
            expected = _copied(compat.tree_flatten(model(**copies))[0])
        except Exception as error:  # whatever the model says to these sizes is no matter of padding
            return f"without padding and graph the model raises {type(error).__name__}: {error}"
        if not torch.equal(before, default_random_state(call.device)):
            return "the model draws random numbers"
    # Where a call changes what the next one reads, both have to start from the same.
    found = call.replayed() if call.state or call.generators or call.written else call.returned
    for index, (leaf, reference) in enumerate(zip(found, expected, strict=True)):
        problem = None if index in call.cut_as_told else _apart(leaf, reference)
        if problem is not None:
            raise MismatchError(
                f"output {index} is another one at {call.key} than without padding, for sizes {dict(call.sizes)}",
                expected="real rows that do not see the padding",
                found=problem,
                remedy="pad with what the model ignores (padding={argument: value}), mask it, capture every size it "
                "is called with, or take a reduction over the padded dimension out of the model; "
                "check_padding=False goes on without",
            )
    return None


def poisoned(call: PaddedCall, declared: Collection[str]) -> None:
    """Replay with other contents in the padding of each argument that is not ``declared``, one after the other.

    Raises:
        MismatchError: real rows depend on it.
    """
    reference = call.replayed()
    for name, buffer in call.inputs.buffers.items():
        if name in declared or buffer.real(call.sizes).shape == buffer.tensor.shape:
            continue
        for kind, contents in _poisons(buffer, call.given[name]):
            for index, (leaf, other) in enumerate(zip(reference, call.replayed({name: contents}), strict=True)):
                if isinstance(leaf, torch.Tensor) and not _identical(leaf, other):
                    raise MismatchError(
                        f"real rows of output {index} depend on the padding of {name!r} at {call.key}",
                        expected="the same bits for every content of the padding",
                        found=f"others where it holds {kind}",
                        remedy=f"declare what the model needs there, padding={{{name!r}: value}}, or keep it from "
                        "mixing: a mask, and keys and values through graphpass.zero_padding",
                    )


def _poisons(buffer: InputBuffer, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Padding that a model must not see. Integers are values of real rows: another one may be no valid index."""
    real = value.flatten()
    for _ in range(2):
        drawn = real[torch.randint(len(real), buffer.tensor.shape, device=real.device)]
        yield "values of other rows", drawn
        if buffer.tensor.is_floating_point() or buffer.tensor.is_complex():
            yield "NaN", torch.full_like(buffer.tensor, float("nan"))
            return


def _copied(leaves: Sequence[Any]) -> list[Any]:
    """``leaves`` by themselves: a model may return what it writes to, which is put back afterwards."""
    return [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _identical(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _apart(found: Any, expected: Any) -> str | None:
    """How a result differs from the one without padding; None where it does not, or only by rounding."""
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        return None if found is expected or found == expected else f"{found!r} instead of {expected!r}"
    if found.shape != expected.shape:
        return f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    tolerance = _TOLERANCE.get(expected.dtype)
    if tolerance is None or not expected.numel():
        return None  # where two values are as good as equal, rounding may choose another index
    width = expected.shape[-1] if expected.dim() else 1
    off, norms = row_errors(*(t.to(torch.float64).reshape(-1, width) for t in (found, expected)))
    wrong = ~(off <= tolerance * torch.maximum(norms, norms.mean()))
    if not bool(wrong.any()):
        return None
    row = int(wrong.nonzero()[0])
    return f"row {row} (of {int(wrong.sum())} that differ) off by {float(off[row]):.3g}, its norm is {norms[row]:.3g}"
