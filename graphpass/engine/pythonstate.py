"""What a model keeps in Python: attributes of its modules, and the lists, dicts and sets in them.

A capture calls the model, and a model that counts its calls would count captures. Buffers and random numbers can be
saved as tensors; attributes are saved here.
"""

from __future__ import annotations

import collections
import contextlib
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpass.compat import sideeffects
from graphpass.errors import CaptureError

__all__ = ["PythonState", "python_state_kept", "refuse_kept_tensors", "refuse_side_effects"]


@dataclass(frozen=True, slots=True)
class PythonState:
    """Shallow copies of the attributes of modules, and of all built-in containers that hang on them.

    Attributes:
        copies: id of each dict, list, set or deque -> it, and its items.
        modules: ids of the modules.
        numbers: state of Python's random numbers.
    """

    copies: dict[int, tuple[Any, Any]]
    modules: frozenset[int]
    numbers: Any

    @classmethod
    def of(cls, modules: Sequence[torch.nn.Module]) -> PythonState:
        """The state as it is."""
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
        """Whether the object with this id is a module or container that :meth:`restore` puts back."""
        return owner in self.modules or owner in self.copies

    def holds_tensor(self, tensor: torch.Tensor) -> bool:
        """Whether an attribute or container of the modules held this very tensor."""
        return any(
            value is tensor
            for _, items in self.copies.values()
            for value in (items.values() if isinstance(items, dict) else items)
        )

    def new_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Tensors that have entered a container since, each with the text of its key or position."""
        found = []
        for container, items in self.copies.values():
            known = set(map(id, items.values() if isinstance(items, dict) else items))
            now = container.items() if isinstance(container, dict) else enumerate(container)
            found += [(repr(k), v) for k, v in now if isinstance(v, torch.Tensor) and id(v) not in known]
        return found

    def restore(self) -> None:
        """Put everything back that is not what it was; what is unchanged is not touched."""
        for container, items in self.copies.values():
            if not _same(_items_of(container), items):
                _refill(container, items)
        random.setstate(self.numbers)


_CONTAINERS = (dict, list, set, collections.deque)


def _items_of(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _same(found: Any, saved: Any) -> bool:
    """Whether two copies hold the same objects in the same order."""
    if isinstance(saved, dict) and list(found) != list(saved):
        return False
    pairs = (found.values(), saved.values()) if isinstance(saved, dict) else (found, saved)
    return len(found) == len(saved) and all(one is other for one, other in zip(*pairs, strict=True))


def _refill(container: Any, items: Any) -> None:
    """Exchange the items by the methods of the built-in class: those of a subclass may do more."""
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
def python_state_kept(modules: Sequence[torch.nn.Module]) -> Iterator[PythonState]:
    """Undo what the body does to the Python state of modules, also when it raises."""
    state = PythonState.of(modules)
    try:
        yield state
    finally:
        state.restore()


def refuse_side_effects(effects: Iterable[sideeffects.SideEffect], state: PythonState) -> None:
    """Refuse a model whose calls leave something in Python that a manager can neither keep nor undo.

    Raises:
        CaptureError: a call stores a tensor, which lies in memory that later steps overwrite, or changes an object that
            is not part of the model's modules.
    """
    for effect in effects:
        if effect.keeps_tensor:
            raise _keeps_tensor(f"a forward that {effect.text}")
        if effect.owner is not None and not state.holds(effect.owner):
            raise CaptureError(
                "the model changes Python state that a capture cannot put back",
                expected="changes of the model's own modules, and of lists, dicts and sets in their attributes",
                found=f"a forward that {effect.text}",
                remedy="keep it in an attribute of a module or in a registered buffer, or count outside of the model",
            )


def refuse_kept_tensors(state: PythonState, own: Collection[int]) -> None:
    """Refuse a model whose Python between graphs, which no record covers, stores tensors in its modules.

    Args:
        state: the state before a run that is over.
        own: ids of tensors that belong to the model.

    Raises:
        CaptureError: it does.
    """
    for name, tensor in state.new_tensors():
        if id(tensor) not in own and not isinstance(tensor, torch.nn.Parameter):
            raise _keeps_tensor(f"a forward that stores one as {name}")


def _keeps_tensor(found: str) -> CaptureError:
    return CaptureError(
        "the model keeps a tensor beyond its call",
        expected="a forward that stores no argument and no result in Python objects: the manager's memory is "
        "overwritten by the next step",
        found=found,
        remedy="return the tensor, or copy it into a registered buffer: self.last.copy_(x)",
    )
