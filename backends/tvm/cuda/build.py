"""The builder for GPUs: from the graphs of a stage to a shared library with machine code for one architecture, on a
machine that needs no GPU.

In: stage graphs, an architecture. Out: a .so with the host part and the device code (a cubin: no source, no PTX).
Lowering happens in this process; nvcc and the linker run in one of their own (compiler.py). TVM makes device code only
where it can load its CUDA runtime, which needs libcuda.so.1. Where there is no driver, that process gets a stand-in for
it, which no other code may see.

Cached by content like code for CPUs; the version of nvcc is part of the key.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec
import tvm

from penstock.backends.interface import CompileOptions, StageSources
from penstock.backends.tvm.compile.build import CACHE_PART, Built, texts_of
from penstock.backends.tvm.compile.jobs import ONE_AT_A_TIME
from penstock.backends.tvm.compile.pool import BuildError
from penstock.backends.tvm.compile.sources import calls_of
from penstock.backends.tvm.fingerprint import key_of
from penstock.backends.tvm.lower.lower import functions_text, kernel_texts, plan_kernels, relax_module
from penstock.backends.tvm.processes import environment
from penstock.ir.graph import Graph
from penstock.support.cache import Cache
from penstock.support.entry_points import command_line
from penstock.support.errors import UsageError

from .target import device_machine

# A stage of a large model has hundreds of kernels, and nvcc takes up to seconds for each.
_LONGEST = 3600.0


@cache
def nvcc_version() -> str:
    """Return the version line of nvcc."""
    return _ask_nvcc("--version").strip().splitlines()[-1]


@cache
def known_architectures() -> tuple[str, ...]:
    """Return the architectures that nvcc makes machine code for."""
    return tuple(re.findall(r"sm_\w+", _ask_nvcc("--list-gpu-code")))


def _ask_nvcc(option: str) -> str:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise UsageError(
            "stages on CUDA devices are compiled with nvcc, which is not on the PATH",
            hint="install the CUDA toolkit (13.0) on the machine that compiles; "
            "the machine that runs needs only the driver",
        )
    try:
        return subprocess.run([nvcc, option], capture_output=True, text=True, check=True, timeout=60).stdout
    except (subprocess.SubprocessError, OSError) as error:
        raise UsageError(f"nvcc does not run: {error}", where=nvcc) from error


def check_architecture(name: str) -> None:
    """Raise a UsageError when this machine cannot make code for an architecture."""
    device_machine(name)
    if name not in known_architectures():
        raise UsageError(
            f"nvcc makes no code for {name!r}",
            where=nvcc_version(),
            hint=f"it knows {', '.join(known_architectures())}",
        )


def build_graphs(graphs: Sequence[Graph], out: Path, options: CompileOptions) -> Built:
    """Compile graphs into the library `out`, for a GPU."""
    target, viewer = options.target, options.viewer
    check_architecture(target)
    where = ", ".join(g.name for g in graphs)
    report = options.progress or (lambda done, total, what: None)
    out.parent.mkdir(parents=True, exist_ok=True)
    report(0, 3, f"lowering {where}")
    key, libraries = key_of("library", target, nvcc_version(), *texts_of(graphs)), Cache.of_user(CACHE_PART)
    content = libraries.get(key)
    sources = _kept_sources(libraries, key) if viewer is not None else None
    cached = content is not None and (viewer is None or sources is not None)
    if content is None or not cached:
        with options.step("kernels") as remarks, ONE_AT_A_TIME:
            called: list[str] = []
            lowered = [plan_kernels(graph, device_machine(target)) for graph in graphs]
            module = relax_module(lowered, declared=False, called=called)
            kernels = kernel_texts(module) if viewer is not None else {}
            count = sum(isinstance(f, tvm.tirx.PrimFunc) for _, f in module.functions_items())
            remarks.append(f"{count} kernels of {where}")
        report(1, 3, f"compiling {count} kernels of {where} for {target} with nvcc")
        device = {"kernels.cu": "", "ptxas.txt": ""}
        try:
            with options.step("nvcc") as remarks:
                remarks.append(out.name)
                compile_apart(tvm.ir.save_json(module), target, out, where, device)
        finally:
            if viewer is not None:
                # Code that nvcc refuses is shown, too.
                sources = StageSources(
                    target, calls_of(lowered, called), kernels, functions_text(module), *device.values()
                )
                viewer.sources(out.name.partition(".")[0], sources)
        content = out.read_bytes()
        libraries.put(key, content)
        if sources is not None:
            libraries.put(key_of("sources", key), msgspec.json.encode(sources))
        libraries.trim()
    else:
        out.write_bytes(content)
        if sources is not None and viewer is not None:
            viewer.sources(out.name.partition(".")[0], sources)
    report(3, 3, libraries.told(f"{'found' if cached else 'compiled'} {where}"))
    return Built(out, hashlib.sha256(content).hexdigest(), cached)


def _kept_sources(libraries: Cache, key: str) -> StageSources | None:
    entry = libraries.get(key_of("sources", key))
    return None if entry is None else msgspec.json.decode(entry, type=StageSources)


def compile_apart(module: str, target: str, out: Path, where: str, texts: dict[str, str] | None = None) -> None:
    """Compile a lowered module, given as TVM's JSON, in a process of its own. The files for readers that `texts` names
    are put there, as far as the process has made them."""
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".cuda-") as scratch:
        work = Path(scratch)
        (work / "module.json").write_text(module)
        command = [*command_line("compile for cuda"), str(work), target]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_LONGEST, check=False, env=environment()
            )
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"nvcc did not finish within {_LONGEST:g} s", where=where) from error
        for name in texts or ():
            if (work / name).exists():
                assert texts is not None
                texts[name] = (work / name).read_text(encoding="utf-8")
        failure = work / "failure.json"
        if failure.exists():
            raise BuildError(**json.loads(failure.read_text()), where=where)
        if done.returncode != 0:
            raise BuildError(
                f"the compiler for {target} ended with {done.returncode}: {done.stderr.strip()[-2000:]}", where=where
            )
        (work / "stage.so").replace(out)
