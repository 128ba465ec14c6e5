"""The ways in which an operation can be split over the axes of a mesh, by its rule.

In: an operation of the forward graph, its rule, and the sizes of axes. Out: ways. Each gives every axis to one name of
the rule or to none. It says how operands are needed, how results lie, and over which axes gradients of operands are
left partial. A result that is a partial sum lies as one way or another of adding it up: whole, or with a dimension
split over the axis. The first way splits nothing.

Names with an own form (passes/sharding/forms.py) are among them where the form is made of sums and of largest elements.
Windows over rows of neighbours and rings of attention are not: presets split these.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, prod

from penstock.ir.graph import Op
from penstock.ir.sharding.splits import UNSPLIT, Split, SplitRule, laid_out, read_split
from penstock.ir.types import TensorType
from penstock.passes.sharding.halos import HALOS
from penstock.passes.sharding.propagate import bears, fits, is_alone
from penstock.passes.sharding.rings.attention import RINGS


@dataclass(frozen=True, slots=True)
class SplitWay:
    """A way of splitting an operation. `needs` are the types of operands, and `sums` the axes over which gradients of
    these are left partial. `raw` are the types of results as they come out, `gives` those as they lie. A device
    computes this `part` of the operation. Own forms add `own_rows` numbers up over the axes `own`."""

    needs: tuple[TensorType, ...]
    sums: tuple[tuple[str, ...], ...]
    raw: tuple[TensorType, ...]
    gives: tuple[TensorType, ...]
    part: float
    own: tuple[str, ...] = ()
    own_rows: int = 0


def ways_of(
    op: Op, rule: SplitRule, sizes: Mapping[str, int], blocks: Mapping[str, Collection[int]], whole: Collection[str]
) -> list[SplitWay]:
    """Return the ways of an operation. `blocks` are numbers of blocks that names may have, and `whole` names results
    that stay whole."""
    splits = _splits(op, rule, sizes, blocks)
    return [way for chosen in splits for way in _added_up(op, rule, chosen, sizes, whole)]


def _splits(
    op: Op, rule: SplitRule, sizes: Mapping[str, int], blocks: Mapping[str, Collection[int]]
) -> Iterator[dict[str, Split]]:
    """Yield splits of names, each of which the operation bears."""
    names = [name for name in rule.sizes if _may_split(op, rule, name)]
    for chosen in product([None, *names], repeat=len(sizes)):
        axes_of: dict[str, tuple[str, ...]] = {}
        for name, axis in zip(chosen, sizes, strict=True):
            if name is not None:
                axes_of[name] = (*axes_of.get(name, ()), axis)
        each = [
            [(name, Split(axes, count)) for count in sorted({1, *blocks.get(name, ())})]
            for name, axes in axes_of.items()
        ]
        for pairs in product(*each):
            splits = dict(pairs)
            if all(_is_borne(op, rule, name, split, sizes) for name, split in pairs) and _lies(op, rule, splits):
                yield splits


def _may_split(op: Op, rule: SplitRule, name: str) -> bool:
    return rule.may_split(name) and not (rule.has_own_form(name) and op.kind in (*HALOS, *RINGS))


def _is_borne(op: Op, rule: SplitRule, name: str, split: Split, sizes: Mapping[str, int]) -> bool:
    alone = all(is_alone(rule, name, factors) for dims in rule.operands() for factors in dims if name in factors)
    return bears(op, rule, name, split) and fits(split, rule.sizes[name], sizes, alone)


def _lies(op: Op, rule: SplitRule, splits: Mapping[str, Split]) -> bool:
    """Return whether operands and results can lie so, and one of them is split at all where something is asked."""
    types = [value.type.plain for value in (*op.ins, *op.outs)]
    laid = [laid_out(t, dims, splits, rule.sizes) for t, dims in zip(types, rule.operands(), strict=True)]
    return all(t is not None for t in laid) and (not splits or any(t != p for t, p in zip(laid, types, strict=True)))


def _added_up(
    op: Op, rule: SplitRule, splits: Mapping[str, Split], sizes: Mapping[str, int], whole: Collection[str]
) -> Iterator[SplitWay]:
    """Yield a way for each layout that the sum of a partial result may have."""
    needs = [_laid(v.type, dims, splits, rule) for v, dims in zip(op.ins, rule.ins, strict=True)]
    bare = [_laid(v.type, dims, splits, rule) for v, dims in zip(op.outs, rule.outs, strict=True)]
    raw = [t.laid(t.axes, _left(rule, splits, dims), t.blocks) for t, dims in zip(bare, rule.outs, strict=True)]
    sums = tuple(_absent(splits, dims) for dims in rule.ins)
    part = prod(_part(rule.sizes[name], split, sizes) for name, split in splits.items())
    # A form whose result is partial adds nothing up by itself.
    forms = [name for name in splits if rule.has_own_form(name) and not rule.leaves_sums(name)]
    over = tuple(axis for name in forms for axis in splits[name].axes)
    rows = [n for n, factors in zip(op.ins[0].type.dims, rule.ins[0], strict=True) if not {*factors} & {*forms}]
    choices = [
        [t.plain] if value.name in whole else [t, *(_scattered(t, r.partial, sizes) if not place else ())]
        for place, (value, t, r) in enumerate(zip(op.outs, bare, raw, strict=True))
    ]
    for gives in product(*choices):
        yield SplitWay(tuple(needs), sums, tuple(raw), gives, part, over, prod(rows) if over else 0)


def _laid(t: TensorType, dims: Sequence[tuple[str, ...]], splits: Mapping[str, Split], rule: SplitRule) -> TensorType:
    laid = laid_out(t.plain, tuple(dims), splits, rule.sizes)
    assert laid is not None
    return laid


def _left(rule: SplitRule, splits: Mapping[str, Split], dims: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the axes over which a result with these dimensions is a partial sum."""
    here = {name for factors in dims for name in factors}
    return tuple(
        sorted(axis for name, s in splits.items() if name not in here and rule.leaves_sums(name) for axis in s.axes)
    )


