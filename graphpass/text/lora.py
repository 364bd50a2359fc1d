"""LoRA adapters under captured graphs: the tokens of one batch can use different adapters of one model.

Adapters are stored in slots: buffers that captured graphs read. So an adapter is loaded by writing to a slot, without a
new capture. Each token's slot is an input of the model, and the number of adapters that a graph computes is part of its
key.

In each adapted layer an op multiplies all tokens by the stacked down-projections of all n adapters of the step, sets
the results of other adapters than the token's to zero, and multiplies by the stacked up-projections. So a graph that is
captured for n adapters serves every mix of up to n. The op reads n from the forward context's batch descriptor; without
one it computes all slots.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from graphpass.compat import nnmodules
from graphpass.context import current_context
from graphpass.dispatch.dispatchkeys import LoraKeys
from graphpass.errors import OptionError, ShapeError, did_you_mean, positive
from graphpass.padding import OpCall, PaddedValue, register_padding_rule
from graphpass.serving.batch import Batch, InputSpec

ADD_LORA = "graphpass::add_lora"
NO_ADAPTER = -1
SLOTS, ORDER = "lora_slots", "lora_order"
"""The inputs of an adapted model: the slot of each token, and all slots with those in use first."""

_STATE_DICT_NAME = re.compile(r"(?:base_model\.model\.)?(?P<path>.+)\.lora_(?P<which>[AB])(?:\.[^.]+)?\.weight")


@dataclass(frozen=True, slots=True, eq=False)
class AdapterBatch:
    """The adapters of a batch."""

    inputs: Mapping[str, torch.Tensor]  #: each token's slot and the order of slots, see ``LoraAdapters.input_specs``
    num_active: int  #: number of different adapters, the value for :attr:`Batch.num_active_loras`

    def added_to(self, batch: Batch) -> Batch:
        """A copy of ``batch`` with these inputs and ``num_active_loras``."""
        inputs = {**(batch.inputs or {}), **self.inputs}
        return replace(batch, inputs=inputs, num_active_loras=self.num_active)


class LoraAdapters:
    """Slots for adapters in a model's linear layers.

    The targeted layers are replaced in ``model`` by layers with the same parameters under the same names; tokens
    without an adapter get the same output as before. Create this object before the model is captured. Adapters can be
    loaded and unloaded afterwards.

    For n adapters, each layer computes two more products of inner size ``n * max_rank``, copies the n adapters' weights
    if n is below ``max_loras``, and launches about six more kernels. n is the number in the key, see
    :class:`LoraKeys <graphpass.LoraKeys>`.

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
        self.layers = {
            path: LoraLinear(layer, self.tokens, max_loras=max_loras, max_rank=max_rank)
            for path, layer in _targeted_layers(model, targets).items()
        }
        for path, layer in self.layers.items():
            owner, _, attribute = path.rpartition(".")
            setattr(model.get_submodule(owner), attribute, layer)
        self._slot_of: dict[str, int] = {}
        self._free = list(range(max_loras))[::-1]
        self._uses: list[weakref.WeakMethod[Callable[[], Collection[str | None]]]] = []

    @property
    def loaded(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        return tuple(self._slot_of)

    def wrap(self, model: nn.Module) -> LoraModel:
        """A module around ``model``, with the inputs of :meth:`input_specs`, too."""
        return LoraModel(model, self)

    def input_specs(self, max_num_tokens: int) -> tuple[InputSpec, InputSpec]:
        """The two inputs that :meth:`wrap` adds. Padded tokens have no adapter."""
        return (
            InputSpec(SLOTS, (max_num_tokens,), torch.int64, padding=NO_ADAPTER),
            InputSpec(ORDER, (self.max_loras,), torch.int64, token_dim=None),
        )

    def load(
        self, name: str, weights: Mapping[str, Any], *, alpha: float | None = None, scaling: float | None = None
    ) -> None:
        """Write an adapter to a free slot; captured graphs serve it.

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
        if name in self._slot_of or not self._free:
            raise OptionError(
                f"adapter {name!r} cannot be loaded",
                expected=f"a new name, and fewer than max_loras={self.max_loras} adapters",
                found=f"{len(self._slot_of)} loaded: {sorted(self._slot_of)}",
                remedy="unload() one of them, or create LoraAdapters with a larger max_loras",
            )
        if alpha is not None and scaling is not None:
            raise OptionError(
                f"adapter {name!r} has two scales",
                expected="alpha, which is divided by the rank, or scaling, which is not",
                found=f"alpha={alpha}, scaling={scaling}",
                remedy="pass alpha or scaling, not both",
            )
        pairs = _pairs_of(name, weights)
        _check_pairs(name, pairs, self.layers, self.max_rank)
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
        if any(name in in_use() for use in self._uses if (in_use := use()) is not None):  # guard: lora_in_use
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
        inputs = {SLOTS: np.repeat(slots, lengths), ORDER: order}
        return AdapterBatch({key: torch.from_numpy(value).to(device) for key, value in inputs.items()}, num_active)

    def numbers_of(self, names: Sequence[str | None]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
        """The slot of each row, all slots with those in use first, and the number in use."""
        slots = [NO_ADAPTER if name is None else self.slot_of(name) for name in names]
        used = sorted({*slots} - {NO_ADAPTER})
        order = [*used, *(slot for slot in range(self.max_loras) if slot not in used)]
        return np.array(slots, dtype=np.int64), np.array(order, dtype=np.int64), len(used)

    def watch(self, in_use: Callable[[], Collection[str | None]]) -> None:
        """Refuse to unload the adapters that a bound method returns, as long as its object exists."""
        self._uses = [use for use in (*self._uses, weakref.WeakMethod(in_use)) if use() is not None]

    def _blank(self, slot: int) -> None:
        for layer in self.layers.values():
            for tensor in (layer.lora_a, layer.lora_b):
                tensor[slot].zero_()  # guard: lora_blank_slot


class LoraModel(nn.Module):
    """A model with each token's adapter as an input: ``lora_slots`` and ``lora_order``, by name.

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


def lora_keys(adapters: LoraAdapters | None, model: nn.Module, keys: LoraKeys | None) -> LoraKeys | None:
    """The adapter counts of a causal LM's keys, by default one for any number; None without adapters."""
    max_loras = 0 if adapters is None else adapters.max_loras
    layers = () if adapters is None else tuple(adapters.layers.values())
    modules = set(map(id, model.modules()))
    head = model.get_output_embeddings()  # type: ignore[operator]
    if any(id(layer) not in modules for layer in layers):
        problem = "layers of another model"
    elif any(layer is head for layer in layers):
        problem = "the head among its layers, which sees the last tokens alone"
    elif keys is not None and keys.max_loras != max_loras:
        problem = f"{max_loras} slots, and keys for {keys.max_loras}"
    else:
        return LoraKeys(max_loras) if keys is None and adapters is not None else keys
    raise OptionError(
        "this model cannot generate with these adapters",
        expected="LoraAdapters(model, ...) of its layers below the head, and LoraKeys of the same max_loras",
        found=problem,
        remedy="create the adapters for the model of the CausalLM, without its head, and leave lora out",
    )


# -- the layers that take adapters, and the weights of an adapter ------------------------------------------------------


def _targeted_layers(model: nn.Module, targets: Collection[str]) -> dict[str, nn.Linear]:
    """{path: layer} of the layers that match a target."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, nn.Linear] = {}
    for target in ((targets,) if isinstance(targets, str) else tuple(targets)) or ("",):
        matching = [path for path in modules if path and (path == target or path.endswith(f".{target}"))]
        if not matching:
            last_parts = {path.rpartition(".")[2] for path, module in modules.items() if type(module) is nn.Linear}
            raise OptionError(
                f"target {target!r} names no layer",
                expected=f"the end of a linear layer's path: {', '.join(sorted(last_parts))}",
                found=repr(target),
                remedy=did_you_mean(target, last_parts, otherwise="see model.named_modules()"),
            )
        for path in matching:
            layer, is_hooked = modules[path], nnmodules.has_hooks(modules[path])
            if type(layer) is not nn.Linear or is_hooked:
                raise OptionError(
                    f"{path} takes no adapters",
                    expected="torch.nn.Linear itself, without hooks, not replaced before",
                    found=type(layer).__name__ + (" with hooks, which would be lost" if is_hooked else ""),
                    remedy="leave it out of the targets; create one LoraAdapters for all adapters, before hooks are "
                    "added",
                )
            found[path] = layer
    if len({id(layer) for layer in found.values()}) < len(found):
        raise OptionError(
            "a target layer has several paths in the model",
            expected="one path for each layer",
            found=", ".join(sorted(found)),
            remedy="leave shared layers out of the targets",
        )
    return found


def _pairs_of(name: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    """An adapter's weights as {layer: (A, B)}."""
    if weights and not any(isinstance(value, torch.Tensor) for value in weights.values()):
        return dict(weights)
    halves: dict[str, dict[str, Any]] = {}
    wrong = []
    for key, tensor in weights.items():
        found = _STATE_DICT_NAME.fullmatch(key)
        if found is None:
            wrong.append(repr(key))
        else:
            halves.setdefault(found["path"], {})[found["which"]] = tensor
    wrong += [f"lora_{next(iter(pair))} alone of {path}" for path, pair in halves.items() if len(pair) < 2]
    if wrong or not halves:
        raise OptionError(
            f"adapter {name!r} is not made of low-rank pairs of linear layers",
            expected="lora_A and lora_B of each layer, with names like base_model.model.<layer>.lora_A.weight, or "
            "{layer: (A, B)}",
            found=wrong[0] if wrong else "no weights",
            remedy="pass the whole state dict of an adapter of linear layers; a request without an adapter has None",
        )
    return {path: (pair["A"], pair["B"]) for path, pair in halves.items()}


def _check_pairs(name: str, pairs: Mapping[str, Any], layers: Mapping[str, LoraLinear], max_rank: int) -> None:
    for path, pair in pairs.items():
        if path not in layers:
            raise OptionError(
                f"adapter {name!r} has weights for a layer that takes no adapters",
                expected=f"layers among the targets: {', '.join(sorted(layers)[:4])}, ...",
                found=repr(path),
                remedy=did_you_mean(path, layers, otherwise="name its layers in LoraAdapters(targets=...)"),
            )
        layer, weight = layers[path], layers[path].weight
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(t, torch.Tensor) for t in pair)
        rank = pair[0].shape[0] if is_pair and pair[0].dim() == 2 else 0
        fits = (
            1 <= rank <= max_rank
            and pair[0].shape == (rank, layer.in_features)
            and pair[1].shape == (layer.out_features, rank)
            and all(t.dtype == weight.dtype and t.device == weight.device for t in pair)
        )
        if fits and all(bool(t.isfinite().all()) for t in pair):
            continue
        found = ", ".join(f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in pair) if is_pair else repr(pair)[:80]
        raise ShapeError(
            f"{path} of adapter {name!r} does not fit",
            expected=f"finite A (rank, {layer.in_features}) and B ({layer.out_features}, rank), rank at most "
            f"{max_rank}, {weight.dtype} on {weight.device}",
            found=f"{found}, of which one is not finite" if fits else found,
            remedy="check the file of the weights, pass them in the layer's dtype and on its device, or make "
            "LoraAdapters with a larger max_rank",
        )


