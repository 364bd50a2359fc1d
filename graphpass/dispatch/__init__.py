"""Decides which graphs exist and which of them serves a batch. Uses no torch."""

from graphpass.dispatch.sizeplan import SizePlan

__all__ = ["SizePlan"]
