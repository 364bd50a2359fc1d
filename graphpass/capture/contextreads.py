"""Records the values that a region reads from the forward context at capture, and compares them before each replay.

An op inside a graph reads the context once, at capture. A number such as a maximum sequence length becomes part of the
graph, and so does the address of a tensor such as a slot mapping. While a region is recorded, a proxy of the context
logs each read; each replay compares exactly these values with its own context.
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from graphpass.compat import memory
from graphpass.context import ForwardContext
from graphpass.errors import CaptureError, StaticInputError

__all__ = ["ContextReads", "ReadLog", "joined"]

_Path = tuple[tuple[str, Any], ...]
_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)
_METHODS = (types.FunctionType, classmethod, staticmethod, property, functools.cached_property)
# Fields that identify the graph and its dispatcher; `num_tokens` is the key's padded count during capture.
_OF_THE_KEY = frozenset({"runtime_mode", "batch_descriptor", "num_tokens", "owner"})


@dataclass(frozen=True, slots=True)
class ContextReads:
    """The values that one graph read from its context at capture.

    Attributes:
        numbers: (path, value) of every value that is no tensor.
        paths: path of each tensor in the context.
        addresses: address of each tensor at capture.
        tensors: strong references, which prevent the addresses from being reused while the entry lives.
    """

    numbers: tuple[tuple[_Path, Any], ...]
    paths: tuple[_Path, ...]
    addresses: list[int | None]
    tensors: tuple[torch.Tensor, ...]

    def __bool__(self) -> bool:
        return bool(self.numbers or self.paths)

    def check(self, context: ForwardContext, name: str) -> None:
        """Compare with the context of a replay.

        Raises:
            CaptureError: a number differs from the value baked into the graph.
            StaticInputError: a tensor has another address than at capture.
        """
        for path, value in self.numbers:
            found = _followed(context, path)
            if found is not value and (type(found) is not type(value) or found != value):
                raise CaptureError(
                    f"{_shown(path)} of the forward context is baked into the graph of {name}",
                    expected=repr(value),
                    found=repr(found),
                    remedy="put it into the key, BatchDescriptor(..., extra=((name, value),)), or pass it in a tensor",
                )
        if not self.paths:
            return
        now = [_followed(context, path) for path in self.paths]
        if all(isinstance(t, torch.Tensor) for t in now) and memory.data_ptrs_equal(
            now, self.addresses, list(range(len(now)))
        ):
            return
        for path, address, tensor in zip(self.paths, self.addresses, now, strict=True):
            if not isinstance(tensor, torch.Tensor) or tensor.data_ptr() != address:  # guard: context_addresses
                raise StaticInputError(
                    f"{_shown(path)} of the forward context was read by the graph of {name} at capture",
                    expected=f"the tensor at {address or 0:#x}",
                    found=f"{tensor.data_ptr():#x}" if isinstance(tensor, torch.Tensor) else repr(tensor),
                    remedy="keep one tensor and refill it in place (`tensor.copy_(new)`)",
                )


class ReadLog:
    """Logs the values that are read from a context while ``is_open`` is True."""

    def __init__(self) -> None:
        self._found: dict[_Path, Any] = {}
        self.is_open = False

    def watched(self, context: ForwardContext, *, of: ForwardContext) -> ForwardContext:
        """A proxy of ``context`` that logs reads, except of fields in which it differs from ``of``."""
        own = {f.name for f in fields(context) if getattr(context, f.name) is not getattr(of, f.name)}
        return self._proxy(context, (), unwatched=_OF_THE_KEY | own)  # type: ignore[no-any-return]

    def reads(self) -> ContextReads:
        """The values read so far."""
        tensors = {path: value for path, value in self._found.items() if isinstance(value, torch.Tensor)}
        return ContextReads(
            numbers=tuple((path, value) for path, value in self._found.items() if path not in tensors),
            paths=tuple(tensors),
            addresses=[tensor.data_ptr() for tensor in tensors.values()],
            tensors=tuple(tensors.values()),
        )

    def read(self, value: Any, path: _Path) -> Any:
        """Log ``value`` and return it; for a container or an object, return a proxy that logs reads of its parts."""
        if isinstance(value, (torch.Tensor, *_SCALARS)):
            if self.is_open:
                self._found[path] = value
            return value
        if type(value) is dict:
            return _WatchedDict(value, path, self)
        if isinstance(value, (list, tuple)):
            parts = [self.read(part, (*path, ("item", n))) for n, part in enumerate(value)]
            if type(value) is tuple:
                return tuple(parts)
            return type(value)(*parts) if hasattr(value, "_fields") else value  # a list may be written to
        if isinstance(value, (*_METHODS, types.MethodType, types.BuiltinFunctionType, type)):
            return value
        return self._proxy(value, path)

    def _proxy(self, value: Any, path: _Path, unwatched: frozenset[str] = frozenset()) -> Any:
        """An instance of a subclass of the value's class that forwards attribute reads and writes to the value."""
        kind: Any = type(value)

        def get(proxy: Any, name: str) -> Any:
            if name == "__dict__":
                return {part: get(proxy, part) for part in vars(value)}
            static = inspect.getattr_static(kind, name, None)
            if isinstance(static, _METHODS) or (name.startswith("__") and name.endswith("__")):
                return kind.__getattribute__(proxy, name)
            found = getattr(value, name)
            return found if name in unwatched else self.read(found, (*path, ("attribute", name)))

        namespace = {
            "__slots__": (),
            "__getattribute__": get,
            "__setattr__": lambda _, name, new: setattr(value, name, new),
        }
        try:
            return object.__new__(type(kind)(kind.__name__, (kind,), namespace))
        except TypeError:  # a class that is final or written in C: reads of its parts are not logged
            return value


class _WatchedDict(dict[Any, Any]):
    """A dict that logs the values read from it."""

    def __init__(self, original: dict[Any, Any], path: _Path, log: ReadLog) -> None:
        super().__init__(original)
        self._path = path
        self._log = log

    def __getitem__(self, key: Any) -> Any:
        return self._log.read(super().__getitem__(key), (*self._path, ("item", key)))

    def __iter__(self) -> Iterator[Any]:  # also keeps dict(self) and {**self} from reading past __getitem__
        return super().__iter__()

    def get(self, key: Any, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def values(self) -> Any:
        return [self[key] for key in self]

    def items(self) -> Any:
        return [(key, self[key]) for key in self]


def _followed(value: Any, path: _Path) -> Any:
    """The value at ``path`` now; None if there is none."""
    for kind, name in path:
        try:
            value = getattr(value, name) if kind == "attribute" else value[name]
        except (AttributeError, LookupError, TypeError):
            return None
    return value


def _shown(path: _Path) -> str:
    return "".join(f".{name}" if kind == "attribute" else f"[{name!r}]" for kind, name in path).lstrip(".")


def joined(reads: Sequence[ContextReads]) -> ContextReads:
    """All reads, each path once: graphs of one key were captured under one context."""
    numbers = {path: value for one in reads for path, value in one.numbers}
    tensors = {path: tensor for one in reads for path, tensor in zip(one.paths, one.tensors, strict=True)}
    return ContextReads(
        tuple(numbers.items()), tuple(tensors), [t.data_ptr() for t in tensors.values()], tuple(tensors.values())
    )
