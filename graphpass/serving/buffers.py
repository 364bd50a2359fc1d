"""A manager's persistent input buffers: one per input, as large as the largest batch, shared by all sizes.

A key reads the first entries of each. All after the real ones are padding, also where a larger batch was before.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpass.capture.staging import Copies, grouped_copies, storage_id
from graphpass.compat import dynamo, memory
from graphpass.errors import OptionError, ShapeError
from graphpass.paddedcalls import PaddedMemory, check_fits, fill_padding
from graphpass.serving.batch import InputSpec

Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PaddedInputs:
    """The model's inputs at one padded shape: views of the persistent buffers."""

    sizes: Sizes  #: the padded size of each key field
    arguments: Mapping[str, torch.Tensor]  #: {input name: view of its buffer}, the keyword arguments of the model
    dims: Mapping[str, Mapping[int, str]]  #: {input name: {padded dimension: key field}}
    is_padding: torch.Tensor  #: mask of the padded tokens, bool (num_tokens,), a view that steps update


class RealInputs:
    """The inputs at one real size in one padded shape: fills the buffers with batches, and copies writes back."""

    def __init__(self, buffers: InputBuffers, sizes: Sizes, padded: PaddedInputs, args: Sequence[Any] = ()) -> None:
        self.sizes, self.padded = sizes, padded  #: the real size of each key field, and the buffers at the padded shape
        self._buffers, self._args = buffers, args
        with torch.inference_mode(False), torch.no_grad():
            #: {input name: view of its real entries}
            self.targets = {name: cut(view, padded.dims[name], sizes) for name, view in padded.arguments.items()}
        self._fit: Callable[..., bool] | None = None
        self._copies: Copies | None = None

    def placed(self, _: object) -> Sequence[Any]:
        """The flat arguments of the graph at the padded shape."""
        return self._args

    def fill(self, inputs: Mapping[str, torch.Tensor] | None) -> None:
        """Copy a batch into the buffers, unless it is there, in one fused copy, and write the padding after it.

        If an input does not fit, the buffers are unchanged.
        """
        if inputs is not None:
            self._copy_in(inputs)
        self._buffers.pad(self)

    def _copy_in(self, inputs: Mapping[str, torch.Tensor]) -> None:
        fit, copies = self._fit, self._copies
        if fit is not None and copies is not None and inputs.keys() == self.targets.keys():
            values = [inputs[name] for name in self.targets]
            # guard: known_inputs_fit
            if fit(*values) and not any(map(self._buffers.contain, values)):
                copies(values)
                return
        sources = self.checked(inputs)
        copies = grouped_copies(list(self.targets.values()), sources)
        copies(sources)
        # Later batches in the layouts of this one are compared with it in one native call.
        self._fit, self._copies = memory.layouts_of(sources), copies

    def copy_back(
        self, inputs: Mapping[str, torch.Tensor] | None, names: Iterable[str], outputs: Iterable[Any]
    ) -> None:
        """Copy what the model wrote to these inputs into the caller's tensors, but not over results in ``outputs``."""
        if inputs is None or not names:
            return
        results = {storage_id(output) for output in outputs if isinstance(output, torch.Tensor)}
        for name in names:
            if storage_id(inputs[name]) not in results:  # guard: manager_result_as_input
                inputs[name].copy_(self.targets[name])

    def checked(self, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The tensors to copy for a batch, in the order of the inputs; raises if one does not fit its buffer."""
        if inputs.keys() != self.targets.keys():
            raise ShapeError(
                "the inputs of the batch are not the declared inputs",
                expected=", ".join(sorted(self.targets)),
                found=", ".join(sorted(inputs)) or "none",
                remedy="pass a tensor for each InputSpec, or inputs=None after writing to the manager's buffers",
            )
        sources = []
        for name, target in self.targets.items():
            value = inputs[name]
            check_fits(name, value, target)
            if value.data_ptr() != target.data_ptr() and self._buffers.contain(value):
                value = value.clone()  # guard: manager_buffers_as_inputs
            sources.append(value)
        return sources


class InputBuffers(PaddedMemory[str]):
    """The input buffers of a manager. The caller may write the real entries itself; the padding is the manager's."""

    def __init__(self, specs: Sequence[InputSpec], device: torch.device) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._dims = {spec.name: spec.dims() for spec in specs}
        # Padding that is not a constant is written again in every step.
        self._computed = {spec.name for spec in specs if not isinstance(spec.padding, (bool, int, float))}
        self.largest = _largest(specs)  #: {key field: size of the largest batch}
        self.device = device
        with torch.inference_mode(False):
            # Two extra entries. The first run may need one to make two sizes differ, and Dynamo compiles another graph
            # for a view that is as long as its base.
            super().__init__(
                {
                    spec.name: torch.full(
                        [size + 2 if dim in spec.dims() else size for dim, size in enumerate(spec.shape)],
                        self._first_value(spec),
                        dtype=spec.dtype,
                        device=device,
                    )
                    for spec in specs
                }
            )
            self._is_padding = torch.ones(self.largest["num_tokens"] + 1, dtype=torch.bool, device=device)
        #: {input name: its buffer at the largest batch}
        self.tensors = {name: cut(self._memory[name], dims, self.largest) for name, dims in self._dims.items()}
        storages = [memory.untyped_storage() for memory in self._memory.values()]
        ends = ((storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages)
        # The addresses at which the memory of a buffer starts and ends.
        self._spans = sorted(address for span in ends for address in span)
        self._filled = dict.fromkeys(self.largest, 0)
        self._at: dict[tuple[int, ...], PaddedInputs] = {}

    def at(self, sizes: Sizes) -> PaddedInputs:
        """The model's inputs at these padded sizes, the same tensor objects in every call.

        Dynamo treats them as inputs with dynamic sizes and static addresses.
        """
        known = self._at.get(tuple(sizes.values()))
        if known is None:
            arguments = {}
            for name, dims in self._dims.items():
                view = arguments[name] = cut(self._memory[name], dims, sizes)
                memory.mark_static_address(view)
                for dim in dims:
                    dynamo.mark_maybe_dynamic(view, dim)
            known = PaddedInputs(dict(sizes), arguments, self._dims, self._is_padding[: sizes["num_tokens"]])
            self._at[tuple(sizes.values())] = known
        return known

    def pad_always(self, names: Iterable[str]) -> None:
        """Write the padding of these inputs again in every step, because the model writes to it."""
        self._computed.update(names)

    def contain(self, value: torch.Tensor) -> bool:
        """Whether a tensor lies in the memory of a buffer."""
        return bool(bisect_right(self._spans, value.data_ptr()) & 1)

    def pad(self, real: RealInputs) -> None:
        """Write the padding after a batch that is in the buffers."""
        for field, size in real.sizes.items():
            if size != self._filled[field]:
                self._pad_after(field, size)
        for name in self._computed:
            buffer, rule = real.padded.arguments[name], self._specs[name].padding
            fill_padding(buffer, real.targets[name], rule, name=f"input {name!r}")

    def blank(self) -> None:
        """Reset all entries to padding, because an entry of a larger batch may not be valid in a smaller one."""
        for name, spec in self._specs.items():
            self._memory[name].fill_(self._first_value(spec))
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

    def _pad_after(self, field: str, size: int) -> None:
        filled = self._filled[field]
        if field == "num_tokens":
            self._is_padding[min(size, filled) : max(size, filled)].fill_(size < filled)
        if size < filled:  # guard: manager_padding
            for name, dims in self._dims.items():
                for dim, its_field in dims.items():
                    if its_field == field and name not in self._computed:
                        rest = self._memory[name].narrow(dim, size, filled - size)
                        rest.fill_(self._first_value(self._specs[name]))
        self._filled[field] = size

    @staticmethod
    def _first_value(spec: InputSpec) -> float:
        return spec.padding if isinstance(spec.padding, (bool, int, float)) else 0

    def described(self) -> str:
        """Text for comparing ranks: name, shape at the largest batch, dtype and padded dimensions of each input."""
        return ", ".join(f"{spec.name} {spec.shape} {spec.dtype} {spec.dims()}" for spec in self._specs.values())


def cut(buffer: torch.Tensor, dims: Mapping[int, str], sizes: Sizes) -> torch.Tensor:
    """The view of the first entries of a buffer; ``dims`` has the key field of each dimension to cut."""
    for dim, field in dims.items():
        buffer = buffer.narrow(dim, 0, sizes[field])
    return buffer


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
