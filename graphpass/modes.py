"""Runtime modes: what a forward may replay, and how a mode for decode batches pairs with one for mixed batches."""

from __future__ import annotations

import enum

from graphpass.errors import OptionError

__all__ = ["CUDAGraphMode"]


class CUDAGraphMode(enum.Enum):
    """What this forward may replay.

    ``NONE``, ``PIECEWISE`` and ``FULL`` are runtime modes. ``FULL_DECODE_ONLY`` and ``FULL_AND_PIECEWISE`` are pairs
    (decode mode, mixed mode): uniform decode batches replay one full graph, mixed batches run ``NONE`` or
    ``PIECEWISE``. Only runtime modes may stand in a forward context.
    """

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)

    @classmethod
    def parse(cls, mode: str | CUDAGraphMode) -> CUDAGraphMode:
        """The mode named by ``mode``, in any case.

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
        """The runtime mode of batches that are not uniform decode."""
        return CUDAGraphMode(self.value[1]) if isinstance(self.value, tuple) else self

    def is_valid_runtime_mode(self) -> bool:
        """Whether a forward context may carry this mode: True for NONE, PIECEWISE and FULL."""
        return not isinstance(self.value, tuple)

    def separate_routine(self) -> bool:
        """Whether decode batches and mixed batches have modes of their own."""
        return isinstance(self.value, tuple)

    def has_mode(self, mode: CUDAGraphMode) -> bool:
        """Whether a batch can run in the runtime mode ``mode`` under this mode.

        Raises:
            OptionError: ``mode`` is a pair, which no batch runs in.
        """
        if not mode.is_valid_runtime_mode():
            raise OptionError(
                "has_mode() asks for a runtime mode",
                expected="NONE, PIECEWISE or FULL",
                found=str(mode),
                remedy="ask for mode.decode_mode() and mode.mixed_mode() one by one",
            )
        return mode in (self.decode_mode(), self.mixed_mode())

    def requires_piecewise_compilation(self) -> bool:
        """Whether some batch replays region by region, so that the model has to be partitioned."""
        return self.has_mode(CUDAGraphMode.PIECEWISE)

    def max_cudagraph_mode(self) -> CUDAGraphMode:
        """The largest runtime mode that a batch can get (NONE < PIECEWISE < FULL)."""
        return max(self.decode_mode(), self.mixed_mode(), key=lambda mode: int(mode.value))

    def without_piecewise(self) -> CUDAGraphMode:
        """This mode where no region can be captured by itself: PIECEWISE becomes NONE, FULL stays."""
        if self is CUDAGraphMode.PIECEWISE:
            return CUDAGraphMode.NONE
        if self is CUDAGraphMode.FULL_AND_PIECEWISE:
            return CUDAGraphMode.FULL_DECODE_ONLY
        return self

    def __bool__(self) -> bool:
        return self is not CUDAGraphMode.NONE

    def __str__(self) -> str:
        return self.name
