"""A manager's persistent input and output buffers: one per tensor, as large as the largest batch, shared by all sizes.

A key reads the first entries of each input buffer and writes its results to the first entries of the output buffers.
All entries of an input behind the real ones are padding: if a batch is smaller than the one before, the surplus entries
are overwritten with padding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpass.capture.staging import copy_each, storage_id
from graphpass.compat import dynamo, memory
from graphpass.engine.batch import InputSpec
from graphpass.errors import OptionError, ShapeError
from graphpass.paddedmemory import PaddedBuffer, PaddedMemory

__all__ = ["OutputBuffers", "PaddedInputs", "StepBuffers"]

Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PaddedInputs:
    """The model's inputs at one padded shape: views of the persistent buffers.

    Attributes:
        sizes: the padded size of each key field.
        buffers: {input name: view of its buffer, with its padding rule}.
        arguments: {input name: the same view}, the keyword arguments of the model.
        is_padding: mask of the padded tokens, bool (num_tokens,).
    """

    sizes: Sizes
    buffers: Mapping[str, PaddedBuffer]
    arguments: Mapping[str, torch.Tensor]
    is_padding: torch.Tensor


class StepBuffers(PaddedMemory[str]):
    """The input buffers of a manager.

    The caller may write the real entries itself; the padding belongs to the manager.

    Args:
        specs: the declared inputs.
        device: device of the buffers.

    Attributes:
        largest: {key field: size of the largest batch}.
        device: device of the buffers.
        tensors: {input name: its buffer at the largest batch}.

    Raises:
        OptionError: two inputs have the same name, none has a token dimension, or their largest batches differ.
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
        # Padding that is not a constant is written again in every step.
        self._computed = {
            name for name, spec in self._specs.items() if not isinstance(spec.padding, (bool, int, float))
        }

    def at(self, sizes: Sizes) -> dict[str, PaddedBuffer]:
        """Views of the buffers at these padded sizes.

        Dynamo treats them as inputs with dynamic sizes and static addresses.
        """
        views = {}
        for name, spec in self._specs.items():
            view = self._cut(self._memory[name], spec.dims(), sizes)
            memory.mark_static_address(view)
            for dim in spec.dims():
                dynamo.mark_maybe_dynamic(view, dim)
            views[name] = PaddedBuffer(name, view, spec.dims(), spec.padding)
        return views

    def pad_always(self, names: Iterable[str]) -> None:
        """Write the padding of these inputs again in every step, because the model writes to it."""
        self._computed.update(names)

    def is_padding(self, num_tokens: int) -> torch.Tensor:
        """Mask of the padding among the first ``num_tokens`` tokens: bool (num_tokens,), a view that steps update."""
        return self._is_padding[:num_tokens]

    def fill(self, inputs: Mapping[str, torch.Tensor] | None, sizes: Sizes, padded: Mapping[str, PaddedBuffer]) -> None:
        """Copy a batch into the buffers, all inputs in one fused copy, and write the padding behind it.

        Args:
            inputs: a tensor for each declared input, without padding; None if the buffers contain them already.
            sizes: the real size of each key field.
            padded: the views that the model reads, see :meth:`at`.

        Raises:
            ShapeError: an input is missing, not declared, or does not fit; the buffers are unchanged.
        """
        if inputs is not None:
            copy_each(*self.paired(inputs, sizes, padded))
        for field, size in sizes.items():
            if size != self._filled[field]:
                self._blank_behind(field, size)
        for name in self._computed:
            padded[name].fill_padding(sizes)

    def blank(self) -> None:
        """Reset all entries to padding, because an entry of a larger batch may not be valid in a smaller one."""
        for name, spec in self._specs.items():
            self._memory[name].fill_(_first_value(spec))
        self._is_padding.fill_(True)
        self._filled = dict.fromkeys(self.largest, 0)

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """Save the contents of the buffers, and restore them after the body."""
        saved = {name: memory.clone() for name, memory in self._memory.items()}
        filled, is_padding = dict(self._filled), self._is_padding.clone()
        try:
            yield
        finally:
            for name, memory in self._memory.items():
                memory.copy_(saved[name])
            self._is_padding.copy_(is_padding)
            self._filled = filled

    def paired(
        self, inputs: Mapping[str, torch.Tensor], sizes: Sizes, padded: Mapping[str, PaddedBuffer]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The copies that :meth:`fill` needs for a batch, as (targets, sources); nothing is copied yet.

        Raises:
            ShapeError: an input is missing, not declared, or does not fit.
        """
        if inputs.keys() != self._specs.keys():
            raise ShapeError(
                "the inputs of the batch are not the declared inputs",
                expected=", ".join(sorted(self._specs)),
                found=", ".join(sorted(inputs)) or "none",
                remedy="pass a tensor for each InputSpec, or inputs=None after writing to the manager's buffers",
            )
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for name, buffer in padded.items():
            target, value = buffer.real(sizes), inputs[name]
            buffer.check(value, target)
            if value.data_ptr() != target.data_ptr() and storage_id(value) == storage_id(target):
                value = value.clone()  # another part of the same buffer, which may overlap the target
            targets.append(target)
            sources.append(value)
        return targets, sources

    def _blank_behind(self, field: str, size: int) -> None:
        filled = self._filled[field]
        if field == "num_tokens":
            self._is_padding[min(size, filled) : max(size, filled)].fill_(size < filled)
        if size < filled:  # guard: manager_padding
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
        """Text for comparing ranks: name, shape at the largest batch, dtype and padded dimensions of each input."""
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
            expected="different names, at least one token dimension, one size for all token dimensions, and one size "
            "for all request dimensions",
            found=", ".join(f"{spec.name} {spec.shape} {spec.dims()}" for spec in specs) or "no input",
            remedy="declare the shape of every input for the same largest batch",
        )
    return {field: found.pop() for field, found in sizes.items() if found}


def _memory(spec: InputSpec, device: torch.device) -> torch.Tensor:
    # Two extra entries. The first run may need one to make two sizes differ, and Dynamo compiles another graph for a
    # view that is as long as its base.
    shape = [size + 2 if dim in spec.dims() else size for dim, size in enumerate(spec.shape)]
    with torch.inference_mode(False):
        return torch.full(shape, _first_value(spec), dtype=spec.dtype, device=device)


def _first_value(spec: InputSpec) -> float:
    return spec.padding if isinstance(spec.padding, (bool, int, float)) else 0


@dataclass(frozen=True, slots=True)
class OutputBuffers:
    """The output buffers of a manager, one per leaf of the result; a key writes to the first entries.

    Attributes:
        buffers: for each tensor of the result, a tensor at the size of the largest batch; for other leaves, the value.
        dims: for each leaf, {dimension: key field} of the dimensions that grow with the batch.
    """

    buffers: tuple[Any, ...]
    dims: tuple[Mapping[int, str], ...]

    @classmethod
    def like(cls, leaves: Sequence[Any], dims: Sequence[Mapping[int, str]], largest: Sizes) -> OutputBuffers:
        """Allocate buffers for results with the dtypes and devices of ``leaves``, at the sizes in ``largest``."""
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
        """The first entries of one result, as a new tensor object over the buffer."""
        part = self.buffers[index]
        for dim, field in self.dims[index].items():
            part = part.narrow(dim, 0, sizes[field])
        return part if self.dims[index] or not isinstance(part, torch.Tensor) else part.detach()

    def store(self, leaves: Sequence[Any], sizes: Sizes) -> None:
        """Copy results of these sizes into the buffers, in one fused copy.

        Raises:
            ShapeError: a result has another shape or dtype than its buffer.
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
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers if isinstance(buffer, torch.Tensor))
