"""The edits of the shrinker.

Each family names its atoms, and makes a case without some of them, or None where that cannot be.

    batches     one step less of training
    outputs     one result less
    sooner      the operands of a result in its place
    operations  a result stands as data in the place of the operation that made it: a constant, or a variable that holds
                its elements
    shortcuts   readers of a result read an operand of the same type instead
    parameters  no longer trained
    dimensions  a size, wherever it stands in inputs and variables, gets smaller; so do its multiples, or not

No edit looks at the fault, and none is trusted: the verifier decides whether its result is legal. `tidied` drops unused
parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.ir.attrs import Attr, Scalar
from penstock.ir.graph import BUFFER, PARAM, Graph, Module, Op, Value, Var, graph_kind, substitute
from penstock.ir.interpreter.ops import Array
from penstock.ir.ops import infer_op
from penstock.ir.types import TensorType, numpy_dtype
from penstock.runtime.data.domains import domain_of

from .case import KERNEL, Case

_DATA = ("read", "const")
# Attributes whose numbers are sizes.
_SIZES = ("shape", "stop")


@dataclass(frozen=True)
class Family:
    """A family of edits: one way to make a case smaller. `together` says whether several atoms can be removed at
    once."""

    name: str
    atoms: Callable[[Case], Sequence[Any]]
    apply: Callable[[Case, Sequence[Any]], Case | None]
    together: bool = True


# ------------------------------------------------------------------------------------------------ unused parts


def tidied(case: Case) -> Case:
    """Return the case without unused operations, saved values, inputs and variables."""
    graphs = dict(case.module.graphs)
    for name in reversed(graphs):
        graphs[name] = _live(graphs[name])
        forward = graphs.get("F")
        if name == "B" and forward is not None:
            read = {v for op in graphs["B"].ops for v in op.ins} | {*graphs["B"].outs}
            graphs["B"] = replace(graphs["B"], ins=tuple(v for v in graphs["B"].ins if v in read))
            graphs["F"] = replace(forward, saved=tuple(v for v in forward.saved if v in graphs["B"].ins))
    head = next((name for name in ("main", "F", KERNEL) if name in graphs), None)
    module = case.module
    if head is not None:
        graph = graphs[head]
        used = {v for op in graph.ops for v in op.ins} | {*graph.outs, *graph.saved}
        # The inputs say how many microbatches a batch has: one is always needed.
        inputs = tuple(v for v in graph.ins if v in used) or graph.ins[:1]
        graphs[head] = replace(graph, ins=inputs)
        module = module.but(inputs=inputs)
    touched = {op.var for graph in graphs.values() for op in graph.ops if "var" in op.attrs}
    module = module.but(graphs=graphs, vars={name: var for name, var in module.vars.items() if name in touched})
    return _fitted(case, module)


def _live(graph: Graph) -> Graph:
    needed = {*graph.outs, *graph.saved}
    ops: list[Op] = []
    for op in reversed(graph.ops):
        if op.kind in ("accum", "write") or needed.intersection(op.outs):
            ops.append(op)
            needed.update(op.ins)
    return graph if len(ops) == len(graph.ops) else replace(graph, ops=tuple(reversed(ops)))


def _fitted(case: Case, module: Module) -> Case:
    """Return the same data, as much of it as the module has a place for."""
    weights = {name: array for name, array in case.weights.items() if name in module.vars}
    names = {v.name for v in module.inputs}
    return Case(
        module, weights, [{name: array for name, array in batch.items() if name in names} for batch in case.batches]
    )


# ------------------------------------------------------------------------------------------------ batches and outputs


def _fewer_batches(case: Case, chunk: Sequence[int]) -> Case | None:
    left = [batch for i, batch in enumerate(case.batches) if i not in chunk]
    return replace(case, batches=left) if left else None


def _fewer_outputs(case: Case, chunk: Sequence[str]) -> Case | None:
    left = tuple(name for name in case.module.outputs if name not in chunk)
    return with_outputs(case, left) if left else None


def _sooner(case: Case, chunk: Sequence[str]) -> Case | None:
    """Replace a result by its operands."""
    (name,) = chunk
    graph = next((case.module.graphs[n] for n in ("main", KERNEL) if n in case.module.graphs), None)
    op = None if graph is None else next((op for op in graph.ops if name in (v.name for v in op.outs)), None)
    if op is None or op.kind in _DATA or not op.ins:
        return None
    names = dict.fromkeys(
        n for out in case.module.outputs for n in ([v.name for v in op.ins] if out == name else [out])
    )
    return with_outputs(case, tuple(names))


def with_outputs(case: Case, names: Sequence[str]) -> Case | None:
    """Return the case of an untrained model with some of its values as results."""
    name = next((name for name in ("main", KERNEL) if name in case.module.graphs), None)
    if name is None:
        return None
    graph = case.module.graphs[name]
    known = {v.name: v for v in (*graph.ins, *(v for op in graph.ops for v in op.outs))}
    if not all(n in known for n in names):
        return None
    module = case.module.with_graph(replace(graph, outs=tuple(known[n] for n in names))).but(outputs=tuple(names))
    return tidied(replace(case, module=module))


# ------------------------------------------------------------------------------------------------ operations

# The graph, and the first result of the operation, or the variable that it changes.
At = tuple[str, str]


def _operations(case: Case) -> list[At]:
    return [
        (graph.name, op.outs[0].name)
        for graph in case.module.graphs.values()
        for op in graph.ops
        if op.outs and op.kind not in (*_DATA, "take")
    ]


def _as_data(case: Case, chunk: Sequence[At]) -> Case | None:
    chosen = set(chunk)
    module, weights = case.module, dict(case.weights)
    held = dict(module.vars)
    for graph in module.graphs.values():
        ops: list[Op] = []
        for op in graph.ops:
            if not op.outs or (graph.name, op.outs[0].name) not in chosen:
                ops.append(op)
                continue
            for value in op.outs:
                array = case.values.get((graph_kind(graph.name), 0, value.name))
                if array is None:
                    return None
                ops.append(_datum(value, np.asarray(array), held, weights))
        module = module.with_graph(replace(graph, ops=tuple(ops)))
    return tidied(Case(module.but(vars=held), weights, case.batches))


def _datum(value: Value, array: Array, held: dict[str, Var], weights: dict[str, Array]) -> Op:
    """Return an operation that yields the elements of a value: a constant where they are all the
    same, else a variable.
    """
    first = array.reshape(-1)[:1]
    if array.size and (array == first).all() and np.isfinite(first.astype(np.float64)).all():
        number = first[0].item()
        return Op("const", (), (value,), {"value": number, "shape": value.type.dims, "dtype": value.type.dtype})
    name = f"{value.name}.data"
    held[name] = Var(name, value.type, BUFFER)
    weights[name] = array.astype(numpy_dtype(value.type.dtype))
    return Op("read", (), (value,), {"var": name})


def _shortcuts(case: Case) -> list[At]:
    return [
        (graph.name, op.outs[0].name)
        for graph in case.module.graphs.values()
        for op in graph.ops
        if op.outs and any(v.type == op.outs[0].type for v in op.ins)
    ]


def _taken_short(case: Case, chunk: Sequence[At]) -> Case | None:
    chosen = set(chunk)
    module = case.module
    for graph in module.graphs.values():
        table: dict[Value, Value] = {}
        ops = []
        for op in graph.ops:
            op = op.with_ins(substitute(op.ins, table))
            same = next((v for v in op.ins if op.outs and v.type == op.outs[0].type), None)
            if same is not None and (graph.name, op.outs[0].name) in chosen:
                table[op.outs[0]] = same
            ops.append(op)
        if table.keys() & {*graph.outs, *graph.saved}:
            # Results keep their names, by which other graphs know them.
            return None
        module = module.with_graph(replace(graph, ops=tuple(ops)))
    return tidied(replace(case, module=module))


# ------------------------------------------------------------------------------------------------ parameters


def _parameters(case: Case) -> list[str]:
    return [name for name, var in case.module.vars.items() if var.role == PARAM and f"{name}.grad" in case.module.vars]


def _frozen(case: Case, chunk: Sequence[str]) -> Case | None:
    """Return the case with parameters that are read, but have no gradient, state and update."""
    chosen = set(chunk)

    def belongs(name: str) -> bool:
        return name in chosen or any(name.startswith(f"{param}.") and name not in case.weights for param in chosen)

    module = case.module
    for graph in module.graphs.values():
        module = module.with_graph(
            replace(
                graph, ops=tuple(op for op in graph.ops if op.kind not in ("accum", "write") or not belongs(op.var))
            )
        )
    roles = {name: replace(var, role=BUFFER) if name in chosen else var for name, var in module.vars.items()}
    return tidied(replace(case, module=module.but(vars=roles)))


# ------------------------------------------------------------------------------------------------ dimensions

# A size, what it becomes, and whether its multiples change with it.
Resize = tuple[int, int, bool]


def _resizes(case: Case) -> list[Resize]:
    sources: list[Value | Var] = [*case.module.inputs, *case.module.vars.values()]
    sizes = sorted({n for v in sources for n in v.type.dims if n > 1})
    return [
        (n, m, multiples)
        for n in sizes
        for m in sorted({n // 2, 2, 1}, reverse=True)
        if m < n
        for multiples in (False, True)
    ]


def _resized(case: Case, chunk: Sequence[Resize]) -> Case | None:
    ((n, m, multiples),) = chunk

    def size(k: int) -> int:
        return k // n * m if k == n or (multiples and n and k % n == 0) else k

    def resized(kind: TensorType) -> TensorType:
        return kind.with_shape(tuple(map(size, kind.dims)))

    module = case.module
    held = {name: replace(var, type=resized(var.type)) for name, var in module.vars.items()}
    if any(isinstance(var.init, tuple) and var.type.size != len(var.init) for var in held.values()):
        return None
    inputs = tuple(Value(v.name, resized(v.type)) for v in module.inputs)
    types = {v.name: v.type for v in inputs}
    try:
        graphs = {name: _retyped(graph, held, types, size) for name, graph in module.graphs.items()}
    except (TypeError, ValueError, KeyError):  # type rules raise these for operands that do not fit
        return None
    module = module.but(vars=held, inputs=inputs, graphs=graphs)
    weights = {
        name: _corner(np.asarray(array), held[name].type.dims) for name, array in case.weights.items() if name in held
    }
    pairs = list(zip(case.module.inputs, inputs, strict=True))
    batches = [
        {new.name: _rows(np.asarray(batch[new.name]), old, new, module) for old, new in pairs if new.name in batch}
        for batch in case.batches
    ]
    return Case(module, weights, batches)


def _sizes_anew(sizes: tuple[Scalar, ...], size: Callable[[int], int]) -> Attr:
    return tuple(size(n) for n in sizes if isinstance(n, int))


def _retyped(graph: Graph, held: Mapping[str, Var], types: dict[str, TensorType], size: Callable[[int], int]) -> Graph:
    """Return the graph with the types that follow from those of inputs and variables; `types` are those of all values
    so far.
    """
    known = {v: Value(v.name, types[v.name]) for v in graph.ins}
    var_types = {name: var.type for name, var in held.items()}
    ops = []
    for op in graph.ops:
        attrs = {k: _sizes_anew(x, size) if k in _SIZES and isinstance(x, tuple) else x for k, x in op.attrs.items()}
        probe = Op(op.kind, tuple(known[v] for v in op.ins), (), attrs, op.loc)
        outs = tuple(Value(v.name, t) for v, t in zip(op.outs, infer_op(probe, var_types), strict=True))
        known.update(zip(op.outs, outs, strict=True))
        types.update((v.name, v.type) for v in outs)
        ops.append(Op(op.kind, probe.ins, outs, attrs, op.loc))
    ins, outs, saved = (tuple(known[v] for v in values) for values in (graph.ins, graph.outs, graph.saved))
    return Graph(graph.name, ins, outs, tuple(ops), saved)


def _corner(array: Array, dims: Sequence[int]) -> Array:
    return array[tuple(slice(0, n) for n in dims)]


def _rows(array: Array, old: Value, new: Value, module: Module) -> Array:
    """Return the first samples of every microbatch; indices stay within their range."""
    if not old.type.dims:
        return array
    apart = array.reshape(-1, *old.type.dims)
    samples = _corner(apart, (len(apart), *new.type.dims)).reshape(-1, *new.type.dims[1:])
    limit = domain_of(module, new.name).high if samples.dtype.kind in "iu" else None
    return samples if limit is None else samples % max(1, limit)


# In order of benefit: families that remove much with few attempts come first.
FAMILIES = (
    Family("batches", lambda case: list(range(len(case.batches))), _fewer_batches),
    Family("outputs", lambda case: list(case.module.outputs), _fewer_outputs),
    Family("sooner", lambda case: list(case.module.outputs), _sooner, together=False),
    Family("parameters", _parameters, _frozen),
    Family("operations", _operations, _as_data),
    Family("shortcuts", _shortcuts, _taken_short),
    Family("dimensions", _resizes, _resized, together=False),
)
