"""Addresses, layouts, versions and copies of tensors; streams and the caching allocator."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._dynamo import guards

from graphpass.compat.symbolic import fake_mode_of
from graphpass.errors import CaptureError


def storage_id(tensor: torch.Tensor) -> int | None:
    """An id that tensors share exactly while they share a storage; None for tensors without storage (sparse)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def watch_storage(tensor: torch.Tensor, died: Callable[[Any], object]) -> weakref.ref[Any]:
    """A weak reference to the storage of a tensor; ``died`` is called when the last tensor with that storage is freed.

    ``torch.utils.swap_tensors`` refuses tensors with weak references, but not storages. The Python object of a storage
    lives as long as the storage.
    """
    return weakref.ref(tensor.untyped_storage(), died)


def without_ownership(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same layout at the same address that does not keep the memory allocated."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return tensor.detach()
    unowned = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    # An inference tensor exactly in inference mode, as any other result.
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return with_bits_of(view.set_(unowned, tensor.storage_offset(), tensor.shape, tensor.stride()), tensor)


def is_lazy(value: Any) -> bool:
    """Whether a value is a tensor whose memory holds the conjugates or negatives of its elements."""
    return isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg())


def with_bits_of(view: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``view``, lazily conjugate and negative exactly as ``like`` is."""
    if view.is_conj() != like.is_conj():
        view = view.conj()
    return view if view.is_neg() == like.is_neg() else torch._neg_view(view)


def memory_id(tensor: torch.Tensor) -> int | None:
    """A real tensor's memory address, which several storages may share; a fake tensor's :func:`storage_id`."""
    if fake_mode_of((tensor,)) is not None or tensor.layout is not torch.strided:
        return storage_id(tensor)
    return tensor.untyped_storage().data_ptr()


def _data_ptrs_equal_in_python(
    tensors: Sequence[Any], expected: Sequence[int | None], positions: Sequence[int]
) -> bool:
    addresses = map(torch.Tensor.data_ptr, map(tensors.__getitem__, positions))
    return all(map(operator.eq, addresses, map(expected.__getitem__, positions)))


data_ptrs_equal: Callable[[list[Any], list[int | None], list[int]], bool] = getattr(
    torch._C, "_tensors_data_ptrs_at_indices_equal", _data_ptrs_equal_in_python
)
"""Whether ``tensors[p].data_ptr() == expected[p]`` for every ``p`` in ``positions``: (tensors, expected, positions).

One native call in torch for GPUs: about 3 µs for 300 tensors, against 12 µs in Python.
"""


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements occupy contiguous memory without overlap, in any order of dimensions."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def any_overlap(tensors: list[torch.Tensor]) -> bool:
    """Whether AOTAutograd considers any two of these tensors, views of one storage, to overlap."""
    numbers = [number for t in tensors for number in (*t.shape, *t.stride(), t.storage_offset())]
    is_symbolic = any(isinstance(number, torch.SymInt) for number in numbers)
    return bool(guards.compute_overlapping_tensors(tensors, symbolic=is_symbolic))


def layouts_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A check that its arguments have the shapes and strides of ``tensors``, in one native call; it holds no tensor.

    The check may also return False because a mode (autocast, inference) has changed.
    """
    return guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def version_of(tensor: torch.Tensor) -> int | None:
    """A tensor's version counter, which every in-place op increments; None for inference tensors, which lack one."""
    return None if tensor.is_inference() else tensor._version


def has_static_address(tensor: torch.Tensor) -> bool:
    """Whether the tensor has a static address, marked by ``mark_static_address`` or by Dynamo (module tensors)."""
    return getattr(tensor, "_dynamo_static_input_type", None) is not None


def mark_static_address(tensor: torch.Tensor) -> None:
    """Declare to Dynamo and the wrappers that the tensor's address is constant; Dynamo adds no guard for it."""
    torch._dynamo.mark_static_address(tensor, guard=False)


def copied_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on another device, also of a fake tensor, whose ``to`` may be a no-op."""
    copy: torch.Tensor = torch.ops.aten._to_copy.default(tensor, device=device)
    return copy


foreach_copy_: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_
"""Copy the second list of tensors into the first in one fused call; public torch under an underscored name."""


def current_stream_of(device: torch.device) -> Any:
    """An id of a device's current stream; ten times as fast as creating a ``torch.cuda.Stream``."""
    return torch._C._cuda_getCurrentStream(device.index)


def is_capturing_stream(device: torch.device | None) -> bool:
    """Whether the current stream of a device is under CUDA graph capture; False for devices that are no GPU."""
    if device is None or device.type != "cuda" or not torch.cuda.is_initialized():
        return False
    if device.index in (None, torch.cuda.current_device()):
        return bool(torch._C._cuda_isCurrentStreamCapturing())
    with torch.cuda.device(device):
        return bool(torch._C._cuda_isCurrentStreamCapturing())


def refuse_inside_capture(device: torch.device, who: str) -> None:
    """Refuse a forward over graphs on a stream that somebody else captures: theirs would be invalidated."""
    if is_capturing_stream(device):
        raise CaptureError(
            f"{who} cannot use graphs inside another capture",
            expected="a stream that is not being captured",
            found=f"a capture on {device} that graphpass did not begin",
            remedy="capture and replay it outside of that capture, or call it there without a forward context",
        )


def drop_blas_workspaces() -> None:
    """Free the cuBLAS workspaces that torch caches per stream."""
    torch._C._cuda_clearCublasWorkspaces()


def register_generators(graph: torch.cuda.CUDAGraph, generators: Sequence[torch.Generator]) -> None:
    """Register generators with a graph on a stream that is not capturing, before the capture begins.

    Torch 2.11 ends the process when it frees a graph whose registration failed half way, as here and in
    ``capture_begin``: in a capture, or without memory for the two numbers of a generator. There is room for them
    afterwards, those of the default generator included, which ``capture_begin`` registers.
    """
    device = torch.cuda.current_device()
    room = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(2 * (1 + len(generators)))]
    room.clear()  # the next allocations of this stream take its place
    for generator in generators:
        graph.register_generator_state(generator)  # guard: cuda_generator_registered


def forget_failed_capture(device: torch.device, pool: Any, graph: torch.cuda.CUDAGraph) -> None:
    """Reset a graph whose capture did not begin or was invalidated, and release what torch keeps for it.

    Before 2.15, torch stops redirecting allocations to the pool, and releases the graph's reference to it, only after a
    successful capture; without this call the pool's segments would never be freed. No further capture can use the pool.
    """
    graph.reset()
    with contextlib.suppress(RuntimeError):  # raised by the first one if torch has done both
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
