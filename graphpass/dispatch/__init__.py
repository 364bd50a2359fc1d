"""Decisions: which graphs exist and which of them serves a batch. No tensor anywhere."""

from graphpass.dispatch.choose import SizePlan

__all__ = ["SizePlan"]
