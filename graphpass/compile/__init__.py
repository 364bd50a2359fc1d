"""A region becomes a callable, once for each structure: through Inductor, AOTAutograd alone, or as it is."""

from graphpass.compile.compilers import COMPILERS, compile_training
from graphpass.compile.once import CompiledRegions, RegionCompiler, SizeRanges
from graphpass.compile.region import CompiledRegion

__all__ = ["COMPILERS", "CompiledRegion", "CompiledRegions", "RegionCompiler", "SizeRanges", "compile_training"]
