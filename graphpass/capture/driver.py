"""The CUDA driver, for what torch has no call for."""

from __future__ import annotations

import ctypes
import sys

from graphpass.errors import DeviceError

__all__ = ["checked", "driver"]


def driver() -> ctypes.CDLL:
    """The driver's library; its functions return a status for :func:`checked`."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def checked(status: int, what: str) -> None:
    """Nothing, where the driver could do ``what``.

    Raises:
        DeviceError: it could not.
    """
    if status:
        raise DeviceError(
            f"the CUDA driver could not {what}",
            expected="status 0",
            found=f"status {status}",
            remedy="look the status up in cuda.h (CUresult); a sticky one comes from an earlier kernel",
        )
