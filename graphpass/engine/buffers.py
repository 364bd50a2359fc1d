"""A manager's persistent inputs and outputs: one buffer each, as large as the largest batch, shared by all sizes.

A key reads the first entries of each buffer and leaves its results in the first entries of others. What lies behind the
real entries of an input is padding, always: a batch that is smaller than the one before it blanks what that one wrote.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpass.capture.copies import copy_each
from graphpass.capture.layout import storage_id
from graphpass.compat import dynamo, memory
from graphpass.engine.batch import InputSpec
from graphpass.errors import OptionError, ShapeError
from graphpass.ladder.padding import PaddedBuffer, PaddedBuffers

__all__ = ["OutputBuffers", "StepBuffers"]

Sizes = Mapping[str, int]


class StepBuffers(PaddedBuffers):
    """The inputs, each cut in its padded dimensions.

    The engine may write real entries into them itself; all other entries are the manager's.

    Args:
        specs: the declared inputs.
        device: where they lie.

    Raises:
        OptionError: two inputs have one name, none has a token dimension, or they disagree about the largest batch.
    """

    def __init__(self, specs: Sequence[InputSpec], device: torch.device) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self.largest = _largest(specs)
        self.device = device
        super().__init__({spec.name: _memory(spec, device) for spec in specs})
        self.tensors = {
            name: self._cut(self._memory[name], spec.dims(), self.largest) for name, spec in self._specs.items()
        }
        with torch.inference_mode(False):
            self._is_padding = torch.ones(self.largest["num_tokens"] + 1, dtype=torch.bool, device=device)
        self._filled = dict.fromkeys(self.largest, 0)
        # Rules that are no value have to be asked again in every step.
        self._computed = {
            name for name, spec in self._specs.items() if not isinstance(spec.padding, (bool, int, float))
        }

    def at(self, sizes: Sizes) -> dict[str, PaddedBuffer]:
        """What the model is given at these padded sizes: views of the buffers, for Dynamo dynamic and static."""
        views = {}
        for name, spec in self._specs.items():
            view = self._cut(self._memory[name], spec.dims(), sizes)
            memory.mark_static_address(view)
            for dim in spec.dims():
                dynamo.mark_maybe_dynamic(view, dim)
            views[name] = PaddedBuffer(name, view, spec.dims(), spec.padding)
        return views

    def pad_always(self, names: Iterable[str]) -> None:
        """Pad these inputs in every step: the model writes to them, padding included."""
        self._computed.update(names)

    def is_padding(self, num_tokens: int) -> torch.Tensor:
        """Which of the first ``num_tokens`` entries are padding."""
        return self._is_padding[:num_tokens]

    def fill(self, inputs: Mapping[str, torch.Tensor] | None, sizes: Sizes, padded: Mapping[str, PaddedBuffer]) -> None:
        """Copy a batch in, all inputs at once, and make everything behind it padding.

        Args:
            inputs: a tensor for each declared input, at real sizes; None where they are in the buffers already.
            sizes: the real size of each key field.
            padded: what the model will be given, see :meth:`at`.

        Raises:
            ShapeError: an input is missing, new, or does not fit; nothing has been written then.
        """
        if inputs is not None:
            copy_each(*self.paired(inputs, sizes, padded))
        for field, size in sizes.items():
            if size != self._filled[field]:
                self._blank_behind(field, size)
        for name in self._computed:
            padded[name].fill_padding(sizes)

    def blank(self) -> None:
        """Make them what they were at first: what a larger batch has left may be no valid entry of a smaller one."""
        for name, spec in self._specs.items():
            self._memory[name].fill_(_first_value(spec))
        self._is_padding.fill_(True)
        self._filled = dict.fromkeys(self.largest, 0)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Whatever happens in the body, afterwards the buffers hold what they held."""
        held = {name: memory.clone() for name, memory in self._memory.items()}
        filled, is_padding = dict(self._filled), self._is_padding.clone()
        try:
            yield
        finally:
            for name, memory in self._memory.items():
                memory.copy_(held[name])
            self._is_padding.copy_(is_padding)
            self._filled = filled

    def paired(
        self, inputs: Mapping[str, torch.Tensor], sizes: Sizes, padded: Mapping[str, PaddedBuffer]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Where each tensor of a batch goes, and what is copied there; see :meth:`fill`.

        Raises:
            ShapeError: an input is missing, new, or does not fit.
        """
        if inputs.keys() != self._specs.keys():
            raise ShapeError(
                "the batch has other inputs than were declared",
                expected=", ".join(sorted(self._specs)),
                found=", ".join(sorted(inputs)) or "none",
                remedy="pass a tensor for each InputSpec, or inputs=None where they are in the buffers already",
            )
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for name, buffer in padded.items():
            target, value = buffer.real(sizes), inputs[name]
            buffer.check(value, target)
            if value.data_ptr() != target.data_ptr() and storage_id(value) == storage_id(target):
                value = value.clone()  # it lies elsewhere in the buffer, and may overlap what it is copied to
            targets.append(target)
            sources.append(value)
        return targets, sources

    def _blank_behind(self, field: str, size: int) -> None:
        filled = self._filled[field]
        if field == "num_tokens":
            self._is_padding[min(size, filled) : max(size, filled)].fill_(size < filled)
        if size < filled:
            for name, spec in self._specs.items():
                for dim, its_field in spec.dims().items():
                    if its_field == field and name not in self._computed:
                        self._memory[name].narrow(dim, size, filled - size).fill_(spec.padding)  # type: ignore[arg-type]
        self._filled[field] = size

    @staticmethod
    def _cut(memory: torch.Tensor, dims: Mapping[int, str], sizes: Sizes) -> torch.Tensor:
        for dim, field in dims.items():
            memory = memory.narrow(dim, 0, sizes[field])
        return memory

    def described(self) -> str:
        """Names, shapes at the largest batch, dtypes and dimensions that grow."""
        return ", ".join(f"{spec.name} {spec.shape} {spec.dtype} {spec.dims()}" for spec in self._specs.values())


def _largest(specs: Sequence[InputSpec]) -> dict[str, int]:
    names = [spec.name for spec in specs]
    sizes: dict[str, set[int]] = {"num_tokens": set(), "num_reqs": set()}
    for spec in specs:
        for dim, field in spec.dims().items():
            sizes[field].add(spec.shape[dim])
    if len(set(names)) < len(names) or not sizes["num_tokens"] or any(len(found) > 1 for found in sizes.values()):
        raise OptionError(
            "the inputs do not describe one largest batch",
            expected="names that differ, a token dimension, and one size for it and for the request dimension",
            found=", ".join(f"{spec.name} {spec.shape} {spec.dims()}" for spec in specs) or "no input",
            remedy="give every input its shape at the same largest batch",
        )
    return {field: found.pop() for field, found in sizes.items() if found}


def _memory(spec: InputSpec, device: torch.device) -> torch.Tensor:
    # Two entries more than the largest batch: a first run may need one more, so that two sizes differ, and torch takes
    # a view as long as its base for another graph.
    shape = [size + 2 if dim in spec.dims() else size for dim, size in enumerate(spec.shape)]
    with torch.inference_mode(False):
        return torch.full(shape, _first_value(spec), dtype=spec.dtype, device=device)


def _first_value(spec: InputSpec) -> float:
    return spec.padding if isinstance(spec.padding, (bool, int, float)) else 0


@dataclass(frozen=True, slots=True)
class OutputBuffers:
    """The results, flat: what a key returns lies in the first entries of the buffers.

    Attributes:
        buffers: a tensor as large as the largest batch for each tensor of the result; other values as they are.
        dims: for each, {dimension: key field} of the dimensions that a batch cuts.
    """

    buffers: tuple[Any, ...]
    dims: tuple[Mapping[int, str], ...]

    @classmethod
    def like(cls, leaves: Sequence[Any], dims: Sequence[Mapping[int, str]], largest: Sizes) -> OutputBuffers:
        """Buffers for results like ``leaves``."""
        buffers = []
        for leaf, of_leaf in zip(leaves, dims, strict=True):
            if isinstance(leaf, torch.Tensor):
                shape = [largest[of_leaf[d]] if d in of_leaf else size for d, size in enumerate(leaf.shape)]
                with torch.inference_mode(False):
                    buffers.append(torch.zeros(shape, dtype=leaf.dtype, device=leaf.device))
            else:
                buffers.append(leaf)
        return cls(tuple(buffers), tuple(dict(of_leaf) for of_leaf in dims))

    def cut(self, index: int, sizes: Sizes) -> Any:
        """The first entries of one result, a tensor object of the caller's own."""
        part = self.buffers[index]
        for dim, field in self.dims[index].items():
            part = part.narrow(dim, 0, sizes[field])
        return part if self.dims[index] or not isinstance(part, torch.Tensor) else part.detach()

    def store(self, leaves: Sequence[Any], sizes: Sizes) -> None:
        """Copy results of these sizes in, all at once.

        Raises:
            ShapeError: one of them is not like it was when the buffers were made.
        """
        targets, sources = [], []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                target = self.cut(index, sizes)
                if target.shape != leaf.shape or target.dtype != leaf.dtype:
                    raise ShapeError(
                        f"output {index} does not fit its buffer",
                        expected=f"{tuple(target.shape)} {target.dtype}",
                        found=f"{tuple(leaf.shape)} {leaf.dtype}",
                        remedy="return results of the same shape and dtype for every batch of a size",
                    )
                if target.data_ptr() != leaf.data_ptr():
                    targets.append(target)
                    sources.append(leaf)
        copy_each(targets, sources)

    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(buffer.nbytes for buffer in self.buffers if isinstance(buffer, torch.Tensor))
