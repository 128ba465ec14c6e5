"""Algebraic identities, a dictionary over the op table: `IDENTITIES[kind]` are rules `rule(scene, op)` tried in order.

A rule returns None where it does not apply. Otherwise it returns a Value that equals the op's only result, or the
operations that replace the op. The last of these has the op's results. Rules are exact: they give the same numbers,
with three exceptions. A sum with 0 forgets the sign of zero. A power by a small exponent is rounded as multiplications
are. And -inf has a power 0.5 but no root.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.ir.attrs import Attr
from penstock.ir.graph import ANNOTATIONS, Op, Value
from penstock.ir.ops import complete_attrs, infer_op, integer, ints, make, reduced_axes
from penstock.ir.types import FLOATS, INTS, ITEM_BYTES, UNSIGNED


class Scene(Protocol):
    """The graph as rules see it: the operation that makes a value, the number of its uses, and free names."""

    def maker(self, value: Value) -> Op | None: ...
    def uses(self, value: Value) -> int: ...
    def fresh(self, base: str) -> str: ...


Found = Value | Sequence[Op] | None
Rule = Callable[[Scene, Op], Found]


def becomes(op: Op, kind: str, *ins: Value, **attrs: Attr) -> Op:
    """Return an op of another kind with the results, loc and annotations of `op`."""
    annotations = {k: v for k, v in op.attrs.items() if k in ANNOTATIONS}
    return Op(kind, ins, op.outs, {**attrs, **annotations}, op.loc)


def helper(scene: Scene, op: Op, kind: str, *ins: Value, **attrs: Attr) -> Op:
    """Return a new op in front of `op`, with its loc and, unless it is a constant, its annotations."""
    annotations = {k: v for k, v in op.attrs.items() if k in ANNOTATIONS and kind != "const"}
    return make(kind, ins, [scene.fresh(f"{op.outs[0].name}.{kind}")], op.loc, **attrs, **annotations)


def uniform(scene: Scene, value: Value) -> float | None:
    return uniform_number(scene.maker, value)


def uniform_number(maker: Callable[[Value], Op | None], value: Value) -> float | None:
    """Return the number that every element of a constant has; None for anything else. `maker` returns the operation
    that makes a value."""
    op = maker(value)
    while op is not None and op.kind in ("broadcast", "reshape"):
        op = maker(op.ins[0])
    if op is None or op.kind != "const" or isinstance(op.attrs["value"], (tuple, str)):
        return None
    return op.attrs["value"]


def _made_by(scene: Scene, value: Value, kind: str) -> Op | None:
    op = scene.maker(value)
    return op if op is not None and op.kind == kind else None


# ---------------------------------------------------------------------------------------- elementwise


def _neutral(number: float, sides: tuple[int, ...]) -> Rule:
    """Make the rule x op number = x, with the number on one of the given sides."""

    def rule(scene: Scene, op: Op) -> Found:
        for side in sides:
            other = op.ins[1 - side]
            if other.type == op.outs[0].type and uniform(scene, op.ins[side]) == number:
                return other
        return None

    return rule


def _add_of_negative(scene: Scene, op: Op) -> Found:
    for side in (1, 0):
        negative = _made_by(scene, op.ins[side], "neg")
        if negative is not None:
            return [becomes(op, "sub", op.ins[1 - side], negative.ins[0])]
    return None


def _sub_of_negative(scene: Scene, op: Op) -> Found:
    negative = _made_by(scene, op.ins[1], "neg")
    return None if negative is None else [becomes(op, "add", op.ins[0], negative.ins[0])]


def _double_negative(scene: Scene, op: Op) -> Found:
    inner = _made_by(scene, op.ins[0], op.kind)
    return None if inner is None else inner.ins[0]


def _divide_by_power_of_two(scene: Scene, op: Op) -> Found:
    number = uniform(scene, op.ins[1])
    if (
        op.outs[0].type.dtype not in FLOATS
        or not number
        or math.frexp(number)[0] not in (0.5, -0.5)
        or not 2**-14 <= abs(number) <= 2**14
    ):
        return None
    factor = helper(scene, op, "const", value=1.0 / number, dtype=op.outs[0].type.dtype)
    shaped = op.outs[0].type == op.ins[0].type
    return [factor, becomes(op, "mul", op.ins[0], factor.outs[0])] if shaped else None


def _power(scene: Scene, op: Op) -> Found:
    x, number = op.ins[0], uniform(scene, op.ins[1])
    if x.type != op.outs[0].type or number is None:
        return None
    match number:
        case 1.0:
            return x
        case 2.0:
            return [becomes(op, "mul", x, x)]
        case 3.0:
            square = helper(scene, op, "mul", x, x)
            return [square, becomes(op, "mul", square.outs[0], x)]
        case 0.5:
            return [becomes(op, "sqrt", x)]
        case -0.5:
            return [becomes(op, "rsqrt", x)]
        case -1.0:
            one = helper(scene, op, "const", value=1.0, dtype=x.type.dtype)
            return [one, becomes(op, "div", one.outs[0], x)]
    return None


def _inverse_root(scene: Scene, op: Op) -> Found:
    """Replace 1 / sqrt(x) by rsqrt."""
    root = _made_by(scene, op.ins[1], "sqrt")
    if root is None or uniform(scene, op.ins[0]) != 1 or root.ins[0].type != op.outs[0].type:
        return None
    return [becomes(op, "rsqrt", root.ins[0])]


def _same_operands(scene: Scene, op: Op) -> Found:
    return op.ins[0] if op.ins[0] == op.ins[1] else None


def _decided(scene: Scene, op: Op) -> Found:
    """Resolve a `where` with a constant condition, or the same value on both sides."""
    chosen = uniform(scene, op.ins[0])
    if chosen is None:
        return op.ins[1] if op.ins[1] == op.ins[2] and op.ins[1].type == op.outs[0].type else None
    value = op.ins[1] if chosen else op.ins[2]
    return value if value.type == op.outs[0].type else None


def _cast(scene: Scene, op: Op) -> Found:
    if op.ins[0].type == op.outs[0].type:
        return op.ins[0]
    inner = _made_by(scene, op.ins[0], "cast")
    if inner is None or inner.ins[0].type != op.outs[0].type:
        return None
    first, middle = inner.ins[0].type.dtype, op.ins[0].type.dtype
    widened = (
        middle == "f64" or (first in ("f16", "bf16") and middle == "f32")
        if first in FLOATS
        else middle in INTS and (middle not in UNSIGNED or first in (*UNSIGNED, "bool"))
    )
    return inner.ins[0] if widened and ITEM_BYTES[middle] > ITEM_BYTES[first] else None


def _spread_operand(scene: Scene, value: Value) -> Value | Op | None:
    """Return a smaller value that broadcasts to the same: the operand of a broadcast, of a reshape that adds leading
    ones, or a scalar constant."""
    op = scene.maker(value)
    if op is None or not value.type.shape:
        return None
    if op.kind == "broadcast":
        return op.ins[0]
    if op.kind == "reshape":
        inner, extra = op.ins[0].type.shape, value.type.rank - op.ins[0].type.rank
        return op.ins[0] if extra > 0 and value.type.shape == (1,) * extra + inner else None
    if op.kind == "const" and not isinstance(op.attrs["value"], tuple):
        attrs: dict[str, Attr] = {"value": op.attrs["value"], "dtype": op.attrs["dtype"]}
        return make("const", (), [scene.fresh(value.name)], op.loc, **attrs)
    return None


def _implicit_broadcast(scene: Scene, op: Op) -> Found:
    """Drop explicit broadcasts of operands: elementwise operations broadcast by themselves."""
    before: list[Op] = []
    ins = list(op.ins)
    for i in range(len(ins)):
        smaller = _spread_operand(scene, ins[i])
        if smaller is None:
            continue
        trial = [*ins]
        trial[i] = smaller.outs[0] if isinstance(smaller, Op) else smaller
        if infer_op(Op(op.kind, tuple(trial), (), op.attrs), {}) != (op.outs[0].type,):
            continue
        ins = trial
        before += [smaller] if isinstance(smaller, Op) else []
    if ins == list(op.ins):
        return None
    return [*before, op.with_ins(tuple(ins))]


# ---------------------------------------------------------------------------------------- layout and reductions


def _unchanged(scene: Scene, op: Op) -> Found:
    """Drop a layout operation whose result has the operand's type and moves nothing: in a slice of the same size there
    is no room for another start or step."""
    return op.ins[0] if op.ins[0].type == op.outs[0].type else None


def _of_same_kind(scene: Scene, op: Op) -> Found:
    """Merge a reshape of a reshape, or a broadcast of a broadcast: the last one decides."""
    inner = _made_by(scene, op.ins[0], op.kind)
    return None if inner is None else [op.with_ins(inner.ins)]


def _transpose(scene: Scene, op: Op) -> Found:
    perm, shape = ints(op.attrs["perm"]), op.ins[0].type.dims
    if perm == tuple(range(len(perm))):
        return op.ins[0]
    inner = _made_by(scene, op.ins[0], "transpose")
    if inner is not None:
        first = ints(inner.attrs["perm"])
        return [becomes(op, "transpose", inner.ins[0], perm=tuple(first[p] for p in perm))]
    moved = [p for p in perm if shape[p] != 1]
    if moved == sorted(moved):
        return [becomes(op, "reshape", op.ins[0], shape=op.outs[0].type.dims)]
    return None


def _concat(scene: Scene, op: Op) -> Found:
    if len(op.ins) == 1:
        return op.ins[0]
    axis = integer(op.attrs["axis"]) % op.ins[0].type.rank
    flat: list[Value] = []
    for value in op.ins:
        inner = _made_by(scene, value, "concat")
        joins = inner is not None and integer(inner.attrs["axis"]) % value.type.rank == axis
        flat += inner.ins if inner is not None and joins and scene.uses(value) == 1 else [value]
    return None if len(flat) == len(op.ins) else [becomes(op, "concat", *flat, axis=axis)]


def _lone_dimensions(scene: Scene, op: Op) -> Found:
    """Drop a sum, mean or maximum over dimensions of size 1 only."""
    axes = reduced_axes(op.ins[0].type, op.attrs["axes"])
    if any(op.ins[0].type.dims[i] != 1 for i in axes):
        return None
    if op.ins[0].type == op.outs[0].type:
        return op.ins[0]
    return [becomes(op, "reshape", op.ins[0], shape=op.outs[0].type.dims)]


def _padding(op: Op | None) -> tuple[int, int, int] | None:
    """Return (axis, low, high) of a pad with zeros along one dimension."""
    if op is None or op.kind != "pad":
        return None
    a = complete_attrs(op)
    low, high = ints(a["low"]), ints(a["high"])
    axes = [i for i in range(len(low)) if low[i] or high[i]]
    if len(axes) != 1 or any(ints(a["inner"])) or a["value"] != 0:
        return None
    return axes[0], low[axes[0]], high[axes[0]]


def _sum_of_pads(scene: Scene, op: Op) -> Found:
    """Concatenate two neighbouring parts of one tensor instead of adding padded ones, as gradients of slices are."""
    left, right = (scene.maker(v) for v in op.ins)
    if left is None or right is None or op.ins[0] == op.ins[1] or any(scene.uses(v) != 1 for v in op.ins):
        return None
    a, b = _padding(left), _padding(right)
    if a is None or b is None or a[0] != b[0]:
        return None
    axis = a[0]
    if a[1] > b[1]:
        left, right, a, b = right, left, b, a
    size = op.outs[0].type.dims[axis]
    if size - a[2] != b[1]:
        return None
    parts = (left.ins[0], right.ins[0])
    if not a[1] and not b[2]:
        return [becomes(op, "concat", *parts, axis=axis)]
    joined = helper(scene, op, "concat", *parts, axis=axis)
    rank = op.outs[0].type.rank
    low = tuple(a[1] if i == axis else 0 for i in range(rank))
    high = tuple(b[2] if i == axis else 0 for i in range(rank))
    return [joined, becomes(op, "pad", joined.outs[0], low=low, high=high)]


# ---------------------------------------------------------------------------------------- contractions


def _matmul_of_transpose(scene: Scene, op: Op) -> Found:
    """Fold a swap of the last two dimensions into ta or tb; of a longer permutation leave the part that keeps rows
    contiguous."""
    for side, flag in ((0, "ta"), (1, "tb")):
        inner = _made_by(scene, op.ins[side], "transpose")
        if inner is None:
            continue
        perm = ints(inner.attrs["perm"])
        if perm[-2] != len(perm) - 1:
            continue
        outer_perm = (*perm[:-2], perm[-1], perm[-2])
        before, operand = [], inner.ins[0]
        if outer_perm != tuple(range(len(outer_perm))):
            before = [helper(scene, op, "transpose", operand, perm=outer_perm)]
            operand = before[0].outs[0]
        ins = (operand, op.ins[1]) if side == 0 else (op.ins[0], operand)
        turned = not complete_attrs(op)[flag]
        attrs = {k: v for k, v in op.attrs.items() if k != flag} | ({flag: True} if turned else {})
        return [*before, Op("matmul", ins, op.outs, attrs, op.loc)]
    return None


IDENTITIES: dict[str, tuple[Rule, ...]] = {
    "neg": (_double_negative,),
    "not": (_double_negative,),
    "add": (_neutral(0, (0, 1)), _add_of_negative, _sum_of_pads, _implicit_broadcast),
    "sub": (_neutral(0, (1,)), _sub_of_negative, _implicit_broadcast),
    "mul": (_neutral(1, (0, 1)), _implicit_broadcast),
    "div": (_neutral(1, (1,)), _inverse_root, _divide_by_power_of_two, _implicit_broadcast),
    "pow": (_power, _implicit_broadcast),
    "minimum": (_same_operands, _implicit_broadcast),
    "maximum": (_same_operands, _implicit_broadcast),
    "and": (_same_operands, _implicit_broadcast),
    "or": (_same_operands, _implicit_broadcast),
    "equal": (_implicit_broadcast,),
    "less": (_implicit_broadcast,),
    "less_equal": (_implicit_broadcast,),
    "where": (_decided, _implicit_broadcast),
    "cast": (_cast,),
    "reshape": (_unchanged, _of_same_kind),
    "broadcast": (_unchanged, _of_same_kind),
    "transpose": (_transpose,),
    "slice": (_unchanged,),
    "pad": (_unchanged,),
    "concat": (_concat,),
    "sum": (_lone_dimensions,),
    "mean": (_lone_dimensions,),
    "max": (_lone_dimensions,),
    "matmul": (_matmul_of_transpose,),
}
