"""What Dynamo's guards guarded, for calls that go past Dynamo.

A direct call of a captured callable skips Dynamo's code and not its guards, which see what no record of ours would: a
longer list, another activation function, a hook. What ought to be refused by name (ambient state at capture) is
compared before them, and parameters, whose identity they leave open, are looked up where the module keeps them.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpass import compat
from graphpass.capture.ambient import AmbientState
from graphpass.capture.places import Places
from graphpass.errors import CaptureError, ShapeError

__all__ = [
    "CallGuards",
    "DynamoGuards",
    "KeptLayouts",
    "OwnedTensors",
    "entry_of",
    "local_values",
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


class OwnedTensors(Places):
    """Where a model keeps the tensors that a captured call was given.

    The modules on the way to a tensor are among the places: replacing one replaces the tensor.
    """

    __slots__ = ()

    @classmethod
    def locate(
        cls, modules: Sequence[torch.nn.Module], wanted: Iterable[torch.Tensor], *, all_children: bool = False
    ) -> OwnedTensors | None:
        """Find every wanted tensor among parameters and buffers; None when one is kept elsewhere.

        Args:
            modules: all modules of the model.
            wanted: the tensors.
            all_children: watch children that own none of them as well, where nothing else sees one exchanged.
        """
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
            here += [
                (module._modules, name, child)
                for name, child in module._modules.items()
                if all_children or id(child) in owners
            ]
            if here:
                owners.add(id(module))
            places += here
        if missing != found:
            return None
        return cls.of(places)


class KeptLayouts:
    """Shapes and strides of a model's tensors.

    Args:
        tensors: parameters and buffers that a captured call was given.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tuple({id(tensor): tensor for tensor in tensors}.values())
        self._layouts = [(tensor.shape, tensor.stride()) for tensor in self._tensors]
        self._unchanged = compat.layout_check(self._tensors)

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
        self._unchanged = compat.layout_check(self._tensors)  # another mode, or requires_grad: the layouts are the same


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


def local_values(entry: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What Dynamo's guards of ``entry`` look at when it is called with these arguments: they and its closure."""
    return {**inspect.getclosurevars(entry).nonlocals, "arguments": dict(arguments)}


@dataclass(frozen=True, slots=True)
class DynamoGuards:
    """Dynamo's own guards of the code that a direct call goes past: all that tracing the model relied on."""

    _check: Callable[[dict[str, Any]], bool]
    _locals: dict[str, Any]

    @classmethod
    def of(cls, entry: Callable[..., Any], arguments: Mapping[str, Any]) -> DynamoGuards | None:
        """The guards that hold now; None where Dynamo's code for ``entry`` is more, or less, than one graph.

        Args:
            entry: the function that was compiled; its closure is what it reads besides arguments.
            arguments: what it was called with, by name.
        """
        here = local_values(entry, arguments)
        check = compat.holding_guards(entry, here)
        return None if check is None else cls(check, here)

    def hold(self) -> bool:
        """Whether Dynamo would run the same code again."""
        return self._check(self._locals)


@dataclass(frozen=True, slots=True)
class CallGuards:
    """All that is compared before what was captured of a model runs past Dynamo.

    Attributes:
        ambient: torch's settings and the modules' train/eval flags at capture.
        owned: where the model keeps the tensors that the graph reads.
        dynamo: Dynamo's own, for everything else that tracing the model relied on; None where they are not asked.
        layouts: shapes and strides of those tensors; None where Dynamo's guards are asked, and see them.
    """

    ambient: AmbientState
    owned: OwnedTensors
    dynamo: DynamoGuards | None
    layouts: KeptLayouts | None

    @classmethod
    def of(
        cls,
        modules: Sequence[torch.nn.Module],
        owned: OwnedTensors,
        tensors: Sequence[torch.Tensor],
        dynamo: DynamoGuards | None,
    ) -> CallGuards:
        """The guards as of now.

        Args:
            modules: all modules of the model.
            owned: the places of ``tensors``.
            tensors: those of the model that the graph reads.
            dynamo: Dynamo's guards, or None not to ask them.
        """
        sees_layouts = dynamo is not None and compat.guards_see_layouts()
        return cls(AmbientState.now(modules), owned, dynamo, None if sees_layouts else KeptLayouts(tensors))

    def hold(self, modules: Sequence[torch.nn.Module]) -> bool:
        """Whether the model still has the tensors of the capture, and is what Dynamo traced, as far as it is asked.

        Raises:
            CaptureError: a setting changed since capture.
            ShapeError: a tensor has another layout, at its old address.
        """
        refuse_other_settings(self.ambient, modules)
        if not self.owned.in_place():
            return False
        if self.dynamo is not None and not self.dynamo.hold():
            return False
        if self.layouts is not None:
            self.layouts.refuse_change()
        return True
