"""Whole-encoder CUDA graphs: images of any size are packed and padded to one of several token budgets."""

from graphpass.encoder.attached import AttachedEncoder, attach
from graphpass.encoder.costs import PackingCosts
from graphpass.encoder.encoderstats import EncoderStats
from graphpass.encoder.options import generate_budgets, smallest_fitting_budget
from graphpass.encoder.planner import PackedBatch, pack_items
from graphpass.encoder.protocol import (
    EncoderAxis,
    EncoderCudaGraphConfig,
    EncoderGraphKey,
    EncoderItemSpec,
    SupportsEncoderCompilation,
    SupportsEncoderCudaGraph,
    SupportsEncoderExamples,
    SupportsEncoderKernels,
)
from graphpass.encoder.sharding import ItemShares, balance_items

__all__ = [
    "AttachedEncoder",
    "EncoderAxis",
    "EncoderCudaGraphConfig",
    "EncoderGraphKey",
    "EncoderItemSpec",
    "EncoderStats",
    "ItemShares",
    "PackedBatch",
    "PackingCosts",
    "SupportsEncoderCompilation",
    "SupportsEncoderCudaGraph",
    "SupportsEncoderExamples",
    "SupportsEncoderKernels",
    "attach",
    "balance_items",
    "generate_budgets",
    "pack_items",
    "smallest_fitting_budget",
]
