"""The tree of a model's modules, as the names of its operations show it.

The `loc` of an operation is its path: `h.0.mlp.fc/linear` of torch, `/h.0/mlp/fc/MatMul` or `h.0.mlp.fc.product` of
ONNX. Each part but the last is a module. An operation in a module, but in none of its inner ones, goes with what stands
before it. A node whose name has no slash is a module of its own where it reads parameters. A module that is called
twice is visited twice, as stages follow the order of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from penstock.ir.graph import Op, Value

from .chain import modules_around, readers

# What stages are cut between.
OPERATION, MODULE = "operation", "module"


@dataclass(frozen=True, slots=True, eq=False)
class ModuleVisit:
    """One call of a module: the operations of a chain from `first` to `last` - 1. The `children` cover all of them,
    where there are any. `cost` is its part of the model's."""

    name: str
    first: int
    last: int
    cost: float
    children: tuple[ModuleVisit, ...] = ()


def tree_of(locs: Sequence[str], reads: Sequence[bool], costs: Sequence[float]) -> ModuleVisit:
    """Return the tree of a chain, of which the locs, the costs and the readers of parameters are known. It has no
    children where names show no modules."""
    paths = [modules_around(loc) for loc in locs]
    for path, loc, reads_parameters in zip(paths, locs, reads, strict=True):
        if reads_parameters and loc and "/" not in loc:
            path.append(loc)
    if not any(map(modules_around, locs)):
        paths = [[] for _ in locs]
    before = np.concatenate([[0.0], np.cumsum(costs)])

    def visit(name: str, first: int, last: int, depth: int) -> ModuleVisit:
        starts = _starts(paths, first, last, depth)
        while len(starts) == 1 and any(len(path) > depth for path in paths[first:last]):
            # A visit of one inner module, and of nothing beside it, has the name of that one.
            name = paths[first][depth] if name and all(len(path) > depth for path in paths[first:last]) else name
            depth += 1
            starts = _starts(paths, first, last, depth)
        children: tuple[ModuleVisit, ...] = ()
        if len(starts) > 1:
            names = [next(path[depth] for path in paths[a:b] if len(path) > depth) for a, b in ranges(starts, last)]
            children = tuple(
                visit(inner, a, b, depth + 1) for inner, (a, b) in zip(names, ranges(starts, last), strict=True)
            )
        return ModuleVisit(name, first, last, float(before[last] - before[first]), children)

    return visit("", 0, len(locs), 0)


def _starts(paths: Sequence[Sequence[str]], first: int, last: int, depth: int) -> list[int]:
    """Return the operations with which the modules of a depth begin, the first of all always among them."""
    named = [i for i in range(first, last) if len(paths[i]) > depth]
    return [first, *(b for a, b in pairwise(named) if paths[a][depth] != paths[b][depth])]


def ranges(starts: Sequence[int], last: int) -> list[tuple[int, int]]:
    """Return the stretches that begin at `starts`, of which one ends at `last`."""
    return list(pairwise([*starts, last]))


def tree_of_chain(chain: Sequence[Op], params: Mapping[Value, frozenset[str]], costs: Sequence[float]) -> ModuleVisit:
    """Return the tree of a chain. `params` are the parameters behind values."""
    read = {i for positions in readers(chain, params).values() for i in positions}
    return tree_of([op.loc for op in chain], [i in read for i in range(len(chain))], costs)


# ---------------------------------------------------------------------------------------- words


def modules_of_stages(
    chain: Sequence[Op], params: Mapping[Value, frozenset[str]], stages: Sequence[int]
) -> list[list[str]]:
    """Name the modules of every stage, where stages are ranges. `params` are the parameters behind values."""
    tree, starts = tree_of_chain(chain, params, [0.0] * len(chain)), np.flatnonzero(np.diff(stages)) + 1
    return [modules_between(tree, a, b) for a, b in pairwise([0, *starts.tolist(), len(chain)])]


def modules_between(tree: ModuleVisit, first: int, last: int) -> list[str]:
    """Name the modules that are wholly among some operations, the largest ones, and those of which a part is."""
    if first <= tree.first and tree.last <= last and tree.name:
        return [tree.name]
    inner = [child for child in tree.children if child.first < last and first < child.last]
    if not inner:
        return [f"a part of {tree.name}"] if tree.name else []
    return [name for child in inner for name in modules_between(child, first, last)]


def module_words(names: Sequence[str]) -> str:
    """Return names of modules as words; of three and more neighbours that have one parent only the ends are said."""
    runs: list[list[str]] = []
    for name in names:
        parent = modules_around(name)[-1:]
        before = runs[-1] if runs and parent and not name.startswith("a part") else []
        if before and name not in before and modules_around(before[-1])[-1:] == parent:
            before.append(name)
        else:
            runs.append([name])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs)
