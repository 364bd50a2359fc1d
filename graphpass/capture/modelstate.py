"""The state of a model: whether it is the one of the capture, and how a capture leaves it unchanged.

A replay evaluates no guards of Dynamo. The comparison of settings, parameters, buffers, submodules and layouts
(:class:`ModelState`) replaces them; after a change of other attributes, hooks or lengths of lists the user has to
capture again.

A model that counts its calls would count captures: :class:`PythonState` restores its attributes, and
:mod:`graphpass.capture.settings` tensors and random numbers.
"""

from __future__ import annotations

import collections
import contextlib
import operator
import random
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from graphpass.capture.staging import Layouts
from graphpass.compat import memory, nnmodules, sideeffects
from graphpass.compat.subclasses import is_wrapper, plain_tensors
from graphpass.errors import CaptureError, ShapeError

_TRAINING = operator.attrgetter("training")
_DEPTH = 4
"""The search for an object's modules follows this many attributes and container items."""


class SharesWeights:
    """Base class of objects whose weights the :class:`ModelState` of another object already compares."""


def _ambient_now(modules: Iterable[torch.nn.Module]) -> dict[str, Any]:
    """{name: value} of the settings that select the kernels of a forward. A graph replays those of its capture."""
    devices = ("cpu", "cuda")
    return {
        "autocast": [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices
        ],
        "matmul_precision": torch.backends.cuda.matmul.fp32_precision == "tf32",
        "default_dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "training": tuple(map(_TRAINING, modules)),
    }


def _shown(name: str, value: Any) -> str:
    return f"{sum(value)} of {len(value)} modules in training mode" if name == "training" else str(value)


@dataclass(frozen=True, slots=True)
class DictSlots:
    """``owners[i][names[i]]`` was ``values[i]`` at capture. The references keep the addresses from being reused."""

    owners: tuple[dict[str, Any], ...]
    names: tuple[str, ...]
    values: tuple[Any, ...]
    wrappers: tuple[torch.Tensor, ...]  #: the values that wrap tensors; their attributes are slots, too
    dicts: tuple[dict[str, Any], ...]  #: the attributes of each, which ``swap_tensors`` exchanges

    @classmethod
    def of(cls, slots: Iterable[tuple[dict[str, Any], str, Any]]) -> Self:
        """The slots of (owner, name, value) triples."""
        triples, wrappers = list(slots), list[torch.Tensor]()
        for _, _, value in triples:  # which grows
            if is_wrapper(value):
                wrappers.append(value)
                triples += [(vars(value), name, held) for name, held in vars(value).items()]
        owners, names, values = zip(*triples, strict=True) if triples else ((), (), ())
        return cls(owners, names, values, tuple(wrappers), tuple(map(vars, wrappers)))

    def in_place(self) -> bool:
        """Whether every slot has the same object as at capture."""
        # The loop runs in C: every call looks up hundreds of slots.
        return all(map(operator.is_, map(dict.get, self.owners, self.names), self.values)) and all(
            map(operator.is_, map(vars, self.wrappers), self.dicts)  # guard: swapped_wrappers
        )


