"""Changes a model while it is served, on configs of its own, and gives it back as it was."""

from __future__ import annotations

import contextlib
import copy
import importlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from graphpass.errors import OptionError

__all__ = ["ServedModel", "refuse_stateful", "restored_on_error"]


def refuse_stateful(model: torch.nn.Module) -> None:
    """Refuse a model with layers that carry a state from token to token, such as a state space or linear attention.

    A manager refuses such a model too, because these layers mix the tokens of a batch, but only after it has compiled
    the model, which takes minutes for a scan.

    Raises:
        OptionError: Transformers marks the class of the model as stateful.
    """
    if getattr(model, "_is_stateful", False):
        raise OptionError(
            f"{type(model).__name__} keeps a state for each request that pages do not cover",
            expected="a decoder that reads earlier tokens only through the keys and values of attention",
            found="layers that carry a state from token to token, such as a state space, linear attention or a "
            "convolution: Transformers marks the class as stateful",
            remedy="generate with Transformers (model.generate)",
        )


class ServedModel:
    """A Hugging Face model that is changed to be served, until it is given back.

    The attention implementation of a model is a setting of its config, and other models may share the config object.
    So the modules of a served model refer to copies of their configs. Objects that serve the same modules, as one model
    or as parts of several, share the copies. They may give the modules back in any order; a module is as before when
    none of them uses it.

    Args:
        model: the model; its modules refer to the copies from now on.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._is_in_use = model, False
        self._changes = _own_configs(model)
        self.use()

    @property
    def model_name(self) -> str:
        """The class of the model."""
        return type(self._model).__name__

    @contextlib.contextmanager
    def changed(self) -> Iterator[None]:
        """Record the attributes and buffers of modules that the body sets. If it fails, the model is given back."""
        before = {module: _attributes(module) for module in self._model.modules()}
        try:
            with restored_on_error(self._model):
                yield
        except BaseException:
            self.give_back()
            raise
        for module, name, former in _changed_since(before):
            change = _Change(_slot_of(module, name), _attributes(module)[name])
            change.slot.enter(change, former)
            self._changes.append(change)

    def use(self) -> None:
        """Change the model again after :meth:`give_back`. Does nothing if this object uses the model already."""
        if self._is_in_use:
            return
        self._is_in_use = True
        for change in self._changes:
            change.slot.enter(change, getattr(change.slot.module, change.slot.name))
            setattr(change.slot.module, change.slot.name, change.own)

    def give_back(self) -> None:
        """Take back all changes that no other object has made as well.

        An attribute that was set to another value since then is unchanged.
        """
        if not self._is_in_use:
            return
        self._is_in_use = False
        for change in reversed(self._changes):
            change.slot.leave(change)


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Slot:
    """An attribute of a module that served models change.

    Attributes:
        module: the module.
        name: the attribute.
        former: its value when no served model uses the module.
        changes: the changes that are in use, the latest last.
        copy: the copy of the config that the attribute refers to; None: the attribute is no config.
    """

    module: torch.nn.Module
    name: str
    former: Any = None
    changes: list[_Change] = field(default_factory=list)
    copy: Any = None

    def enter(self, change: _Change, former: Any) -> None:
        """Put ``change`` into use; ``former`` is the attribute's value before."""
        if not self.changes:
            self.former = former
        self.changes.append(change)

    def leave(self, change: _Change) -> None:
        """Take ``change`` out of use: the attribute gets the value of the latest other one, or its former value."""
        is_latest = self.changes[-1] is change
        self.changes.remove(change)
        if is_latest and _attributes(self.module).get(self.name) is change.own:
            # guard: served_model_users
            setattr(self.module, self.name, self.changes[-1].own if self.changes else self.former)


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """One object's value of an attribute while it serves the model."""

    slot: _Slot
    own: Any


_SLOTS: weakref.WeakKeyDictionary[torch.nn.Module, weakref.WeakValueDictionary[str, _Slot]] = (
    weakref.WeakKeyDictionary()
)
"""{module: {attribute: its slot}}, of all served models."""


def _slot_of(module: torch.nn.Module, name: str) -> _Slot:
    """The slot of an attribute. A slot lives as long as a served model that has changed it."""
    slots = _SLOTS.setdefault(module, weakref.WeakValueDictionary())
    slot = slots.get(name)
    if slot is None:
        slot = slots[name] = _Slot(module, name)
    return slot


def _own_configs(model: torch.nn.Module) -> list[_Change]:
    """A copy for every reference of a module to a config. References to one object have one copy."""
    config_class = importlib.import_module("transformers").PreTrainedConfig
    slots = [
        _slot_of(module, name)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, config_class)
    ]
    copies: dict[int, Any] = {}
    for slot in slots:  # other served models have copied these already
        value = getattr(slot.module, slot.name)
        if slot.copy is not None and (value is slot.former or value is slot.copy):
            copies |= {id(slot.former): slot.copy, id(slot.copy): slot.copy}
    for slot in slots:
        slot.copy = copy.deepcopy(getattr(slot.module, slot.name), copies)  # guard: served_model_own_configs
    return [_Change(slot, slot.copy) for slot in slots]


@contextlib.contextmanager
def restored_on_error(model: torch.nn.Module) -> Iterator[None]:
    """Set attributes and buffers of modules, and the settings of their configs, back if the body fails."""
    before = {module: _attributes(module) for module in model.modules()}
    settings = [(config, dict(vars(config))) for config in _configs_of(model)]
    try:
        yield
    except BaseException:
        for module, name, former in _changed_since(before):
            setattr(module, name, former)
        for config, values in settings:
            vars(config).clear()
            vars(config).update(values)
        raise


def _configs_of(model: torch.nn.Module) -> list[Any]:
    config_class = importlib.import_module("transformers").PreTrainedConfig
    found = {id(v): v for module in model.modules() for v in vars(module).values() if isinstance(v, config_class)}
    return list(found.values())


def _changed_since(before: dict[torch.nn.Module, dict[str, Any]]) -> list[tuple[torch.nn.Module, str, Any]]:
    """(module, name, former value) of each attribute and buffer that is another object now."""
    return [
        (module, name, former[name])
        for module, former in before.items()
        for name, value in _attributes(module).items()
        if name in former and former[name] is not value
    ]


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    """The attributes and buffers of a module."""
    return {**vars(module), **dict(module.named_buffers(recurse=False))}
