"""The tower of a stock model, served by graphs in its place: :func:`attach`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from graphpass.compat import nnmodules, operators
from graphpass.encoder.adapters import TowerAdapter
from graphpass.encoder.adapters.adapter import BOTH
from graphpass.encoder.adapters.tables import GRID_KEY
from graphpass.encoder.manager import EncoderCudaGraphManager
from graphpass.encoder.options import EncoderOptions
from graphpass.errors import EncoderConfigError
from graphpass.ledger import Reason
from graphpass.report import Report

_ATTACHED = "_graphpass_attached"
_TRAINED = Reason("a gradient is needed, or another model traces the call", is_expected=True)
_NO_ITEMS = Reason("a call has no items", is_expected=True)
_ASKS_MORE = Reason(
    "the call passes or asks for more than graphs serve, such as hidden states",
    "detach(), and compile the tower itself: model.set_encoder(torch.compile(tower, backend='cgpass'), modality)",
)
_MOVED = Reason(
    "the weights are on another device, or of another dtype, than at the capture",
    "detach(), and attach the model where it is now",
)


class AttachedEncoder:
    """A model whose tower is served by graphs. :func:`attach` makes it.

    Attributes:
        manager: captures, packs and replays; its ``adapt()`` and statistics are those of any manager.
    """

    def __init__(self, model: Any, modality: str, tower: nn.Module, manager: EncoderCudaGraphManager) -> None:
        self.manager, self._model, self._modality, self._tower = manager, model, modality, tower
        self._adapter = cast(TowerAdapter, manager.model)
        self._served = _served(tower, self)
        self._names = [name for name in inspect.signature(tower.forward).parameters if name != "kwargs"]

    def detach(self) -> None:
        """Give the model its tower back, with the weights of now, and release the graphs. It may be repeated."""
        if self._model.get_encoder(self._modality) is self._served:
            self._model.set_encoder(self._tower, self._modality)
        self.manager.clear()

    def report(self) -> Report:
        """See :meth:`EncoderCudaGraphManager.report`."""
        return self.manager.report()

    def _put(self) -> None:
        """Put the served tower in its place, or undo that and refuse."""
        model, modality = self._model, self._modality
        before = [(children, dict(children)) for children in map(nnmodules.child_dict, model.modules())]
        model.set_encoder(self._served, modality)
        if model.get_encoder(modality) is self._served:  # guard: attached_encoder_found
            return
        for children, known in before:
            children.clear()
            children.update(known)
        raise _unattached(f"an encoder of {modality} that set_encoder replaces", "another module after set_encoder")

    def items(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, torch.Tensor] | Reason:
        """The items of a call, or why the stock tower has to run it."""
        more = {**dict(zip(self._names, args, strict=False)), **named}
        pixels, grids, weight = more.pop(self._names[0], None), more.pop(GRID_KEY, None), next(self._tower.parameters())
        asks_more = any(isinstance(v, torch.Tensor) or (v and name.startswith("output_")) for name, v in more.items())
        needs_grad = operators.needs_grad((pixels, *self._tower.parameters()))
        if needs_grad or torch.compiler.is_compiling():  # guard: attached_encoder_grad
            return _TRAINED
        if asks_more or more.get("return_dict") is False or not isinstance(pixels, torch.Tensor):
            return _ASKS_MORE
        if (weight.device, weight.dtype) != self.manager.place:
            return _MOVED
        found = {"pixel_values": pixels}
        if grids is not None:
            found = {"pixel_values": pixels.reshape(-1, *self._adapter.row_shape), GRID_KEY: grids.cpu()}
        return found if len(found["pixel_values"]) else _NO_ITEMS


def attach(
    model: Any, *, modality: str = "image", options: EncoderOptions | None = None, **adapter_options: Any
) -> AttachedEncoder:
    """Serve the vision tower of a stock model by graphs, within its own ``generate``.

    The tower is captured now. Calls that need a gradient, that ask for more than the tower's usual output, or that come
    while the weights are on another device than at the capture, run the stock tower. Saving, loading, moving and PEFT
    work as before: parameters, buffers, submodules, hooks and flags are the stock tower's own.

    Args:
        model: a model of transformers with ``get_encoder`` and ``set_encoder``, in eval mode and on its device.
        modality: ``image`` or ``video``, which have one tower.
        options: see :class:`EncoderOptions`.
        adapter_options: options of the adapter, such as ``max_tokens``.

    Returns:
        What gives the model its tower back.

    Raises:
        EncoderConfigError: no adapter can serve the tower, the model's tower cannot be replaced, or is already served.
    """
    if not hasattr(model, "set_encoder"):
        raise _unattached("a model of transformers with set_encoder", type(model).__name__)
    tower = model.get_encoder(modality)
    if tower is model or not isinstance(tower, nn.Module):
        raise _unattached(f"a model with an encoder of {modality}", f"none in {type(model).__name__}")
    if hasattr(type(tower), _ATTACHED):  # guard: attached_encoder_twice
        raise _unattached("a model without an attached encoder", "one that is attached")
    manager = EncoderCudaGraphManager.from_model(tower, options=options, output=BOTH, **adapter_options)
    attached = AttachedEncoder(model, modality, tower, manager)
    attached._put()
    try:
        manager.capture()
    except BaseException:
        attached.detach()
        raise
    return attached


def _served(tower: nn.Module, attached: AttachedEncoder) -> nn.Module:
    """A module that shares all attributes of the tower, but not its forward."""
    stock: Any = type(tower)

    @functools.wraps(stock.forward)
    def forward(self: nn.Module, *args: Any, **named: Any) -> Any:
        items = attached.items(args, named)
        if isinstance(items, Reason):
            attached.manager.count_stock_call(items)
            return stock.forward(self, *args, **named)
        return attached._adapter.as_output(attached.manager.execute_together(items))

    def reduced(self: nn.Module, _: Any) -> Any:
        """Copies and pickles are stock towers."""
        return object.__new__, (stock,), self.__dict__

    own = {"forward": forward, "__reduce_ex__": reduced, "__module__": stock.__module__, _ATTACHED: True}
    kind: Any = type(stock.__name__, (stock,), own)
    served: nn.Module = kind.__new__(kind)
    served.__dict__ = tower.__dict__
    return served


def _unattached(expected: str, found: str) -> EncoderConfigError:
    remedy = "detach() the first; serve text by text.CausalLM, a tower by EncoderCudaGraphManager"
    return EncoderConfigError("the encoder cannot be attached", expected=expected, found=found, remedy=remedy)
