"""Decisions: which graphs exist and which of them serves a batch. Pure Python, no tensor."""

from graphpass.dispatch.dispatcher import CudagraphDispatcher, Dispatch, DispatchReason
from graphpass.dispatch.lora import LoraKeys
from graphpass.dispatch.support import AttentionSupport, resolve_mode

__all__ = [
    "AttentionSupport",
    "CudagraphDispatcher",
    "Dispatch",
    "DispatchReason",
    "LoraKeys",
    "resolve_mode",
]
