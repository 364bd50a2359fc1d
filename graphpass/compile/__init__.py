"""Compiles each distinct region structure once: with Inductor, with AOTAutograd alone, or not at all."""

from graphpass.compile.compilers import COMPILERS, compile_training
from graphpass.compile.once import CompiledRegions, RegionCompiler, SizeRanges, traced_regions
from graphpass.compile.region import CompiledRegion
from graphpass.compile.traces import GraphTrace, RegionTrace

__all__ = [
    "COMPILERS",
    "CompiledRegion",
    "CompiledRegions",
    "GraphTrace",
    "RegionCompiler",
    "RegionTrace",
    "SizeRanges",
    "compile_training",
    "traced_regions",
]
