"""The interface every back end implements: compile the graphs of stages into files, load those of one stage into a callable program.

In: a scheduled module and stage numbers. Out of `compile_stages`: for each stage its files in a folder, named relative to it, so that a
bundle can be moved. All stages are given at once, so that a back end can compile what they have in common once, and use all cores. Out of
`load_stage`: a StageProgram, whose `call` follows the convention of `penstock.ir.graph.signature`: positional arguments are the graph's
inputs, then one tensor per slot in order of first use; results are its outputs, then the saved values. Slots are updated in place.

A slot's tensor may be passed twice (`latest` and `next` of a variable with one version); programs give the right result then too.
Programs are not re-entrant: one caller at a time for each StageProgram.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.ir.cluster.cluster import Device
from penstock.ir.graph import Graph, Module
from penstock.support.errors import UsageError

if TYPE_CHECKING:
    import torch

# done, total, what is being worked on
Progress = Callable[[int, int, str], None]

# The alignment, in bytes, that kernels for GPUs rely on for every tensor they are given, and that every buffer of a stage has.
ALIGNMENT = 64

BACKENDS = ("tvm", "numpy")


class Temporary(NamedTuple):
    """A block of memory that a call of a graph takes for itself, and the first and the last kernel that work in it."""

    nbytes: int
    first: str
    last: str


class StageProgram(Protocol):
    """The compiled graphs of one stage, ready to run in this process. All tensors are on `device`."""

    device: torch.device

    def call(self, graph: str, args: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...

    def watch(self, graph: str, args: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[Temporary] | None]:
        """`call`, and what memory it took beside its results, in the order of allocation; None where the
        back end cannot tell. Slower than a call."""

    def hold(self, graph: str, slots: Sequence[torch.Tensor]) -> None:
        """A promise: these tensors, one per slot of the graph, keep their values from now on. The program may keep what it makes of them.
        Calls with other tensors give the right result, too. For graphs that only read their variables."""


@dataclass(frozen=True)
class KernelCall:
    """A call of a kernel: the graph it stands in, the attribute `kernel` of its operations, the name of its source, and its operations,
    `%h = matmul` or `accum @w.grad`."""

    graph: str
    kernel: str
    source: str
    operations: tuple[str, ...]


@dataclass(frozen=True)
class StageSources:
    """The code of a stage for people: calls in order, sources of kernels by name, the functions that call them,
    and what a compiler for GPUs is given."""

    target: str
    calls: tuple[KernelCall, ...]
    kernels: Mapping[str, str]
    functions: str
    device: str = ""


class Viewer(Protocol):
    """Who wants to see what a back end makes, and what it does meanwhile."""

    def step(self, name: str) -> AbstractContextManager[list[str]]:
        """Something that takes time; what is put into the list was said of it."""

    def sources(self, stage: str, found: StageSources) -> None:
        """What was made of a stage, `s0`; as far as it came, where making it failed."""


@dataclass(frozen=True)
class CompileOptions:
    """How to compile. `target` names an instruction set (`host`, or a name the back end knows); `jobs` is the most processes to compile
    with, one per core if not given; `viewer` is shown what was made, which costs nothing where there is none."""

    target: str = "host"
    jobs: int | None = None
    progress: Progress | None = None
    viewer: Viewer | None = None

    def step(self, name: str) -> AbstractContextManager[list[str]]:
        return nullcontext([]) if self.viewer is None else self.viewer.step(name)


# What one gets without asking for anything.
DEFAULTS = CompileOptions()


class Backend(Protocol):
    """One way to compile and run stages."""

    name: str

    def compile_stages(
        self, module: Module, stages: Sequence[int], out_dir: Path, options: CompileOptions = DEFAULTS
    ) -> dict[int, tuple[str, ...]]: ...

    def check_host(self, module: Module, stage: int) -> None:
        """UsageError where this host lacks the device of a stage, which `load_stage` would say, too: for those who compile first."""

    def prepare(self) -> None:
        """Import what loading a stage takes, and touch no device: for a process that others are forked from."""

    def load_stage(
        self, module: Module, stage: int, files: Sequence[Path], threads: int = 1, device: str | None = None
    ) -> StageProgram:
        """The code of a stage, for one of its devices: the first if none is named."""


def backend_of(name: str) -> Backend:
    """The back end of that name, imported only now."""
    if name == "tvm":
        from .tvm_backend import TvmBackend

        return TvmBackend()
    if name == "numpy":
        from .numpy_backend import NumpyBackend

        return NumpyBackend()
    raise UsageError(f"unknown back end {name!r}", hint=f"one of {', '.join(BACKENDS)}")


def check_cache(name: str) -> None:
    """The settings of the cache, where a back end has one: now, because compiling reads them when much of the work is done."""
    if name == "tvm":
        from penstock.support.cache import cache_bound

        cache_bound()


def stage_graphs(module: Module, stage: int) -> tuple[Graph, ...]:
    """The graphs of a stage in module order: `s2.F`, `s2.B`, `s2.U`, those that exist."""
    prefix = f"s{stage}."
    return tuple(g for name, g in module.graphs.items() if name.startswith(prefix))


def device_of(module: Module, stage: int, name: str | None = None) -> Device | None:
    """The device of the cluster that a stage runs on, the first if it has several and none is named; None in a module without a cluster."""
    if module.cluster is None or stage not in (s.index for s in module.stages):
        return None
    return module.cluster.device(name or module.devices_of(stage)[0])


def target_of(module: Module, stage: int, processor: str) -> str:
    """What to compile a stage for: the architecture of its GPU, else `processor`."""
    device = device_of(module, stage)
    return device.target if device is not None and device.kind == "cuda" else processor
