"""TVM's virtual machine, opened without TVM's Python package: importing that takes a hundred times as long as all that
running a stage needs of it.

In: a compiled library. Out: a machine, which gives its functions by name. It is initialised with the numbers that TVM's
own wrapper passes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.support.errors import UsageError

from .runtime_library import load_runtime

# Kinds of devices, as DLPack counts them, and the allocator that keeps blocks which were freed.
CPU, CUDA = 1, 2
_POOLED = 2


# The files that were loaded from a path, in order.
_FILES: dict[str, list[tuple[int, int]]] = {}


def _spelled(library: Path) -> str:
    """Return a spelling of the path that belongs to this file alone. The system's loader takes a name that it knows
    for the library it has, though the path has another file since then."""
    path, status = os.path.abspath(library), library.stat()
    files, file = _FILES.setdefault(path, []), (status.st_dev, status.st_ino)
    if file not in files:
        files.append(file)
    folder, name = os.path.split(path)
    return os.path.join(folder, *["."] * files.index(file), name)


def give_back() -> None:
    """Give back the memory that machines of this process keep, and that no tensor of theirs is in; then what the C
    library keeps of it, where it is one that has a function for that."""
    from tvm_ffi import get_global_func  # lazy: heavy

    get_global_func("vm.builtin.memory_manager.clear")()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


class VirtualMachine:
    """The functions of one library, on one device."""

    def __init__(self, library: Path, kind: int = CPU, number: int = 0) -> None:
        load_runtime()
        from tvm_ffi import load_module  # lazy: heavy

        try:
            loaded = load_module(_spelled(library))
        except RuntimeError as error:
            # The loader says the same of a file system whose files must not be executed as of memory that is short.
            if "failed to map segment" in str(error) and os.statvfs(library).f_flag & os.ST_NOEXEC:
                raise UsageError(
                    "lies on a file system that is mounted noexec, from which no code is loaded",
                    where=str(library),
                    hint="copy the bundle to another file system",
                ) from error
            raise
        self._module: Any = loaded["vm_load_executable"]()
        # Functions of shapes run on the CPU, whatever the device.
        devices = [(kind, number)] if kind == CPU else [(kind, number), (CPU, 0)]
        self._module["vm_initialization"](*(part for device in devices for part in (*device, _POOLED)))
        self._set_instrument = self._module["set_instrument"]

    def __getitem__(self, name: str) -> Any:
        return self._module[name]

    def instrument(self, watch: Callable[..., int] | None) -> None:
        """Call `watch` before and after every call that the machine makes; None ends it."""
        self._set_instrument(watch)
