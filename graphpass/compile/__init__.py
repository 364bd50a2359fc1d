"""Compiles each distinct region structure once: with Inductor, with AOTAutograd alone, or not at all."""

from graphpass.compile.compilers import (
    COMPILERS,
    RegionPass,
    RegionTrace,
    compile_training,
    summary,
)
from graphpass.compile.once import (
    CompiledRegion,
    CompiledRegions,
    PlainRegion,
    RegionCompiler,
    SizeRanges,
    WaitingFunction,
    chosen,
    traced_regions,
)
from graphpass.compile.tuning import TunedRegion, Tuning

__all__ = [
    "COMPILERS",
    "CompiledRegion",
    "CompiledRegions",
    "PlainRegion",
    "RegionCompiler",
    "RegionPass",
    "RegionTrace",
    "SizeRanges",
    "TunedRegion",
    "Tuning",
    "WaitingFunction",
    "chosen",
    "compile_training",
    "summary",
    "traced_regions",
]