@dataclass(frozen=True, slots=True)
class ModelState:
    """The state of a model at capture: of the tensors that one graph reads, or of a whole object.

    A graph's plan compares the addresses of the former; the latter compares addresses and the number of submodules,
    too.
    """

    ambient: Mapping[str, Any]  #: {name: value} of torch's settings, and the training flags
    modules: tuple[torch.nn.Module, ...]  #: all modules of the model
    slots: DictSlots  #: the module dictionaries with the tensors and submodules
    tensors: Sequence[torch.Tensor]  #: the tensors, each once
    layouts: Layouts  #: of the tensors
    _has_extent: Callable[[], bool]  #: compares the number of submodules and the addresses of a whole object

    @classmethod
    def of_arguments(cls, modules: Sequence[torch.nn.Module], tensors: Sequence[torch.Tensor]) -> ModelState | None:
        """The state of the tensors that a graph reads; None if one of them is neither a parameter nor a buffer.

        The slots include all submodules: one that is replaced may compute something else even without tensors.
        """
        missing = {id(tensor) for tensor in tensors}
        slots: list[tuple[dict[str, Any], str, Any]] = []
        for module in reversed(modules):
            slots += [
                (owner, name, tensor)
                for owner in nnmodules.tensor_dicts(module)
                for name, tensor in owner.items()
                if tensor is not None and any(id(plain) in missing for _, plain in plain_tensors(tensor))
            ]
            children = nnmodules.child_dict(module)
            slots += [(children, name, child) for name, child in children.items()]  # guard: manager_children
        found = {id(plain) for _, _, value in slots for _, plain in plain_tensors(value)}
        if not missing <= found:  # guard: tensors_kept_elsewhere
            return None
        own = list({id(tensor): tensor for tensor in tensors}.values())
        return cls(_ambient_now(modules), tuple(modules), DictSlots.of(slots), own, Layouts(own), lambda: True)

    @classmethod
    def of_object(cls, model: object) -> ModelState:
        """The state of all parameters, buffers and submodules of an object, and of the modules among its attributes."""
        roots = _roots_within(model, _DEPTH, set())  # guard: encoder_weights_within
        modules = tuple({id(module): module for root in roots for module in root.modules()}.values())
        slots = DictSlots.of(
            (owner, name, value)
            for module in modules
            for owner in (*nnmodules.tensor_dicts(module), nnmodules.child_dict(module))
            for name, value in owner.items()
        )
        tensors = list({id(plain): plain for value in slots.values for _, plain in plain_tensors(value)}.values())
        children = tuple(map(nnmodules.child_dict, modules))
        addresses: list[int | None] = [tensor.data_ptr() for tensor in tensors]
        count, everywhere = sum(map(len, children)), list(range(len(tensors)))

        def has_extent() -> bool:
            return sum(map(len, children)) == count and memory.data_ptrs_equal(tensors, addresses, everywhere)

        return cls(_ambient_now(modules), modules, slots, tensors, Layouts(tensors), has_extent)

    def has_weights(self) -> bool:
        """Whether tensors and submodules are the captured objects, with the same addresses and layouts."""
        return self.slots.in_place() and self._has_extent() and self.layouts.changed(self.tensors) is None

    def has_training_flags(self) -> bool:
        """Whether the ``training`` flag of each module is the same as at capture."""
        return bool(self.ambient["training"] == tuple(map(_TRAINING, self.modules)))

    def setting_changed(self) -> str | None:
        """The name of a setting that has changed since the capture, or None."""
        return self._first_other(_ambient_now(self.modules))

    def _first_other(self, now: Mapping[str, Any]) -> str | None:
        return None if now == self.ambient else next(name for name in now if now[name] != self.ambient[name])

    def matches_modules(self, modules: Sequence[torch.nn.Module]) -> bool:
        """Whether all tensors and submodules are the captured objects; raises if a setting or a layout has changed."""
        self._refuse_other(_ambient_now(modules))  # guard: manager_ambient
        if not self.slots.in_place():  # guard: manager_weights
            return False
        changed = self.layouts.changed(self.tensors)  # guard: manager_layouts
        if changed is not None:
            raise ShapeError(
                "a parameter or buffer has another layout than at capture, at its old address",
                expected=changed[1],
                found=changed[2],
                remedy="write into it in place, or torch.compiler.reset() and close(), and capture again",
            )
        return True

    def _refuse_other(self, now: Mapping[str, Any]) -> None:
        name = self._first_other(now)
        if name is not None:
            raise CaptureError(
                f"{name} changed since the graphs were captured",
                expected=_shown(name, self.ambient[name]),
                found=_shown(name, now[name]),
                remedy=f"restore {name} before the call, or close() and capture again under the new setting",
            )


def modules_of(model: object) -> tuple[torch.nn.Module, ...]:
    """All modules of a model, the model first; empty for a function."""
    return tuple(model.modules()) if isinstance(model, torch.nn.Module) else ()


