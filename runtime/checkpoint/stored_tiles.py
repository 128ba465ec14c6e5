"""The files of a checkpoint, and the tiles of tensors that they hold.

In: the entries of an index. Out: the files that a wanted tile is filled from, and what is wrong with the tiles of an
index: one that does not fit its tensor, elements that no file holds, elements that two files hold with other contents.

A file holds a tensor whole, or a tile of it without padding. A tied parameter lies on several stages, so two files may
hold the same elements. A tile is filled from as few files as hold it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.backends.bundle.tensor_file import map_tensors
from penstock.ir.sharding.tiles import (
    Ranges,
    SharedSlices,
    TensorTile,
    copy,
    missing_element,
    overlaps,
    packed_tile,
    whole_tile,
)
from penstock.ir.types import TensorType, numpy_dtype, parse_type


class SavedFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True, omit_defaults=True):
    """One file of a checkpoint. `version` is that of the parameters in the file; `tensors` maps names to types of whole
    tensors. `tiles` has the ranges of those of which the file holds a part, by dimension."""

    sha256: str
    size: int
    version: int
    tensors: dict[str, str]
    tiles: dict[str, Ranges] = {}

    def tile(self, name: str) -> TensorTile:
        """Return the tile of a tensor that the file holds."""
        ranges = self.tiles.get(name)
        return whole_tile(parse_type(self.tensors[name])) if ranges is None else packed_tile(ranges)

    def stored_type(self, name: str) -> TensorType:
        """Return the type of a tensor as it stands in the file."""
        return parse_type(self.tensors[name]).with_shape(self.tile(name).shape)


Files = Mapping[str, SavedFile]


def files_for(files: Files, wanted: Mapping[str, TensorTile | None], version: int) -> dict[str, dict[str, TensorTile]]:
    """Return the files to read the wanted tiles of a version from: file name -> tensor name -> the tile that is in
    there. None stands for the whole tensor. Names that are nowhere are left out."""
    chosen: dict[str, dict[str, TensorTile]] = {}
    for name, tile in wanted.items():
        holders = {key: file for key, file in files.items() if file.version == version and name in file.tensors}
        if not holders:
            continue
        if not any(name in file.tiles for file in holders.values()):
            key, file = next(iter(holders.items()))
            chosen.setdefault(key, {})[name] = file.tile(name)
            continue
        target = tile if tile is not None else whole_tile(parse_type(next(iter(holders.values())).tensors[name]))
        for key in _fewest(holders, name, target):
            chosen.setdefault(key, {})[name] = holders[key].tile(name)
    return chosen


def _fewest(holders: Files, name: str, wanted: TensorTile) -> list[str]:
    """Return files that hold a tile together, those first that hold most of it, none that adds nothing."""
    target = wanted.packed
    shared = {key: overlaps(file.tile(name), target) for key, file in holders.items()}
    held: list[Ranges] = []
    chosen = []
    for key in sorted(shared, key=lambda key: -sum(_elements(pair) for pair in shared[key])):
        if missing_element(target.shape, held) is None:
            break
        ranges: list[Ranges] = [tuple(((s.start, s.stop),) for s in pair.other) for pair in shared[key]]
        if any(not _holds(held, pair.other) for pair in shared[key]):
            chosen.append(key)
            held += ranges
    return chosen


def _elements(pair: SharedSlices) -> int:
    count = 1
    for one in pair.one:
        count *= one.stop - one.start
    return count


def _holds(held: list[Ranges], slices: tuple[slice, ...]) -> bool:
    """Return whether some tiles hold all elements of a slice."""
    box = packed_tile(tuple(((s.start, s.stop),) for s in slices))
    inside: list[Ranges] = [
        tuple(((s.start, s.stop),) for s in pair.one) for ranges in held for pair in overlaps(box, packed_tile(ranges))
    ]
    return missing_element(box.shape, inside) is None


# ------------------------------------------------------------------------------------------------ what is wrong


def tile_problem(files: Files) -> str:
    """Return the first tile that does not fit its tensor, or the tensor that no files hold whole; nothing where all is
    well."""
    for key, file in files.items():
        for name, ranges in file.tiles.items():
            if problem := _range_problem(file.tensors.get(name), ranges):
                return f"{key} has a tile of {name}, {problem}"
    tiled = sorted({(file.version, name) for file in files.values() for name in file.tiles})
    for version, name in tiled:
        holders = [file for file in files.values() if file.version == version and name in file.tensors]
        types = sorted({file.tensors[name] for file in holders})
        if len(types) > 1:
            return f"{name} is {types[0]} in one file and {types[1]} in another"
        missing = missing_element(parse_type(types[0]).dims, [file.tile(name).ranges for file in holders])
        if missing is not None:
            return f"no file of version {version} holds {name}{list(missing)}"
    return ""


def _range_problem(type: str | None, ranges: Ranges) -> str:
    if type is None:
        return "which the file does not have"
    try:
        whole = parse_type(type)
    except ValueError as error:
        return str(error)
    if not whole.is_static or not whole.is_plain:
        return f"which is {type}, no whole tensor"
    if len(ranges) != whole.rank:
        return f"which has {len(ranges)} dimensions, of {type}"
    for line, n in zip(ranges, whole.dims, strict=True):
        edges = [edge for pair in line for edge in pair]
        if edges != sorted(edges) or any(not 0 <= edge <= n for edge in edges) or any(a == b for a, b in line):
            return f"whose ranges {[list(pair) for pair in line]} do not fit {type}"
    return ""


def conflicts(place: Path, files: Files) -> Iterator[str]:
    """Yield elements that two files hold with other contents. The files are whole; only what they share is read."""
    by_name: dict[tuple[int, str], list[str]] = {}
    for key, file in files.items():
        for name in file.tensors:
            by_name.setdefault((file.version, name), []).append(key)
    for (_, name), keys in by_name.items():
        if not any(name in files[key].tiles for key in keys):
            continue
        for one, other in combinations(keys, 2):
            pairs = overlaps(files[one].tile(name), files[other].tile(name))
            if pairs and not _equal(_array(place, files, one, name), _array(place, files, other, name), pairs):
                yield f"{name}: {one} and {other} hold the same elements with other contents"


def _array(place: Path, files: Files, key: str, name: str) -> np.ndarray[Any, Any] | None:
    """Return a tensor of a file; None where it is another than the index says."""
    array = map_tensors(place / key).get(name)
    stored = files[key].stored_type(name)
    fits = array is not None and (array.dtype, array.shape) == (numpy_dtype(stored.dtype), stored.dims)
    return array if fits else None


def _equal(one: np.ndarray[Any, Any] | None, other: np.ndarray[Any, Any] | None, pairs: list[SharedSlices]) -> bool:
    if one is None or other is None:
        return False
    # Bits are compared: nan is equal to itself.
    bits = np.dtype(f"u{one.dtype.itemsize}")
    return all(np.array_equal(one[a].view(bits), other[b].view(bits)) for a, b in pairs)


# ------------------------------------------------------------------------------------------------ whole tensors


def whole_array(type: str, parts: list[tuple[np.ndarray[Any, Any], TensorTile]]) -> np.ndarray[Any, Any]:
    """Return a tensor from tiles of it that hold all of it; the array itself where one holds all."""
    whole = parse_type(type)
    target = whole_tile(whole)
    if len(parts) == 1 and parts[0][1] == target:
        return parts[0][0]
    joined = np.empty(whole.dims, numpy_dtype(whole.dtype))
    for array, tile in parts:
        copy(array, tile, joined, target)
    return joined
