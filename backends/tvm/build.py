"""From the graphs of a stage to one shared library, through a cache keyed by content.

In: the stage's graphs, a target. Out: a relocatable .so that the loader needs nothing else for. The cache key is the sha256 of the graphs'
text, the target, the versions of TVM and LLVM, and the source of this back end, so that a hit needs no lowering and a change of a
kernel generator is never missed. An entry holds the library and the hash of its bytes, is written under a temporary name and renamed, so
that readers never see half of it, and is rebuilt when the hash does not fit. Folder: $PENSTOCK_CACHE, else $XDG_CACHE_HOME/penstock, else
~/.cache/penstock; PENSTOCK_CACHE=off turns it off.

The same inputs give the same bytes: names come from the graphs, and the link is done with no build id, path or time in it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import tvm
from tvm.target import codegen

from penstock.ir.errors import PenstockError
from penstock.ir.graph import Graph
from penstock.ir.text import print_graph

from ..interface import Progress
from .lower import Lowered, lower_graphs
from .pipeline import PIPELINE
from .target import Machine, machine_of, tvm_target

# TVM builds Relax functions on one stack for the whole process: stages may be linked side by side, but not lowered.
ONE_AT_A_TIME = threading.Lock()


class BuildError(PenstockError):
    """The compiler or the linker failed on a stage."""


@dataclass(frozen=True)
class Built:
    """What a build gave, and where the time went."""

    path: Path
    sha256: str
    cached: bool
    seconds: float


def cache_folder() -> Path | None:
    """Where compiled stages are kept; None when the cache is off."""
    chosen = os.environ.get("PENSTOCK_CACHE")
    if chosen == "off":
        return None
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "penstock"


def content_key(graphs: Sequence[Graph], machine: Machine, compiler: str = "") -> str:
    """The name of a stage's library in the cache. `compiler` is that of the device, where another one than LLVM makes its code."""
    digest = hashlib.sha256(source_fingerprint())
    target = f"cuda {machine.name} {compiler}" if machine.is_device else str(tvm_target(machine.name))
    versions = (tvm.__version__, str(codegen.llvm_version_major()), target)
    texts = ("\n".join(print_graph(_without_locations(graph))) for graph in graphs)
    for part in (*versions, *texts):
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()


def _without_locations(graph: Graph) -> Graph:
    """Where an operation came from does not change the code."""
    return replace(graph, ops=tuple(replace(op, loc="") for op in graph.ops))


@cache
def source_fingerprint() -> bytes:
    """A hash over the source files that turn graphs into code."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.relative_to(Path(__file__).parent).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.digest()


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Cache:
    """Libraries by key. An entry is KEY.so beside KEY.sha256."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder / "tvm" if folder is not None else None

    def fetch(self, key: str, to: Path) -> bool:
        """Copy an entry; False when there is none or its bytes are not what was stored."""
        if self.folder is None:
            return False
        entry, digest = self.folder / f"{key}.so", self.folder / f"{key}.sha256"
        try:
            expected = digest.read_text().strip()
            _publish(entry, to)
        except FileNotFoundError:
            return False
        if sha256_of(to) == expected:
            return True
        to.unlink()
        return False

    def keep(self, key: str, library: Path) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        _publish(library, self.folder / f"{key}.so")
        with tempfile.NamedTemporaryFile("w", dir=self.folder, suffix=".part", delete=False) as file:
            file.write(sha256_of(library) + "\n")
        Path(file.name).replace(self.folder / f"{key}.sha256")


def _publish(source: Path, target: Path) -> None:
    """Copy a file so that it appears under its name only when it is whole."""
    with source.open("rb") as bytes_in, tempfile.NamedTemporaryFile(dir=target.parent, suffix=".part", delete=False) as file:
        try:
            shutil.copyfileobj(bytes_in, file)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    Path(file.name).replace(target)


def dump_kernels(folder: Path, module: Any, lowered: Sequence[Lowered], name: str) -> None:
    """Relax text and the source of every kernel, for people."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.relax.py").write_text(module.script() + "\n")
    lines = []
    for plan in lowered:
        lines.append(f"{plan.graph.name}: {len(plan.steps)} kernels")
        lines += [f"  {step.name}: {', '.join(op.kind for op in step.group.ops)}" for step in plan.steps]
    (folder / f"{name}.kernels.txt").write_text("\n".join(lines) + "\n")


def build_graphs(
    graphs: Sequence[Graph],
    out: Path,
    *,
    target: str = "host",
    progress: Progress | None = None,
    dump_dir: Path | None = None,
) -> Built:
    """Compile graphs into the library `out`."""
    started = time.monotonic()
    machine = machine_of(target)
    where = ", ".join(g.name for g in graphs)
    report = progress or (lambda done, total, what: None)
    out.parent.mkdir(parents=True, exist_ok=True)
    report(0, 3, f"lowering {where}")
    key, libraries = content_key(graphs, machine), Cache(cache_folder())
    cached = libraries.fetch(key, out)
    if not cached or dump_dir is not None:
        with ONE_AT_A_TIME:
            module, lowered = lower_graphs(graphs, machine)
            if dump_dir is not None:
                dump_kernels(dump_dir, module, lowered, out.stem)
            if not cached:
                count = sum(isinstance(f, tvm.tirx.PrimFunc) for _, f in module.functions_items())
                report(1, 3, f"compiling {count} kernels of {where}")
                executable = _compile(module, machine, where)
        if not cached:
            report(2, 3, f"linking {where}")
            _link(executable, out, where)
            libraries.keep(key, out)
    report(3, 3, f"{'found' if cached else 'compiled'} {where}")
    return Built(out, sha256_of(out), cached, time.monotonic() - started)


def _compile(module: Any, machine: Machine, where: str) -> Any:
    try:
        return tvm.compile(module, target=tvm_target(machine.name), relax_pipeline="default_build", tir_pipeline=PIPELINE)
    except RuntimeError as error:
        raise _failed(error, where) from error


def _link(executable: Any, out: Path, where: str) -> None:
    try:
        with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
            part = Path(scratch) / "stage.so"
            executable.export_library(str(part), workspace_dir=scratch, options=["-Wl,--build-id=none"])
            part.replace(out)
    except RuntimeError as error:
        raise _failed(error, where) from error


def _failed(error: RuntimeError, where: str) -> BuildError:
    last = str(error).strip().splitlines()[-1]
    return BuildError(
        f"TVM could not compile the stage: {last}", where=where, hint="g++ must be on the PATH; `--dump-ir` shows the kernels"
    )
