"""Layouts that the user gives: patterns of names, and how tensors with such names lie on the mesh.

    h.*.c_attn.weight=[_,3*/tp]      the second dimension is three blocks, each split over tp; the first is whole
    x=[?,/sp]                        the first dimension is left to propagation
    tokens=[_,-2*/tp]                the second dimension is two blocks, split in folded order

`_` is whole, `?` is free, `/a/b` splits over axes a and b, a major. Names are those of parameters, buffers and inputs,
or of values of the forward graph where none of these fits; of several patterns that fit, the first counts. With a sign
in front they are of variables (`@w`) or of inputs and values (`%w`) alone. One error lists all that is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import lcm, prod

from penstock.ir.graph import BUFFER, CACHE, PARAM, REPLICAS, Module
from penstock.ir.sharding.splits import UNSPLIT, Split
from penstock.ir.types import TensorType, are_blocks
from penstock.support.errors import UsageError
from penstock.support.words import MOST_ITEMS, counted, itemised, meant

# A layout by dimension: None is free.
Layout = tuple[Split | None, ...]

# Names that an error lists.
_SHOWN = 8
_MESH_AXIS = re.compile(r"([A-Za-z_]\w*)\s*=\s*([1-9]\d{0,8})")
_WORDS: dict[str, Split | None] = {"?": None, "_": UNSPLIT}
_DIMENSION = re.compile(r"(?:(-?[1-9]\d*)\*)?((?:/[A-Za-z_]\w*)+)")


@dataclass(frozen=True)
class GivenLayout:
    """A pattern of names with its layout, and the text that it was written as."""

    pattern: str
    layout: Layout
    text: str


def stage_meshes(text: str) -> list[dict[str, int]]:
    """Return the axes of the mesh of every stage, which are written `tp=2;tp=1`; one mesh for all stages otherwise. All
    stages have the same axis dp."""
    meshes = [_one_mesh(part) for part in text.split(";")]
    replicas = sorted({mesh.get(REPLICAS, 1) for mesh in meshes})
    if len(replicas) > 1:
        listed = " and ".join(map(str, replicas))
        raise UsageError(f"axis {REPLICAS} has sizes {listed} in the meshes {text!r}: stages have as many replicas")
    return meshes


def parse_mesh(text: str) -> dict[str, int]:
    """Return the axes of a mesh, such as `dp=2,tp=2`, with their sizes. Where stages have several, what can be split by
    their least common multiple can be split on each."""
    axes: dict[str, int] = {}
    for mesh in stage_meshes(text):
        for axis, size in mesh.items():
            axes[axis] = lcm(size, axes.get(axis, 1))
    return axes


def mesh_text(module: Module) -> str:
    """Return the mesh of a module's stages as the user writes it: one for all, or one of each stage."""
    meshes = [module.mesh_of(stage.index).sizes for stage in module.stages]
    axes = dict.fromkeys(axis for mesh in meshes for axis in mesh)
    texts = [",".join(f"{axis}={mesh.get(axis, 1)}" for axis in axes) for mesh in meshes]
    return texts[0] if len(set(texts)) == 1 else ";".join(texts)


def _one_mesh(text: str) -> dict[str, int]:
    axes: dict[str, int] = {}
    for part in text.split(","):
        match = _MESH_AXIS.fullmatch(part.strip())
        if match is None or match[1] in axes:
            raise UsageError(
                f"cannot read the mesh {text!r} at {part!r}",
                hint="write axes with their sizes, each once, such as dp=2,tp=2",
            )
        axes[match[1]] = int(match[2])
    return axes


def parse_given(texts: Iterable[str]) -> list[GivenLayout]:
    """Return the given layouts."""
    layouts, problems = [], []
    for text in texts:
        pattern, equals, shape = text.rpartition("=")
        shape = shape.strip()
        if not equals or not (shape.startswith("[") and shape.endswith("]")):
            problems.append(f"{text!r} is no PATTERN=[DIMENSION,...], such as 'h.*.weight=[_,/tp]'")
            continue
        words = [word.strip() for word in shape[1:-1].split(",")] if shape != "[]" else []
        wrong = [word for word in words if word not in _WORDS and not _is_split(word)]
        if wrong:
            problems.append(f"{text!r} has the dimension {wrong[0]!r}, expected _, ?, /AXIS, 3*/AXIS or -2*/AXIS")
        else:
            layouts.append(GivenLayout(pattern.strip(), tuple(map(_split, words)), text))
    if problems:
        raise UsageError("cannot read these layouts:" + itemised(problems, MOST_ITEMS))
    return layouts


