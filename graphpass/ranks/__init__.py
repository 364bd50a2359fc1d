"""Data-parallel ranks agree before each step on the graph that all of them run."""

from graphpass.ranks.group import DataParallelAgreement

__all__ = ["DataParallelAgreement"]
