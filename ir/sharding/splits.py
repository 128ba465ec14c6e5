"""Names of dimensions, and splits of them: what the rule of an operation is made of.

A dimension may have several factors, the major one first: [b, (h e)] of a reshape. A split of its first factor splits
the dimension; a split of a later one splits each of its blocks. A negative number of blocks is folded order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from penstock.ir.types import TensorType

FREE, SUM, WHOLE, OWN, EQUAL = "", "+", "^", "*", "="


class Split(NamedTuple):
    """The mesh axes that split a dimension, the first major, and the number of blocks that are split each."""

    axes: tuple[str, ...] = ()
    blocks: int = 1


UNSPLIT = Split()

# The names of the factors of a dimension, the major one first; none of a dimension that cannot be split.
Factors = tuple[str, ...]
Name = str | Factors
Dimensions = tuple[Factors, ...]


@dataclass(frozen=True)
class SplitRule:
    """The rule of one operation. `linear` are the sets of operands through which a partial sum passes."""

    ins: tuple[Dimensions, ...]
    outs: tuple[Dimensions, ...]
    sizes: Mapping[str, int]
    marks: Mapping[str, str] = field(default_factory=dict)
    linear: tuple[frozenset[int], ...] = ()

    def may_split(self, name: str) -> bool:
        return WHOLE not in self.marks.get(name, FREE)

    def leaves_sums(self, name: str) -> bool:
        return SUM in self.marks.get(name, FREE)

    def has_own_form(self, name: str) -> bool:
        return OWN in self.marks.get(name, FREE)

    def needs_equal(self, name: str) -> bool:
        return EQUAL in self.marks.get(name, FREE)

    def operands(self) -> Iterator[Dimensions]:
        """Yield the dimensions of operands and results."""
        yield from self.ins
        yield from self.outs


def read_split(factors: Factors, split: Split, sizes: Mapping[str, int], parts: int) -> tuple[str, Split] | None:
    """Return the factor of a dimension that a split of the dimension splits, and how; None where it splits none alone.
    `parts` is the number of parts."""
    if len(factors) == 1:
        return factors[0], split
    before = 1
    for i, name in enumerate(factors):
        n, blocks = sizes[name], split.blocks // before
        # A pair of blocks in folded order is one of a factor's own.
        if split.blocks % before == 0 and n > abs(blocks) and (blocks > 0 or blocks % 2 == 0):
            # Parts are equal where the factor has others behind it, or blocks.
            equal = blocks != 1 or i + 1 < len(factors)
            return (name, Split(split.axes, blocks)) if not equal or n % (blocks * parts) == 0 else None
        before *= n
    return None


def split_of(factors: Factors, splits: Mapping[str, Split], sizes: Mapping[str, int]) -> Split | None:
    """Return the split of a dimension with the given splits of its factors; None where there is none."""
    before, chosen = 1, UNSPLIT
    for name in factors:
        split = splits.get(name, UNSPLIT)
        if split.axes:
            if chosen.axes:
                return None
            chosen = Split(split.axes, before * split.blocks)
        before *= sizes[name]
    return chosen


def laid_out(
    t: TensorType, dimensions: Dimensions, splits: Mapping[str, Split], sizes: Mapping[str, int]
) -> TensorType | None:
    """Return the type of an operand or result, with the given splits of names; None where there is none."""
    chosen = [split_of(factors, splits, sizes) if factors else UNSPLIT for factors in dimensions]
    if any(split is None for split in chosen):
        return None
    kept = [split or UNSPLIT for split in chosen]
    axes = [axis for split in kept for axis in split.axes]
    if len(set(axes)) < len(axes):
        return None
    return t.laid([split.axes for split in kept], (), [split.blocks for split in kept])


def build(
    names: Sequence[Sequence[Name]],
    shapes: Sequence[Sequence[int]],
    operands: int,
    marks: Mapping[str, str] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> SplitRule:
    """Return a rule from one name, or a tuple of factors, per dimension. A dimension of size 1 that others of its name
    exceed has none. `sizes` are those of factors."""
    size = dict(sizes or {})
    for listed, shape in zip(names, shapes, strict=True):
        for name, n in zip(listed, shape, strict=True):
            if isinstance(name, str):
                size[name] = max(size.get(name, n), n)
    dimensions = tuple(
        tuple(
            name if isinstance(name, tuple) else ((name,) if size[name] == n else ())
            for name, n in zip(listed, shape, strict=True)
        )
        for listed, shape in zip(names, shapes, strict=True)
    )
    return SplitRule(dimensions[:operands], dimensions[operands:], size, dict(marks or {}))


def parts_of(split: Split, sizes: Mapping[str, int]) -> int:
    """Return the number of parts that a split makes on a mesh."""
    return prod(sizes.get(axis, 1) for axis in split.axes)
