"""Weights that stay in host memory: each layer's is copied to the device shortly before the layer runs.

The device has a few slots, each as large as one layer. A layer's parameters are views of its slot and never move, so
that graphs may bake their addresses in. A layer says that it begins, by an op where it is compiled; then the weights of
layers behind it are copied, on a stream of their own, while it computes (:mod:`graphpass.offload.rotation`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from graphpass.compat import memory
from graphpass.engine.hooks import ForwardHooks
from graphpass.errors import DeviceError, OffloadError, OptionError
from graphpass.offload.op import IN_CONTEXT, ONLOAD
from graphpass.offload.rotation import SlotRotation
from graphpass.offload.slots import LayerLayout, WeightPlace, copies_to, host_memory

__all__ = ["WeightOffloader"]


class WeightOffloader(ForwardHooks):
    """Keeps the weights of equal layers in pinned host memory, and those of a few at a time on the device.

    Make it before the model is compiled, and give it to the manager: ``CudaGraphManager(..., offloader=offloader)``.
    The model itself runs too, eagerly. The layers' parameters no longer require gradients; their buffers lie on the
    device. One forward at a time: a second thread's waits, if both go through managers.

    Weights live in host memory: what is written to a parameter is lost when its slot is filled again. Write with
    :meth:`write` or ``model.load_state_dict()``, and read with ``model.state_dict()``, whose tensors are views of the
    host memory.

    Args:
        layers: in the order in which a forward runs them, all of them, each once.
        num_slots: layers that the device has room for, at least 2 and fewer than there are. With 2 each copy has one
            layer's compute to hide behind. A number that does not divide that of the layers leaves one copy a forward
            with nothing to hide behind.
        max_device_bytes: in place of ``num_slots``: as many slots as fit.
        device: where the layers compute; None for where they are.

    Raises:
        OptionError: too few layers, slots or bytes; layers of unequal structure.
        OffloadError: layers share a weight, or were compiled or offloaded already.
    """

    splitting_ops = (ONLOAD,)

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        num_slots: int | None = None,
        max_device_bytes: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self._layers = tuple(layers)
        if len(self._layers) < 3:
            raise _bad_slots("there is nothing to offload", "at least 3 layers", str(len(self._layers)))
        _refuse_used(self._layers)
        self._layout = LayerLayout.of(self._layers)
        self.num_slots = _checked_slots(num_slots, max_device_bytes, self._layout.num_bytes, len(self._layers))
        self.device = _with_index(next(self._layers[0].parameters()).device if device is None else device)
        self._copies = copies_to(self.device, self.num_slots)
        with torch.inference_mode(False), torch.no_grad():
            self._move()
        self._rotation = SlotRotation(self._host, self._slots, self._copies)
        self._addresses: list[int | None] = [weight.data_ptr() for weight in self._weights]
        self._positions = list(range(len(self._weights)))
        self._is_in_forward = False
        self._turn = threading.RLock()
        for index, layer in enumerate(self._layers):
            self._announce(layer, index)

    # -- what users call ------------------------------------------------------------------------------------------

    def device_bytes(self) -> int:
        """Bytes of device memory that the layers' weights take: the slots'."""
        return self.num_slots * self._layout.num_bytes

    def host_bytes(self) -> int:
        """Bytes of host memory that they take; where it is pinned, torch may round each layer's up."""
        return len(self._layers) * self._layout.num_bytes

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All weights by ``<layer>.<name>``, as views of the host memory: read them, write with :meth:`write`."""
        return {
            f"{index}.{place.name}": place.view(memory)
            for index, memory in enumerate(self._host)
            for place in self._layout.places
        }

    def write(self, name: str, value: torch.Tensor) -> None:
        """Give a weight new contents; the next forward has them, also one that replays a graph.

        Args:
            name: as :meth:`state_dict` has it, ``3.mlp.weight``.
            value: of the weight's shape.

        Raises:
            OffloadError: there is no such weight, or its shape is another.
        """
        index, _, rest = name.partition(".")
        place = next((place for place in self._layout.places if place.name == rest), None)
        is_layer = index.isdecimal() and int(index) < len(self._layers)
        if place is None or not is_layer or value.shape != place.shape:
            raise OffloadError(
                f"{name!r} cannot be written",
                expected=f"{tuple(place.shape)}" if place and is_layer else "a name of state_dict()",
                found=f"{tuple(value.shape)}",
                remedy="pass '<layer>.<name within the layer>' and a tensor of the weight's shape",
            )
        self._write(int(index), {place: value})

    # -- what a manager calls ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def forward(self, *, replays: bool = False) -> Iterator[None]:
        """One forward in the body: :meth:`sync_prev_onload` before, and afterwards home again.

        Args:
            replays: it may be one graph, whose layers nothing announces here.

        Raises:
            OffloadError: some of the layers ran, and not the rest of them.
        """
        with self._turn:
            self.sync_prev_onload()
            self._is_in_forward = True
            try:
                yield
                if self._rotation.is_under_way() or not replays:
                    self._rotation.end()
            except BaseException:
                # What is in a slot is anyone's guess, and events may belong to a capture that is no more.
                self._rotation.is_home = False
                raise
            finally:
                self._is_in_forward = False

    def sync_prev_onload(self) -> None:
        """Order what follows on the current stream behind the copies that the last forward left in flight.

        Before a capture, which cannot wait for what was launched outside of it; and before a replay, whose copies and
        layers rely on *home*. After a forward that failed, or weights that were written, home is made anew.

        Raises:
            OffloadError: a parameter is not where its slot is.
        """
        if not memory.data_ptrs_equal(self._weights, self._addresses, self._positions):
            self._refuse_moved()
        self._rotation.come_home()

    def join_after_forward(self) -> None:
        """End a forward that is being captured: the copy stream joins the current one, or the capture is void.

        Raises:
            OffloadError: not all layers ran.
        """
        self._rotation.join()

    def onload(self, index: int) -> None:
        """Layer ``index`` begins: start the copy into the slot that the last one has left, and wait for its own.

        Raises:
            OffloadError: it is another layer's turn, or nothing has brought the first layers' weights.
        """
        self._rotation.begin(index)

    @property
    def context(self) -> Mapping[str, Callable[[int], None]]:
        """What a forward context carries to the layers' ops, as ``extra``."""
        # A method: a capture looks into any other object, to freeze what is read of it.
        return {IN_CONTEXT: self.onload}

    def check_model(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        """Whether a manager of this model, on this device, can use this offloader.

        Raises:
            OptionError: it has been made for the layers of another model.
            OffloadError: a weight of a layer is used outside of the layers too.
            DeviceError: it fills slots on another device.
        """
        if self.device != _with_index(device):
            raise DeviceError(
                "the offloader's slots lie on another device than the manager's buffers",
                expected=str(_with_index(device)),
                found=str(self.device),
                remedy="move the rest of the model there first, and pass device= to WeightOffloader",
            )
        if not {id(layer) for layer in self._layers} <= {id(module) for module in modules}:
            raise OptionError(
                "the offloader was made for the layers of another model",
                expected="layers that are modules of the manager's model",
                found=f"{len(self._layers)} layers, not all of them in it",
                remedy="make it of this model's own layers: WeightOffloader(model.layers, ...)",
            )
        inside = {id(module) for layer in self._layers for module in layer.modules()}
        own = {id(weight) for weight in self._weights}
        for module in modules:
            for name, parameter in module.named_parameters(recurse=False):
                if id(module) not in inside and id(parameter) in own:
                    raise OffloadError(
                        f"{type(module).__name__}.{name} is a weight of an offloaded layer too",
                        expected="weights that are used within their layer alone",
                        found="one parameter in two places",
                        remedy="untie it: outside of its layer's turn it is not on the device",
                    )

    def __reduce__(self) -> NoReturn:
        raise OffloadError(
            "a model with offloaded weights cannot be copied or pickled",
            expected="a model whose parameters hold its weights",
            found="parameters that hold whichever layer is on the device",
            remedy="copy it before its weights are offloaded, or save model.state_dict()",
        )

    # -- setting up -------------------------------------------------------------------------------------------------

    def _move(self) -> None:
        """Weights to host memory, parameters into the slots, buffers to the device."""
        pins = self.device.type == "cuda"
        self._host = [host_memory(self._layout, layer, is_pinned=pins) for layer in self._layers]
        self._slots = [
            torch.zeros(self._layout.num_bytes, dtype=torch.uint8, device=self.device) for _ in range(self.num_slots)
        ]
        self._weights: list[torch.Tensor] = []
        for index, layer in enumerate(self._layers):
            parameters = dict(layer.named_parameters())
            for place in self._layout.places:
                weight = parameters[place.name].requires_grad_(False)
                weight.data = place.view(self._slots[index % self.num_slots])
                memory.mark_static_address(weight)
                self._weights.append(weight)
            for module in layer.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    if buffer.device != self.device:
                        setattr(module, name, buffer.to(self.device))

    def _announce(self, layer: nn.Module, index: int) -> None:
        """Let a layer say when it begins, and have its weights saved from, and loaded to, host memory."""

        def before(_: nn.Module, args: tuple[Any, ...]) -> None:
            if torch.compiler.is_compiling():
                torch.ops.graphpass.onload(index)
            else:
                _refuse_grad(args)
                self._onload_eagerly(index)

        layer.register_forward_pre_hook(before)
        layer.register_state_dict_post_hook(partial(self._saved))
        layer.register_load_state_dict_pre_hook(self._loaded)

    def _onload_eagerly(self, index: int) -> None:
        """A layer of a model that is called by itself, without a manager: each of its forwards begins with layer 0."""
        if index == 0 and not self._is_in_forward:
            self.sync_prev_onload()
        self.onload(index)

    # -- the weights in host memory -----------------------------------------------------------------------------------

    def _saved(self, layer: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        memory = self._host[self._layers.index(layer)]
        for place in self._layout.places:
            state[prefix + place.name] = place.view(memory)

    def _loaded(self, layer: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
        if metadata.get("assign_to_params_buffers", False):
            raise OffloadError(
                "offloaded weights cannot be replaced by other tensors",
                expected="load_state_dict(state), which copies",
                found="assign=True",
                remedy="leave assign out, or load before the weights are offloaded",
            )
        found = {place: state[prefix + place.name] for place in self._layout.places if prefix + place.name in state}
        # A shape that differs is load_state_dict's to report.
        fitting = {place: value for place, value in found.items() if value.shape == place.shape}
        self._write(self._layers.index(layer), fitting)

    def _write(self, index: int, values: Mapping[WeightPlace, torch.Tensor]) -> None:
        with self._turn:
            self._copies.finish()
            for place, value in values.items():
                place.view(self._host[index]).copy_(value.detach())
            self._rotation.is_home = False

    def _refuse_moved(self) -> NoReturn:
        raise OffloadError(
            "a parameter of an offloaded layer is not where its slot is",
            expected="parameters as the offloader left them",
            found="others: the model was moved or converted, or a parameter's data replaced",
            remedy="convert the model before its weights are offloaded; write new contents with write()",
        )


def _refuse_grad(args: Sequence[Any]) -> None:
    if torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in args):
        raise OffloadError(
            "offloaded layers cannot run under autograd",
            expected="a call under torch.no_grad() or torch.inference_mode()",
            found="grad mode on and an input that requires grad: backward would read the weights of other layers",
            remedy="wrap the forward in `with torch.inference_mode():`",
        )


def _refuse_used(layers: Sequence[nn.Module]) -> None:
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            if memory.has_static_address(parameter):
                raise OffloadError(
                    f"layer {index} has been compiled, or offloaded, already ({name})",
                    expected="layers that no compiled code, graph or offloader knows",
                    found="a parameter whose address is baked in",
                    remedy="make the offloader first, and compile and capture afterwards",
                )


def _checked_slots(num_slots: int | None, max_bytes: int | None, layer_bytes: int, num_layers: int) -> int:
    if (num_slots is None) == (max_bytes is None):
        found = "neither" if num_slots is None else "both"
        raise _bad_slots("how much may lie on the device is not clear", "num_slots or max_device_bytes", found)
    if max_bytes is not None:
        num_slots = max_bytes // layer_bytes
    assert num_slots is not None
    if not 2 <= num_slots < num_layers:
        found = f"{num_slots}" if max_bytes is None else f"{num_slots} in {max_bytes} bytes, {layer_bytes} a slot"
        raise _bad_slots("the slots do not fit the layers", f"2 to {num_layers - 1} slots for {num_layers}", found)
    return num_slots


def _bad_slots(problem: str, expected: str, found: str) -> OptionError:
    remedy = "one slot computes while another is filled; what fits the device as a whole is not offloaded"
    return OptionError(problem, expected=expected, found=found, remedy=remedy)


def _with_index(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
