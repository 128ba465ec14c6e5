"""Bounds of dimensions: as users give them, and as a module of one size says them.

A user bounds a symbolic dimension, `seq<=512`, perhaps with the sizes that code is made for, `seq<=512:64,128,512`.
The module of one such size has a line `bound seq 64 : %ids[1], %y[1]`. It names the dimensions of inputs and outputs
that are multiples of that size. `rows` behind the size says that rows do not see each other: a request may be cut
into pieces. Without the word the size is filled up. What sums over it is masked then, by the size of the request,
which is the input `size.seq`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# The first part of the names of inputs that no data gives: the size of a request along a bounded dimension.
SIZE = "size."
_BOUND = re.compile(r"<=\s*(\d+)\s*(?::\s*(\d+(?:\s*,\s*\d+)*))?")


@dataclass(frozen=True)
class Bound:
    """A bound of a dimension: the largest size, and the sizes to make code for. None are given: they are chosen."""

    most: int
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(sorted(set(self.sizes))))
        if not 1 <= self.most < 2**31:
            raise ValueError(f"a bound is a number from 1 to {2**31 - 1}, got {self.most}")
        if self.sizes and not (self.sizes[0] >= 1 and self.sizes[-1] == self.most):
            listed = ",".join(map(str, self.sizes))
            raise ValueError(
                f"the sizes of a bound of {self.most} lie from 1 on, the last is {self.most}: got {listed}"
            )

    def __str__(self) -> str:
        return f"<={self.most}" + (f":{','.join(map(str, self.sizes))}" if self.sizes else "")


def parse_bound(text: str) -> Bound:
    """Return the bound that `<=512` or `<=512:64,128,512` says; ValueError for other texts."""
    match = _BOUND.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"a bound is written <=MOST or <=MOST:SIZE,...,MOST, got {text!r}")
    return Bound(int(match[1]), tuple(map(int, match[2].split(","))) if match[2] else ())


@dataclass(frozen=True, slots=True)
class Bounded:
    """A bounded dimension in the module of one size. `places` are dimensions of inputs and outputs by name; `rows` says
    that rows do not see each other."""

    name: str
    size: int
    rows: bool
    places: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        places = ", ".join(f"%{name}[{dim}]" for name, dim in self.places)
        return f"bound {self.name} {self.size}{' rows' if self.rows else ''} : {places}"

    @property
    def input(self) -> str:
        """The input that holds the size of a request."""
        return size_input(self.name)

    def dims_of(self, value: str) -> tuple[int, ...]:
        """Return the bounded dimensions of an input or output."""
        return tuple(dim for name, dim in self.places if name == value)


def size_input(name: str) -> str:
    """Return the name of the input that holds the size of a request along a dimension."""
    return SIZE + plain_name(name)


def plain_name(name: str) -> str:
    """Return a name of a dimension as it can stand in the text of a module."""
    return re.sub(r"[^\w./:\-]", "_", name)


_PLACE = re.compile(r"%([\w./:\-]+)\[(\d+)\]")
_LINE = re.compile(r"bound ([\w./:\-]+) (\d+)( rows)? : (.*)")


def parse_bounded(line: str) -> Bounded:
    """Return the bounded dimension that prints as `line`."""
    match = _LINE.fullmatch(line)
    places = [_PLACE.fullmatch(text) for text in match[4].split(", ")] if match is not None else [None]
    if match is None or None in places or int(match[2]) < 1:
        raise ValueError("expected 'bound NAME SIZE [rows] : %name[dimension], ...'")
    return Bounded(
        match[1], int(match[2]), bool(match[3]), tuple((place[1], int(place[2])) for place in places if place)
    )


def sizes_of(bounds: Iterable[Bounded]) -> dict[str, int]:
    """Return the sizes of a module by the names of its bounded dimensions."""
    return {bound.name: bound.size for bound in bounds}


def print_sizes(sizes: Mapping[str, int]) -> str:
    """Write sizes as in `batch=2,seq=64`."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())
