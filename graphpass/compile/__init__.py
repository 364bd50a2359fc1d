"""Compiles each distinct region structure once: with Inductor, with AOTAutograd alone, or not at all."""

from graphpass.compile.compilers import COMPILERS, GraphTrace, RegionTrace, compile_training
from graphpass.compile.once import CompiledRegion, CompiledRegions, RegionCompiler, SizeRanges, traced_regions
from graphpass.compile.tuning import TunedRegion, Tuner, Tuning

__all__ = [
    "COMPILERS",
    "CompiledRegion",
    "CompiledRegions",
    "GraphTrace",
    "RegionCompiler",
    "RegionTrace",
    "SizeRanges",
    "TunedRegion",
    "Tuner",
    "Tuning",
    "compile_training",
    "traced_regions",
]
