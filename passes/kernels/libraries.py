"""Choose the code that computes contractions on GPUs: the vendor's libraries through torch, or generated kernels.
Writes `library` annotations.

In: stage graphs and the cluster. Out: on stages whose device is of kind cuda, matrix products, convolutions with their
gradients, and attention on floats get `library=torch`. With `use=none` nothing is annotated, and every operation gets a
kernel. Stages on CPUs stay as they are.

An operation with this annotation is a kernel by itself, so nothing is fused behind it, but that a product is added to a
variable (`adds_to_variable`). The annotation is a promise: a
back end that cannot keep it refuses the graph. So what a library cannot take is left out here, and a note says what and
why (`reason_against`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from penstock.ir.graph import Graph, Module, Op, Value, graph_stage
from penstock.ir.memory.workspace import is_table
from penstock.ir.ops import VIEWS
from penstock.ir.types import FLOATS
from penstock.support.errors import UsageError

LIBRARIES = ("torch", "none")
_SOURCES = ("const", "iota")
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
        done = with_libraries(graph, options.use)
        if done.ops != graph.ops:
            graphs[name] = done
        notes += _notes_on(done, options.use)
    if all(graphs[n] is module.graphs[n] for n in graphs):
        return module
    return module.but(graphs=graphs).noted("libraries", *notes)


def with_libraries(graph: Graph, use: str = "torch") -> Graph:
    """Return a graph with the annotations of a stage on a GPU."""
    makers = graph.producers()

    def choose(op: Op) -> Op:
        fits = use != "none" and op.kind in KINDS and not reason_against(op, makers)
        return op.with_attrs(library=use if fits else None) if fits or "library" in op.attrs else op

    return replace(graph, ops=tuple(choose(op) for op in graph.ops))


def reason_against(op: Op, makers: Mapping[Value, Op]) -> str:
    """Return why no library can compute a contraction, or nothing when one can. `makers` are those of its graph."""
    dtype = op.outs[0].type.dtype
    if dtype not in FLOATS:
        return f"libraries have none of {dtype}"
    if not all(v.type.size for v in (*op.ins, *op.outs)):
        return "libraries differ in what comes out of nothing"
    if any(map(partial(_has_no_memory, makers), op.ins)):
        return "an operand is made of one constant, and is nowhere in memory"
    return ""


def adds_to_variable(op: Op) -> bool:
    """Return whether a library can add the result of an operation to a variable instead of storing it."""
    return op.kind == "matmul" and op.attrs.get("library") == "torch" and op.outs[0].type.rank == 2


def _has_no_memory(makers: Mapping[Value, Op], value: Value) -> bool:
    """Return whether a value is only computed where it is read, be it through layout changes."""
    op = makers.get(value)
    while op is not None and op.kind in VIEWS:
        op = makers.get(op.ins[0])
    return op is not None and op.kind in _SOURCES and not is_table(op)


def _notes_on(graph: Graph, use: str) -> list[str]:
    """Say how many operations of a graph a library computes, and which it does not, with the reason."""
    count = Counter(op.kind for op in graph.ops if "library" in op.attrs)
    notes = (
        [f"@{graph.name}: {', '.join(f'{n} {kind}' for kind, n in sorted(count.items()))} by {use}"] if count else []
    )
    return notes + ([f"@{graph.name}: {text}" for text in left_to_kernels(graph)] if use != "none" else [])


def left_to_kernels(graph: Graph) -> list[str]:
    """Name the contractions of a graph that no library computes, each with the reason."""
    makers = graph.producers()
    return [
        f"{op.kind} %{op.outs[0].name} by a kernel of Penstock: {reason_against(op, makers) or 'not annotated'}"
        for op in graph.ops
        if op.kind in KINDS and "library" not in op.attrs
    ]