def _absent(splits: Mapping[str, Split], dims: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the axes that split other names than an operand has: its gradient is a sum over them."""
    here = {name for factors in dims for name in factors}
    return tuple(sorted(axis for name, split in splits.items() if name not in here for axis in split.axes))


def _part(size: int, split: Split, sizes: Mapping[str, int]) -> float:
    parts = prod(sizes[axis] for axis in split.axes)
    return ceil(size / parts) / size


def _scattered(t: TensorType, partial: Sequence[str], sizes: Mapping[str, int]) -> Iterator[TensorType]:
    """Yield layouts in which each axis of a partial sum splits a dimension that is whole otherwise."""
    free = [dim for dim in range(t.rank) if not t.axes_of(dim)]
    for dim in free if len(partial) == 1 else ():
        if t.dims[dim] >= sizes[partial[0]]:
            yield t.laid([tuple(partial) if i == dim else t.axes_of(i) for i in range(t.rank)], (), t.blocks)


def layouts_of(t: TensorType, sizes: Mapping[str, int], blocks: Mapping[int, Collection[int]]) -> list[TensorType]:
    """Return the layouts of a variable or an input: every axis splits one dimension or none, perhaps in blocks. The
    first one is whole."""
    laid = [t.plain]
    for chosen in product([None, *range(t.rank)], repeat=len(sizes)):
        every = [tuple(axis for axis, dim in zip(sizes, chosen, strict=True) if dim == i) for i in range(t.rank)]
        for counts in product(*(sorted({1, *blocks.get(i, ())}) if axes else [1] for i, axes in enumerate(every))):
            parts = [prod(sizes[axis] for axis in axes) for axes in every]
            even = all(
                not axes or (t.dims[i] >= n * c and (c == 1 or t.dims[i] % (n * c) == 0))
                for i, (axes, n, c) in enumerate(zip(every, parts, counts, strict=True))
            )
            if any(every) and even:
                laid.append(t.plain.laid(every, (), counts))
    return laid


def blocks_that_meet(
    op: Op,
    rule: SplitRule,
    keys: Sequence[str],
    known: Mapping[tuple[str, int], Collection[int]],
    sizes: Mapping[str, int],
) -> dict[str, set[int]]:
    """Return the numbers of blocks in which names of an operation may be split, as its operands and results may lie so.
    `known` has them by key and dimension, `keys` are those of operands and results."""
    added: dict[str, set[int]] = {}
    axis = min(sizes, key=lambda axis: sizes[axis])
    for key, dims in zip(keys, rule.operands(), strict=True):
        for dim, factors in enumerate(dims):
            for count in known.get((key, dim), ()) if factors else ():
                read = read_split(factors, Split((axis,), count), rule.sizes, sizes[axis])
                if read is not None and read[1].blocks != 1:
                    added.setdefault(read[0], set()).add(read[1].blocks)
    return added


def blocks_made(keys: Sequence[str], ways: Sequence[SplitWay]) -> Iterator[tuple[tuple[str, int], int]]:
    """Yield the keys of operands and results with a dimension, and the numbers of blocks in which ways split these."""
    for way in ways:
        for key, t in zip(keys, (*way.needs, *way.raw), strict=True):
            for dim in range(t.rank):
                if t.axes_of(dim) and t.blocks_of(dim) != UNSPLIT.blocks:
                    yield (key, dim), t.blocks_of(dim)
