"""What a Hugging Face model needs to be served: its next tokens, configs of its own, and fixed rotary frequencies.

Two kinds of rotary embeddings depend on the longest text of a batch: ``dynamic`` frequencies grow with it, and
``longrope`` has other factors for long texts. In a batch of many requests one long text would so change the frequencies
of the others, and a text that becomes long has keys in the cache that were rotated with those for short ones. Up to the
length of training the frequencies are fixed, and served.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from graphpass.errors import OptionError


class NextToken(torch.nn.Module):
    """A causal language model that returns the most likely next token of each request.

    The tokens of all requests are one row: ``input_ids`` and ``position_ids`` are (1, tokens). ``last_rows``,
    (requests,), is the index of each request's last token in it. The result are token ids, int64 (requests,). Logits
    are computed for the last tokens only, if the model has the argument ``logits_to_keep``, and compared in float32.

    To verify k drafts, ``last_rows`` and the result are (requests, 1 + k): of each request's last ``1 + k`` tokens. If
    it has fewer in the step, its first one is repeated in front.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self._selects_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the model."""
        return int(self.model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, last_rows: torch.Tensor) -> torch.Tensor:
        """See the class."""
        rows = last_rows.reshape(-1)
        selected = {"logits_to_keep": rows} if self._selects_rows else {}
        logits = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **selected).logits[0]
        tokens: torch.Tensor = (logits if self._selects_rows else logits[rows]).float().argmax(-1)
        return tokens.view(last_rows.shape)


def refuse_stateful(model: torch.nn.Module) -> None:
    """Refuse a model with layers that carry a state from token to token, before it is compiled, which takes minutes."""
    if getattr(model, "_is_stateful", False):
        raise OptionError(
            f"{type(model).__name__} keeps a state for each request that pages do not cover",
            expected="a decoder that reads earlier tokens only through the keys and values of attention",
            found="layers that carry a state from token to token, such as a state space, linear attention or a "
            "convolution: Transformers marks the class as stateful",
            remedy="generate with Transformers (model.generate)",
        )


# -- changes that are taken back ---------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Attribute:
    """An attribute of a module that served models change."""

    former: Any = None  #: its value while no served model uses the module
    copy: Any = None  #: of a config: the copy that it refers to while it is served
    values: list[tuple[object, Any]] = field(default_factory=list)  #: (who changed it, to what), the latest last


_CHANGED: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, _Attribute]] = weakref.WeakKeyDictionary()


def _changed(module: torch.nn.Module, name: str) -> _Attribute:
    return _CHANGED.setdefault(module, {}).setdefault(name, _Attribute())


class ServedModel:
    """A Hugging Face model that is changed to be served, until it is given back.

    Other models may share its config objects, so its modules refer to copies. Objects that serve the same modules share
    the copies, and may give the modules back in any order.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._key = model, object()
        self._is_in_use = False
        # guard: served_model_changed_by_others
        self._changes = [*_copied_configs(model), *_changes_of_others(model)]
        self.use()

    @contextlib.contextmanager
    def changed(self) -> Iterator[None]:
        """Record what the body sets. If it fails, the model is given back."""
        try:
            with restored_on_error(self._model) as before:
                yield
        except BaseException:
            self.give_back()
            raise
        for module, name, former in _changed_since(before):
            self._changes.append((module, name, _attributes(module)[name]))
            self._enter(*self._changes[-1], former)

    def use(self) -> None:
        """Change the model again after :meth:`give_back`."""
        if self._is_in_use:
            return
        self._is_in_use = True
        for module, name, value in self._changes:
            self._enter(module, name, value, getattr(module, name))
            setattr(module, name, value)

    def _enter(self, module: torch.nn.Module, name: str, value: Any, former: Any) -> None:
        """Count a change; ``former`` is the value before."""
        attribute = _changed(module, name)
        if not attribute.values:  # guard: served_model_shared_modules
            attribute.former = former
        attribute.values.append((self._key, value))

    def give_back(self) -> None:
        """Take back all changes that no other object has made, and that nobody has overwritten."""
        if not self._is_in_use:
            return
        self._is_in_use = False
        for module, name, value in reversed(self._changes):
            attribute = _changed(module, name)
            values = attribute.values
            at = max(index for index, (key, _) in enumerate(values) if key is self._key)
            del values[at]
            if at == len(values) and _attributes(module).get(name) is value:
                setattr(module, name, values[-1][1] if values else attribute.former)  # guard: served_model_users


def _copied_configs(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, Any]]:
    """(module, attribute, copy) for every reference of a module to a config."""
    config_class = importlib.import_module("transformers").PreTrainedConfig
    found = [(m, name, v) for m in model.modules() for name, v in vars(m).items() if isinstance(v, config_class)]
    copies: dict[int, Any] = {}
    for module, name, value in found:  # other served models have copied these already
        known = _changed(module, name)
        if known.copy is not None and (value is known.former or value is known.copy):
            copies |= {id(known.former): known.copy, id(known.copy): known.copy}
    for module, name, value in found:
        _changed(module, name).copy = copy.deepcopy(value, copies)  # guard: served_model_own_configs
    return [(module, name, _changed(module, name).copy) for module, name, _ in found]


