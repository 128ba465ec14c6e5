"""The code of stages for people: the TIR of kernels, and the functions that call them, kept beside what is compiled.

In: the cache, names of kernels, keys of libraries. Out: StageSources. Printing takes about as long as planning, so that texts are made only
where somebody wants to see them, by the processes that have the code in hand, and are kept in the cache from then on:

    NAME.py     the TIR of the kernel of that name
    sources     key: that of the library; its calls of kernels and its functions
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from penstock.backends.interface import KernelCall, StageSources
from penstock.backends.tvm.fingerprint import key_of
from penstock.backends.tvm.lower.plan import Lowered
from penstock.ir.graph import Op
from penstock.support.cache import Cache

_DECODER = msgspec.json.Decoder(StageSources)


def calls_of(plans: Sequence[Lowered], called: Sequence[str] | None = None) -> tuple[KernelCall, ...]:
    """The calls of kernels of all graphs, in order; `called` are names of kernels, where they are not those of the steps."""
    steps = [(plan.graph.name, step) for plan in plans for step in plan.steps]
    names = [step.name for _, step in steps] if called is None else called
    return tuple(
        KernelCall(graph, _kernel_of(step.group.ops), name, tuple(map(_told, step.group.ops)))
        for (graph, step), name in zip(steps, names, strict=True)
    )


def _kernel_of(ops: Iterable[Op]) -> str:
    return next((str(op.attrs["kernel"]) for op in ops if "kernel" in op.attrs), "")


def _told(op: Op) -> str:
    return f"{', '.join('%' + v.name for v in op.outs)} = {op.kind}" if op.outs else f"{op.kind} @{op.var}"


class Texts:
    """The texts that the cache has, and those that were made meanwhile."""

    def __init__(self, store: Cache) -> None:
        self._store = store
        self._kernels: dict[str, str] = {}

    def has(self, kernel: str) -> bool:
        """Whether the text of a kernel is known; from now on it is."""
        if kernel not in self._kernels:
            kept = self._store.get(f"{kernel}.py")
            if kept is None:
                return False
            self._kernels[kernel] = kept.decode()
        return True

    def keep(self, kernel: str, text: str) -> None:
        self._kernels[kernel] = text
        self._store.put(f"{kernel}.py", text.encode())

    def find(self, library: str) -> StageSources | None:
        """All texts of a library, by its key."""
        kept = self._store.get(key_of("sources", library))
        if kept is None:
            return None
        found = _DECODER.decode(kept)
        names = {call.source for call in found.calls}
        return self._with_kernels(found, names) if all(map(self.has, names)) else None

    def keep_library(self, library: str, target: str, calls: tuple[KernelCall, ...], functions: str) -> StageSources:
        found = StageSources(target, calls, {}, functions)
        self._store.put(key_of("sources", library), msgspec.json.encode(found))
        return self._with_kernels(found, {call.source for call in calls})

    def _with_kernels(self, found: StageSources, names: Iterable[str]) -> StageSources:
        kernels: Mapping[str, str] = {name: self._kernels[name] for name in sorted(names)}
        return StageSources(found.target, found.calls, kernels, found.functions)
