"""Changes a model while it is served, on configs of its own, and gives it back as it was."""

from __future__ import annotations

import contextlib
import copy
import importlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from graphpass.errors import OptionError

__all__ = ["ServedModel", "refuse_stateful"]


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
    So the modules of a served model refer to copies of their configs. Objects that serve the same model share the
    copies; the model is as before when none of them uses it.

    Args:
        model: the model; its modules refer to the copies from now on.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        shared = _SHARED.get(id(model))
        if shared is None:
            shared = _SHARED[id(model)] = _Shared(model, _own_configs(model))
        self._shared, self._is_in_use = shared, False
        self.use()

    @property
    def model_name(self) -> str:
        """The class of the model."""
        return type(self._shared.model).__name__

    @contextlib.contextmanager
    def changed(self) -> Iterator[None]:
        """Record the attributes and buffers of modules that the body sets. If it fails, the model is given back."""
        before = {module: _attributes(module) for module in self._shared.model.modules()}
        try:
            yield
        except BaseException:
            self._shared.changes += _changes_since(before)
            self.give_back()
            raise
        self._shared.changes += _changes_since(before)

    def use(self) -> None:
        """Change the model again after :meth:`give_back`. Does nothing if this object uses the model already."""
        if self._is_in_use:
            return
        self._is_in_use = True
        self._shared.users += 1
        if self._shared.users == 1:
            for change in self._shared.changes:
                setattr(change.module, change.name, change.own)

    def give_back(self) -> None:
        """Take back all changes, unless another object uses the model.

        An attribute that was set to another value since then is unchanged.
        """
        if not self._is_in_use:
            return
        self._is_in_use = False
        self._shared.users -= 1
        if self._shared.users == 0:
            for change in reversed(self._shared.changes):
                if _attributes(change.module).get(change.name) is change.own:
                    setattr(change.module, change.name, change.former)


@dataclass(frozen=True, slots=True)
class _Change:
    """An attribute of a module: its former value, and its value while the model is served."""

    module: torch.nn.Module
    name: str
    former: Any
    own: Any


@dataclass(slots=True, weakref_slot=True)
class _Shared:
    """The changes of one model, and the number of objects that use them."""

    model: torch.nn.Module
    changes: list[_Change]
    users: int = 0


_SHARED: weakref.WeakValueDictionary[int, _Shared] = weakref.WeakValueDictionary()
"""{id of a model: its changes}. They refer to the model, so an id is valid as long as its entry exists."""


def _own_configs(model: torch.nn.Module) -> list[_Change]:
    """A copy for every reference of a module to a config. References to one object have one copy."""
    config_class = importlib.import_module("transformers").PreTrainedConfig
    copies: dict[int, Any] = {}
    return [
        _Change(module, name, value, copy.deepcopy(value, copies))
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, config_class)
    ]


def _changes_since(before: dict[torch.nn.Module, dict[str, Any]]) -> list[_Change]:
    return [
        _Change(module, name, former[name], value)
        for module, former in before.items()
        for name, value in _attributes(module).items()
        if name in former and former[name] is not value
    ]


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    """The attributes and buffers of a module."""
    return {**vars(module), **dict(module.named_buffers(recurse=False))}
