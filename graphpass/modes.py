"""CUDA graph modes: runtime modes, and pairs of a mode for decode batches and a mode for mixed batches."""

from __future__ import annotations

import enum

from graphpass.errors import OptionError

__all__ = ["CUDAGraphMode"]


class CUDAGraphMode(enum.Enum):
    """Which graphs a forward may replay: none, one for each region, or one for the whole model.

    ``NONE``, ``PIECEWISE`` and ``FULL`` are runtime modes. ``FULL_DECODE_ONLY`` and ``FULL_AND_PIECEWISE`` are pairs
    (decode mode, mixed mode): uniform decode batches replay one full graph, mixed batches run ``NONE`` or
    ``PIECEWISE``. A forward context has a runtime mode, never a pair.
    """

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)

    @classmethod
    def parse(cls, mode: str | CUDAGraphMode) -> CUDAGraphMode:
        """The mode with the name ``mode``, case-insensitive; a ``CUDAGraphMode`` is returned unchanged.

        Raises:
            OptionError: no mode has that name.
        """
        if isinstance(mode, cls):
            return mode
        if isinstance(mode, str) and mode.upper() in cls.__members__:
            return cls[mode.upper()]
        raise OptionError(
            "unknown mode",
            expected=f"one of {', '.join(cls.__members__)}",
            found=repr(mode),
            remedy="pass a CUDAGraphMode or its name",
        )

    def decode_mode(self) -> CUDAGraphMode:
        """The runtime mode of uniform decode batches."""
        return CUDAGraphMode(self.value[0]) if isinstance(self.value, tuple) else self

    def mixed_mode(self) -> CUDAGraphMode:
        """The runtime mode of batches that are not uniform decode batches."""
        return CUDAGraphMode(self.value[1]) if isinstance(self.value, tuple) else self

    def is_valid_runtime_mode(self) -> bool:
        """Whether a forward context may have this mode: True for NONE, PIECEWISE and FULL."""
        return not isinstance(self.value, tuple)

    def separate_routine(self) -> bool:
        """Whether this mode is a pair, with separate modes for decode batches and mixed batches."""
        return isinstance(self.value, tuple)

    def has_mode(self, mode: CUDAGraphMode | str) -> bool:
        """Whether some batch runs in the runtime mode ``mode`` under this mode.

        Raises:
            OptionError: ``mode`` is a pair, not a runtime mode.
        """
        mode = CUDAGraphMode.parse(mode)
        if not mode.is_valid_runtime_mode():
            raise OptionError(
                "has_mode() asks for a runtime mode",
                expected="NONE, PIECEWISE or FULL",
                found=str(mode),
                remedy="ask for mode.decode_mode() and mode.mixed_mode() one by one",
            )
        return mode in (self.decode_mode(), self.mixed_mode())

    def requires_piecewise_compilation(self) -> bool:
        """Whether some batch replays region by region, which requires that the model is partitioned."""
        return self.has_mode(CUDAGraphMode.PIECEWISE)

    def max_cudagraph_mode(self) -> CUDAGraphMode:
        """The largest runtime mode that a batch can get (NONE < PIECEWISE < FULL)."""
        return max(self.decode_mode(), self.mixed_mode(), key=lambda mode: int(mode.value))

    def without_piecewise(self) -> CUDAGraphMode:
        """This mode for a model whose regions cannot be captured one by one: PIECEWISE becomes NONE, FULL stays."""
        if self is CUDAGraphMode.PIECEWISE:
            return CUDAGraphMode.NONE
        if self is CUDAGraphMode.FULL_AND_PIECEWISE:
            return CUDAGraphMode.FULL_DECODE_ONLY
        return self

    def __bool__(self) -> bool:
        return self is not CUDAGraphMode.NONE

    def __str__(self) -> str:
        return self.name
