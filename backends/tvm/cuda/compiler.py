"""The process that makes device code: `python -m penstock.backends.tvm.cuda.compiler FOLDER ARCHITECTURE`.

In: FOLDER/module.json, a lowered module. Out: FOLDER/stage.so, and for readers FOLDER/kernels.cu and what the assembler
says of it, FOLDER/ptxas.txt; or FOLDER/failure.json with the error.

TVM compiles kernels to machine code only if its CUDA runtime can be loaded, which is linked with libcuda.so.1, the
driver's library. Nothing of it is called while compiling. Where it is missing, a stand-in with the same symbols, each
answering "no device", is made and loaded in this process; it never leaves FOLDER. Source, options and result of nvcc
pass through a callback of this process, so that no environment decides.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
from pathlib import Path

from .resources import loosened, read_assembled
from .target import cuda_target

# The symbols that libtvm_runtime_cuda.so takes from the driver's library.
DRIVER_SYMBOLS = (
    "cuDeviceGetName",
    "cuFuncSetAttribute",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuLaunchKernelEx",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuTensorMapEncodeTiled",
)
# CUDA_ERROR_NO_DEVICE
_NO_DEVICE = 100


class CompilerFailure(Exception):
    """A failure of the compiler, for the user, with a hint."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.what, self.hint = what, hint


def _run(command: list[str], folder: Path, what: str, hint: str) -> str:
    """Run a command; return what it said on stderr."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise CompilerFailure(f"{what}: {command[0]} is not on the PATH", hint) from error
    if done.returncode != 0:
        raise CompilerFailure(f"{what}: {(done.stderr or done.stdout).strip()[-2000:]}", hint)
    return done.stderr


def load_driver(folder: Path) -> None:
    """Load the driver's library, or a stand-in."""
    try:
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        return
    except OSError:
        pass
    source = "".join(f"int {symbol}(void) {{ return {_NO_DEVICE}; }}\n" for symbol in DRIVER_SYMBOLS)
    (folder / "driver.c").write_text(source)
    command = ["g++", "-x", "c", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", "driver.c"]
    _run(
        command,
        folder,
        "cannot make a stand-in for libcuda.so.1",
        "g++ must be on the PATH of the machine that compiles",
    )
    ctypes.CDLL(str(folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)


def load_runtime() -> None:
    """Load CUDA's runtime library from where the toolkit, or a wheel, has put it."""
    name = "libcudart.so.13"
    candidates = [Path(name)]
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        # nvcc on the PATH may be a script that starts the real one.
        root = subprocess.run(
            [nvcc, "--dryrun", "-c", "-x", "cu", "/dev/null"], capture_output=True, text=True, check=False
        ).stderr
        tops = [line.partition("TOP=")[2].strip() for line in root.splitlines() if "TOP=" in line]
        candidates += [
            Path(top) / folder / name for top in tops for folder in ("lib64", "lib", "targets/x86_64-linux/lib")
        ]
    candidates += [Path(entry) / "nvidia" / "cu13" / "lib" / name for entry in sys.path]
    for path in candidates:
        try:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            return
        except OSError:
            continue
    raise CompilerFailure(
        f"{name} was not found", "it is part of the CUDA toolkit, version 13; TVM's CUDA runtime is linked with it"
    )


def _assembled(source: str, folder: Path, architecture: str) -> bytes:
    """Return the machine code of a source. Kernels that spill get other bounds, and all is compiled again."""
    number = architecture.removeprefix("sm_")
    options = ["--cubin", "-O3", "-w", "-Xptxas", "-v", "-gencode", f"arch=compute_{number},code=sm_{number}"]
    command = ["nvcc", *options, "-o", "kernels.cubin", "kernels.cu"]
    while True:
        (folder / "kernels.cu").write_text(source)
        said = _run(command, folder, "nvcc failed", "`--dump-ir` keeps the source")
        spilling = {kernel.name for kernel in read_assembled(said) if kernel.spilled}
        looser = loosened(source, spilling)
        if looser == source:
            break
        source = looser
    # How long the assembler took is another number every time.
    lines = [line for line in said.splitlines(keepends=True) if "Compile time" not in line]
    (folder / "ptxas.txt").write_text("".join(lines))
    return (folder / "kernels.cubin").read_bytes()


def compile_module(folder: Path, architecture: str) -> None:
    """Build stage.so from module.json."""
    load_driver(folder)
    load_runtime()
    import tvm  # lazy: heavy
    import tvm_ffi  # lazy: heavy
    from tvm.base import _LOADED_LIBS  # lazy: heavy

    if "tvm_runtime_cuda" not in _LOADED_LIBS:
        raise CompilerFailure(
            "TVM's libtvm_runtime_cuda.so is missing or cannot be loaded",
            "install the pinned apache-tvm wheel for x86-64 Linux",
        )
    from .pipeline import PIPELINE  # lazy: heavy

    def compile_source(source: str) -> bytearray:
        return bytearray(_assembled(source, folder, architecture))

    tvm_ffi.register_global_func("tvm_callback_cuda_compile", compile_source, override=True)
    module = tvm.ir.load_json((folder / "module.json").read_text())
    target = cuda_target(architecture)
    with target:
        executable = tvm.compile(module, target=target, relax_pipeline="default_build", tir_pipeline=PIPELINE)
    executable.export_library(str(folder / "stage.so"), workspace_dir=str(folder), options=["-Wl,--build-id=none"])


def main(folder: Path, architecture: str) -> int:
    """Compile the module in a folder; return the exit code."""
    try:
        compile_module(folder, architecture)
    except CompilerFailure as error:
        failure = {"what": error.what, "hint": error.hint}
    except RuntimeError as error:
        # An error of the callback comes back through TVM, which keeps its text only.
        failure = {
            "what": f"TVM could not compile the stage: {str(error).strip()[-2000:]}",
            "hint": "`--dump-ir` shows the kernels",
        }
    else:
        return 0
    (folder / "failure.json").write_text(json.dumps(failure))
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
