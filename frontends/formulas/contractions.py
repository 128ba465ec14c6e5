"""Sums of products by an equation (einsum), two operands at a time, as matrix products; and determinants."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from penstock.frontends.writer import Writer
from penstock.ir.graph import Value

from .layout import cut, reshape, transpose

# An operand and the names of its dimensions.
Named = tuple[Value, tuple[str, ...]]


def _names(w: Writer, term: str, rank: int) -> tuple[str, ...]:
    """Name each dimension. Those that `...` stands for are numbered from the last one."""
    term = term.replace(" ", "")
    head, dots, tail = term.partition("...")
    missing = rank - len(head) - len(tail)
    w.require(missing >= 0 if dots else missing == 0, f"{term!r} does not name {rank} dimensions")
    return (*head, *(f".{missing - 1 - i}" for i in range(missing)), *tail)


def _diagonals(w: Writer, x: Value, names: tuple[str, ...]) -> Named:
    """Merge dimensions of the same name into one, their diagonal."""
    while len(set(names)) < len(names):
        i = next(i for i, name in enumerate(names) if name in names[i + 1 :])
        j = names.index(names[i], i + 1)
        others = [k for k in range(len(names)) if k not in (i, j)]
        size = x.type.dims[i]
        w.require(x.type.dims[j] == size, f"dimensions {names[i]} of {x.type} differ")
        lead = [x.type.dims[k] for k in others]
        flat = reshape(w, transpose(w, x, (*others, i, j)), (*lead, size * size))
        starts, stops = (0,) * len(flat.type.dims), flat.type.dims
        x = w.emit("slice", flat, start=starts, stop=stops, step=(*(1,) * len(others), size + 1))
        names = (*(names[k] for k in others), names[i])
    return x, names


def _sum_out(w: Writer, x: Value, names: tuple[str, ...], needed: set[str]) -> Named:
    axes = tuple(i for i, name in enumerate(names) if name not in needed)
    return (w.emit("sum", x, axes=axes), tuple(n for n in names if n in needed)) if axes else (x, names)


def _arranged(w: Writer, x: Value, names: tuple[str, ...], groups: Sequence[Sequence[str]]) -> Value:
    """Sort the dimensions by groups and merge each group into one dimension, except for those of the first group."""
    order = [name for group in groups for name in group]
    turned = transpose(w, x, [names.index(name) for name in order])
    sizes = dict(zip(names, x.type.dims, strict=True))
    return reshape(
        w, turned, (*(sizes[n] for n in groups[0]), *(prod(sizes[n] for n in group) for group in groups[1:]))
    )


def _pair(w: Writer, a: Named, b: Named, needed: set[str]) -> Named:
    (x, xs), (y, ys) = _sum_out(w, *a, needed | set(b[1])), _sum_out(w, *b, needed | set(a[1]))
    shared = [n for n in xs if n in ys and n in needed]
    inner = [n for n in xs if n in ys and n not in needed]
    left, right = ([n for n in names if n not in shared and n not in inner] for names in (xs, ys))
    sizes = dict(zip((*xs, *ys), (*x.type.dims, *y.type.dims), strict=True))
    product = w.emit("matmul", _arranged(w, x, xs, (shared, left, inner)), _arranged(w, y, ys, (shared, inner, right)))
    names = (*shared, *left, *right)
    return reshape(w, product, [sizes[n] for n in names]), names


def einsum(w: Writer, equation: str, operands: Sequence[Value]) -> Value:
    """Sum the products of entries with equal names over all names that the result does not have."""
    sources, arrow, target = equation.partition("->")
    terms = sources.split(",")
    w.require(
        len(terms) == len(operands), f"equation {equation!r} is one of {len(terms)} operands, got {len(operands)}"
    )
    named = [_diagonals(w, x, _names(w, term, x.type.rank)) for x, term in zip(operands, terms, strict=True)]
    sizes: dict[str, int] = {}
    for x, names in named:
        for name, size in zip(names, x.type.dims, strict=True):
            w.require(
                size == 1 or sizes.get(name, 1) in (1, size),
                f"dimension {name} of {equation!r} is {sizes.get(name)} and {size}",
            )
            sizes[name] = size if sizes.get(name, 1) == 1 else sizes[name]
    dots = sorted((name for name in sizes if name[0] == "."), key=lambda name: -int(name[1:]))
    if arrow:
        out = _names(w, target, len(target.replace(" ", "").replace("...", "")) + (len(dots) if "..." in target else 0))
    else:
        letters = sources.replace(" ", "").replace(",", "").replace(".", "")
        out = (*dots, *sorted(c for c in set(letters) if letters.count(c) == 1))
    w.require(
        set(out) <= set(sizes) and len(set(out)) == len(out),
        f"equation {equation!r} asks for dimensions that no operand has",
    )
    # A dimension of size 1 beside a larger one of its name broadcasts: it takes no part.
    for i, (x, names) in enumerate(named):
        kept = [k for k, name in enumerate(names) if x.type.dims[k] == sizes[name]]
        named[i] = (reshape(w, x, [x.type.dims[k] for k in kept]), tuple(names[k] for k in kept))
    total = named[0]
    for i, other in enumerate(named[1:], 1):
        later = {name for _, names in named[i + 1 :] for name in names}
        total = _pair(w, total, other, set(out) | later)
    x, names = _sum_out(w, *total, set(out))
    return transpose(w, x, [names.index(name) for name in out])


def determinant(w: Writer, x: Value) -> Value:
    """Compute determinants of the last two dimensions by elimination, with the largest entry of a column as pivot."""
    *lead, rows, columns = x.type.dims
    w.require(rows == columns and 0 < rows <= 64, f"needs square matrices of up to 64 rows, got {x.type}")
    batch = prod(lead)
    a = reshape(w, x, (batch, rows, rows))
    one = w.literal(1.0, x.type.dtype)
    total: Value | None = None
    for n in range(rows, 0, -1):
        sign = one
        if n > 1:
            column = reshape(w, cut(w, a, 2, 0, 1), (batch, n))
            at = reshape(w, w.emit("argmax", w.emit("abs", column), axis=1), (batch, 1))
            line = w.emit("iota", dtype="i64", shape=(1, n), axis=1)
            # The first row and the chosen one change places.
            source = w.emit("where", w.emit("equal", line, 0), at, w.emit("where", w.emit("equal", line, at), 0, line))
            swap = w.emit("equal", reshape(w, source, (batch, n, 1)), reshape(w, line, (1, 1, n)))
            a = w.emit("matmul", w.emit("cast", swap, dtype=x.type.dtype), a)
            sign = w.emit("where", w.emit("equal", at, 0), one, w.emit("neg", one))
        pivot = reshape(w, cut(w, cut(w, a, 1, 0, 1), 2, 0, 1), (batch, 1))
        factor = w.emit("mul", pivot, sign) if n > 1 else pivot
        total = factor if total is None else w.emit("mul", total, factor)
        if n > 1:
            safe = reshape(w, w.emit("where", w.emit("equal", pivot, 0.0), one, pivot), (batch, 1, 1))
            below, right = cut(w, cut(w, a, 1, 1, n), 2, 0, 1), cut(w, cut(w, a, 1, 0, 1), 2, 1, n)
            a = w.emit("sub", cut(w, cut(w, a, 1, 1, n), 2, 1, n), w.emit("matmul", w.emit("div", below, safe), right))
    assert total is not None
    return reshape(w, total, lead)
