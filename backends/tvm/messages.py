"""The messages between a compile and its worker processes: jobs and answers, one JSON object per line.

A job is complete in itself: operations as IR text, names, and paths of files. Nothing here needs TVM.
"""

from __future__ import annotations

import msgspec


class CompilerHello(msgspec.Struct, frozen=True, tag=True):
    """The first line of a worker: the hash of the sources it runs."""

    fingerprint: str


class NameTarget(msgspec.Struct, frozen=True, tag=True):
    """The job to find LLVM's name of a target; answered by Named."""

    target: str


class Named(msgspec.Struct, frozen=True, tag=True):
    """The answer to NameTarget: LLVM's name of the target."""

    cpu: str


class MakeKernel(msgspec.Struct, frozen=True, tag=True):
    """The job to compile one group into an object file that defines `symbol`, and `symbol` with `_pack` if it has an
    operand to be packed. Write its TIR for readers into `source`. A file without a path is not written. Answered by
    KernelMade or GroupRefused."""

    group: str
    target: str
    symbol: str
    path: str
    source: str = ""


class PackedOperand(msgspec.Struct, frozen=True):
    """An operand in the kernel's own order, under the name of its first source with `.packed`. Equal keys mean that
    it is packed by the same function."""

    sources: tuple[str, ...]
    dtype: str
    size: int
    key: str


class KernelParameters(msgspec.Struct, frozen=True):
    """The parameters of a compiled kernel in order, under the names of its text; slots are variable and slot."""

    ins: tuple[str, ...]
    slots: tuple[tuple[str, str], ...]
    outs: tuple[str, ...]
    packing: PackedOperand | None = None


class KernelMade(msgspec.Struct, frozen=True, tag=True):
    """The answer that the kernel is compiled."""

    parameters: KernelParameters


class GroupRefused(msgspec.Struct, frozen=True, tag=True):
    """The answer that the group cannot be one kernel."""

    reason: str


class KernelStep(msgspec.Struct, frozen=True):
    """One step of a graph: a kernel by name, its parameters under the names of the graph."""

    symbol: str
    parameters: KernelParameters


class LinkStage(msgspec.Struct, frozen=True, tag=True):
    """The job to make the library of a stage: graphs as text, for each its calls in order, and the objects with the
    kernels. Write its functions for readers into `source`. A file without a path is not written. Answered by Linked."""

    graphs: str
    calls: tuple[tuple[KernelStep, ...], ...]
    objects: tuple[tuple[str, str], ...]
    target: str
    path: str
    source: str = ""


class Linked(msgspec.Struct, frozen=True, tag=True):
    """The answer that the library is written."""


class JobFailed(msgspec.Struct, frozen=True, tag=True):
    """The answer that the job failed: by a mistake of the user (`usage`), by the tools, or for lack of `memory`. With a
    traceback, by an error in the rule of an operation (`rule`) or elsewhere in the package."""

    what: str
    hint: str = ""
    usage: bool = False
    memory: bool = False
    rule: bool = False
    traceback: str = ""


Job = NameTarget | MakeKernel | LinkStage
Answer = Named | KernelMade | GroupRefused | Linked | JobFailed


def title(job: Job) -> str:
    """Describe a job in a few words."""
    match job:
        case NameTarget():
            return f"target {job.target}"
        case MakeKernel():
            return f"kernel {job.symbol.rpartition('_')[0]}"
        case LinkStage():
            return f"library {job.path.rpartition('/')[2]}" if job.path else "text of a stage"
