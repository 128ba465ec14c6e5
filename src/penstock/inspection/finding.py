"""Which operations somebody means. In: a module and a name. Out: a Target: the operations, and what kind of name it was.

    %h             a value: the operations that make it, here and where it is computed again
    @fc1.w         a variable: the operations that read, write or add to it
    s0.F/k3        a kernel: its operations
    /fc1/MatMul    a node of the source: everything that came of it, forward, backward and update
    block.0.attn   a module of the source, or part of a path: everything below it

Names of the source are taken as the source spells them, and `%` and `@` may be left out where only one thing is called so: a
value comes before a variable, and that before a node. Limits: a name with characters that the IR cannot print is that of
every node which is spelled alike in it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.ir.graph import Module, Op, graph_kind
from penstock.passes.kernels.divide import divide
from penstock.support.errors import UsageError

VALUE, VARIABLE, KERNEL, NODE, PATH = "value", "variable", "kernel", "node", "path"
# The order in which meanings of a name are tried.
_KINDS = (VALUE, VARIABLE, KERNEL, NODE, PATH)
_KERNEL = re.compile(r"(.+)/(\w+)")
_ENOUGH = 3


@dataclass(frozen=True)
class OpPlace:
    """Where an operation stands: its graph and its position in it."""

    graph: str
    position: int
    op: Op


@dataclass(frozen=True)
class Target:
    """What somebody asks about: `name` as the program spells it, and the operations it stands for."""

    kind: str
    name: str
    places: tuple[OpPlace, ...]

    def within(self, module: Module) -> Target:
        """The same in another module of the pipeline: by the name; where that is not known there, of a kernel by what its operations make,
        and else by the nodes that the operations came from."""
        found = tuple(_places(module, self.kind, self.name))
        if not found and self.kind == KERNEL:
            made = {(graph_kind(place.graph), v.name) for place in self.places for v in place.op.outs}
            found = tuple(
                place for place in _all(module) if any((graph_kind(place.graph), v.name) in made for v in place.op.outs)
            )
        if not found and self.kind in (VALUE, KERNEL):
            nodes = {place.op.loc for place in self.places if place.op.loc}
            found = tuple(place for place in _all(module) if place.op.loc in nodes)
        return Target(self.kind, self.name, found)


def find(module: Module, text: str, spelled: Mapping[str, Sequence[str]] | None = None) -> Target:
    """The operations that a name means; UsageError with names like it where it means none. `spelled` gives, by name of
    the program, what the source calls it."""
    found = look_up(module, text, spelled)
    if found is None:
        like = lookalikes(module, text)
        raise UsageError(
            f"nothing is called {text!r}",
            where=f"@{module.name}",
            hint=f"there is {', '.join(like)}"
            if like
            else "`penstock inspect FILE --op REGEX` searches all operations",
        )
    return found


def look_up(module: Module, text: str, spelled: Mapping[str, Sequence[str]] | None = None) -> Target | None:
    """The same, or None."""
    kinds = {"%": (VALUE,), "@": (VARIABLE, KERNEL)}.get(text[:1], _KINDS)
    bare = text[1:] if text[:1] in ("%", "@") else text
    names = dict.fromkeys(
        [bare, *(ours for ours, theirs in (spelled or {}).items() if bare in theirs), _printable(bare)]
    )
    for kind in kinds:
        for name in names:
            places = tuple(_places(module, kind, name)) if name else ()
            if places:
                return Target(kind, name, places)
    return None


def lookalikes(module: Module, text: str) -> list[str]:
    """Some names like a wrong one: those it is a part of, then those that are spelled nearly so."""
    wanted = text.lstrip("%@")
    names = _names(module)
    inside = [name for name in names if wanted.lower() in name.lower()] if wanted else []
    near = difflib.get_close_matches(wanted, names, n=_ENOUGH, cutoff=0.6) if len(inside) < _ENOUGH else []
    return [_marked(name, names[name]) for name in dict.fromkeys([*near, *sorted(inside, key=len)])][:_ENOUGH]


def _names(module: Module) -> dict[str, str]:
    """All names that can be asked for, with their kinds."""
    found = {op.loc: NODE for graph in module.graphs.values() for op in graph.ops if op.loc}
    found |= dict.fromkeys(module.vars, VARIABLE)
    found |= {v.name: VALUE for graph in module.graphs.values() for op in graph.ops for v in op.outs}
    return found


def _marked(name: str, kind: str) -> str:
    return {VALUE: "%", VARIABLE: "@"}.get(kind, "") + name


def _printable(name: str) -> str:
    """As the frontends write names of the source into the IR."""
    return re.sub(r"[^A-Za-z0-9_./:-]", "_", name)


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