def _is_split(word: str) -> bool:
    match = _DIMENSION.fullmatch(word)
    return match is not None and (match[1] is None or match[1] == "1" or are_blocks(int(match[1])))


def _split(word: str) -> Split | None:
    """Return the split that a dimension of a layout says."""
    if word in _WORDS:
        return _WORDS[word]
    match = _DIMENSION.fullmatch(word)
    assert match is not None
    return Split(tuple(match[2].split("/")[1:]), int(match[1] or 1))


def chosen_layouts(
    module: Module, values: Mapping[str, TensorType], given: Sequence[GivenLayout], sizes: Mapping[str, int]
) -> dict[str, Layout]:
    """Return the layouts of parameters and buffers, as `@name`, and of inputs and other `values`, as `%name`, that
    patterns name. A pattern is about values of the graph only where it fits no parameter, buffer or input. A layout
    that cannot be is refused."""
    roots = {f"@{name}": var.type for name, var in module.vars.items() if var.role in (PARAM, BUFFER, CACHE)}
    roots |= {f"%{value.name}": value.type for value in module.data_inputs}
    inner = {f"%{name}": t for name, t in values.items()}
    chosen: dict[str, Layout] = {}
    problems = list(_conflicts(given))
    for entry in given:
        nodes = next((n for n in (roots, inner) if any(_is_meant(node, entry.pattern) for node in n)), {})
        if not nodes:
            names = [node[1:] for node in roots]
            hint = meant(entry.pattern, names) or f"there are {', '.join(names[:_SHOWN])}" + ", ..." * (
                len(names) > _SHOWN
            )
            problems.append(f"{entry.text!r} fits no name; {hint}")
        misfits: dict[str, list[str]] = {}
        fitting = [node for node in nodes if _is_meant(node, entry.pattern)]
        free = [node for node in fitting if node not in chosen]
        wrong = {node: list(_misfits(nodes[node], entry.layout, sizes)) for node in free or fitting}
        # Where earlier patterns count for all names, this one has to be right for one of them at least.
        for node in wrong if free or all(wrong.values()) else ():
            for what in wrong[node]:
                misfits.setdefault(what, []).append(node)
        chosen |= dict.fromkeys(free, entry.layout)
        problems += [f"{entry.text!r}: {_listed(names)}: {what}" for what, names in misfits.items()]
    if problems:
        raise UsageError("cannot lay tensors out like this:" + itemised(problems, MOST_ITEMS))
    return chosen


def _is_meant(node: str, pattern: str) -> bool:
    """Return whether a pattern fits a node: with its sign, or its name alone."""
    return fnmatchcase(node if pattern[:1] in "@%" else node[1:], pattern)


def _conflicts(given: Sequence[GivenLayout]) -> Iterable[str]:
    """Yield what is wrong with layouts of one and the same pattern."""
    first: dict[str, GivenLayout] = {}
    for entry in given:
        before = first.setdefault(entry.pattern, entry)
        if before.layout != entry.layout:
            yield f"{before.text!r} and {entry.text!r} are two layouts of the same tensors"


def _listed(nodes: Sequence[str]) -> str:
    more = f" and {counted(len(nodes) - 1, 'other')}" if len(nodes) > 1 else ""
    return nodes[0] + more


def _misfits(t: TensorType, layout: Layout, sizes: Mapping[str, int]) -> Iterable[str]:
    if len(layout) != t.rank:
        yield f"{t.plain} has {counted(t.rank, 'dimension')}, the layout {len(layout)}"
        return
    used: list[str] = []
    for i, split in enumerate(layout):
        for axis in split.axes if split else ():
            if axis == REPLICAS:
                yield f"microbatches are dealt out along {REPLICAS}, which splits no tensor"
            elif axis not in sizes:
                yield f"there is no axis {axis}, the mesh has {', '.join(sizes)}"
            elif axis in used:
                yield f"axis {axis} splits two dimensions"
            used.append(axis)
        if split is None or not set(split.axes) <= sizes.keys():
            continue
        n, parts = t.dims[i], prod(sizes[axis] for axis in split.axes)
        if n % split.blocks or (split.blocks != 1 and n // split.blocks % parts):
            yield f"dimension {i} has {n} elements, which are not {abs(split.blocks)} blocks of {parts} equal parts"
        elif parts > 1 and n < parts:
            yield f"dimension {i} has {n} elements for {parts} devices"
