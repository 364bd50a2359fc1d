"""What Dynamo's guards guarded, for calls that go past Dynamo.

A direct call of a captured callable skips Dynamo's guards. The ambient state they compare is recorded at capture and
compared before each direct call; parameters are looked up where the module keeps them, so that a replaced one is seen.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpass.errors import CaptureError

__all__ = ["AmbientState", "GuardedValues", "OwnedTensors"]


_TRAINING = operator.attrgetter("training")


@dataclass(frozen=True, slots=True)
class AmbientState:
    """Process-wide settings and train/eval flags at capture."""

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    matmul_precision: str
    default_dtype: torch.dtype
    deterministic: bool
    training: tuple[bool, ...]

    @classmethod
    def now(cls, modules: Sequence[torch.nn.Module]) -> AmbientState:
        """The state as it is."""
        return cls(
            autocast=tuple(
                (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
                for device in ("cpu", "cuda")
            ),
            matmul_precision=torch.get_float32_matmul_precision(),
            default_dtype=torch.get_default_dtype(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            training=tuple(map(_TRAINING, modules)),
        )

    def refuse_change(self, modules: Sequence[torch.nn.Module]) -> None:
        """Compare with the state as it is now.

        Raises:
            CaptureError: something changed since capture; named.
        """
        now = AmbientState.now(modules)
        if now == self:
            return
        for name in ("autocast", "matmul_precision", "default_dtype", "deterministic", "training"):
            if getattr(now, name) != getattr(self, name):
                raise CaptureError(
                    f"{name} changed since the graphs were captured",
                    expected=_shown(name, self, modules),
                    found=_shown(name, now, modules),
                    remedy=f"restore {name} before the call, or close() and capture again under the new setting",
                )


def _shown(name: str, state: AmbientState, modules: Sequence[torch.nn.Module]) -> str:
    if name != "training":
        return str(getattr(state, name))
    training = sum(state.training)
    return f"{training} of {len(modules)} modules in training mode"


@dataclass(frozen=True, slots=True)
class OwnedTensors:
    """Where a model keeps the tensors that a captured call was given: the n-th owner's n-th name is the n-th kept.

    The modules on the way to a tensor are among the places: replacing one replaces the tensor.
    """

    owners: tuple[dict[str, Any], ...]
    names: tuple[str, ...]
    kept: tuple[Any, ...]

    @classmethod
    def locate(cls, modules: Sequence[torch.nn.Module], wanted: Iterable[torch.Tensor]) -> OwnedTensors | None:
        """Find every wanted tensor among parameters and buffers; None when one is kept elsewhere."""
        missing = {id(tensor) for tensor in wanted}
        places: list[tuple[dict[str, Any], str, Any]] = []
        found = set()
        owners = set()
        # Children come after their parents, so backwards every child is known to own something or not.
        for module in reversed(modules):
            here: list[tuple[dict[str, Any], str, Any]] = [
                (owner, name, tensor)
                for owner in (module._parameters, module._buffers)
                for name, tensor in owner.items()
                if tensor is not None and id(tensor) in missing
            ]
            found |= {id(tensor) for _, _, tensor in here}
            here += [(module._modules, name, child) for name, child in module._modules.items() if id(child) in owners]
            if here:
                owners.add(id(module))
            places += here
        if missing != found:
            return None
        return cls(
            owners=tuple(owner for owner, _, _ in places),
            names=tuple(name for _, name, _ in places),
            kept=tuple(kept for _, _, kept in places),
        )

    def in_place(self) -> bool:
        """Whether the model still keeps the same tensors in the same modules."""
        # All of it in C: hundreds of look-ups stand in every direct call.
        return all(map(operator.is_, map(dict.get, self.owners, self.names), self.kept))


@dataclass(frozen=True, slots=True)
class GuardedValues:
    """Python values that Dynamo guarded (a scale, a config flag), read where the model keeps them."""

    _read: Callable[[Mapping[str, Any], Mapping[str, Any]], tuple[Any, ...]]
    _locals: Mapping[str, Any]
    _globals: Mapping[str, Any]
    _values: tuple[Any, ...]

    @classmethod
    def of(cls, expressions: Sequence[str], entry: Callable[..., Any]) -> GuardedValues:
        """Read the values now.

        Args:
            expressions: over ``L`` and ``G``, as Dynamo writes the sources of its guards.
            entry: the function that was compiled; its closure is what ``L`` names besides arguments.
        """
        here = inspect.getclosurevars(entry).nonlocals
        scope = entry.__globals__
        readable = []
        for expression in expressions:
            # Train and eval are compared, by name, as ambient state.
            if expression.startswith("L['arguments']") or expression.endswith(".training"):
                continue
            try:
                value = _reader([expression])(here, scope)[0]
            except (AttributeError, KeyError, IndexError, TypeError):
                continue
            if isinstance(value, _CONSTANTS):
                readable.append(expression)
        read = _reader(readable)
        return cls(read, here, scope, read(here, scope))

    def unchanged(self) -> bool:
        """Whether every value is what it was."""
        try:
            return self._read(self._locals, self._globals) == self._values
        except (AttributeError, KeyError, IndexError, TypeError):
            return False


_CONSTANTS = (int, float, bool, str, type(None), torch.dtype, torch.device, tuple)


def _reader(expressions: Sequence[str]) -> Callable[[Mapping[str, Any], Mapping[str, Any]], tuple[Any, ...]]:
    # The expressions are torch's own, from its guards; compat lets only chains of attributes and items through.
    reader: Callable[[Mapping[str, Any], Mapping[str, Any]], tuple[Any, ...]] = eval(
        f"lambda L, G: ({''.join(f'{expression}, ' for expression in expressions)})"
    )
    return reader
