"""What goes over the cuts of a chain of operations. In: the chain, and who makes or reads what. Out: bytes by place: entry i is of the cut before operation i."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ..ir.graph import Module, Op, Value
from .wire import travelling

Array = npt.NDArray[np.float64]


def crossing_bytes(chain: Sequence[Op], index: Mapping[Value, int], wire: str) -> Array:
    """Entry i: bytes of messages of values made before operation i of the chain and used at or after it."""
    delta = np.zeros(len(chain) + 2)
    last_use: dict[Value, int] = {}
    for i, op in enumerate(chain):
        for value in op.ins:
            if value in index:
                last_use[value] = i
    for value, last in last_use.items():
        size = travelling(value.type, wire)
        delta[index[value] + 1] += size
        delta[last + 1] -= size
    return np.cumsum(delta)[: len(chain) + 1]


def readers(chain: Sequence[Op], params: Mapping[Value, frozenset[str]]) -> dict[str, list[int]]:
    """The operations that read each parameter, or what is computed from it."""
    found: dict[str, list[int]] = {}
    for i, op in enumerate(chain):
        for value in op.ins:
            for name in params.get(value, ()):
                found.setdefault(name, []).append(i)
    return found


def tied_bytes(module: Module, chain: Sequence[Op], params: Mapping[Value, frozenset[str]]) -> Array:
    """Entry i: bytes of parameters that are read both before operation i of the chain and at or after it."""
    delta = np.zeros(len(chain) + 1)
    for name, positions in readers(chain, params).items():
        delta[positions[0] + 1] += module.vars[name].type.nbytes
        delta[positions[-1] + 1] -= module.vars[name].type.nbytes
    return np.cumsum(delta)
