"""The permission to use tile registers (Intel AMX): Linux gives it to a process that requests it, once, for all its
threads.

Known limits: Linux on x86-64 only; elsewhere there are no tiles.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path

# arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA): asm/prctl.h and Documentation/arch/x86/xstate.rst of Linux.
_ARCH_PRCTL = 158
_REQUEST = 0x1023
_TILE_DATA = 18


@cache
def allow_tiles() -> bool:
    """Return whether this machine has tile registers with products of bf16, and request them for this process."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    if not {"amx_tile", "amx_bf16"}.issubset(flags):
        return False
    answer: int = ctypes.CDLL(None).syscall(
        ctypes.c_long(_ARCH_PRCTL), ctypes.c_long(_REQUEST), ctypes.c_long(_TILE_DATA)
    )
    return answer == 0
