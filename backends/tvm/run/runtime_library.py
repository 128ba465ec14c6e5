"""TVM's runtime library: where it comes from, and how it is loaded, without TVM's Python package and its compiler.

In: TVM as it is installed, or the copy that a bundle carries. Out: the library, loaded into this process; and for a
compile, the files of a copy.

A stage calls the runtime alone, 4 MB of the 260 that TVM takes. A bundle with a copy of it runs where TVM is not
installed: on a host with torch, tvm_ffi and what requirements-runtime.txt lists besides. An installed TVM goes first.
The licence of TVM, Apache 2.0, allows the copy and wants to go with it.

Limit: a process loads one runtime. It refuses a bundle that carries another.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.support.errors import UsageError

LIBRARY, CUDA_LIBRARY, LICENSE = "libtvm_runtime.so", "libtvm_runtime_cuda.so", "LICENSE.apache-tvm"
# CUDA's own runtime, which TVM's is linked with, and torch brings.
CUDA_RUNTIME = "libcudart.so.13"
# What a process has loaded.
_LOADED: list[Path] = []


def carried_files(folder: Path, on_gpus: bool) -> tuple[str, ...]:
    """Copy the runtime of the installed TVM, and its licence, into a folder; return the names of the files."""
    libraries = _installed()
    if libraries is None:
        raise UsageError("TVM is not installed, so its runtime cannot be copied", hint=f"pip install {_wanted()}")
    names = (LIBRARY, CUDA_LIBRARY) if on_gpus else (LIBRARY,)
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copyfile(libraries / name, folder / name)
    (folder / LICENSE).write_text(_terms(libraries.parent), encoding="utf-8")
    return (*names, LICENSE)


def _terms(package: Path) -> str:
    """Return the licence of TVM, its notice, and the licences of what others contributed, as one text."""
    files = [package / "LICENSE", package / "NOTICE", *sorted((package / "licenses").glob("*"))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise UsageError(
            f"the installed TVM has no {' and no '.join(missing)}, which has to go with its runtime",
            where=str(package),
            hint="install the wheel apache-tvm, or compile without --with-runtime",
        )
    return "\n".join(f"---- {file.relative_to(package)} of Apache TVM\n\n{file.read_text('utf-8')}" for file in files)


def load_runtime(carried: Sequence[Path] = ()) -> Path:
    """Load TVM's runtime, of this host or among the files that a bundle carries; return the library."""
    copy = next((path for path in carried if path.name == LIBRARY), None)
    if _LOADED and copy is None:
        return _LOADED[0]
    library = _library(copy)
    if not _LOADED:
        _load_ffi()
        # Stages look for its symbols.
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        _LOADED.append(library)
    elif library != _LOADED[0] and library.read_bytes() != _LOADED[0].read_bytes():
        raise UsageError(
            f"carries another runtime of TVM than {_LOADED[0]}, which this process has loaded",
            where=str(library),
            hint="open the two bundles in different processes",
        )
    return _LOADED[0]


def prepare_runtime() -> None:
    """Load what can be loaded before a bundle is known: all but a runtime that it may carry."""
    _load_ffi()
    if _installed() is not None:
        load_runtime()


def _library(copy: Path | None) -> Path:
    folder = _installed()
    if folder is not None:
        return folder / LIBRARY
    if copy is None:
        raise UsageError(
            "TVM's runtime is missing: TVM is not installed, and the bundle does not carry it",
            hint=f"compile the bundle with --with-runtime, or install TVM here: pip install {_wanted()}",
        )
    return copy


@cache
def _installed() -> Path | None:
    """Return the folder with the libraries of the installed TVM, which is not imported."""
    try:
        package = find_spec("tvm")
    except ImportError:
        return None
    if package is None or package.origin is None:
        return None
    folder = Path(package.origin).resolve().parent / "lib"
    return folder if (folder / LIBRARY).is_file() else None


class _Exit(SystemExit):
    """The end of a process, whose code TVM hands on as text."""

    def __init__(self, text: str) -> None:
        super().__init__(None if text in ("", str(None)) else int(text) if text.removeprefix("-").isdecimal() else text)


def _load_ffi() -> None:
    # torch is to be loaded before TVM's libraries.
    import torch  # lazy: heavy  # noqa: F401

    try:
        import tvm_ffi  # lazy: heavy
    except ModuleNotFoundError as error:
        raise UsageError(
            "the package tvm_ffi is missing, through which compiled stages are called",
            hint="pip install -r requirements-runtime.txt, or: pip install apache-tvm-ffi, in the version listed there",
        ) from error
    # What ends a call from Python comes out of TVM as what it was; else it would be an error without words.
    for kind in (KeyboardInterrupt, SystemExit):
        tvm_ffi.register_error(kind.__name__, kind)
    # TVM knows the end of a process by its class, and makes it anew from its name: that is given another class.
    tvm_ffi.register_error(SystemExit.__name__, _Exit)


def _wanted() -> str:
    """Return the requirement of Penstock for TVM, as it was installed; its name alone where that is not known."""
    try:
        lines = metadata.requires("penstock") or []
    except metadata.PackageNotFoundError:
        lines = []
    return next((repr(line) for line in lines if line.startswith("apache-tvm==")), "apache-tvm")


@cache
def load_cuda_runtime() -> None:
    """Load the CUDA part of TVM's runtime, which does not load it by itself but needs it to start kernels."""
    library = (_LOADED[0] if _LOADED else load_runtime()).parent / CUDA_LIBRARY
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        raise UsageError(
            f"TVM's CUDA runtime cannot be loaded: {error}",
            where=str(library.parent),
            hint="it needs the NVIDIA driver and CUDA 13's libcudart.so.13, "
            "which comes with torch for CUDA 13 or with the wheel nvidia-cuda-runtime",
        ) from error
    from tvm_ffi import get_global_func  # lazy: heavy

    interface: Any = get_global_func("device_api.cuda", allow_missing=True)
    assert interface is not None


def forget_cuda_error() -> None:
    """Forget the last error of CUDA's runtime in this thread. TVM raises such an error and leaves it there; torch would
    raise it again, behind its next launch."""
    ctypes.CDLL(CUDA_RUNTIME).cudaGetLastError()
