"""A training step of a program in local form on the devices of one mesh, and of the whole program on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from penstock.ir.graph import Mesh, Module, Op, graph_kind
from penstock.ir.interpreter.graphs import run_team
from penstock.ir.interpreter.recurrence import run_recurrence
from penstock.ir.interpreter.store import DictStore, initial_arrays
from penstock.ir.types import TensorType

from .drawn_programs import DrawnProgram
from .laid_out import cut_out, put_together

# Values by the kind of their graph and by name.
Values = dict[tuple[str, str], np.ndarray]


def run_whole(module: Module, weights: Mapping[str, np.ndarray], batch: Mapping[str, np.ndarray]) -> Values:
    """Return every value of one step on one device, and the variables after it as kind `var`."""
    seen: Values = {}

    def watch(graph: str, _number: int, op: Op, results: tuple[np.ndarray, ...]) -> None:
        seen.update({(graph, v.name): x for v, x in zip(op.outs, results, strict=True)})

    run = run_recurrence(module, weights, [batch], watch=watch)
    return seen | {("var", name): x for name, x in run.variables.items()}


def run_parts(
    local: Module,
    weights: Mapping[str, np.ndarray],
    batch: Mapping[str, np.ndarray],
    swapped: Mapping[int, int],
) -> tuple[dict[tuple[str, str], list[np.ndarray]], list[DictStore]]:
    """Return every value of one step on all places of a mesh, and their variables after it. A place that is `swapped`
    begins with the variables of another one."""
    mesh = local.mesh_of(0)
    places = range(len(mesh.devices))
    first = initial_arrays(local, weights, list(local.vars), "f64")
    stores = [
        DictStore(
            {name: cut_out(x, local.vars[name].type, mesh, swapped.get(place, place)) for name, x in first.items()}
        )
        for place in places
    ]
    held = [{v.name: cut_out(batch[v.name], v.type, mesh, place) for v in local.inputs} for place in places]
    seen: dict[tuple[str, str], list[np.ndarray]] = {}
    for name in ("s0.F", "s0.B", "s0.U"):
        graph = local.graphs[name]

        def watch(_place: int, op: Op, results: tuple[np.ndarray, ...], kind: str = graph_kind(name)) -> None:
            for value, x in zip(op.outs, results, strict=True):
                seen.setdefault((kind, value.name), []).append(x)

        fed = [{v.name: values[v.name] for v in graph.ins if v.name in values} for values in held]
        for values, results in zip(held, run_team(graph, fed, mesh, stores, "f64", watch), strict=True):
            values.update({v.name: x for v, x in zip(graph.results, results, strict=True)})
    return seen, stores


def differences(
    case: DrawnProgram,
    local: Module | None = None,
    swapped: Mapping[int, int] = MappingProxyType({}),
    tolerance: float = 1e-10,
) -> list[str]:
    """Return the names of values, and of variables with @, of which the places together have another than one device,
    in the order in which they are computed. `local` is the local form, by default the one that the passes make."""
    local = case.local if local is None else local
    weights, batch, mesh = case.weights(), case.batch(), local.mesh_of(0)
    # Values that only the form with layouts has are compared with those of that form on one device.
    right = run_whole(case.laid, weights, batch) | run_whole(case.whole, weights, batch)
    types = {
        (graph_kind(g.name), v.name): v.type for g in case.sharded.graphs.values() for op in g.ops for v in op.outs
    }
    seen, stores = run_parts(local, weights, batch, swapped)
    found = [
        f"%{key[1]}"
        for key, parts in seen.items()
        if key in right and key in types and not _same(parts, types[key], mesh, right[key], tolerance)
    ]
    for name, var in local.vars.items():
        parts = [store.arrays[name] for store in stores]
        if var.role != "grad" and not _same(parts, var.type, mesh, right["var", name], tolerance):
            found.append(f"@{name}")
    return found


def _same(parts: Sequence[np.ndarray], type: TensorType, mesh: Mesh, right: np.ndarray, tolerance: float) -> bool:
    try:
        whole = put_together(parts, type, mesh)
    except AssertionError:
        return False
    scale = max(1.0, float(np.abs(right[np.isfinite(right)]).max(initial=0)))
    return bool(np.allclose(whole, right, rtol=tolerance, atol=tolerance * scale))
