"""The lookup of operations by a name that a user gives.

In: a module and a name. Out: a Target: the operations, and the kind of the name.

    %h             a value: the operations that make it, here and where it is computed again
    @fc1.w         a variable: the operations that read, write or add to it
    s0.F/k3        a kernel: its operations
    /fc1/MatMul    a node of the source: everything that came of it, forward, backward and update
    block.0.attn   a module of the source, or part of a path: everything below it

Names of the source are spelled as in the source. `%` and `@` may be left out: a value comes before a variable, and a
variable before a node. Limit: a name with characters that the IR cannot print stands for every node that is spelled
alike in the IR.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.ir.graph import Module, Op, graph_kind, graph_stage
from penstock.passes.kernels.divide import divide
from penstock.support.errors import UsageError

VALUE, VARIABLE, KERNEL, NODE, PATH = "value", "variable", "kernel", "node", "path"
# The order in which meanings of a name are tried.
_KINDS = (VALUE, VARIABLE, KERNEL, NODE, PATH)
_KERNEL = re.compile(r"(.+)/(\w+)")
_ENOUGH = 3


@dataclass(frozen=True)
class OpPlace:
    """The place of an operation: its graph and its position in it."""

    graph: str
    position: int
    op: Op


@dataclass(frozen=True)
class Target:
    """A name as the program spells it, its kind, and the operations it stands for."""

    kind: str
    name: str
    places: tuple[OpPlace, ...]

    def within(self, module: Module) -> Target:
        """Find the same target in another module of the pipeline.

        The name counts first. Where the module does not have it, a kernel is found by the results of its operations. A
        value or kernel that is still not found is found by the nodes that its operations came from.
        """
        places = tuple(_places(module, self.kind, self.name))
        if not places and self.kind == KERNEL:
            results = {(graph_kind(place.graph), v.name) for place in self.places for v in place.op.outs}
            places = tuple(
                place
                for place in _all(module)
                if any((graph_kind(place.graph), v.name) in results for v in place.op.outs)
            )
        if not places and self.kind in (VALUE, KERNEL):
            nodes = {place.op.loc for place in self.places if place.op.loc}
            places = tuple(place for place in _all(module) if place.op.loc in nodes)
        return Target(self.kind, self.name, places)


def find(module: Module, text: str, spelled: Mapping[str, Sequence[str]] | None = None) -> Target:
    """Return the operations that a name means; raise UsageError, with similar names, where it means none.

    `spelled` gives the source's names by the names of the program.
    """
    target = look_up(module, text, spelled)
    if target is None:
        like = lookalikes(module, text)
        raise UsageError(
            f"nothing is called {text!r}",
            where=f"@{module.name}",
            hint=f"there is {', '.join(like)}"
            if like
            else "`penstock inspect FILE --op REGEX` searches all operations",
        )
    return target


def look_up(module: Module, text: str, spelled: Mapping[str, Sequence[str]] | None = None) -> Target | None:
    """Return the operations that a name means, or None."""
    kinds = {"%": (VALUE,), "@": (VARIABLE, KERNEL)}.get(text[:1], _KINDS)
    bare = text[1:] if text[:1] in ("%", "@") else text
    names = dict.fromkeys(
        [bare, *(key for key, spellings in (spelled or {}).items() if bare in spellings), _printable(bare)]
    )
    for kind in kinds:
        for name in names:
            places = tuple(_places(module, kind, name)) if name else ()
            if places:
                return Target(kind, name, places)
    return None


def lookalikes(module: Module, text: str) -> list[str]:
    """Return some names similar to a wrong one: those that contain it, and those that are spelled alike."""
    wanted = text.lstrip("%@")
    names = _names(module)
    inside = [name for name in names if wanted.lower() in name.lower()] if wanted else []
    near = difflib.get_close_matches(wanted, names, n=_ENOUGH, cutoff=0.6) if len(inside) < _ENOUGH else []
    return [_marked(name, names[name]) for name in dict.fromkeys([*near, *sorted(inside, key=len)])][:_ENOUGH]


def _names(module: Module) -> dict[str, str]:
    """Return all names that can be looked up, with their kinds."""
    kinds = {op.loc: NODE for graph in module.graphs.values() for op in graph.ops if op.loc}
    kinds |= dict.fromkeys(module.vars, VARIABLE)
    kinds |= {v.name: VALUE for graph in module.graphs.values() for op in graph.ops for v in op.outs}
    return kinds


def _marked(name: str, kind: str) -> str:
    return {VALUE: "%", VARIABLE: "@"}.get(kind, "") + name


def _printable(name: str) -> str:
    """Spell a name of the source as the frontends write it into the IR."""
    return re.sub(r"[^A-Za-z0-9_./:-]", "_", name)


def stage_and_devices(module: Module, graph: str, op: Op) -> tuple[int | None, tuple[str, ...]]:
    """Return the stage of an operation, that of its graph or the planned one, and its devices, where they are known."""
    stage = graph_stage(graph)
    if stage is None and "stage" in op.attrs:
        stage = int(str(op.attrs["stage"]))
    return stage, module.devices_of(stage) if stage is not None and stage < len(module.stages) else ()


# ------------------------------------------------------------------------------------------------ meanings


def _places(module: Module, kind: str, name: str) -> Iterable[OpPlace]:
    if kind == KERNEL:
        return _of_kernel(module, name)
    if kind == VALUE:
        return (place for place in _all(module) if any(v.name == name for v in place.op.outs))
    if kind == VARIABLE:
        return (place for place in _all(module) if place.op.attrs.get("var") == name)
    if kind == NODE:
        return (place for place in _all(module) if place.op.loc == name)
    below = re.compile(rf"(?:^|[./]){re.escape(name)}(?:[./]|$)")
    return (place for place in _all(module) if below.search(place.op.loc))


def _all(module: Module) -> Iterator[OpPlace]:
    for graph in module.graphs.values():
        for position, op in enumerate(graph.ops):
            yield OpPlace(graph.name, position, op)


def _of_kernel(module: Module, name: str) -> Iterator[OpPlace]:
    match = _KERNEL.fullmatch(name)
    graph = module.graphs.get(match[1]) if match is not None else None
    if match is None or graph is None or not any("kernel" in op.attrs for op in graph.ops):
        return
    inside = {id(op) for op in divide(graph).kernels.get(match[2], ())}
    yield from (OpPlace(graph.name, position, op) for position, op in enumerate(graph.ops) if id(op) in inside)
