"""Choose the code that computes contractions on GPUs: the vendor's libraries through torch, or generated kernels.
Writes `library` annotations.

In: stage graphs and the cluster. Out: on stages whose device is of kind cuda, matrix products, convolutions with their
gradients, and attention on floats get `library=torch`. With `use=none` nothing is annotated, and every operation gets a
kernel. Stages on CPUs stay as they are.

An operation with this annotation is a kernel by itself, so nothing is fused behind it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from penstock.ir.graph import Graph, Module, Op, graph_stage
from penstock.ir.types import FLOATS
from penstock.support.errors import UsageError

LIBRARIES = ("torch", "none")
KINDS = ("matmul", "conv", "conv_grad_input", "conv_grad_weight", "attention", "attention_grad")


@dataclass(frozen=True, slots=True)
class LibrariesOptions:
    """Options of `libraries`: `use` is torch, which calls the vendor's libraries, or none."""

    use: str = "torch"


def libraries(module: Module, options: LibrariesOptions) -> Module:
    """Annotate the operations of stages on GPUs that a library computes."""
    if options.use not in LIBRARIES:
        raise UsageError(f"unknown library {options.use!r}", hint=f"one of {', '.join(LIBRARIES)}")
    places = {stage.index: module.devices_of(stage.index)[0] for stage in module.stages}
    graphs, notes = dict(module.graphs), []
    for name, graph in module.graphs.items():
        stage = graph_stage(name)
        if (
            stage is None
            or stage not in places
            or module.cluster is None
            or module.cluster.device(places[stage]).kind != "cuda"
        ):
            continue
        done, count = _annotated(graph, options.use)
        if done.ops != graph.ops:
            graphs[name] = done
        if count:
            notes.append(f"@{name}: {', '.join(f'{n} {kind}' for kind, n in sorted(count.items()))} by {options.use}")
    if all(graphs[n] is module.graphs[n] for n in graphs):
        return module
    return module.but(graphs=graphs).noted("libraries", *notes)


def _annotated(graph: Graph, use: str) -> tuple[Graph, Counter[str]]:
    count: Counter[str] = Counter()

    def choose(op: Op) -> Op:
        fits = (
            use != "none"
            and op.kind in KINDS
            and op.outs[0].type.dtype in FLOATS
            and all(v.type.size for v in (*op.ins, *op.outs))
        )
        count[op.kind] += fits
        return op.with_attrs(library=use if fits else None) if fits or "library" in op.attrs else op

    ops = tuple(choose(op) for op in graph.ops)
    return replace(graph, ops=ops), +count
