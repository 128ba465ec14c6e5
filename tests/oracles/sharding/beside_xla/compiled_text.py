"""The collectives of what XLA compiled, read from its text.

In: HLO text. Out: every collective with the size of its result on a device. One of several tensors, as XLA joins them,
counts for each of them.
"""

from __future__ import annotations

import re
from math import prod

from .moved import Moved, sent

_KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "shift",
}
_LINE = re.compile(rf"= (.*?) ({'|'.join(_KINDS)})(?:-start)?\((.*)$", re.MULTILINE)
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
# Groups are listed, counted, or the axes of a mesh.
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_COUNTED = re.compile(r"replica_groups=\[\d+,(\d+)\]")
_AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}")
_WIDTHS = {"f32": 4, "s32": 4, "u32": 4, "pred": 1, "s64": 8, "f64": 8}


def collectives_of(text: str) -> list[Moved]:
    """Return the collectives of a compiled text."""
    found = []
    for shapes, kind, behind in _LINE.findall(text):
        members = _members(behind) if kind != "collective-permute" else 2
        listed = [_WIDTHS[dtype] * _size(dims) for dtype, dims in _SHAPE.findall(shapes)]
        if kind == "all-to-all":
            listed = [sum(listed)]
        found += [Moved(_KINDS[kind], members, nbytes, sent(_KINDS[kind], members, nbytes)) for nbytes in listed]
    return found


def _members(behind: str) -> int:
    """Return the devices that meet."""
    if listed := _LISTED.search(behind):
        return len(listed[1].split(","))
    if counted := _COUNTED.search(behind):
        return int(counted[1])
    axes = _AXES.search(behind)
    assert axes is not None, behind
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes[1]))
    return prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", axes[2]))


def _size(dims: str) -> int:
    return prod(map(int, dims.split(","))) if dims else 1
