"""Decisions: which graphs exist and which of them serves a batch. No tensor anywhere."""

from graphpass.dispatch.choose import SizePlan, plan_sizes
from graphpass.dispatch.dispatcher import CudagraphDispatcher, Dispatch, DispatchReason
from graphpass.dispatch.lora import LoraKeys
from graphpass.dispatch.support import AttentionSupport, resolve_mode

__all__ = [
    "AttentionSupport",
    "CudagraphDispatcher",
    "Dispatch",
    "DispatchReason",
    "LoraKeys",
    "SizePlan",
    "plan_sizes",
    "resolve_mode",
]
