"""A region becomes a callable: through Inductor, AOTAutograd alone, or as it is."""

from graphpass.compile.compilers import COMPILERS, CompiledRegion, compile_region, compile_training

__all__ = ["COMPILERS", "CompiledRegion", "compile_region", "compile_training"]
