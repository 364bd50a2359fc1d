"""LoRA adapters under a manager: the tokens of one batch can use different adapters of one model.

Adapters are stored in slots: buffers that captured graphs read. So an adapter is loaded by writing to a slot, without a
new capture. Each token's slot is an input of the model, and the number of adapters that a graph computes is part of its
key.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from graphpass.checks import positive
from graphpass.dispatch.keys import LoraKeys
from graphpass.engine.batch import Batch, InputSpec
from graphpass.errors import OptionError, did_you_mean
from graphpass.text.lora.op import NO_ADAPTER, LoraLinear, TokenAdapters
from graphpass.text.lora.targets import targeted_layers
from graphpass.text.lora.weights import adapter_pairs, checked_pairs
from graphpass.text.request import Request
from graphpass.text.scheduler import StepPlan
from graphpass.text.steptokens import HostBuffer

__all__ = ["AdapterBatch", "LoraAdapters", "LoraModel", "StepAdapters", "lora_keys", "without_lora"]

_SLOTS, _ORDER = "lora_slots", "lora_order"


@dataclass(frozen=True, slots=True, eq=False)
class AdapterBatch:
    """The adapters of a batch.

    Attributes:
        inputs: each token's slot and the order of slots, by the names of :meth:`LoraAdapters.input_specs`.
        num_active: number of different adapters, the value for :attr:`Batch.num_active_loras`.
    """

    inputs: Mapping[str, torch.Tensor]
    num_active: int

    def added_to(self, batch: Batch) -> Batch:
        """A copy of ``batch`` with these inputs and ``num_active_loras``.

        A graph computes ``num_active_loras`` adapters, so a number that is too small would leave adapters out.
        """
        inputs = {**(batch.inputs or {}), **self.inputs}
        return replace(batch, inputs=inputs, num_active_loras=self.num_active)


class LoraAdapters:
    """Slots for adapters in a model's linear layers.

    The targeted layers are replaced in ``model`` by layers with the same parameters under the same names; tokens
    without an adapter get the same output as before. Create this object before the model is captured. Adapters can be
    loaded and unloaded afterwards.

    For n adapters, each layer computes two more products of inner size ``n * max_rank``, copies the n adapters' weights
    if n is below ``max_loras``, and launches about six more kernels. n is the number in the key, which
    :class:`LoraKeys <graphpass.LoraKeys>` rounds up, not the number in the batch.

    Args:
        model: the model, or a module that contains it; its layers are replaced in place.
        targets: names of layers, each the end of a dotted path, such as ``q_proj`` or ``layers.0.mlp.up_proj``.
        max_loras: number of slots, the most adapters that can be loaded at once.
        max_rank: largest rank of an adapter. Each slot allocates memory for this rank.

    Raises:
        OptionError: a target does not name an ``nn.Linear``, or a limit is below 1.
    """

    def __init__(self, model: nn.Module, targets: Collection[str], *, max_loras: int, max_rank: int) -> None:
        self.max_loras = max_loras = positive(max_loras, "max_loras of the adapters")
        self.max_rank = max_rank = positive(max_rank, "max_rank of the adapters")
        self.tokens = TokenAdapters()
        found = targeted_layers(model, targets)
        self.layers = {
            path: LoraLinear(layer, self.tokens, max_loras=max_loras, max_rank=max_rank)
            for path, layer in found.items()
        }
        for path, layer in self.layers.items():
            owner, _, attribute = path.rpartition(".")
            setattr(model.get_submodule(owner), attribute, layer)
        self._slot_of: dict[str, int] = {}
        self._free = list(range(max_loras))[::-1]
        self._steps: weakref.WeakSet[StepAdapters] = weakref.WeakSet()

    @property
    def loaded(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        return tuple(self._slot_of)

    def wrap(self, model: nn.Module) -> LoraModel:
        """A module around ``model``, which contains the layers; it has the two inputs of :meth:`input_specs` too."""
        return LoraModel(model, self)

    def input_specs(self, max_num_tokens: int) -> tuple[InputSpec, InputSpec]:
        """The declarations of the two inputs that :meth:`wrap` adds. Padded tokens have no adapter."""
        return (
            InputSpec(_SLOTS, (max_num_tokens,), torch.int64, padding=NO_ADAPTER),
            InputSpec(_ORDER, (self.max_loras,), torch.int64, token_dim=None),
        )

    # -- adapters ---------------------------------------------------------------------------------------------------

    def load(
        self, name: str, weights: Mapping[str, Any], *, alpha: float | None = None, scaling: float | None = None
    ) -> None:
        """Write an adapter to a free slot, in place; captured graphs can serve it without a new capture.

        Args:
            name: name of the adapter, for :attr:`Request.adapter`.
            weights: {layer's path: (A, B)}, A (rank, in features) and B (out features, rank); or a state dict with
                PEFT's names. A layer that is left out is not adapted.
            alpha: the adapter adds ``alpha / rank * B @ A``.
            scaling: the adapter adds ``scaling * B @ A``; without alpha and scaling, ``B @ A``.

        Raises:
            OptionError: the name is in use, no slot is free, a layer is not a target, or both scales are passed.
            ShapeError: a tensor does not fit its layer; no slot is changed.
        """
        self._check_room(name)
        if alpha is not None and scaling is not None:
            raise OptionError(
                f"adapter {name!r} has two scales",
                expected="alpha, which is divided by the rank, or scaling, which is not",
                found=f"alpha={alpha}, scaling={scaling}",
                remedy="pass alpha or scaling, not both",
            )
        pairs = checked_pairs(name, adapter_pairs(name, weights), self.layers, self.max_rank)
        slot = self._free.pop()
        self._blank(slot)
        with torch.no_grad():
            for path, (down, up) in pairs.items():
                rank, layer = down.shape[0], self.layers[path]
                scale = alpha / rank if alpha is not None else 1.0 if scaling is None else scaling
                layer.lora_a[slot, :rank].copy_(down)
                layer.lora_b[slot, :rank].copy_(up.t() * scale)
        self._slot_of[name] = slot

    def unload(self, name: str) -> None:
        """Free an adapter's slot.

        Raises:
            OptionError: the adapter is not loaded, or an open request uses it.
        """
        slot = self.slot_of(name)
        if any(name in steps.in_use() for steps in self._steps):  # guard: lora_in_use
            raise OptionError(
                f"adapter {name!r} is in use",
                expected="an adapter that no open request of a Generation uses",
                found="an open request with this adapter",
                remedy="wait until its requests are done, or cancel them",
            )
        self._blank(slot)
        del self._slot_of[name]
        self._free.append(slot)

    def slot_of(self, name: str) -> int:
        """The slot of a loaded adapter.

        Raises:
            OptionError: it is not loaded.
        """
        if name in self._slot_of:
            return self._slot_of[name]
        raise OptionError(
            f"adapter {name!r} is not loaded",
            expected=f"one of {sorted(self._slot_of)}" if self._slot_of else "the name of a loaded adapter",
            found=repr(name),
            remedy=did_you_mean(name, self._slot_of, otherwise="load() it first"),
        )

    def _check_room(self, name: str) -> None:
        if name in self._slot_of or not self._free:
            raise OptionError(
                f"adapter {name!r} cannot be loaded",
                expected=f"a new name, and fewer than max_loras={self.max_loras} adapters",
                found=f"{len(self._slot_of)} loaded: {sorted(self._slot_of)}",
                remedy="unload() one of them, or create LoraAdapters with a larger max_loras",
            )

    def _blank(self, slot: int) -> None:
        for layer in self.layers.values():
            layer.lora_a[slot].zero_()
            layer.lora_b[slot].zero_()

    # -- batches ----------------------------------------------------------------------------------------------------

    def of_rows(self, names: Sequence[str | None], num_tokens: Sequence[int] | None = None) -> AdapterBatch:
        """The adapter inputs of a batch whose rows use these adapters.

        Args:
            names: the adapter of each row; None for a row without one.
            num_tokens: number of tokens of each row; None: one token per row.

        Raises:
            OptionError: an adapter is not loaded, or ``names`` and ``num_tokens`` differ in length.
        """
        lengths = np.ones(len(names), dtype=np.int64) if num_tokens is None else np.array(num_tokens, dtype=np.int64)
        if lengths.shape != (len(names),):
            raise OptionError(
                "names and num_tokens differ in length",
                expected=f"a number of tokens for each of {len(names)} rows",
                found=f"{lengths.size} numbers",
                remedy="pass one number for each row",
            )
        slots, order, num_active = self.numbers_of(names)
        device = next(iter(self.layers.values())).weight.device
        inputs = {_SLOTS: np.repeat(slots, lengths), _ORDER: order}
        return AdapterBatch({key: torch.from_numpy(value).to(device) for key, value in inputs.items()}, num_active)

    def numbers_of(self, names: Sequence[str | None]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
        """The slot of each row, all slots with those in use first, and the number in use.

        Raises:
            OptionError: an adapter is not loaded.
        """
        slots = [NO_ADAPTER if name is None else self.slot_of(name) for name in names]
        used = sorted({*slots} - {NO_ADAPTER})
        order = [*used, *(slot for slot in range(self.max_loras) if slot not in used)]
        return np.array(slots, dtype=np.int64), np.array(order, dtype=np.int64), len(used)

    def watch(self, steps: StepAdapters) -> None:
        """Refuse to unload adapters that these steps use, as long as the object exists."""
        self._steps.add(steps)


class LoraModel(nn.Module):
    """A model with each token's adapter as an input.

    Its forward takes ``lora_slots`` and ``lora_order`` besides the model's inputs, by name, and returns the model's
    result.

    Args:
        model: the model that contains the adapted layers.
        adapters: the adapters of these layers.
    """

    def __init__(self, model: nn.Module, adapters: LoraAdapters) -> None:
        super().__init__()
        self.model = model
        self.adapters = adapters
        self._tokens = adapters.tokens

    def forward(self, *, lora_slots: torch.Tensor, lora_order: torch.Tensor, **inputs: Any) -> Any:
        """See the class."""
        tokens = self._tokens
        tokens.slots, tokens.order = lora_slots, lora_order
        try:
            return self.model(**inputs)
        finally:
            tokens.slots = tokens.order = None


def without_lora(model: Any) -> Any:
    """The model inside a :class:`LoraModel`; any other model is returned unchanged."""
    return model.model if isinstance(model, LoraModel) else model


class StepAdapters:
    """Builds the adapter inputs of a generation's steps; copies them to the device only if rows have changed.

    Args:
        model: the model of a manager; requests can have adapters if it is a :class:`LoraModel`.
        open_requests: the set of requests that have not ended, which the caller updates.
        max_num_tokens: most tokens of a step.
        device: device of the inputs.
    """

    def __init__(
        self, model: Any, open_requests: Collection[Request], *, max_num_tokens: int, device: torch.device
    ) -> None:
        self._adapters = model.adapters if isinstance(model, LoraModel) else None
        self._open = open_requests
        self._last: StepPlan | None = None
        self._batch = AdapterBatch({}, 0)
        if self._adapters is None:
            return
        self._adapters.watch(self)
        self._max_loras = self._adapters.max_loras
        size = self._max_loras + max_num_tokens
        self._hosts = deque(HostBuffer(size, device) for _ in range(2))
        with torch.inference_mode(False):
            self._stage = torch.zeros(size, dtype=torch.int64, device=device)

    def in_use(self) -> set[str]:
        """Names of the adapters of open requests."""
        return {request.adapter for request in self._open if request.adapter is not None}

    def check(self, request: Request) -> None:
        """Refuse a request whose adapter is not available.

        Raises:
            OptionError: the adapter is not loaded, or the manager has no adapters.
        """
        if request.adapter is None:
            return
        if self._adapters is None:
            raise OptionError(
                f"{request.name} has an adapter, but the manager has no adapters",
                expected="the manager of a CausalLM(model, adapters=LoraAdapters(model, ...))",
                found=f"adapter={request.adapter!r}",
                remedy="create the CausalLM with adapters, or leave adapter out",
            )
        self._adapters.slot_of(request.adapter)

    def of(self, plan: StepPlan) -> AdapterBatch:
        """The adapter inputs of a step, valid until the next call."""
        last, self._last = self._last, plan
        if self._adapters is None or (
            last is not None and plan.requests is last.requests and plan.query_lens is last.query_lens
        ):
            return self._batch
        slots, order, num_active = self._adapters.numbers_of([request.adapter for request in plan.requests])
        size = self._max_loras + plan.num_tokens
        self._hosts.rotate()
        host = self._hosts[0]
        host.wait()
        numbers = host.memory.numpy()
        numbers[: self._max_loras] = order
        numbers[self._max_loras : size] = np.repeat(slots, plan.query_lens)
        stage = self._stage[:size].copy_(host.memory[:size], non_blocking=True)
        host.mark_copied()
        self._batch = AdapterBatch({_ORDER: stage[: self._max_loras], _SLOTS: stage[self._max_loras :]}, num_active)
        return self._batch


def lora_keys(adapters: LoraAdapters | None, model: nn.Module, keys: LoraKeys | None) -> LoraKeys | None:
    """The adapter counts of a causal LM's keys: ``keys``, or by default one for any number; None without adapters.

    Raises:
        OptionError: the adapters are for another model or its head, or ``keys`` has another ``max_loras``.
    """
    max_loras = 0 if adapters is None else adapters.max_loras
    layers = () if adapters is None else tuple(adapters.layers.values())
    modules = set(map(id, model.modules()))
    head = model.get_output_embeddings()  # type: ignore[operator]
    problem = None
    if any(id(layer) not in modules for layer in layers):
        problem = "layers of another model"
    elif any(layer is head for layer in layers):
        problem = "the head among its layers, which sees the last tokens alone"
    elif keys is not None and keys.max_loras != max_loras:
        problem = f"{max_loras} slots, and keys for {keys.max_loras}"
    if problem is None:
        return LoraKeys(max_loras) if keys is None and adapters is not None else keys
    raise OptionError(
        "this model cannot generate with these adapters",
        expected="LoraAdapters(model, ...) of its layers below the head, and LoraKeys of the same max_loras",
        found=problem,
        remedy="create the adapters for the model of the CausalLM, without its head, and leave lora out",
    )