def _roots_within(value: object, depth: int, seen: set[int]) -> Iterator[torch.nn.Module]:
    if id(value) in seen or isinstance(value, SharesWeights):
        return
    seen.add(id(value))
    if isinstance(value, torch.nn.Module):
        yield value
    if depth:
        if isinstance(value, Mapping):
            parts = list(value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            parts = list(value)
        else:
            parts = list(getattr(value, "__dict__", {}).values())
        for part in parts:
            yield from _roots_within(part, depth - 1, seen)


# -- Python state -----------------------------------------------------------------------------------------------------


Entries = list[tuple[Any, Any]]
"""The items of a container: (key, value) of a dict, (position, value) of a list, set or deque."""


@dataclass(frozen=True, slots=True)
class PythonState:
    """Shallow copies of the attributes of modules, and of all built-in containers that are reachable from them."""

    copies: dict[int, tuple[Any, Entries]]  #: {id of a dict, list, set or deque: (the container, its items)}
    modules: frozenset[int]  #: ids of the modules
    numbers: Any  #: state of Python's ``random`` module

    @classmethod
    def of(cls, modules: Sequence[torch.nn.Module]) -> PythonState:
        """Copy the current state of these modules."""
        copies: dict[int, tuple[Any, Entries]] = {}
        waiting: list[Any] = [vars(module) for module in modules]
        while waiting:
            container = waiting.pop()
            if id(container) not in copies:
                entries = _entries_of(container)
                copies[id(container)] = (container, entries)
                waiting += [value for _, value in entries if isinstance(value, tuple(_REFILLED))]
        return cls(copies, frozenset(map(id, modules)), random.getstate())

    def restores(self, owner: int) -> bool:
        """Whether the object with this id is a module or container that :meth:`restore` restores."""
        return owner in self.modules or owner in self.copies

    def holds_tensor(self, tensor: torch.Tensor) -> bool:
        """Whether this tensor object was in an attribute or container of the modules."""
        return any(value is tensor for _, entries in self.copies.values() for _, value in entries)

    def new_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Tensors that were added to a container since the copy, each with its key or position as text."""
        found = []
        for container, entries in self.copies.values():
            known, now = {id(value) for _, value in entries}, _entries_of(container)
            found += [(repr(k), v) for k, v in now if isinstance(v, torch.Tensor) and id(v) not in known]
        return found

    def restore(self) -> None:
        """Restore the containers that have changed; unchanged ones are not written to."""
        for container, entries in self.copies.values():
            now = _entries_of(container)
            is_same = [key for key, _ in now] == [key for key, _ in entries] and all(
                value is kept for (_, value), (_, kept) in zip(now, entries, strict=True)
            )
            if not is_same:  # guard: manager_python_state
                _refill(container, entries)
        random.setstate(self.numbers)  # guard: manager_python_random


def _entries_of(container: Any) -> Entries:
    return list(container.items() if isinstance(container, dict) else enumerate(container))


def _refill(container: Any, entries: Entries) -> None:
    """Replace the items by methods of the built-in class, because a subclass may override them with side effects."""
    kind = next(kind for kind in _REFILLED if isinstance(container, kind))
    kind.clear(container)
    _REFILLED[kind](container, entries if isinstance(container, dict) else [value for _, value in entries])


_REFILLED: dict[Any, Callable[[Any, Any], None]] = {
    collections.OrderedDict: collections.OrderedDict.update,
    dict: dict.update,
    list: list.extend,
    set: set.update,
    collections.deque: collections.deque.extend,
}


@contextlib.contextmanager
def restoring_python_state(modules: Sequence[torch.nn.Module]) -> Iterator[PythonState]:
    """Restore the Python state of modules after the body, also if it raises."""
    state = PythonState.of(modules)
    try:
        yield state
    finally:
        state.restore()


def refuse_side_effects(effects: Iterable[sideeffects.SideEffect], state: PythonState) -> None:
    """Refuse a model whose calls change Python state that a manager cannot restore."""
    for effect in effects:
        if effect.keeps_tensor:  # guard: manager_kept_tensors
            raise _keeps_tensor(f"a forward that {effect.text}")
        if effect.owner is not None and not state.restores(effect.owner):  # guard: manager_state_elsewhere
            raise CaptureError(
                "the model changes Python state that cannot be restored after a capture",
                expected="changes only to attributes of the model's modules, and to lists, dicts and sets in them",
                found=f"a forward that {effect.text}",
                remedy="store the state in an attribute of a module or in a registered buffer, or update it outside of "
                "the model",
            )


def refuse_stored_tensors(state: PythonState, own: Collection[int]) -> None:
    """Refuse a model whose Python code between graphs stores tensors in its modules; its buffers are ``own``.

    Dynamo records side effects inside of graphs alone, so the modules are compared.
    """
    for name, tensor in state.new_tensors():
        if id(tensor) not in own and not isinstance(tensor, torch.nn.Parameter):
            raise _keeps_tensor(f"a forward that stores one as {name}")


def _keeps_tensor(found: str) -> CaptureError:
    return CaptureError(
        "the model stores a tensor in a Python object",
        expected="a forward that stores no argument and no result: the next step overwrites their memory",
        found=found,
        remedy="return the tensor; or, if it has the same size in every step, copy it into a registered buffer: "
        "self.last.copy_(x)",
    )


# -- code -------------------------------------------------------------------------------------------------------------


def entry_of(model: Callable[..., Any]) -> Callable[..., Any]:
    """A new function that calls the model; no other function shares its code object."""

    def call_model(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    own = with_own_code(call_model)
    # Its own global variables, too: Dynamo adds some, and a saved call has to bring them along.
    scope = {name: own.__globals__[name] for name in ("__name__", "__builtins__")}
    return types.FunctionType(own.__code__, scope, own.__name__, None, own.__closure__)


def with_own_code(function: Any) -> Callable[..., Any]:
    """A copy of ``function`` with a new code object, because Dynamo limits the compilations of each code object."""
    code = function.__code__.replace()
    return types.FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
