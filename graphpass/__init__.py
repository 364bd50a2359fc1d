"""CUDA graphs for any PyTorch model: partition, dispatch, capture, replay.

``graphpass.graphed(model, ...)`` is the three-line form; ``torch.compile(model, backend="cgpass")`` with a
:class:`GraphRuntime`, a :class:`CudagraphDispatcher` and :func:`set_forward_context` are the parts it is made of.

A name is loaded at its first use, so that a program loads only the parts that it needs. All other public names stand
in the submodule that they belong to: ``graphpass.errors``, ``graphpass.regions``, ``graphpass.text``, ...
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphpass import capture as capture
    from graphpass import dispatch as dispatch
    from graphpass import encoder as encoder
    from graphpass import errors as errors
    from graphpass import offload as offload
    from graphpass import ranks as ranks
    from graphpass import regions as regions
    from graphpass import report as report
    from graphpass import serving as serving
    from graphpass import text as text
    from graphpass.capture.runtime import GraphRuntime as GraphRuntime
    from graphpass.capture.runtime import runtime_of as runtime_of
    from graphpass.capture.wrapper import CUDAGraphWrapper as CUDAGraphWrapper
    from graphpass.context import ForwardContext as ForwardContext
    from graphpass.context import get_forward_context as get_forward_context
    from graphpass.context import is_forward_context_available as is_forward_context_available
    from graphpass.context import set_forward_context as set_forward_context
    from graphpass.dispatch.dispatcher import CudagraphDispatcher as CudagraphDispatcher
    from graphpass.dispatch.dispatchkeys import Dispatch as Dispatch
    from graphpass.dispatch.dispatchkeys import DispatchReason as DispatchReason
    from graphpass.dispatch.dispatchkeys import LoraKeys as LoraKeys
    from graphpass.encoder.manager import EncoderCudaGraphManager as EncoderCudaGraphManager
    from graphpass.encoder.options import EncoderOptions as EncoderOptions
    from graphpass.errors import GraphpassError as GraphpassError
    from graphpass.graphedmodel import GraphedModel as GraphedModel
    from graphpass.graphedmodel import graphed as graphed
    from graphpass.graphedmodel import precapture as precapture
    from graphpass.keys import AttentionSupport as AttentionSupport
    from graphpass.keys import BatchDescriptor as BatchDescriptor
    from graphpass.keys import CUDAGraphMode as CUDAGraphMode
    from graphpass.keys import resolve_mode as resolve_mode
    from graphpass.ops import zero_padding as zero_padding
    from graphpass.regions.rowsapart import rows_apart as rows_apart
    from graphpass.regions.split import partition as partition
    from graphpass.serving.batch import AttentionMetadataBuilder as AttentionMetadataBuilder
    from graphpass.serving.batch import Batch as Batch
    from graphpass.serving.batch import InputSpec as InputSpec
    from graphpass.serving.manager import CudaGraphManager as CudaGraphManager
    from graphpass.sizeplan import plan_sizes as plan_sizes

__version__ = "0.1.0"

_NAMES = {
    "graphpass.capture.runtime": ("GraphRuntime", "runtime_of"),
    "graphpass.capture.wrapper": ("CUDAGraphWrapper",),
    "graphpass.context": (
        "ForwardContext",
        "get_forward_context",
        "is_forward_context_available",
        "set_forward_context",
    ),
    "graphpass.dispatch.dispatcher": ("CudagraphDispatcher",),
    "graphpass.dispatch.dispatchkeys": ("Dispatch", "DispatchReason", "LoraKeys"),
    "graphpass.encoder.manager": ("EncoderCudaGraphManager",),
    "graphpass.encoder.options": ("EncoderOptions",),
    "graphpass.serving.batch": ("AttentionMetadataBuilder", "Batch", "InputSpec"),
    "graphpass.serving.manager": ("CudaGraphManager",),
    "graphpass.errors": ("GraphpassError",),
    "graphpass.graphedmodel": ("GraphedModel", "graphed", "precapture"),
    "graphpass.keys": ("AttentionSupport", "BatchDescriptor", "CUDAGraphMode", "resolve_mode"),
    "graphpass.ops": ("zero_padding",),
    "graphpass.regions.rowsapart": ("rows_apart",),
    "graphpass.regions.split": ("partition",),
    "graphpass.sizeplan": ("plan_sizes",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
__all__ = list(_MODULE_OF)

_SUBMODULES = frozenset(
    {"capture", "dispatch", "encoder", "errors", "offload", "ranks", "regions", "report", "serving", "text"}
)


def __getattr__(name: str) -> Any:
    """A public name or submodule, imported at its first use."""
    if name in _SUBMODULES:
        return importlib.import_module(f"graphpass.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'graphpass' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
