"""The CUDA driver's library, for what torch has no call for."""

from __future__ import annotations

import ctypes
import sys

from graphpass.errors import DeviceError


def driver() -> ctypes.CDLL:
    """The driver's library; its functions return a status for :func:`checked`."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def checked(status: int, what: str) -> None:
    """Raise a DeviceError if the status of a driver call that was to do ``what`` is not 0."""
    if status:
        raise DeviceError(
            f"the CUDA driver could not {what}",
            expected="status 0",
            found=f"status {status}",
            remedy="look the status up in cuda.h (CUresult); a sticky error was caused by an earlier kernel",
        )


def driver_version() -> int:
    """The CUDA version of the driver, such as 13000; torch names it in some builds only."""
    version = ctypes.c_int()
    checked(driver().cuDriverGetVersion(ctypes.byref(version)), "name its version")
    return version.value
