"""What Dynamo's guards guarded, for steps that go past Dynamo.

Settings of torch are compared with those of the capture and a change is refused by name. Parameters and buffers are
looked up where the modules keep them. Attributes, hooks and longer lists are not compared: whoever changes them calls
``recapture()``.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpass.capture.ambient import AmbientState
from graphpass.capture.dictslots import DictSlots
from graphpass.compat import memory
from graphpass.errors import CaptureError, ShapeError

__all__ = [
    "CallGuards",
    "KeptLayouts",
    "OwnedTensors",
    "entry_of",
    "modules_of",
    "refuse_other_settings",
]


def refuse_other_settings(captured: AmbientState, modules: Sequence[torch.nn.Module]) -> None:
    """Compare the state at the capture with the one that holds now.

    Raises:
        CaptureError: something changed since capture; named.
    """
    now = AmbientState.now(modules)
    name = captured.difference(now)
    if name is not None:
        raise CaptureError(
            f"{name} changed since the graphs were captured",
            expected=_shown(name, captured, modules),
            found=_shown(name, now, modules),
            remedy=f"restore {name} before the call, or close() and capture again under the new setting",
        )


def _shown(name: str, state: AmbientState, modules: Sequence[torch.nn.Module]) -> str:
    if name != "training":
        return str(getattr(state, name))
    training = sum(state.training)
    return f"{training} of {len(modules)} modules in training mode"


class OwnedTensors(DictSlots):
    """Where a model keeps the tensors that a captured call was given.

    The modules on the way to a tensor are among the places: replacing one replaces the tensor.
    """

    __slots__ = ()

    @classmethod
    def locate(cls, modules: Sequence[torch.nn.Module], wanted: Iterable[torch.Tensor]) -> OwnedTensors | None:
        """Find every wanted tensor among parameters and buffers; None when one is kept elsewhere.

        Children that own none of them are watched as well: nothing else sees one exchanged.

        Args:
            modules: all modules of the model.
            wanted: the tensors.
        """
        missing = {id(tensor) for tensor in wanted}
        places: list[tuple[dict[str, Any], str, Any]] = []
        for module in reversed(modules):
            places += [
                (owner, name, tensor)
                for owner in (module._parameters, module._buffers)
                for name, tensor in owner.items()
                if tensor is not None and id(tensor) in missing
            ]
            places += [(module._modules, name, child) for name, child in module._modules.items()]
        found = {id(held) for _, _, held in places if isinstance(held, torch.Tensor)}
        return cls.of(places) if missing == found else None


class KeptLayouts:
    """Shapes and strides of a model's tensors.

    Args:
        tensors: parameters and buffers that a captured call was given.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tuple({id(tensor): tensor for tensor in tensors}.values())
        self._layouts = [(tensor.shape, tensor.stride()) for tensor in self._tensors]
        self._unchanged = memory.layout_check(self._tensors)

    def refuse_change(self) -> None:
        """Compare with the layouts as they are now.

        Raises:
            ShapeError: a tensor has another one.
        """
        if self._unchanged():
            return
        for tensor, (shape, stride) in zip(self._tensors, self._layouts, strict=True):
            if (tensor.shape, tensor.stride()) != (shape, stride):
                raise ShapeError(
                    "a parameter or buffer has another layout than at capture, at its old address",
                    expected=f"{tuple(shape)} with strides {stride}",
                    found=f"{tuple(tensor.shape)} with strides {tensor.stride()}",
                    remedy="write into it in place, or torch.compiler.reset() and close(), and capture again",
                )
        self._unchanged = memory.layout_check(self._tensors)  # another mode, or requires_grad: the layouts are the same


def modules_of(model: Callable[..., Any]) -> tuple[torch.nn.Module, ...]:
    """All modules of a model, itself first; none of a function."""
    return tuple(model.modules()) if isinstance(model, torch.nn.Module) else ()


def entry_of(model: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls the model, with code of its own.

    Dynamo counts recompiles by code object: graphed models of one class would use up each other's limit.
    """

    def call_model(**arguments: Any) -> Any:
        return model(**arguments)

    return types.FunctionType(
        call_model.__code__.replace(), call_model.__globals__, "call_model", None, call_model.__closure__
    )


@dataclass(frozen=True, slots=True)
class CallGuards:
    """What is compared before a graph of a model is replayed past Dynamo.

    Attributes:
        ambient: torch's settings and the modules' train/eval flags at capture.
        owned: where the model keeps the tensors that the graph reads.
        layouts: shapes and strides of those tensors.
    """

    ambient: AmbientState
    owned: OwnedTensors
    layouts: KeptLayouts

    @classmethod
    def of(cls, modules: Sequence[torch.nn.Module], owned: OwnedTensors, tensors: Sequence[torch.Tensor]) -> CallGuards:
        """The guards as of now.

        Args:
            modules: all modules of the model.
            owned: the places of ``tensors``.
            tensors: those of the model that the graph reads.
        """
        return cls(AmbientState.now(modules), owned, KeptLayouts(tensors))

    def hold(self, modules: Sequence[torch.nn.Module]) -> bool:
        """Whether the model still has the tensors of the capture.

        Raises:
            CaptureError: a setting changed since capture.
            ShapeError: a tensor has another layout, at its old address.
        """
        refuse_other_settings(self.ambient, modules)
        if not self.owned.in_place():
            return False
        self.layouts.refuse_change()
        return True
