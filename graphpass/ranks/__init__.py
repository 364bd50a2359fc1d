"""Ranks that agree, before each step, on what all of them run."""

from graphpass.ranks.group import DataParallelAgreement

__all__ = ["DataParallelAgreement"]
