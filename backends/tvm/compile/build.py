"""The builder: from the graphs of stages to one shared library each, through a cache of kernels and libraries keyed by
content.

In: graphs, a target. Out: relocatable .so files that the loader needs nothing else for.

    library   key: text of the graphs (without places), target, sources and tools (fingerprint.py). A hit needs no
              planning and no TVM.
    kernel    key: text of the group under neutral names (group.py), target, sources and tools. So equal kernels are
              compiled once, be they of another layer, stage or model. A refusal to make one kernel of a group is
              remembered like a kernel.

Missing kernels are compiled by a pool of processes (pool.py), those of all stages together; then each stage is linked
from kernel objects and its Relax code. `compile_kernel` in jobs.py is the one function that makes a kernel for a
target.

The same inputs give the same bytes: kernels are named after their content, and the link is done with no build id, path
or time in it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import msgspec

from penstock.backends.interface import DEFAULTS, CompileOptions
from penstock.backends.tvm.fingerprint import key_of
from penstock.backends.tvm.group import (
    BEGIN,
    Fusion,
    GeneratedKernel,
    NotOneKernel,
    Renamed,
    collective_kernel,
    module_text,
    name_of,
    parameters_of,
    rename,
)
from penstock.backends.tvm.lower.plan import Lowered, plan_graphs
from penstock.backends.tvm.messages import (
    GroupRefused,
    Job,
    KernelMade,
    KernelStep,
    LinkStage,
    MakeKernel,
    Named,
    NameTarget,
    title,
)
from penstock.backends.tvm.tile_permission import allow_tiles
from penstock.ir.graph import Graph
from penstock.ir.text import print_graph
from penstock.support.atomic_files import naming
from penstock.support.cache import Cache
from penstock.support.processor import processor

from .pool import BuildError, WorkerPool
from .sources import Texts, calls_of

# The part of the user's cache that compiled code is kept in.
CACHE_PART = "tvm"
# Kernels to expect where nothing is in the cache: enough for a second worker to start at once.
_FIRST_TIME = 4
# Digits of the hash in a kernel's name: enough that no two kernels ever share one.
_DIGITS = 32
# The linkers that TVM looks for, in this order; CXX and CC come first.
_LINKERS = ("g++", "gcc", "clang++", "clang", "c++", "cc")
_ENTRY = msgspec.json.Decoder(KernelMade | GroupRefused)


@dataclass(frozen=True)
class LibraryPart:
    """The graphs of one library, and its file."""

    graphs: tuple[Graph, ...]
    out: Path

    @property
    def stage(self) -> str:
        return self.out.name.partition(".")[0]

    @property
    def where(self) -> str:
        return ", ".join(graph.name for graph in self.graphs)


@dataclass(frozen=True)
class MissingPart:
    """A part of which something is missing: its library, its sources for a viewer, or both."""

    part: LibraryPart
    key: str
    library: bool
    sources: bool


@dataclass(frozen=True)
class Built:
    """A library, and whether it comes from the cache."""

    path: Path
    sha256: str
    cached: bool


@dataclass
class Counts:
    """The work of a build, for reports and benchmarks: distinct kernels, and wall seconds spent on kernels and on
    linking."""

    kernels: int = 0
    compiled: int = 0
    kernels_s: float = 0.0
    link_s: float = 0.0


class LibraryBuilder:
    """A builder of libraries for one target: `with LibraryBuilder(options) as builder: builder.build(parts)`."""

    def __init__(self, options: CompileOptions) -> None:
        self.options, self.store, self.counts = options, Cache.of_user(CACHE_PART), Counts()
        self._texts = Texts(self.store) if options.viewer is not None else None
        self._pool = WorkerPool(options.jobs)
        self._report = options.progress or (lambda done, total, what: None)
        self._kernels: dict[str, KernelMade | GroupRefused] = {}
        self._objects: dict[str, Path] = {}
        self._done = self._total = 0
        self._cpu = ""

    def __enter__(self) -> LibraryBuilder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.close()

    @property
    def cpu(self) -> str:
        """LLVM's name of the target. Finding it costs a load of TVM, so the cache keeps it. The key has the processor's
        description, and whether this process may use its tile registers."""
        if not self._cpu:
            target = self.options.target
            mark = processor() if target == "host" else "named"
            key = key_of("target", target, mark, str(allow_tiles()))
            entry = self.store.get(key) if mark else None
            if entry is None:
                # With these sources nothing was ever compiled on this machine, so many kernels follow.
                (answer,) = self._pool.run([NameTarget(target)], expected=_FIRST_TIME)
                assert isinstance(answer, Named)
                entry = answer.cpu.encode()
                if mark:
                    self.store.put(key, entry)
            self._cpu = entry.decode()
        return self._cpu

    def build(self, parts: Sequence[LibraryPart]) -> list[Built]:
        """Build all libraries."""
        keys = [key_of("library", self.cpu, *texts_of(part.graphs)) for part in parts]
        for part in parts:
            part.out.parent.mkdir(parents=True, exist_ok=True)
        libraries = [self._find(part, key) for part, key in zip(parts, keys, strict=True)]
        missing = [i for i, library in enumerate(libraries) if library is None]
        unshown = [i for i, (part, key) in enumerate(zip(parts, keys, strict=True)) if not self._show_kept(part, key)]
        self._done, self._total = len(parts) - len(missing), len(parts)
        if incomplete := sorted({*missing, *unshown}):
            _check_linker()
            self._report(
                self._done, self._total, f"planning kernels of {', '.join(parts[i].where for i in incomplete)}"
            )
            with tempfile.TemporaryDirectory(prefix="penstock-kernels-") as scratch, naming(scratch):
                self._compile(
                    [MissingPart(parts[i], keys[i], i in missing, i in unshown) for i in incomplete], Path(scratch)
                )
            for i in missing:
                content = parts[i].out.read_bytes()
                self.store.put(keys[i], content)
                libraries[i] = Built(parts[i].out, hashlib.sha256(content).hexdigest(), False)
            self.store.trim()
        self._report(self._total, self._total, self._summary(len(parts), len(missing)))
        return [library for library in libraries if library is not None]

    def _find(self, part: LibraryPart, key: str) -> Built | None:
        """Write the library from the cache, if it is there."""
        content = self.store.get(key)
        if content is None:
            return None
        with naming(part.out):
            part.out.write_bytes(content)
        return Built(part.out, hashlib.sha256(content).hexdigest(), True)

    def _summary(self, parts: int, missing: int) -> str:
        from_cache = f"found {parts - missing} in the cache" if missing < parts else ""
        compiled = (
            f"made {missing}, compiled {self.counts.compiled} of {self.counts.kernels} kernels" if missing else ""
        )
        return self.store.told(f"libraries: {'; '.join(filter(None, [from_cache, compiled]))}")

    # ------------------------------------------------------------------------------ kernels

    def _compile(self, wanted: Sequence[MissingPart], scratch: Path) -> None:
        with self.options.step("kernels") as remarks:
            lowered = iter(
                plan_graphs(
                    [graph for missing in wanted for graph in missing.part.graphs],
                    lambda groups: self._make(groups, scratch),
                )
            )
            plans = [[next(lowered) for _ in missing.part.graphs] for missing in wanted]
            remarks.append(f"compiled {self.counts.compiled} of {self.counts.kernels} kernels")
        with self.options.step("link") as remarks:
            remarks += [missing.part.out.name for missing in wanted if missing.library]
            begin = time.perf_counter()
            jobs = [self._link_job(missing, plan, scratch) for missing, plan in zip(wanted, plans, strict=True)]
            try:
                self._pool.run(jobs, self._count)
            finally:
                for missing, plan, job in zip(wanted, plans, jobs, strict=True):
                    if job.source and Path(job.source).exists():
                        self._show(missing, plan, Path(job.source).read_text(encoding="utf-8"))
            self.counts.link_s += time.perf_counter() - begin

    def _make(self, groups: Sequence[Fusion], scratch: Path) -> list[tuple[str, GeneratedKernel] | NotOneKernel]:
        """Return the kernels of groups: from the cache, or compiled by the pool. Collectives are calls without code."""
        outcomes: list[tuple[str, GeneratedKernel] | NotOneKernel | None] = []
        for group in groups:
            try:
                call = collective_kernel(group)
            except NotOneKernel as refusal:
                outcomes.append(refusal)
            else:
                outcomes.append(None if call is None else (BEGIN, call))
        coded = [group for group, outcome in zip(groups, outcomes, strict=True) if outcome is None]
        kernels = iter(self._make_own(coded, scratch) if coded else [])
        return [next(kernels) if outcome is None else outcome for outcome in outcomes]

    def _make_own(self, groups: Sequence[Fusion], scratch: Path) -> list[tuple[str, GeneratedKernel] | NotOneKernel]:
        """Return the kernels of groups that need code of their own."""
        begin = time.perf_counter()
        renamed = [rename(group) for group in groups]
        symbols = [
            f"{name_of(group)}_{key_of('kernel', self.cpu, r.text)[:_DIGITS]}"
            for group, r in zip(groups, renamed, strict=True)
        ]
        to_compile: dict[str, MakeKernel] = {}
        for symbol, group in zip(symbols, renamed, strict=True):
            if symbol in self._kernels or symbol in to_compile:
                continue
            path = "" if self._recall(symbol, scratch) else str(scratch / f"{symbol}.o")
            source = "" if self._has_text(symbol) else str(scratch / f"{symbol}.py")
            if path or source:
                to_compile[symbol] = MakeKernel(group.text, self.cpu, symbol, path, source)
        # The longest first, or one core waits for the other at the end.
        jobs = sorted(to_compile.values(), key=_effort)
        self._total += len(jobs)
        for job, answer in zip(jobs, self._pool.run(jobs, self._count), strict=True):
            assert isinstance(answer, KernelMade | GroupRefused)
            self._remember(job, answer)
        self.counts.kernels, self.counts.compiled = (
            len(self._kernels),
            self.counts.compiled + sum(bool(job.path) for job in jobs),
        )
        self.counts.kernels_s += time.perf_counter() - begin
        return [self._outcome(symbol, group) for symbol, group in zip(symbols, renamed, strict=True)]

    def _count(self, job: Job) -> None:
        self._done += 1
        # The last line is the summary.
        if self._done < self._total:
            self._report(self._done, self._total, title(job))

    def _recall(self, symbol: str, scratch: Path) -> bool:
        content = self.store.get(symbol)
        if content is None:
            return False
        head, _, code = content.partition(b"\n")
        self._kernels[symbol] = _ENTRY.decode(head)
        self._objects[symbol] = scratch / f"{symbol}.o"
        self._objects[symbol].write_bytes(code)
        return True

    def _has_text(self, symbol: str) -> bool:
        """Return whether the text of a kernel is there, or is not needed. A refused kernel has none."""
        return self._texts is None or isinstance(self._kernels.get(symbol), GroupRefused) or self._texts.has(symbol)

    def _remember(self, job: MakeKernel, answer: KernelMade | GroupRefused) -> None:
        if job.source and isinstance(answer, KernelMade):
            assert self._texts is not None
            self._texts.keep(job.symbol, Path(job.source).read_text(encoding="utf-8"))
        if not job.path:
            return
        code = b""
        if isinstance(answer, KernelMade):
            self._objects[job.symbol] = Path(job.path)
            code = Path(job.path).read_bytes()
        self._kernels[job.symbol] = answer
        self.store.put(job.symbol, msgspec.json.encode(answer) + b"\n" + code)

    def _outcome(self, symbol: str, group: Renamed) -> tuple[str, GeneratedKernel] | NotOneKernel:
        answer = self._kernels[symbol]
        if isinstance(answer, GroupRefused):
            return NotOneKernel(answer.reason)
        return symbol, group.kernel(answer.parameters)

    # ------------------------------------------------------------------------------ libraries

    def _link_job(self, wanted: MissingPart, plans: Sequence[Lowered], scratch: Path) -> LinkStage:
        calls = tuple(tuple(KernelStep(step.name, parameters_of(step.kernel)) for step in plan.steps) for plan in plans)
        used = dict.fromkeys(step.name for plan in plans for step in plan.steps if step.name != BEGIN)
        objects = tuple((symbol, str(self._objects[symbol])) for symbol in used)
        library = str(wanted.part.out) if wanted.library else ""
        source = str(scratch / f"{wanted.part.out.stem}.relax.py") if wanted.sources else ""
        return LinkStage(module_text([plan.graph for plan in plans]), calls, objects, self.cpu, library, source)

    # ------------------------------------------------------------------------------ sources

    def _show_kept(self, part: LibraryPart, key: str) -> bool:
        """Show the viewer, if there is one, what the cache has; return whether nothing is missing."""
        sources = self._texts.find(key) if self._texts is not None else None
        if sources is not None and self.options.viewer is not None:
            self.options.viewer.sources(part.stage, sources)
        return self._texts is None or sources is not None

    def _show(self, wanted: MissingPart, plans: Sequence[Lowered], functions: str) -> None:
        assert self._texts is not None
        assert self.options.viewer is not None
        self.options.viewer.sources(
            wanted.part.stage, self._texts.keep_library(wanted.key, self.cpu, calls_of(plans), functions)
        )


def _check_linker() -> None:
    """Raise the error for a missing linker before the work, not after it."""
    if not (os.environ.get("CXX") or os.environ.get("CC") or any(map(shutil.which, _LINKERS))):
        raise BuildError(
            "there is no C++ compiler on the PATH to link stages with", hint="install g++, or name one in CXX"
        )


def _effort(job: MakeKernel) -> tuple[bool, int]:
    """Guess what a kernel takes to compile, for sorting: those with loops of their own first, then by length."""
    heavy = any(f" {kind}" in job.group for kind in ("matmul(", "conv", "attention"))
    return (not heavy, -len(job.group))


def texts_of(graphs: Sequence[Graph]) -> list[str]:
    """Return the text that the code of graphs depends on; the places that operations came from do not change it."""
    return [print_graph(replace(graph, ops=tuple(replace(op, loc="") for op in graph.ops))) for graph in graphs]


def build_graphs(graphs: Sequence[Graph], out: Path, options: CompileOptions = DEFAULTS) -> Built:
    """Compile graphs into the library `out`."""
    with LibraryBuilder(options) as builder:
        (built,) = builder.build([LibraryPart(tuple(graphs), out)])
    return built
