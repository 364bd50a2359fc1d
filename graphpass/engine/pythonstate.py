"""Saves and restores the Python state of a model: attributes of its modules, and the lists, dicts and sets in them.

A capture calls the model, so a model that counts its calls would count captures. This module restores Python
attributes; :mod:`graphpass.capture.snapshot` restores tensors and torch's random numbers.
"""

from __future__ import annotations

import collections
import contextlib
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpass.compat import dynamo
from graphpass.errors import CaptureError

__all__ = ["PythonState", "refuse_side_effects", "refuse_stored_tensors", "restoring_python_state"]


@dataclass(frozen=True, slots=True)
class PythonState:
    """Shallow copies of the attributes of modules, and of all built-in containers that are reachable from them.

    Attributes:
        copies: {id of a dict, list, set or deque: (the container, a copy of its items)}.
        modules: ids of the modules.
        numbers: state of Python's ``random`` module.
    """

    copies: dict[int, tuple[Any, Any]]
    modules: frozenset[int]
    numbers: Any

    @classmethod
    def of(cls, modules: Sequence[torch.nn.Module]) -> PythonState:
        """Copy the current state of these modules."""
        copies: dict[int, tuple[Any, Any]] = {}
        waiting: list[Any] = [vars(module) for module in modules]
        while waiting:
            container = waiting.pop()
            if id(container) in copies:
                continue
            items = _items_of(container)
            copies[id(container)] = (container, items)
            values = items.values() if isinstance(items, dict) else items
            waiting += [value for value in values if isinstance(value, _CONTAINERS)]
        return cls(copies, frozenset(map(id, modules)), random.getstate())

    def holds(self, owner: int) -> bool:
        """Whether the object with this id is a module or container that :meth:`restore` restores."""
        return owner in self.modules or owner in self.copies

    def holds_tensor(self, tensor: torch.Tensor) -> bool:
        """Whether this tensor object was in an attribute or container of the modules."""
        return any(
            value is tensor
            for _, items in self.copies.values()
            for value in (items.values() if isinstance(items, dict) else items)
        )

    def new_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Tensors that were added to a container since the copy, each with its key or position as text."""
        found = []
        for container, items in self.copies.values():
            known = set(map(id, items.values() if isinstance(items, dict) else items))
            now = container.items() if isinstance(container, dict) else enumerate(container)
            found += [(repr(k), v) for k, v in now if isinstance(v, torch.Tensor) and id(v) not in known]
        return found

    def restore(self) -> None:
        """Restore the containers that have changed; unchanged ones are not written to."""
        for container, items in self.copies.values():
            if not _same(_items_of(container), items):
                _refill(container, items)
        random.setstate(self.numbers)  # guard: manager_python_random


_CONTAINERS = (dict, list, set, collections.deque)


def _items_of(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _same(found: Any, saved: Any) -> bool:
    """Whether two copies contain the same objects in the same order."""
    if isinstance(saved, dict) and list(found) != list(saved):
        return False
    pairs = (found.values(), saved.values()) if isinstance(saved, dict) else (found, saved)
    return len(found) == len(saved) and all(one is other for one, other in zip(*pairs, strict=True))


def _refill(container: Any, items: Any) -> None:
    """Replace the items by methods of the built-in class, because a subclass may override them with side effects."""
    kind = next(kind for kind in _REFILLED if isinstance(container, kind))
    kind.clear(container)
    _REFILLED[kind](container, items)


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


def refuse_side_effects(effects: Iterable[dynamo.SideEffect], state: PythonState) -> None:
    """Refuse a model whose calls change Python state that a manager cannot restore.

    Raises:
        CaptureError: a call stores a tensor, whose memory later steps overwrite, or changes an object that is not
            part of the model's modules.
    """
    for effect in effects:
        if effect.keeps_tensor:  # guard: manager_kept_tensors
            raise _keeps_tensor(f"a forward that {effect.text}")
        if effect.owner is not None and not state.holds(effect.owner):  # guard: manager_state_elsewhere
            raise CaptureError(
                "the model changes Python state that cannot be restored after a capture",
                expected="changes only to attributes of the model's modules, and to lists, dicts and sets in them",
                found=f"a forward that {effect.text}",
                remedy="store the state in an attribute of a module or in a registered buffer, or update it outside of "
                "the model",
            )


def refuse_stored_tensors(state: PythonState, own: Collection[int]) -> None:
    """Refuse a model whose Python code between graphs stores tensors in its modules.

    Dynamo records the side effects inside of graphs alone, so the modules are compared before and after a run.

    Args:
        state: the state before the run.
        own: ids of the model's buffers, which are allowed.

    Raises:
        CaptureError: the run has stored a tensor.
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
