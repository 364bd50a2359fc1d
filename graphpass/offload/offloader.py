"""Stores weights in host memory; each layer's weights are copied to the device shortly before the layer runs.

A layer's parameters are views of one of the device's few slots and never move, so graphs can contain their addresses.
Each layer begins with :meth:`WeightOffloader.onload`, which starts the copy of a later layer.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from graphpass.compat import memory, operators
from graphpass.compat.subclasses import is_wrapper, plain_state, plain_tensors, rebuild_of
from graphpass.errors import DeviceError, OffloadError, OptionError
from graphpass.offload.onload import IN_CONTEXT, ONLOAD
from graphpass.offload.slots import SlotRotation, WeightPlace, copies_to, layout_of
from graphpass.serving import ForwardHooks


class WeightOffloader(ForwardHooks):
    """Stores the weights of equal layers in host memory (pinned for CUDA), and those of a few layers on the device.

    Create it before the model is compiled, and pass it to the manager: ``CudaGraphManager(..., offloader=offloader)``.
    The model also runs eagerly without a manager. The layers' parameters no longer require gradients, and their buffers
    are moved to the device. Only one forward runs at a time: managers of several threads wait for each other.

    The weights in host memory are the only complete copy: a value that is written to a parameter is lost when its slot
    is filled again. Write weights with :meth:`write` or ``model.load_state_dict()``. The tensors of
    ``model.state_dict()`` are views of the host memory.

    Args:
        layers: the layers to offload, in the order in which every forward runs them, each once.
        num_slots: number of layers on the device, at least 2 and fewer than there are layers. With 2 slots a copy
            overlaps with the compute of one layer. If ``num_slots`` does not divide the number of layers, one copy of
            each forward does not overlap with compute.
        max_device_bytes: limit of the slots' memory, in place of ``num_slots``.
        device: device that the layers run on; None: the device of their parameters.

    Attributes:
        num_slots: number of slots.
        device: device of the slots.

    Raises:
        OptionError: there are too few layers, slots or bytes, or the layers differ in structure.
        OffloadError: layers share a weight, or are compiled or offloaded already.
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
            raise _bad_slots("there are too few layers to offload", "at least 3 layers", str(len(self._layers)))
        _refuse_used(self._layers)
        self._places, self._layer_bytes = layout_of(self._layers)
        self.num_slots = _checked_slots(num_slots, max_device_bytes, self._layer_bytes, len(self._layers))
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
            self._register_hooks(layer, index)

    # -- what users call ------------------------------------------------------------------------------------------

    def device_bytes(self) -> int:
        """Bytes of device memory of all slots."""
        return self.num_slots * self._layer_bytes

    def host_bytes(self) -> int:
        """Bytes of host memory of all layers' weights; torch may round pinned allocations up."""
        return len(self._layers) * self._layer_bytes

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All weights by ``<layer>.<name>``, as views of the host memory; write with :meth:`write`."""
        return {
            f"{index}.{place.name}": place.view(memory)
            for index, memory in enumerate(self._host)
            for place in self._places
        }

    def write(self, name: str, value: torch.Tensor) -> None:
        """Overwrite a weight; the next forward uses the new value, also if it replays a graph.

        Args:
            name: key of :meth:`state_dict`, such as ``3.mlp.weight``.
            value: tensor of the weight's shape, on any device; it is copied.

        Raises:
            OffloadError: there is no weight of this name, or it has another shape.
        """
        index, _, rest = name.partition(".")
        place = next((place for place in self._places if place.name == rest), None)
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
        """See :class:`ForwardHooks`. Calls :meth:`sync_prev_onload` before; afterwards all layers must have run."""
        with self._turn:
            self.sync_prev_onload()
            self._is_in_forward = True
            try:
                yield
                if self._rotation.is_under_way() or not replays:
                    self._rotation.end()
            except BaseException:
                # The contents of the slots are undefined, and events may belong to a capture that has failed.
                self._rotation.is_home = False
                raise
            finally:
                self._is_in_forward = False

    def sync_prev_onload(self) -> None:
        """Make the current stream wait for the copies that the last forward has left in flight.

        Call it before a capture or a replay. After a failed forward or a :meth:`write` it fills the first slots again
        (*home*, see ``graphpass.offload.slots``).

        Raises:
            OffloadError: a parameter is not at the address of its slot.
        """
        if not memory.data_ptrs_equal(self._weights, self._addresses, self._positions):  # guard: offload_moved
            raise OffloadError(
                "a parameter of an offloaded layer is not at the address of its slot",
                expected="parameters that are views of the offloader's slots",
                found="another address: the model was moved or converted, or a parameter's data was replaced",
                remedy="move or convert the model before its weights are offloaded; write new values with write()",
            )
        self._rotation.reset_to_start()

    def join_after_forward(self) -> None:
        """End a forward inside a capture: the current stream waits for all copies, as CUDA requires of a capture."""
        self._rotation.join()

    def onload(self, index: int) -> None:
        """Begin layer ``index``: start the copy into the slot of the layer before, and wait for its weights."""
        self._rotation.begin(index)

    @property
    def context(self) -> Mapping[str, Callable[[int], None]]:
        """The entries of ``ForwardContext.extra`` that the layers' op reads."""
        # A bound method, because a capture freezes the attributes of any other object that is read from the context.
        return {IN_CONTEXT: self.onload}

    def check_model(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        """See :class:`ForwardHooks`. No module outside of the layers may share a weight with one."""
        if self.device != _with_index(device):
            raise DeviceError(
                "the offloader's slots are on another device than the manager's buffers",
                expected=str(_with_index(device)),
                found=str(self.device),
                remedy="move the rest of the model there first, and pass device= to WeightOffloader",
            )
        if not {id(layer) for layer in self._layers} <= {id(module) for module in modules}:
            raise OptionError(
                "the offloader was created for the layers of another model",
                expected="layers that are modules of the manager's model",
                found=f"{len(self._layers)} layers, not all of them in the model",
                remedy="create the offloader with layers of this model: WeightOffloader(model.layers, ...)",
            )
        inside = {id(module) for layer in self._layers for module in layer.modules()}
        own = {id(weight) for weight in self._weights}
        for module in modules:
            for name, parameter in plain_state(module, recurse=False).items():
                if id(module) not in inside and id(parameter) in own:
                    raise OffloadError(
                        f"{type(module).__name__}.{name} is also a weight of an offloaded layer",
                        expected="weights that only their layer uses",
                        found="one parameter in two modules",
                        remedy="untie the weights: an offloaded weight is on the device only while its layer runs",
                    )

    def __reduce__(self) -> NoReturn:
        raise OffloadError(
            "a model with offloaded weights cannot be copied or pickled",
            expected="a model with all its weights in its parameters",
            found="parameters that are views of slots, which layers share",
            remedy="copy the model before its weights are offloaded, or save model.state_dict()",
        )

    # -- setting up -------------------------------------------------------------------------------------------------

    def _move(self) -> None:
        """Copy the weights to host memory, and turn parameters into views of the slots."""
        num_bytes, device = self._layer_bytes, self.device
        self._host = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in self._layers]
        self._slots = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(self.num_slots)]
        self._weights: list[torch.Tensor] = []
        for index, layer in enumerate(self._layers):
            parameters = plain_state(layer.requires_grad_(False))
            for place in self._places:
                weight = parameters[place.name]
                place.view(self._host[index]).copy_(weight)
                weight.data = place.view(self._slots[index % self.num_slots])
                memory.mark_static_address(weight)
                self._weights.append(weight)
            for module in layer.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    if buffer.device != self.device:
                        setattr(module, name, buffer.to(self.device))

    def _register_hooks(self, layer: nn.Module, index: int) -> None:
        """A layer's forward calls :meth:`onload`, and its state dict uses the host memory."""

        def before(_: nn.Module, args: tuple[Any, ...]) -> None:
            if torch.compiler.is_compiling():
                torch.ops.graphpass.onload(index)
                return
            _refuse_grad(args)
            if index == 0 and not self._is_in_forward:  # without a manager, layer 0 begins a new forward
                self.sync_prev_onload()
            self.onload(index)

        layer.register_forward_pre_hook(before)
        layer.register_state_dict_post_hook(partial(self._saved))
        layer.register_load_state_dict_pre_hook(self._loaded)

    # -- the weights in host memory -----------------------------------------------------------------------------------

    def _saved(self, layer: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        memory = self._host[self._layers.index(layer)]
        views = {place.name: place.view(memory) for place in self._places}
        for name, weight in layer.named_parameters():
            tensors = [views[".".join((name, *path))] for path, _ in plain_tensors(weight)]
            state[prefix + name] = rebuild_of(weight, [])(*tensors) if is_wrapper(weight) else tensors[0]

    def _loaded(self, layer: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
        if metadata.get("assign_to_params_buffers", False):
            raise OffloadError(
                "offloaded weights cannot be replaced by other tensors",
                expected="load_state_dict(state), which copies",
                found="assign=True",
                remedy="leave assign out, or load before the weights are offloaded",
            )
        given = {name: state[prefix + name] for name, _ in layer.named_parameters() if prefix + name in state}
        parts = {".".join((name, *path)): one for name, value in given.items() for path, one in plain_tensors(value)}
        found = {place: parts[place.name] for place in self._places if place.name in parts}
        # load_state_dict itself reports shapes that differ.
        fitting = {place: value for place, value in found.items() if value.shape == place.shape}
        self._write(self._layers.index(layer), fitting)

    def _write(self, index: int, values: Mapping[WeightPlace, torch.Tensor]) -> None:
        with self._turn:
            self._copies.finish()
            for place, value in values.items():
                place.view(self._host[index]).copy_(value.detach())
            self._rotation.is_home = False  # guard: offload_new_weights


def _refuse_grad(args: Sequence[Any]) -> None:
    if operators.needs_grad(args):
        raise OffloadError(
            "offloaded layers cannot run under autograd",
            expected="a call under torch.no_grad() or torch.inference_mode()",
            found="grad mode on and an input that requires grad: backward would read the weights of other layers",
            remedy="wrap the forward in `with torch.inference_mode():`",
        )


def _refuse_used(layers: Sequence[nn.Module]) -> None:
    for index, layer in enumerate(layers):
        for name, parameter in plain_state(layer).items():
            if memory.has_static_address(parameter):
                raise OffloadError(
                    f"layer {index} has been compiled, or offloaded, already ({name})",
                    expected="layers that no compiled code, graph or offloader uses",
                    found="a parameter with a static address",
                    remedy="create the offloader first, then compile and capture",
                )


def _checked_slots(num_slots: int | None, max_bytes: int | None, layer_bytes: int, num_layers: int) -> int:
    if (num_slots is None) == (max_bytes is None):
        found = "neither" if num_slots is None else "both"
        raise _bad_slots("the number of slots is not clear", "either num_slots or max_device_bytes", found)
    if max_bytes is not None:
        num_slots = max_bytes // layer_bytes
    assert num_slots is not None
    if not 2 <= num_slots < num_layers:
        found = f"{num_slots}" if max_bytes is None else f"{num_slots} in {max_bytes} bytes, {layer_bytes} a slot"
        expected = f"2 to {num_layers - 1} slots for {num_layers} layers"
        raise _bad_slots("the number of slots does not fit the layers", expected, found)
    return num_slots


def _bad_slots(problem: str, expected: str, found: str) -> OptionError:
    remedy = "pass 2 or more slots, or do not offload layers that all fit on the device"
    return OptionError(problem, expected=expected, found=found, remedy=remedy)


def _with_index(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
