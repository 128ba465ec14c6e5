"""A fault as a case: a module with its weights and inputs.

The shrinker makes it smaller, and a reproducer is written from it.

`module` is whole (`main`, or `F`, `B`, `N`, `U`), or has one graph `s0.F` that stands for a kernel. Weights are by
variable, batches by input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from penstock.ir.graph import Module, Value, Var
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.ops import F64, Array
from penstock.ir.interpreter.recurrence import microbatches_of, run_recurrence
from penstock.ir.interpreter.store import DictStore, initial_arrays

from .values import Key, Seen

KERNEL = "s0.F"


@dataclass(frozen=True)
class Case:
    """A module with the weights and batches that show a fault."""

    module: Module
    weights: Mapping[str, Array]
    batches: Sequence[Mapping[str, Array]]

    @property
    def size(self) -> tuple[int, int, int]:
        """The numbers of computing operations, of names from outside, and of elements; sizes are compared in this
        order.
        """
        graphs = self.module.graphs.values()
        results = [v for graph in graphs for op in graph.ops for v in op.outs]
        sources: list[Value | Var] = [*self.module.inputs, *self.module.vars.values()]
        ops = sum(op.kind not in ("read", "const") for graph in graphs for op in graph.ops)
        return (
            ops,
            len(sources) + len(self.module.outputs) + len(self.batches),
            sum(v.type.size for v in (*results, *sources)),
        )

    @cached_property
    def values(self) -> Mapping[Key, Array]:
        """The results of every operation for the first microbatch (of updates, the first batch)."""
        seen = Seen()
        if "U" in self.module.graphs:
            run_recurrence(self.module, self.weights, self.batches[:1], watch=seen.watch)
            return seen.values
        store = DictStore(initial_arrays(self.module, self.weights, list(self.module.vars), F64))
        if KERNEL in self.module.graphs:
            run_graph(self.module.graphs[KERNEL], self.batches[0], store, F64, partial(seen.watch, KERNEL, 0))
            return seen.values
        part = microbatches_of(self.module, self.batches[0])[0]
        graph = self.module.graphs.get("F") or self.module.graphs["main"]
        results = run_graph(graph, part, store, F64, partial(seen.watch, "F", 0))
        if "B" in self.module.graphs:
            inputs = {**part, **{v.name: np.asarray(x) for v, x in zip(graph.results, results, strict=True)}}
            run_graph(self.module.graphs["B"], inputs, store, F64, partial(seen.watch, "B", 0))
        return seen.values
