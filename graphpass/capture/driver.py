"""Calls of the CUDA driver for which torch has no function."""

from __future__ import annotations

import ctypes
import sys

from graphpass.errors import DeviceError

__all__ = ["checked", "driver"]


def driver() -> ctypes.CDLL:
    """The driver's library; its functions return a status for :func:`checked`."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def checked(status: int, what: str) -> None:
    """Check the status of a driver call that was to do ``what``.

    Raises:
        DeviceError: the status is not 0.
    """
    if status:
        raise DeviceError(
            f"the CUDA driver could not {what}",
            expected="status 0",
            found=f"status {status}",
            remedy="look the status up in cuda.h (CUresult); a sticky error was caused by an earlier kernel",
        )
