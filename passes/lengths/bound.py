"""Make a module of one size stand for all sizes up to it: the pass `bound`.

In: a model of one graph with numbers for all sizes, and which dimensions of its inputs are one bounded size. Out: the
same module, in which padding behind the size of a request changes nothing. What sums over the dimension is masked, by
the input `size.NAME` that the runtime fills (walk.py, forms.py). A line `bound` says which dimensions of inputs and
outputs are padded and cut.

Rows that do not see each other need no mask. A module of size 1 needs none either: nothing is left to pad.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.ir.graph import Graph, Module
from penstock.ir.ladder.bounds import Bounded, plain_name
from penstock.support.errors import UnsupportedModel, UsageError
from penstock.support.words import itemised

from .walk import LengthWalk

_PLACE = re.compile(r"%(.+)\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class BoundOptions:
    """Options of `bound`. `size` is that of this module along dimension `name`. `inputs` and `outputs` are places of
    it, `%ids[1]`; `grown` are places in values of which no operand has it; `ends` are results of slices that take the
    last element along it. `rows` promises that rows do not see each other."""

    name: str
    size: int
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    grown: tuple[str, ...] = ()
    rows: bool = False
    ends: tuple[str, ...] = ()


def bound(module: Module, options: BoundOptions) -> Module:
    """Mask what padding behind the size of a request would change."""
    if list(module.graphs) != ["main"]:
        raise UsageError("takes a whole model, with one graph @main", hint="run it before `split`")
    inputs, outputs, grown = (_places(texts) for texts in (options.inputs, options.outputs, options.grown))
    line = Bounded(
        plain_name(options.name),
        options.size,
        options.rows,
        tuple((name, dim) for places in (inputs, outputs) for name, dims in places.items() for dim in dims),
    )
    module = module.but(bounds=(*module.bounds, line))
    if options.size == 1 or options.rows:
        return module
    walk = LengthWalk(module.graphs["main"], options.name, options.size, inputs, grown, ends=options.ends)
    graph = walk.run()
    if walk.mixes and not walk.problems:
        # Padding that was finite once stays so, in most models, and needs no other mask.
        walk = LengthWalk(module.graphs["main"], options.name, options.size, inputs, grown, ends=options.ends)
        graph = walk.run(clean=True)
    if walk.problems:
        raise cannot_bound(options.name, walk.problems)
    return _with_graph(module, graph, walk)


def _with_graph(module: Module, graph: Graph, walk: LengthWalk) -> Module:
    more = (walk.masks.live,) if walk.masks.used else ()
    return module.but(inputs=(*module.inputs, *more)).with_graph(graph)


def cannot_bound(name: str, problems: Sequence[str]) -> UnsupportedModel:
    """Return the error for a dimension that cannot be bounded: one for all operations in the way."""
    return UnsupportedModel(
        f"dimension {name} cannot be bounded:" + itemised(list(dict.fromkeys(problems))),
        hint=f"give it a number, --dim {name}=INT",
    )


def print_places(places: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Write places as options of the pass."""
    return tuple(f"%{name}[{dim}]" for name, dims in places.items() for dim in dims)


def _places(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    places: dict[str, tuple[int, ...]] = {}
    for text in texts:
        match = _PLACE.fullmatch(text)
        if match is None:
            raise UsageError(f"bad place {text!r}, expected %name[dimension]")
        places[match[1]] = (*places.get(match[1], ()), int(match[2]))
    return places