def _changes_of_others(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, Any]]:
    """(module, attribute, value) of what objects that serve the modules already have set, apart from configs."""
    return [
        (module, name, attribute.values[-1][1])
        for module in model.modules()
        for name, attribute in _CHANGED.get(module, {}).items()
        if attribute.copy is None and attribute.values and _attributes(module).get(name) is attribute.values[-1][1]
    ]


@contextlib.contextmanager
def restored_on_error(model: torch.nn.Module) -> Iterator[dict[torch.nn.Module, dict[str, Any]]]:
    """Set modules, whose attributes it yields, and their configs back if the body fails."""
    before = {module: _attributes(module) for module in model.modules()}
    config_class = importlib.import_module("transformers").PreTrainedConfig
    configs = {id(v): v for module in before for v in vars(module).values() if isinstance(v, config_class)}
    settings = [(config, dict(vars(config))) for config in configs.values()]
    try:
        yield before
    except BaseException:
        for module, name, former in _changed_since(before):
            setattr(module, name, former)
        for config, values in settings:
            vars(config).clear()
            vars(config).update(values)
        raise


def _changed_since(before: dict[torch.nn.Module, dict[str, Any]]) -> list[tuple[torch.nn.Module, str, Any]]:
    """(module, name, former value) of what is another object now."""
    return [
        (module, name, former[name])
        for module, former in before.items()
        for name, value in _attributes(module).items()
        if name in former and former[name] is not value
    ]


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    return {**vars(module), **dict(module.named_buffers(recurse=False))}


# -- rotary frequencies ------------------------------------------------------------------------------------------------

_FIXED = {"dynamic": "unscaled (graphpass)", "longrope": "short factors (graphpass)"}
"""{rope type: the type of a module with fixed frequencies}, which transformers does not change."""


def fix_frequencies(model: torch.nn.Module, max_seq_len: int) -> None:
    """Give the rotary embeddings of a model the frequencies of texts up to ``max_seq_len`` tokens, in every call."""
    changing = [
        (name, module, layer_type, kind)
        for name, module in model.named_modules()
        for layer_type, rope_type in _rope_types(module)
        if (kind := _changing_kind(rope_type)) is not None
    ]
    for name, module, layer_type, kind in changing:
        longest, setting = _longest_fixed(module, layer_type, kind)
        if max_seq_len > longest:  # guard: rope_longest
            raise OptionError(
                f"the rotary frequencies of this model change once a text is longer than {longest} tokens",
                expected=f"max_seq_len of at most {longest}, the model's {setting}: a longer text would change the "
                "frequencies of all requests of its batch, and those of its own keys in the cache",
                found=f"max_seq_len={max_seq_len}, rope_type {kind!r} in {name or 'the model'} "
                f"({type(module).__name__})",
                remedy=f"pass max_seq_len={longest}, or use a model whose rope_type has fixed frequencies (yarn, "
                "llama3, linear)",
            )
    for _, module, layer_type, kind in changing:
        _fix(module, layer_type, kind)


def _rope_types(module: torch.nn.Module) -> list[tuple[str | None, str]]:
    """(type of layers, or None for all, type of their rotary embedding)."""
    rope_type = getattr(module, "rope_type", None)
    if isinstance(rope_type, dict):
        return list(rope_type.items())
    return [(None, rope_type)] if isinstance(rope_type, str) else []


def _changing_kind(rope_type: str) -> str | None:
    """The kind of an embedding, fixed or not; None if its frequencies never change."""
    by_name = {fixed: kind for kind, fixed in _FIXED.items()}
    if "dynamic" in rope_type:
        return "dynamic"
    return rope_type if rope_type == "longrope" else by_name.get(rope_type)


def _longest_fixed(module: Any, layer_type: str | None, kind: str) -> tuple[int, str]:
    """The longest text with the frequencies of shorter ones, and the setting that says so."""
    if kind == "dynamic":
        return module.original_max_seq_len, "max_position_embeddings"
    parameters = module.config.rope_parameters
    parameters = parameters if layer_type is None else parameters[layer_type]
    return parameters["original_max_position_embeddings"], "original_max_position_embeddings"


def _fix(module: Any, layer_type: str | None, kind: str) -> None:
    """Give one embedding its original frequencies, unless it has them: graphs may read them."""
    if dict(_rope_types(module))[layer_type] == _FIXED[kind]:
        return
    prefix = "" if layer_type is None else f"{layer_type}_"  # as transformers names them
    buffer = f"{prefix}inv_freq"
    # A copy: transformers may keep the buffer's tensor for long texts.
    original = getattr(module, f"{prefix}original_inv_freq")  # guard: rope_original
    setattr(module, buffer, original.to(getattr(module, buffer).device, copy=True))
    module.rope_type = _FIXED[kind] if layer_type is None else {**module.rope_type, layer_type: _FIXED[kind]}
