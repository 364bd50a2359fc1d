"""The input buffers of all keys: one memory an input, as large as the largest key needs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpass import compat
from graphpass.capture import GraphRuntime
from graphpass.capture.copies import copy_each
from graphpass.context import set_forward_context
from graphpass.errors import OptionError, ShapeError
from graphpass.keys import BatchDescriptor
from graphpass.manager.padding import InputBuffer, PadRule
from graphpass.modes import CUDAGraphMode

__all__ = ["BufferSet", "KeyInputs"]


@dataclass(frozen=True, slots=True)
class KeyInputs:
    """The inputs of one key.

    Attributes:
        buffers: padded tensors, by argument.
        others: arguments that are no tensors, passed on as they are; the same in every call.
        padded: padded size of each key field.
        is_padding: which rows are padding, flat, in the order of the key fields.
    """

    buffers: Mapping[str, InputBuffer]
    others: Mapping[str, Any]
    padded: Mapping[str, int]
    is_padding: torch.Tensor
    _marked: dict[str, int]

    @classmethod
    def of(cls, buffers: Mapping[str, InputBuffer], others: Mapping[str, Any], padded: Mapping[str, int]) -> KeyInputs:
        """The inputs of a key with these padded sizes; until they are filled all rows count as padding."""
        device = next((buffer.tensor.device for buffer in buffers.values()), None)
        rows = torch.ones(math.prod(padded.values()), dtype=torch.bool, device=device)
        return cls(buffers, others, dict(padded), rows, {})

    @contextlib.contextmanager
    def forward(
        self, runtime: GraphRuntime, mode: CUDAGraphMode, key: BatchDescriptor, sizes: Mapping[str, int]
    ) -> Iterator[None]:
        """A forward at this key: it has the pool and a context that tells real rows from padding.

        Buffers are filled inside: a replay on another stream may still be reading them before.
        """
        context = set_forward_context(
            runtime_mode=mode, batch_descriptor=key, num_tokens=math.prod(sizes.values()), is_padding=self.is_padding
        )
        with context as entered:
            runtime.enter_forward(entered, (self.is_padding,), "a graphed model")
            try:
                yield
            finally:
                runtime.exit_forward()

    def arguments(self) -> dict[str, Any]:
        """What the model is called with at this key."""
        return {**self.others, **{name: buffer.tensor for name, buffer in self.buffers.items()}}

    def fill(self, given: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """Pad a call's inputs into the buffers: a fused copy of what is real, then the padding.

        Raises:
            ShapeError: arguments are missing, new, or do not fit their buffer.
        """
        buffers = self.buffers
        targets, sources = [], []
        for name, value in given.items():
            buffer = buffers.get(name)
            if buffer is None:
                if name not in self.others or not _same_constant(value, self.others[name]):
                    raise self._other_arguments(given)
                continue
            target = buffer.real(sizes)
            buffer.check(value, target)
            targets.append(target)
            sources.append(value)
        if len(given) != len(buffers) + len(self.others):
            raise self._other_arguments(given)
        copy_each(targets, sources)
        for name, buffer in buffers.items():
            if buffer.dims:
                buffer.fill_padding(given[name], sizes)
        if self._marked != sizes:
            self._mark(sizes)

    def _mark(self, sizes: Mapping[str, int]) -> None:
        real = self.is_padding.fill_(True).view(tuple(self.padded.values()))
        for dim, field in enumerate(self.padded):
            real = real.narrow(dim, 0, sizes[field])
        real.fill_(False)
        self._marked.update(sizes)

    def _other_arguments(self, given: Mapping[str, Any]) -> ShapeError:
        tensors = sorted(name for name, value in given.items() if isinstance(value, torch.Tensor))
        return ShapeError(
            "this call has other arguments than the captured one",
            expected=f"tensors {sorted(self.buffers)} and {dict(self.others)}",
            found=f"tensors {tensors} and { {name: value for name, value in given.items() if name not in tensors} }",
            remedy="pass the same arguments in every call, or make another graphed(...) for the other form",
        )

    def stretched(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """An example at this key's sizes: the given rows, repeated or cut, so that every value is a valid one."""
        example = dict(self.others)
        for name, buffer in self.buffers.items():
            value = given[name]
            for dim in buffer.dims:
                rows = torch.arange(buffer.tensor.shape[dim], device=value.device) % value.shape[dim]
                value = value.index_select(dim, rows)
            example[name] = value
        return example

    def cut(self, example: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
        """An example at this key's sizes, cut to smaller real ones."""
        given = dict(example)
        for name, buffer in self.buffers.items():
            for dim, field in buffer.dims.items():
                given[name] = given[name].narrow(dim, 0, sizes[field])
        return given


class BufferSet:
    """Makes the inputs of each key over shared memory, and owns that memory.

    Args:
        shared: {argument: {dimension: key field}} for every tensor argument.
        largest: the largest size of each key field.
        rules: {argument: padding rule}; zeros where nothing is said.
    """

    def __init__(
        self, shared: Mapping[str, Mapping[int, str]], largest: Mapping[str, int], rules: Mapping[str, PadRule]
    ) -> None:
        self._shared = shared
        self._largest = largest
        self._rules = rules
        self._memory: dict[str, tuple[tuple[int, ...], torch.Tensor]] = {}

    def inputs(self, padded: Mapping[str, int], given: Mapping[str, Any]) -> KeyInputs:
        """The inputs of the key with these padded sizes, for calls with arguments like ``given``.

        Raises:
            OptionError: an argument holds tensors inside a list or dict.
        """
        buffers, others = {}, {}
        for name, value in given.items():
            if not isinstance(value, torch.Tensor):
                _refuse_nested_tensors(name, value)
                others[name] = value
                continue
            dims = {dim % value.dim(): field for dim, field in self._shared.get(name, {}).items()}
            memory = self._reserve(name, value, _resized(value.shape, dims, self._largest))
            shape = _resized(value.shape, dims, padded)
            buffers[name] = InputBuffer.over(memory, name, shape, dims, self._rules.get(name, 0))
        return KeyInputs.of(buffers, others, padded)

    def _reserve(self, name: str, value: torch.Tensor, largest: tuple[int, ...]) -> torch.Tensor:
        """The memory of one argument, flat.

        Raises:
            ShapeError: the argument's other dimensions, its dtype or its device are not those of the first call.
        """
        found = (largest, value.dtype, value.device)
        shape, memory = self._memory.get(name) or (
            largest,
            torch.zeros(math.prod(largest), dtype=value.dtype, device=value.device),
        )
        if found != (shape, memory.dtype, memory.device):
            raise ShapeError(
                f"input {name!r} does not fit its buffer",
                expected=f"at the largest key {shape} {memory.dtype} on {memory.device}",
                found=f"{largest} {value.dtype} on {value.device}, from {tuple(value.shape)}",
                remedy="declare the dimension that varies in dynamic_dims, or make another graphed(...) for it",
            )
        self._memory[name] = shape, memory
        return memory

    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(memory.nbytes for _, memory in self._memory.values())


def _same_constant(value: Any, captured: Any) -> bool:
    """Whether two values trace alike: 2, 2.0 and True are equal and make other graphs."""
    if isinstance(value, torch.Tensor):
        return False
    if isinstance(value, (int, float, str, bytes, type(None))):
        return type(value) is type(captured) and value == captured
    types = [[type(leaf) for leaf in compat.tree_flatten(v)[0]] for v in (value, captured)]
    return value is captured or (types[0] == types[1] and bool(value == captured))


def _refuse_nested_tensors(name: str, value: Any) -> None:
    """A tensor inside a list or dict has no name to be padded and buffered by."""
    if any(isinstance(leaf, torch.Tensor) for leaf in compat.tree_flatten(value)[0]):
        raise OptionError(
            f"argument {name!r} holds tensors inside a {type(value).__name__}",
            expected="tensors as arguments, and other values that stay the same",
            found=f"a {type(value).__name__} of tensors",
            remedy="wrap the model in a function that takes each tensor as an argument of its own",
        )


def _resized(shape: Sequence[int], dims: Mapping[int, str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[dims[dim]] if dim in dims else size for dim, size in enumerate(shape))