# -- the layer and its op ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class TokenAdapters:
    """The adapters of the running forward, which all layers of a model share; without one None."""

    slots: torch.Tensor | None = None  #: of each token, int64 (tokens,), ``NO_ADAPTER`` for none
    order: torch.Tensor | None = None  #: all slots, those in use first, int64 (slots,)


class LoraLinear(nn.Linear):
    """A linear layer that adds the output of each token's adapter. Adapters are not in its state dict."""

    lora_a: torch.Tensor  #: down-projections, (slots, rank, in_features); zero in a free slot
    lora_b: torch.Tensor  #: up-projections, scaled, (slots, rank, out_features)

    def __init__(self, linear: nn.Linear, tokens: TokenAdapters, *, max_loras: int, max_rank: int) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate another weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.training = linear.training
        self._tokens = tokens
        with torch.inference_mode(False):
            for name, width in (("lora_a", self.in_features), ("lora_b", self.out_features)):
                self.register_buffer(name, linear.weight.new_zeros(max_loras, max_rank, width), persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as nn.Linear calls it
        """The output of the layer and of adapters."""
        out = F.linear(input, self.weight, self.bias)
        tokens = self._tokens
        if tokens.slots is not None:
            torch.ops.graphpass.add_lora(input, out, self.lora_a, self.lora_b, tokens.slots, tokens.order)
        return out


torch.library.define(
    ADD_LORA, "(Tensor x, Tensor(a!) out, Tensor lora_a, Tensor lora_b, Tensor slots, Tensor order) -> ()"
)


@torch.library.impl(ADD_LORA, "default")
@torch.no_grad()
def _add_lora(
    x: torch.Tensor,
    out: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    slots: torch.Tensor,
    order: torch.Tensor,
) -> None:
    """Add the outputs of the tokens' adapters for ``x`` to ``out``; only the first slots of ``order`` are computed."""
    num_tokens, num_rows = slots.shape[0], x.numel() // x.shape[-1]
    if num_rows != num_tokens:
        raise ShapeError(
            "the input of a layer with adapters does not have one row per token",
            expected=f"a row for each of {num_tokens} tokens",
            found=f"{num_rows} rows, of an input {tuple(x.shape)}",
            remedy="leave the layer out of the targets: adapters need one row for each token",
        )
    max_loras, rank, _ = lora_a.shape
    context = current_context()
    key = None if context is None else context.batch_descriptor
    count = max_loras if key is None else min(key.num_active_loras, max_loras)  # guard: lora_count_of_the_key
    if count == 0 or num_tokens == 0:
        return
    if count < max_loras:
        computed = order[:count]
        lora_a, lora_b = lora_a.index_select(0, computed), lora_b.index_select(0, computed)
    else:  # all of them, as they lie
        computed = torch.arange(max_loras, device=slots.device)
    low = x.reshape(num_tokens, -1) @ lora_a.view(count * rank, -1).t()
    # Fill instead of multiply by zero: the result of another adapter may be infinite.
    # guard: lora_filled, lora_own_tokens
    low.view(num_tokens, count, rank).masked_fill_((slots.unsqueeze(1) != computed).unsqueeze(2), 0.0)
    out.view(num_tokens, -1).addmm_(low, lora_b.view(count * rank, -1))


def _add_lora_by_row(call: OpCall) -> tuple[PaddedValue, ...]:
    """Padding rule: a row depends on its input and on its token's adapter."""
    x, out, slots = call.tensor("x"), call.tensor("out"), call.tensor("slots")
    for name in ("lora_a", "lora_b", "order"):
        tensor = call.tensor(name)
        call.unpadded(tensor, range(tensor.rank), "adapters lie along")
    for tensor in (x, out):
        call.unpadded(tensor, [tensor.rank - 1], "multiplies matrices over")
        call.unify(tuple(size for of_dim in tensor.factors[:-1] for size in of_dim), slots.factors[0])
    return (PaddedValue(out.factors),)


torch.library.register_fake(ADD_LORA, lambda *_: None)
register_padding_rule(ADD_LORA, _add_lora_by_row)
