"""All that a caller can see after a call: results, arguments, the model's state; what is one object, or one memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpass import GraphRuntime
from graphpass.capture.scope import CallObserver, ReachedCall
from graphpass.compat.subclasses import is_wrapper, parts_of
from graphpass.context import entered, set_forward_context

__all__ = ["Observed", "calls_with_graph", "reached", "reported_regions"]

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.Size, torch.dtype, torch.device)
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}


def reached(runtime: GraphRuntime, call: Callable[[], object], **context: Any) -> list[ReachedCall]:
    """The calls of compiled graphs that ``call`` reaches under this forward context."""
    observer = CallObserver(runtime)
    with set_forward_context(**context) as current, entered(dataclasses.replace(current, observer=observer)):
        call()
    return observer.reached


@dataclass(frozen=True, slots=True)
class Observed:
    """What was found by walking through named values, also into containers, objects and modules.

    Attributes:
        values: path -> number, text or copied tensor; for a container its type and its names in order.
        objects: path of a tensor -> the first path with the same object.
        memory: path of a tensor -> the first path with the same storage.
    """

    values: Mapping[str, Any]
    objects: Mapping[str, str]
    memory: Mapping[str, str]

    @classmethod
    def of(cls, **named: Any) -> Observed:
        """Look at these values now; what happens to them afterwards is not seen."""
        values: dict[str, Any] = {}
        objects: dict[str, str] = {}
        memory: dict[str, str] = {}
        first_objects: dict[int, str] = {}
        first_memory: dict[int, str] = {}
        for path, value in _walked(named, "", set()):
            if isinstance(value, torch.Tensor):
                objects[path] = first_objects.setdefault(id(value), path)
                if value.numel():
                    memory[path] = first_memory.setdefault(value.untyped_storage().data_ptr(), path)
                values[path] = (type(value), value.stride(), value.detach().clone())
            else:
                values[path] = value
        return cls(values, objects, memory)

    def difference(self, other: Observed) -> str | None:
        """The first thing that is another one in ``other``, which this is the oracle of; None where all is the same."""
        if list(self.values) != list(other.values):
            apart = set(self.values) ^ set(other.values)
            return f"other things are there: {sorted(apart) or 'in another order'}"
        for path, value in self.values.items():
            problem = _value_difference(value, other.values[path])
            if problem is not None:
                return f"{path}: {problem}"
        for what, mine, theirs in (("object", self.objects, other.objects), ("memory", self.memory, other.memory)):
            for path, first in mine.items():
                if theirs[path] != first:
                    return f"{path} is one {what} with {theirs[path]} instead of {first}"
        return None


def calls_with_graph(runtime: GraphRuntime) -> int:
    """Calls of the runtime's callables that replayed a graph."""
    return sum(key.calls for key in runtime.report().figures.keys)


def reported_regions(runtime: GraphRuntime) -> list[tuple[str, str, str]]:
    """(name, kind, why) of every region of a runtime; the end of a graph is ``g0.end`` of kind ``end``."""
    return [
        row
        for record in runtime.callables()
        for row in (
            *((f"{record.name}.{region.name}", region.kind, region.why) for region in record.regions),
            *((f"{record.name}.end", "end", str(end)) for end in (record.ends,) if end is not None),
        )
    ]


def _walked(value: Any, path: str, inside: set[int]) -> Iterator[tuple[str, Any]]:
    """(path, leaf) of everything in ``value``; a container is a leaf, too, of its type and names."""
    if is_wrapper(value):
        yield path, (type(value).__name__, repr(value.__tensor_flatten__()))
        for name, part in parts_of(value):
            yield from _walked(part, f"{path}.{name}", inside)
        return
    if isinstance(value, (torch.Tensor, *_PLAIN)):
        yield path, value
        return
    if callable(value) and not isinstance(value, torch.nn.Module):
        yield path, getattr(value, "__qualname__", "a function")
        return
    if id(value) in inside:
        yield path, "itself, further up"
        return
    items = _items(value)
    yield path, (type(value).__name__.removeprefix("Graphed"), [name for name, _ in items])
    for name, item in items:
        yield from _walked(item, f"{path}.{name}" if path else str(name), inside | {id(value)})


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, torch.nn.Module):
        held = {**value._parameters, **value._buffers, **value._modules, "training": value.training}
        own = {name: item for name, item in vars(value).items() if not name.startswith("_") and name != "training"}
        return list({**held, **own}.items())
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if isinstance(value, (set, frozenset)):
        return list(enumerate(sorted(value, key=str)))
    if dataclasses.is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return list(vars(value).items()) if hasattr(value, "__dict__") else []


def _value_difference(wanted: Any, found: Any) -> str | None:
    if not (isinstance(wanted, tuple) and len(wanted) == 3 and isinstance(wanted[2], torch.Tensor)):
        same = type(wanted) is type(found) and (wanted == found or wanted != wanted)
        return None if same else f"{found!r} instead of {wanted!r}"
    if not (isinstance(found, tuple) and len(found) == 3 and isinstance(found[2], torch.Tensor)):
        return f"{found!r} instead of a tensor"
    kind, stride, tensor = wanted
    its_kind, its_stride, its_tensor = found
    if (kind, tensor.shape, tensor.dtype) != (its_kind, its_tensor.shape, its_tensor.dtype):
        return f"{_described(found)} instead of {_described(wanted)}"
    if _strides_that_count(tensor.shape, stride) != _strides_that_count(tensor.shape, its_stride):
        return f"strides {its_stride} instead of {stride} at {tuple(tensor.shape)}"
    tolerance = _TOLERANCE.get(tensor.dtype, 0.0)
    if torch.allclose(its_tensor, tensor, rtol=tolerance, atol=tolerance, equal_nan=True):
        return None
    return f"{its_tensor.flatten()[:6].tolist()} instead of {tensor.flatten()[:6].tolist()}"


def _strides_that_count(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    return [step for size, step in zip(shape, stride, strict=True) if size > 1]


def _described(value: tuple[Any, Any, torch.Tensor]) -> str:
    kind, _, tensor = value
    return f"{kind.__name__} {tensor.dtype} {tuple(tensor.shape)}"
