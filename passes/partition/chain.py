"""The chain of operations that stages are cut from, as `partition` and the planner see it.

In: a module, or the chain of its forward graph. Out: the operations of the chain with their names, where no stage may
start, the parameters that operations read, and the traffic over the cuts. Traffic is arrays of bytes; entry i belongs
to the cut before operation i.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from penstock.ir.graph import PARAM, Graph, Module, Op, Value
from penstock.ir.liveness import from_state_alone
from penstock.ir.ops import OPS
from penstock.passes.communicate.wire import travelling

Array = npt.NDArray[np.float64]


def forward_graph(module: Module) -> Graph:
    """Return the whole model's forward graph: F once differentiated, main before that and for inference."""
    return module.graphs["F"] if "F" in module.graphs else module.graphs["main"]


def chain_of(module: Module) -> list[Op]:
    """Return the operations that stages are cut from: all of the forward graph that depend on an input, or on a
    variable that it changes."""
    forward = forward_graph(module)
    anywhere = from_state_alone(forward)
    return [op for op in forward.ops if op.kind == "write" or not anywhere.issuperset(op.outs)]


def positions_of(chain: Sequence[Op]) -> dict[str, int]:
    """Return the positions of operations by the names a user may give: a loc stands for the first operation that has
    it, a module for its first one, a value for the one that makes it. Torch calls values `linear` and modules as well:
    `%linear` is the value in any case, the plain name only where no operation and no module has it."""
    values = {v.name: i for i, op in reversed(list(enumerate(chain))) for v in op.outs}
    locs = {op.loc: i for i, op in reversed(list(enumerate(chain)))}
    modules = {name: first for name, (first, _) in module_spans(chain).items()}
    return {f"%{name}": i for name, i in values.items()} | values | modules | locs


def names_to_split_at(chain: Sequence[Op]) -> list[str]:
    """Return for every operation a name that stands for it alone: its loc if it is the first that has it, else what it
    makes or touches."""
    position = positions_of(chain)

    def name_of(i: int, op: Op) -> str:
        if position.get(op.loc) == i or not op.outs:
            return op.loc if position.get(op.loc) == i else op.var
        value = op.outs[0].name
        return value if position[value] == i else f"%{value}"

    return [name_of(i, op) for i, op in enumerate(chain)]


def modules_around(loc: str) -> list[str]:
    """Return the names of the modules around an operation, the outermost first: each part of its loc but the last.
    The slash in front of names of ONNX belongs to none."""
    return [loc[:i].lstrip("/") for i, sign in enumerate(loc) if sign in "./" and i and loc[i - 1] not in "./"]


def module_spans(chain: Sequence[Op]) -> dict[str, tuple[int, int]]:
    """Return the first and the last operation in each module."""
    spans: dict[str, tuple[int, int]] = {}
    for i, op in enumerate(chain):
        for name in modules_around(op.loc):
            spans[name] = spans.get(name, (i, i))[0], i
    return spans


def moving_spans(chain: Sequence[Op]) -> dict[str, tuple[int, int]]:
    """Return the first and the last operation that touch each variable that the forward graph changes. No stage may
    start between the two."""
    return {name: (users[0], users[-1]) for name, users in moving_users(chain).items()}


def moving_users(chain: Sequence[Op]) -> dict[str, list[int]]:
    """Return the operations that touch each variable that the forward graph changes. What looks at a cache touches it:
    a cache does not travel."""
    users: dict[str, list[int]] = {op.var: [] for op in chain if op.kind in ("write", "put")}
    caches = {value: op.var for op in chain if op.kind == "put" for value in op.outs}
    for i, op in enumerate(chain):
        touched = {caches[value] for value in op.ins if value in caches}
        if OPS[op.kind].effect and op.var in users:
            touched.add(op.var)
        for name in touched:
            users[name].append(i)
    return users


def params_behind(module: Module) -> dict[Value, frozenset[str]]:
    """Return, for values of the forward graph that any stage can compute, the parameters behind them, such as a weight
    behind its transpose."""
    forward = forward_graph(module)
    anywhere = from_state_alone(forward)
    params: dict[Value, frozenset[str]] = {}
    for op in forward.ops:
        if op.outs and anywhere.issuperset(op.outs):
            used = [params[v] for v in op.ins]
            if op.kind == "read" and module.vars[op.var].role == PARAM:
                used.append(frozenset((op.var,)))
            params |= dict.fromkeys(op.outs, frozenset[str]().union(*used))
    return params


def readers(chain: Sequence[Op], params: Mapping[Value, frozenset[str]]) -> dict[str, list[int]]:
    """Return the operations that read each parameter, or what is computed from it."""
    positions: dict[str, list[int]] = {}
    for i, op in enumerate(chain):
        for value in op.ins:
            for name in params.get(value, ()):
                positions.setdefault(name, []).append(i)
    return positions


def crossing_bytes(chain: Sequence[Op], wire: str, dtypes: Collection[str] | None = None) -> Array:
    """Return the message bytes of values made before a cut and used behind it. With `dtypes`, only these element types
    count."""
    maker = {v: i for i, op in enumerate(chain) for v in op.outs}
    last_use = {value: i for i, op in enumerate(chain) for value in op.ins if value in maker}
    delta = np.zeros(len(chain) + 1)
    for value, last in last_use.items():
        if dtypes is None or value.type.dtype in dtypes:
            size = travelling(value.type, wire)
            delta[maker[value] + 1] += size
            delta[last + 1] -= size
    return np.cumsum(delta)


def tied_bytes(module: Module, chain: Sequence[Op], params: Mapping[Value, frozenset[str]]) -> Array:
    """Return the bytes of parameters that are read both before a cut and behind it."""
    delta = np.zeros(len(chain) + 1)
    for name, positions in readers(chain, params).items():
        delta[positions[0] + 1] += module.vars[name].type.nbytes
        delta[positions[-1] + 1] -= module.vars[name].type.nbytes
    return np.cumsum(delta)
