"""The libraries of straw, built and loaded.

In: a folder. Out: libcudart.so.13 and libcuda.so.1 in it, and an nvcc; the variables of an environment in which TVM's CUDA runtime, and the compiler of
stages, get these and no others.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
RUNTIME, DRIVER = "libcudart.so.13", "libcuda.so.1"
# The wheel of TVM asks for this version of every function of the runtime.
_VERSIONS = f"{RUNTIME} {{ global: cuda*; straw_*; local: *; }};\n"


def build(folder: Path) -> None:
    """Build both libraries, and write a program `nvcc`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "versions").write_text(_VERSIONS)
    flags = ["g++", "-O1", "-std=c++17", "-Wall", "-Werror", "-shared", "-fPIC", str(HERE / "driver.cpp")]
    runtime = [f"-Wl,-soname,{RUNTIME}", "-Wl,--version-script,versions", "-o", RUNTIME]
    driver = ["-DSTRAW_DRIVER", f"-Wl,-soname,{DRIVER}", "-o", DRIVER, "-L.", f"-l:{RUNTIME}", "-Wl,-rpath,$ORIGIN"]
    for options in (runtime, driver):
        subprocess.run([*flags, *options], cwd=folder, check=True, timeout=120)
    (folder / "bin").mkdir(exist_ok=True)
    nvcc = folder / "bin" / "nvcc"
    program = shlex.join([sys.executable, "-m", "gpu.straw.nvcc"])
    nvcc.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(TESTS))} exec {program} "$@"\n')
    nvcc.chmod(0o755)


def environment(folder: Path, devices: int = 1) -> dict[str, str]:
    """Return the variables of processes that use the libraries in a folder."""
    return {
        **os.environ,
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": f"{HERE / 'site'}{os.pathsep}{TESTS}",
        "STRAW": str(folder),
        "STRAW_DEVICES": str(devices),
        "OMP_NUM_THREADS": "1",
    }


def load(folder: Path) -> ctypes.CDLL:
    """Load both libraries, and return the first, which has the functions of the report."""
    runtime = ctypes.CDLL(str(folder / RUNTIME), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(folder / DRIVER), mode=ctypes.RTLD_GLOBAL)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    runtime.straw_allocate.argtypes = [pointer, size, ctypes.c_int]
    runtime.straw_free_later.argtypes = [pointer, pointer, ctypes.c_int]
    runtime.straw_is_pinned.argtypes = [pointer]
    runtime.straw_report.argtypes = [ctypes.c_char_p, size, ctypes.c_int]
    runtime.straw_report.restype = size
    runtime.cudaHostRegister.argtypes = [pointer, size, ctypes.c_uint]
    runtime.cudaHostUnregister.argtypes = [pointer]
    runtime.cudaMemcpyAsync.argtypes = [pointer, pointer, size, ctypes.c_int, pointer]
    for name in ("cudaStreamSynchronize", "cudaEventDestroy", "cudaEventSynchronize", "cudaEventQuery"):
        getattr(runtime, name).argtypes = [pointer]
    runtime.cudaEventElapsedTime.argtypes = [pointer, pointer, pointer]
    runtime.cudaEventRecord.argtypes = [pointer, pointer]
    runtime.cudaStreamWaitEvent.argtypes = [pointer, pointer, ctypes.c_uint]
    runtime.cudaStreamBeginCapture.argtypes = [pointer, ctypes.c_int]
    runtime.cudaStreamEndCapture.argtypes = [pointer, pointer]
    runtime.cudaGraphInstantiate.argtypes = [pointer, pointer, ctypes.c_ulonglong]
    runtime.cudaGraphLaunch.argtypes = [pointer, pointer]
    for name in ("cudaGraphDestroy", "cudaGraphExecDestroy"):
        getattr(runtime, name).argtypes = [pointer]
    runtime.cudaFree.argtypes = [pointer]
    runtime.cudaFreeHost.argtypes = [pointer]
    runtime.cudaMalloc.argtypes = [pointer, size]
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    return runtime


def report(runtime: ctypes.CDLL, blocks: bool = False) -> list[str]:
    """Return what was wrong, a line each; with `blocks` also what is still allocated."""
    size = runtime.straw_report(None, 0, blocks) + 1
    text = ctypes.create_string_buffer(size)
    runtime.straw_report(text, size, blocks)
    return text.value.decode().splitlines()
