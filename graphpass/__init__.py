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
    from graphpass import engine as engine
    from graphpass import errors as errors
    from graphpass import ladder as ladder
    from graphpass import offload as offload
    from graphpass import ranks as ranks
    from graphpass import regions as regions
    from graphpass import report as report
    from graphpass import text as text
    from graphpass.capture.runtime import GraphRuntime, runtime_of
    from graphpass.capture.wrapper import CUDAGraphWrapper
    from graphpass.context import ForwardContext, get_forward_context, is_forward_context_available, set_forward_context
    from graphpass.dispatch.dispatcher import CudagraphDispatcher
    from graphpass.dispatch.keys import Dispatch, DispatchReason, LoraKeys
    from graphpass.encoder.manager import EncoderCudaGraphManager
    from graphpass.encoder.options import EncoderOptions
    from graphpass.engine.batch import AttentionMetadataBuilder, Batch, InputSpec
    from graphpass.engine.manager import CudaGraphManager
    from graphpass.errors import GraphpassError
    from graphpass.graphedmodel import GraphedModel, graphed, precapture
    from graphpass.keys import BatchDescriptor
    from graphpass.modes import AttentionSupport, CUDAGraphMode, resolve_mode
    from graphpass.ops import zero_padding
    from graphpass.regions.split import partition
    from graphpass.sizeplan import plan_sizes

__all__ = [
    "AttentionMetadataBuilder",
    "AttentionSupport",
    "Batch",
    "BatchDescriptor",
    "CUDAGraphMode",
    "CUDAGraphWrapper",
    "CudaGraphManager",
    "CudagraphDispatcher",
    "Dispatch",
    "DispatchReason",
    "EncoderCudaGraphManager",
    "EncoderOptions",
    "ForwardContext",
    "GraphRuntime",
    "GraphedModel",
    "GraphpassError",
    "InputSpec",
    "LoraKeys",
    "get_forward_context",
    "graphed",
    "is_forward_context_available",
    "partition",
    "plan_sizes",
    "precapture",
    "resolve_mode",
    "runtime_of",
    "set_forward_context",
    "zero_padding",
]

_MODULE_OF = {
    "AttentionMetadataBuilder": "graphpass.engine.batch",
    "AttentionSupport": "graphpass.modes",
    "Batch": "graphpass.engine.batch",
    "BatchDescriptor": "graphpass.keys",
    "CUDAGraphMode": "graphpass.modes",
    "CUDAGraphWrapper": "graphpass.capture.wrapper",
    "CudaGraphManager": "graphpass.engine.manager",
    "CudagraphDispatcher": "graphpass.dispatch.dispatcher",
    "Dispatch": "graphpass.dispatch.keys",
    "DispatchReason": "graphpass.dispatch.keys",
    "EncoderCudaGraphManager": "graphpass.encoder.manager",
    "EncoderOptions": "graphpass.encoder.options",
    "ForwardContext": "graphpass.context",
    "GraphRuntime": "graphpass.capture.runtime",
    "GraphedModel": "graphpass.graphedmodel",
    "GraphpassError": "graphpass.errors",
    "InputSpec": "graphpass.engine.batch",
    "LoraKeys": "graphpass.dispatch.keys",
    "get_forward_context": "graphpass.context",
    "graphed": "graphpass.graphedmodel",
    "is_forward_context_available": "graphpass.context",
    "partition": "graphpass.regions.split",
    "plan_sizes": "graphpass.sizeplan",
    "precapture": "graphpass.graphedmodel",
    "resolve_mode": "graphpass.modes",
    "runtime_of": "graphpass.capture.runtime",
    "set_forward_context": "graphpass.context",
    "zero_padding": "graphpass.ops",
}

_SUBMODULES = frozenset(
    {"capture", "dispatch", "encoder", "engine", "errors", "ladder", "offload", "ranks", "regions", "report", "text"}
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
