"""What Dynamo's guards guarded, for calls that go past Dynamo.

A direct call of a captured callable skips Dynamo's guards. The ambient state they compare is recorded at capture and
compared before each direct call; parameters are looked up where the module keeps them, so that a replaced one is seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpass.errors import CaptureError

__all__ = ["AmbientState", "OwnedTensors"]


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
                (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
            ),
            matmul_precision=torch.get_float32_matmul_precision(),
            default_dtype=torch.get_default_dtype(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            training=tuple([module.training for module in modules]),
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
    """Where a model keeps the tensors that a captured call was given: (owner's dict, name, tensor or module).

    The modules on the way to a tensor are among the places: replacing one replaces the tensor.
    """

    places: tuple[tuple[dict[str, Any], str, Any], ...]

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
        return cls(tuple(places)) if missing == found else None

    def in_place(self) -> bool:
        """Whether the model still keeps the same tensors in the same modules."""
        for owner, name, kept in self.places:  # noqa: SIM110 - a generator costs twice as much here
            if owner.get(name) is not kept:
                return False
        return True
