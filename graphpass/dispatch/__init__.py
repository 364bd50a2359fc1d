"""Decides which graphs exist and which of them serves a batch. Uses no torch."""

from graphpass.sizeplan import SizePlan

__all__ = ["SizePlan"]
