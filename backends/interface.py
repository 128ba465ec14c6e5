"""The interface of a back end, which compiles the graphs of stages into files and loads those of one stage into a
program.

In: a scheduled module and stage numbers. Out of `compile_stages`: the files of each stage in a folder, named relative
to it, so that a bundle can be moved. All stages are compiled in one call, so that a back end can compile once what they
have in common, and use all cores. Out of `load_stage`: a StageProgram, whose `call` follows the convention of
`penstock.ir.graph.signature`. Positional arguments are the graph's inputs, then one tensor per slot in order of first
use; results are its outputs, then the saved values. Slots are updated in place.

A slot's tensor may be passed twice (`latest` and `next` of a variable with one version); programs give the right result
then too. Programs are not re-entrant: one caller at a time for each StageProgram.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.ir.action_kinds import UPDATE
from penstock.ir.cluster.cluster import Device
from penstock.ir.collective_calls import CollectiveCall
from penstock.ir.graph import Graph, Module, graph_kind
from penstock.ir.ladder.ladder import Ladder, Rung
from penstock.ir.memory.update_parts import update_parts
from penstock.support.errors import VerifyError

if TYPE_CHECKING:
    import numpy as np
    import torch

# A report of jobs done, jobs in total, and the job that is under way.
Progress = Callable[[int, int, str], None]

# The alignment in bytes that every buffer of a stage has, and that kernels for GPUs rely on for every tensor.
ALIGNMENT = 64


class Temporary(NamedTuple):
    """A block of memory that a call of a graph allocates for itself, and the first and the last kernel that work in
    it."""

    nbytes: int
    first: str
    last: str


class Exchange(Protocol):
    """The way in which the ranks of a stage do collectives together, handed over when a stage is loaded.

    A program begins a collective where it stands in its graph, and waits for it before the first kernel that reads its
    result. Between the two, `x` keeps its value, and `out` has none. A collective is begun again only after it
    was waited for. All ranks of a group begin their collectives in one order, and wait for them in one order.
    """

    def begin(self, call: CollectiveCall, x: torch.Tensor, out: torch.Tensor) -> None:
        """Begin a collective of the tensor `x`; its result goes into `out`. Both are contiguous."""

    def wait(self, call: CollectiveCall) -> None:
        """Return when the result is there; PeerLost where a rank of the group is gone or does not answer."""


class StageProgram(Protocol):
    """The compiled graphs of one stage, ready to run in this process. All tensors are on `device`."""

    device: torch.device

    def call(self, graph: str, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run a graph; slots among the arguments are updated in place."""

    def watch(self, graph: str, args: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[Temporary] | None]:
        """Run a graph, and give its results and the memory it took beside them, in the order of allocation; None where
        the back end cannot tell. Slower than a call."""

    def uncaptured(self) -> Mapping[str, str]:
        """Return why graphs are launched kernel by kernel on a device that can launch all of them at once, by graph."""

    def captured_bytes(self) -> int:
        """Return the bytes that calls keep which were captured, to be launched at once."""

    def hold(self, graph: str, slots: Sequence[torch.Tensor]) -> frozenset[int]:
        """Promise that these tensors, one per slot of the graph, keep their values from this call on. The program may
        keep what it derives from them. Calls with other tensors give the right result, too. For graphs that only read
        their variables. Returned are the places of slots that calls do not read from then on."""

    def unread(self, slots: Mapping[str, Sequence[str]]) -> set[str]:
        """Return the variables that calls do not read once these graphs are held. `slots` are names, for each graph."""

    def hold_all(self, slots: Mapping[str, Sequence[str]], tensor: Callable[[str], torch.Tensor]) -> Iterator[str]:
        """Hold several graphs. `tensor` is asked for variables when something is made of them. Yield each of `unread`
        as soon as it may be let go, so that a variable and what is made of it are never there for all of them."""

    def stand_in(self, graph: str, place: int) -> torch.Tensor:
        """Return a tensor without memory for a slot that calls of a held graph do not read: the tensor that was held
        may then be let go."""

    def bind(self, graph: str, slots: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
        """Return a graph as a function of its inputs alone, with these tensors as its slots. They are checked once, and
        must stay where they are. What `hold` derived from them is used. Any thread may call it, one at a time."""

    def bind_arrays(
        self, graph: str, slots: Sequence[torch.Tensor]
    ) -> Callable[[Sequence[np.ndarray]], list[np.ndarray]] | None:
        """Return what `bind` does as a function of arrays, which gives arrays. They must have the types of the graph's
        inputs, and be in C order, aligned, writable and not empty. None where arrays have to become tensors."""


@dataclass(frozen=True)
class KernelCall:
    """A call of a kernel: its graph, the attribute `kernel` of its operations, the name of its source, and its
    operations, `%h = matmul` or `accum @w.grad`."""

    graph: str
    kernel: str
    source: str
    operations: tuple[str, ...]


@dataclass(frozen=True)
class StageSources:
    """The readable code of a stage: calls in order, sources of kernels by name, the functions that call them; the input
    of a compiler for GPUs, and what its assembler says of each kernel."""

    target: str
    calls: tuple[KernelCall, ...]
    kernels: Mapping[str, str]
    functions: str
    device: str = ""
    assembled: str = ""


class Viewer(Protocol):
    """A watcher of a compile: it is shown the code that a back end makes, and the steps on the way."""

    def step(self, name: str) -> AbstractContextManager[list[str]]:
        """Watch a step that takes time; the back end puts remarks on it into the list."""

    def sources(self, stage: str, sources: StageSources, /) -> None:
        """Receive the code of a stage, `s0`; where making it failed, as far as it came."""


@dataclass(frozen=True)
class CompileOptions:
    """The options of a compile. `target` names an instruction set (`host`, or a name the back end knows). `jobs` is the
    most processes to compile with, one per core if not given. `viewer` is shown the code; without one that costs
    nothing. `with_runtime` adds what runs the code where the compiler is not installed."""

    target: str = "host"
    jobs: int | None = None
    progress: Progress | None = None
    viewer: Viewer | None = None
    with_runtime: bool = False

    def step(self, name: str) -> AbstractContextManager[list[str]]:
        """Announce a step to the viewer, if there is one."""
        return nullcontext([]) if self.viewer is None else self.viewer.step(name)


DEFAULTS = CompileOptions()


class Backend(Protocol):
    """A way to compile and run stages."""

    def compile_stages(
        self, module: Module, stages: Sequence[int], out_dir: Path, options: CompileOptions = DEFAULTS
    ) -> dict[int, tuple[str, ...]]:
        """Write the files of stages; return their names inside `out_dir`, by stage."""

    def check_host(self, module: Module, stage: int, device: str | None = None) -> None:
        """Raise the UsageError of `load_stage` where this host lacks the device of a stage, or memory on it.

        For callers that compile first, and for ranks before they meet.
        """

    def prepare(self) -> None:
        """Import what loading a stage takes, and touch no device: for a process that ranks are forked from."""

    def allows(self, threads: int) -> bool:
        """Return whether this process may load stages of so many threads: what was loaded before may forbid that."""

    def load_stage(
        self,
        module: Module,
        stage: int,
        files: Sequence[Path],
        threads: int = 1,
        device: str | None = None,
        *,
        exchange: Exchange | None = None,
    ) -> StageProgram:
        """Load the code of a stage for one of its devices: the first if none is named. Graphs with collectives run with
        an exchange alone."""


def without_exchange(call: CollectiveCall) -> VerifyError:
    """Return the error for a collective of a stage that was loaded without an exchange."""
    return VerifyError(
        "is done by the ranks of a group together, and this program was loaded for one rank alone",
        where=f"@{call.graph}: {call}",
    )


def stage_graphs(module: Module, stage: int) -> tuple[Graph, ...]:
    """Return the graphs of a stage in module order: those of `s2.F`, `s2.B` and `s2.U` that exist, the last in the
    parts that it runs as."""
    graphs: list[Graph] = []
    for name, graph in module.graphs.items():
        if name.startswith(f"s{stage}."):
            graphs += update_parts(module, stage).values() if graph_kind(name) == UPDATE else (graph,)
    return tuple(graphs)


def graph_on_rung(ladder: Ladder[Module], rung: Rung[Module], graph: str) -> str:
    """Return the name of a rung's graph in the library of its stage, which has those of all rungs. Those of the largest
    keep theirs."""
    return graph if rung is ladder.largest else f"{graph}.{rung.name}"


def all_rungs(ladder: Ladder[Module]) -> Module:
    """Return the module of the largest rung with the graphs of all, to be compiled and loaded together."""
    largest = ladder.largest
    graphs = dict(largest.held.graphs)
    for rung in ladder:
        if rung is not largest:
            names = {name: graph_on_rung(ladder, rung, name) for name in rung.held.graphs}
            graphs |= {names[name]: replace(graph, name=names[name]) for name, graph in rung.held.graphs.items()}
    return largest.held.but(graphs=graphs)


def device_of(module: Module, stage: int, name: str | None = None) -> Device | None:
    """Return the device that a stage runs on: the first if it has several and none is named. None in a module without a
    cluster."""
    if module.cluster is None or stage not in (s.index for s in module.stages):
        return None
    return module.cluster.device(name or module.devices_of(stage)[0])


def target_of(module: Module, stage: int, processor: str) -> str:
    """Return the target to compile a stage for: the architecture of its GPU, else `processor`."""
    device = device_of(module, stage)
    return device.target if device is not None and device.kind == "cuda" else processor
