"""A region becomes a callable, once for each structure: through Inductor, AOTAutograd alone, or as it is."""

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
