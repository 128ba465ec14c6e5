"""Rules of operations whose dimensions depend on their attributes: layouts, reductions, convolutions, attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod

from penstock.ir.attrs import Attrs
from penstock.ir.graph import Op
from penstock.ir.ops import integer, ints, reduced_axes

from .splits import EQUAL, OWN, SUM, WHOLE, Factors, Name, SplitRule, build

Computed = Callable[[Op, Attrs], SplitRule]


def _shapes(op: Op) -> list[tuple[int, ...]]:
    return [v.type.dims for v in (*op.ins, *op.outs)]


def _transpose(op: Op, a: Attrs) -> SplitRule:
    names = [f"d{i}" for i in range(op.ins[0].type.rank)]
    return build([names, [names[p] for p in ints(a["perm"])]], _shapes(op), 1)


def _broadcast(op: Op, a: Attrs) -> SplitRule:
    rank, operand = op.outs[0].type.rank, op.ins[0].type.rank
    names = [f"d{i}" for i in range(rank)]
    return build([names[rank - operand :], names], _shapes(op), 1)


def _reshape(op: Op, a: Attrs) -> SplitRule:
    """Match dimensions from the left. Where products of sizes meet, a group of dimensions ends on both sides. Within a
    group the factors are what lies between consecutive products of either side, if each divides the next."""
    before, after = (v.type.dims for v in (*op.ins, *op.outs))
    names: tuple[list[Name], list[Name]] = ([()] * len(before), [()] * len(after))
    if prod(before) == 0:
        return build(names, _shapes(op), 1)
    ends = [{prod(shape[:i]) for i in range(len(shape) + 1)} for shape in (before, after)]
    cuts, sizes = sorted(ends[0] | ends[1]), dict[str, int]()
    for low, high in pairwise(sorted(ends[0] & ends[1])):
        inner = list(pairwise(c for c in cuts if low <= c <= high))
        if all(d % c == 0 for c, d in inner):
            sizes |= {f"f{c}": d // c for c, d in inner}
    for shape, listed in zip((before, after), names, strict=True):
        for i in range(len(shape)):
            low, high = prod(shape[:i]), prod(shape[: i + 1])
            factors = tuple(f"f{c}" for c in cuts if low <= c < high)
            if factors and all(name in sizes for name in factors):
                listed[i] = factors
    return build(names, _shapes(op), 1, sizes=sizes)


def _slice(op: Op, a: Attrs) -> SplitRule:
    """Untouched dimensions are free. Of a dimension made of equal blocks, of which the slice takes one, each block may
    be split."""
    x: list[Name] = []
    y: list[Name] = []
    sizes: dict[str, int] = {}
    parts = zip(ints(a["start"]), ints(a["stop"]), ints(a["step"]), op.ins[0].type.dims, strict=True)
    for i, (start, stop, step, n) in enumerate(parts):
        length = stop - start
        if length == n and step == 1:
            x.append(f"d{i}")
            y.append(f"d{i}")
        elif step == 1 and length > 1 and n % length == 0 and start % length == 0:
            sizes |= {f"b{i}": n // length, f"d{i}": length}
            x.append((f"b{i}", f"d{i}"))
            y.append((f"d{i}",))
        else:
            x.append(())
            y.append(())
    return build([x, y], _shapes(op), 1, {name: WHOLE for name in sizes if name[0] == "b"}, sizes)


def _pad(op: Op, a: Attrs) -> SplitRule:
    """Untouched dimensions are free. Where whole blocks of the operand's size are added, the block may be split."""
    x: list[Name] = []
    y: list[Name] = []
    sizes: dict[str, int] = {}
    low, high = ints(a["low"]), ints(a["high"])
    inner = ints(a["inner"]) or (0,) * len(low)
    for i, (p, q, between, n) in enumerate(zip(low, high, inner, op.ins[0].type.dims, strict=True)):
        if p == q == between == 0:
            x.append(f"d{i}")
            y.append(f"d{i}")
        elif between == 0 and n > 1 and p % n == q % n == 0:
            sizes |= {f"b{i}": (p + n + q) // n, f"d{i}": n}
            x.append((f"d{i}",))
            y.append((f"b{i}", f"d{i}"))
        else:
            x.append(())
            y.append(())
    return build([x, y], _shapes(op), 1, {name: WHOLE for name in sizes if name[0] == "b"}, sizes)


def _concat(op: Op, a: Attrs) -> SplitRule:
    """Other dimensions are free. Operands of one size are blocks of the result, each of which may be split."""
    rank, axis = op.ins[0].type.rank, integer(a["axis"]) % op.ins[0].type.rank
    lengths = {v.type.dims[axis] for v in op.ins}
    operand: list[Name] = [f"d{i}" for i in range(rank)]
    result, sizes = list(operand), dict[str, int]()
    if len(lengths) == 1 and (length := lengths.pop()) > 1:
        sizes = {"b": len(op.ins), f"d{axis}": length}
        operand[axis], result[axis] = (f"d{axis}",), ("b", f"d{axis}")
    else:
        operand[axis] = result[axis] = ()
    return build([*[operand] * len(op.ins), result], _shapes(op), len(op.ins), {"b": WHOLE} if sizes else {}, sizes)


def _reduction(mark: str, of_axis: bool = False) -> Computed:
    def rule(op: Op, a: Attrs) -> SplitRule:
        x = op.ins[0].type
        axes = (integer(a["axis"]) % x.rank,) if of_axis else reduced_axes(x, a["axes"])
        names = [f"n{i}" if i in axes else f"d{i}" for i in range(x.rank)]
        result: list[Name] = [() if i in axes else name for i, name in enumerate(names)]
        if of_axis or not a["keep"]:
            result = [name for i, name in enumerate(names) if i not in axes]
        return build([names, result], _shapes(op), 1, {f"n{i}": mark for i in axes})

    return rule


def _conv(summed: str, order: tuple[int, int, int]) -> Computed:
    """Return the rule of a convolution or a gradient of one. `order` says which of operands and result are the image,
    the weight and the other image; `summed` is the name of the dimension that is summed over."""

    def rule(op: Op, a: Attrs) -> SplitRule:
        groups, values = integer(a["groups"]), (*op.ins, *op.outs)
        sizes, marks, spatial = _spatial(values[order[0]].type.dims, values[order[2]].type.dims)
        if summed == "n":
            marks = dict.fromkeys(marks, OWN + SUM)
        x, w = values[order[0]].type.dims, values[order[1]].type.dims
        sizes |= {"n": x[0], "g": groups, "c": w[1], "o": w[0] // groups}
        channels: Factors = ("c",) if groups == 1 else ("g", "c")
        filters: Factors = ("o",) if groups == 1 else ("g", "o")
        names: list[list[Name]] = [
            [("n",), channels, *spatial],
            [filters, ("c",), *[()] * len(spatial)],
            [("n",), filters, *spatial],
        ]
        listed = [names[order.index(i)] for i in range(3)]
        return build(listed, _shapes(op), 2, marks | {summed: SUM}, sizes)

    return rule


def _spatial(image: Sequence[int], result: Sequence[int]) -> tuple[dict[str, int], dict[str, str], list[Factors]]:
    """Return sizes, marks and names of the spatial dimensions of an image and of what windows over it result in. They
    have one name with two sizes, of which the smaller one counts."""
    sizes = {f"y{i}": min(pair) for i, pair in enumerate(zip(image[2:], result[2:], strict=True))}
    return sizes, dict.fromkeys(sizes, OWN), [(name,) for name in sizes]


def _pool(image: int, result: int) -> Computed:
    """Return the rule of a pool or a gradient of one. `image` and `result` are the numbers of an operand or result that
    has the shape of either."""

    def rule(op: Op, a: Attrs) -> SplitRule:
        shapes = _shapes(op)
        sizes, marks, spatial = _spatial(shapes[image], shapes[result])
        names: list[Name] = ["n", "c", *spatial]
        return build([names] * len(shapes), shapes, len(op.ins), marks, sizes)

    return rule


def _attention(grad: bool, apart: bool = False) -> Computed:
    """Return the rule of attention or its gradient. Where there are as many queries as keys, the positions of both may
    be split together: keys and values go round (passes/sharding/rings). `apart` names them apart."""

    def rule(op: Op, a: Attrs) -> SplitRule:
        queries, keys = (op.ins[i + grad].type.dims[2] for i in range(2))
        alike = queries == keys and not apart
        of_keys = "s" if alike else "t"
        q, k, v = (["b", "h", where, size] for where, size in (("s", "d"), (of_keys, "d"), (of_keys, "e")))
        y, row = ["b", "h", "s", "e"], ["b", "h", "s"]
        names = [y, q, k, v, y, row, row] if grad else [q, k, v]
        results = [q, k, v] if grad else [y, row, row]
        if len(op.ins) > len(names):
            # A rank has what the mask says of its own queries, about all keys.
            scores = ["b", "h", "s", "t"]
            names = [*names, scores[4 - op.ins[-1].type.rank :]]
        marks = dict.fromkeys("stde" if not alike else "tde", WHOLE) | ({"s": OWN + EQUAL} if alike else {})
        return build([*names, *results], _shapes(op), len(op.ins), marks)

    return rule


attention_apart = _attention(grad=False, apart=True)


def _put(op: Op, a: Attrs) -> SplitRule:
    """Heads are free. The rows of a microbatch belong to any sequences, so a rank needs all of them."""
    names: list[list[Name]] = [["t", "h", "d"], ["t"], ["b", "r", "h", "d"]]
    return build(names, _shapes(op), 2, dict.fromkeys("tdbr", WHOLE))


def _attend(op: Op, a: Attrs) -> SplitRule:
    """Heads of the cache are free, each with the heads of the queries that look at it."""
    heads, group = op.ins[1].type.dims[2], op.ins[0].type.dims[1] // op.ins[1].type.dims[2]
    cache: list[Name] = ["b", "r", ("h",), "d"]
    rows: list[Name] = ["t", ("h", "g"), "d"]
    names: list[list[Name]] = [rows, cache, cache, ["c"], ["s"], ["s", "n"], rows]
    return build(names, _shapes(op), 6, dict.fromkeys("brdtgcsn", WHOLE), {"h": heads, "g": group})


def _quantised(lookup: bool) -> Computed:
    """Return the rule of a product or lookup by a weight in groups: rows of the weight may be split in a product."""

    def rule(op: Op, a: Attrs) -> SplitRule:
        lead: list[Name] = [f"d{i}" for i in range(op.ins[0].type.rank - (not lookup))]
        weight: list[list[Name]] = [["n", "j"]]
        weight += [["n", "g"] for _ in op.ins[2:]]
        names = [lead, *weight, [*lead, "k"]] if lookup else [[*lead, "k"], *weight, [*lead, "n"]]
        return build(names, _shapes(op), len(op.ins), dict.fromkeys("jgkn" if lookup else "jgk", WHOLE))

    return rule


def _source(op: Op, a: Attrs) -> SplitRule:
    """Return the rule of a source. A single number may be split in any way, a list of numbers in none."""
    names: list[Name] = [f"d{i}" for i in range(op.outs[0].type.rank)]
    listed = isinstance(a.get("value"), tuple)
    marks = dict.fromkeys([str(name) for name in names], WHOLE) if listed else {}
    if op.kind == "iota":
        marks[f"d{integer(a['axis']) % len(names)}"] = OWN
    return build([names], _shapes(op), 0, marks)


COMPUTED: dict[str, Computed] = {
    "const": _source,
    "iota": _source,
    "transpose": _transpose,
    "broadcast": _broadcast,
    "reshape": _reshape,
    "slice": _slice,
    "pad": _pad,
    "concat": _concat,
    "sum": _reduction(SUM),
    "mean": _reduction(OWN + SUM),
    "max": _reduction(OWN),
    "argmax": _reduction(OWN, of_axis=True),
    "conv": _conv("c", (0, 1, 2)),
    "conv_grad_input": _conv("o", (2, 1, 0)),
    "conv_grad_weight": _conv("n", (0, 2, 1)),
    "max_pool": _pool(0, 1),
    "max_pool_grad": _pool(0, 1),
    "avg_pool": _pool(0, 1),
    "avg_pool_grad": _pool(1, 0),
    "matmul_q": _quantised(lookup=False),
    "gather_q": _quantised(lookup=True),
    "attention": _attention(grad=False),
    "attention_grad": _attention(grad=True),
    "put": _put,
    "attend": _attend,
}
