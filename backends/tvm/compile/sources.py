"""The code of stages for readers: the TIR of kernels, and the functions that call them, kept beside the compiled code.

In: the cache, names of kernels, keys of libraries. Out: StageSources. Printing takes about as long as planning. So
texts are made only for a viewer, by the processes that compile the code, and are in the cache from then on:

    NAME.py     the TIR of the kernel of that name
    sources     key: that of the library; its calls of kernels and its functions
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from penstock.backends.interface import KernelCall, StageSources
from penstock.backends.tvm.fingerprint import key_of
from penstock.backends.tvm.group import BEGIN
from penstock.backends.tvm.lower.plan import Lowered
from penstock.ir.graph import Op
from penstock.support.cache import Cache

_DECODER = msgspec.json.Decoder(StageSources)


def calls_of(plans: Sequence[Lowered], called: Sequence[str] | None = None) -> tuple[KernelCall, ...]:
    """Return the calls of kernels of all graphs, in order; `called` are names of kernels, where they are not those of
    the steps."""
    steps = [(plan.graph.name, step) for plan in plans for step in plan.steps]
    names = [step.name for _, step in steps] if called is None else called
    return tuple(
        KernelCall(graph, _kernel_of(step.group.ops), name, tuple(map(_label, step.group.ops)))
        for (graph, step), name in zip(steps, names, strict=True)
    )


def _own_kernels(calls: Iterable[KernelCall]) -> set[str]:
    """Return the kernels that have code of their own."""
    return {call.source for call in calls} - {BEGIN}


def _kernel_of(ops: Iterable[Op]) -> str:
    return next((str(op.attrs["kernel"]) for op in ops if "kernel" in op.attrs), "")


def _label(op: Op) -> str:
    return f"{', '.join('%' + v.name for v in op.outs)} = {op.kind}" if op.outs else f"{op.kind} @{op.var}"


class Texts:
    """Sources of kernels: those that the cache has, and those made since."""

    def __init__(self, store: Cache) -> None:
        self._store = store
        self._kernels: dict[str, str] = {}

    def has(self, kernel: str) -> bool:
        """Load the text of a kernel, and return whether there is one."""
        if kernel not in self._kernels:
            entry = self._store.get(f"{kernel}.py")
            if entry is None:
                return False
            self._kernels[kernel] = entry.decode()
        return True

    def keep(self, kernel: str, text: str) -> None:
        """Add the text of a kernel."""
        self._kernels[kernel] = text
        self._store.put(f"{kernel}.py", text.encode())

    def find(self, library: str) -> StageSources | None:
        """Return all texts of a library, by its key; None where one is missing."""
        entry = self._store.get(key_of("sources", library))
        if entry is None:
            return None
        sources = _DECODER.decode(entry)
        names = _own_kernels(sources.calls)
        return self._with_kernels(sources, names) if all(map(self.has, names)) else None

    def keep_library(self, library: str, target: str, calls: tuple[KernelCall, ...], functions: str) -> StageSources:
        """Add the calls and the functions of a library; return all its texts."""
        sources = StageSources(target, calls, {}, functions)
        self._store.put(key_of("sources", library), msgspec.json.encode(sources))
        return self._with_kernels(sources, _own_kernels(calls))

    def _with_kernels(self, sources: StageSources, names: Iterable[str]) -> StageSources:
        kernels: Mapping[str, str] = {name: self._kernels[name] for name in sorted(names)}
        return StageSources(sources.target, sources.calls, kernels, sources.functions)
