"""Find attention in the operations that exporters write: a rule like those of passes/rewrite/recognize.py, tried on the
product with the values.

    softmax(scale * q k^T, masked) v        on [batch, heads, positions, size] or [any, positions, size]

The scale may stand on the scores, on q, on k, or on several of them. Masks, in any order with the scale:

    where(visible, scores, fill), or where(hidden, fill, scores)    fill at most -1e4, so that nothing of a hidden score
                                                                    is left
    scores + where(visible, 0, fill)                                the same, if fill is so low that it leaves nothing
                                                                    of the score
    scores + mask                                                   added as it is

A mask that is made of constants and iota is known when compiling. If it shows each position itself and all positions
before it, the attention becomes causal. If it shows everything, the mask is dropped. Any other mask becomes an operand
of attention.

Shares may be guarded: where(share is nan, 0, share), that is 0 for a row of which -inf hides everything; then so is the
result.

Left alone: scores or shares with other readers; an outer scale over an added mask; two masks that are not causal;
softmax along another axis; operands that broadcast. Where a mask hides a whole row by -inf, the result was nan and
becomes a mean of the values.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.ir.attrs import Attr
from penstock.ir.graph import Op, Value, substitute
from penstock.ir.interpreter.ops import apply_op
from penstock.ir.ops import OPS, complete_attrs, infer_op
from penstock.ir.types import FLOATS

from .identities import Found, Scene, becomes, helper, uniform

# The largest fill that hides a score, added to it or in its place: e^(x - largest) is 0 for it unless all scores are as
# low.
_HIDES = -1e4
# The largest number that absorbs a score when it is added to it.
_ABSORBS = -1e30
# Elements of a mask that are worth computing to see what it is.
_LARGEST_MASK = 1 << 24


@dataclass(frozen=True)
class _Hiding:
    """One `where` over scores. Positions stay where `visible` holds (or, if `turned`, does not hold)."""

    visible: Value
    turned: bool
    fill: float


@dataclass(frozen=True)
class _MaskedScores:
    """The scores q k^T under factors and masks."""

    q: Value
    k: Value
    turned: bool  # k lies as [size, positions]
    scale: float = 1.0
    hiding: tuple[_Hiding, ...] = ()
    added: tuple[Value, ...] = ()


@dataclass
class _Emitted:
    """The operations in front of the attention."""

    scene: Scene
    op: Op
    ops: list[Op] = field(default_factory=list)

    def emit(self, kind: str, *ins: Value, **attrs: Attr) -> Value:
        self.ops.append(helper(self.scene, self.op, kind, *ins, **attrs))
        return self.ops[-1].outs[0]


def attention(scene: Scene, op: Op) -> Found:
    """Recognise attention at a matmul: the rule for that kind."""
    shares, values = op.ins
    attrs = complete_attrs(op)
    guarded = _guarded(scene, shares)
    softmax = scene.maker(guarded or shares)
    uses = scene.uses(shares) == 1 and (guarded is None or scene.uses(guarded) == 3)
    if attrs["ta"] or attrs["tb"] or softmax is None or softmax.kind != "softmax" or not uses:
        return None
    rank = shares.type.rank
    if shares.type.dtype not in FLOATS or rank not in (3, 4) or complete_attrs(softmax)["axis"] not in (-1, rank - 1):
        return None
    scores = _scores(scene, softmax.ins[0], 1.0)
    if scores is None:
        return None
    q, k = scores.q.type, scores.k.type
    depth, keys = (k.shape[-2], k.shape[-1]) if scores.turned else (k.shape[-1], k.shape[-2])
    if not q.shape[:-2] == k.shape[:-2] == values.type.shape[:-2] == shares.type.shape[:-2] or q.rank != rank:
        return None
    if depth != q.shape[-1] or keys != values.type.shape[-2] or not shares.type.is_static:
        return None
    emitted = _Emitted(scene, op)
    masked = _masks(emitted, scores, shares)
    if masked is None or (guarded and (scores.added or any(hidden.fill != -np.inf for hidden in scores.hiding))):
        return None
    causal, masks = masked
    key = (
        emitted.emit("transpose", scores.k, perm=(*range(rank - 2), rank - 1, rank - 2)) if scores.turned else scores.k
    )
    operands = [_with_heads(emitted, v) for v in (scores.q, key, values)]
    masks = [_with_heads(emitted, m) if rank == 3 and m.type.rank == 3 else m for m in masks]
    q = operands[0].type
    names = [scene.fresh(f"{op.outs[0].name}.{name}") for name in ("whole", "largest", "sum")]
    inner = infer_op(Op("attention", (*operands, *masks), (), {"causal": causal, "scale": scores.scale}), {})
    y, largest, total = (Value(name, t) for name, t in zip(names, inner, strict=True))
    new = becomes(op, "attention", *operands, *masks, causal=causal, scale=scores.scale)
    emitted.ops.append(Op(new.kind, new.ins, (y, largest, total), new.attrs, new.loc))
    if guarded and masks:
        column = emitted.emit("reshape", largest, shape=(*largest.type.dims, 1))
        limit = emitted.emit("const", value=float(np.finfo(np.float32).min) / 2, dtype=largest.type.dtype)
        y = emitted.emit(
            "where", emitted.emit("less", column, limit), emitted.emit("const", value=0.0, dtype=q.dtype), y
        )
    if rank == 3:
        y = emitted.emit("reshape", y, shape=op.outs[0].type.dims)
    # The last operation gives the result.
    table = {y: op.outs[0]}
    return [Op(o.kind, substitute(o.ins, table), substitute(o.outs, table), o.attrs, o.loc) for o in emitted.ops]


def _guarded(scene: Scene, shares: Value) -> Value | None:
    """Return x of where(x is nan, 0, x); nan is the number that does not equal itself."""
    op = scene.maker(shares)
    if op is None or op.kind != "where":
        return None
    condition, x, other = scene.maker(op.ins[0]), op.ins[1], op.ins[2]
    if condition is not None and condition.kind == "not":
        condition, x, other = scene.maker(condition.ins[0]), other, x
    if condition is None or condition.kind != "equal" or condition.ins != (x, x) or uniform(scene, other) != 0:
        return None
    return x


def _with_heads(emitted: _Emitted, value: Value) -> Value:
    if value.type.rank == 4:
        return value
    return emitted.emit("reshape", value, shape=(value.type.dims[0], 1, *value.type.dims[1:]))


# ---------------------------------------------------------------------------------------- scores


def _scores(scene: Scene, x: Value, outer: float) -> _MaskedScores | None:
    """Match the operations that make scores; `outer` is the factor by which they are multiplied later."""
    op = scene.maker(x)
    if op is None or scene.uses(x) != 1:
        return None
    inner: _MaskedScores | None
    match op.kind:
        case "matmul":
            attrs = complete_attrs(op)
            if attrs["ta"]:
                return None
            (q, a), (k, b) = (_unscaled(scene, v) for v in op.ins)
            return _MaskedScores(q, k, not attrs["tb"], a * b * outer)
        case "mul" | "div":
            for value, other in (op.ins, op.ins[::-1]) if op.kind == "mul" else (op.ins,):
                number = uniform(scene, other)
                if number is not None and number != 0 and value.type == x.type:
                    return _scores(scene, value, outer * (number if op.kind == "mul" else 1 / number))
        case "where":
            for value, other, turned in ((op.ins[1], op.ins[2], False), (op.ins[2], op.ins[1], True)):
                number = uniform(scene, other)
                if number is not None and number * outer <= _HIDES and value.type == x.type:
                    inner = _scores(scene, value, outer)
                    return inner and replace(inner, hiding=(*inner.hiding, _Hiding(op.ins[0], turned, number * outer)))
        case "add":
            for value, other in (op.ins, op.ins[::-1]):
                if outer == 1 and value.type == x.type and (inner := _scores(scene, value, outer)) is not None:
                    hiding = _absorbing(scene, other)
                    if hiding is not None:
                        return replace(inner, hiding=(*inner.hiding, hiding))
                    return replace(inner, added=(*inner.added, other))
    return None


def _absorbing(scene: Scene, mask: Value) -> _Hiding | None:
    """Match a mask to be added that is 0 or absorbs."""
    op = scene.maker(mask)
    if op is None or op.kind != "where":
        return None
    for seen, hidden, turned in ((op.ins[1], op.ins[2], False), (op.ins[2], op.ins[1], True)):
        fill = uniform(scene, hidden)
        if uniform(scene, seen) == 0 and fill is not None and fill <= _ABSORBS:
            return _Hiding(op.ins[0], turned, fill)
    return None


def _unscaled(scene: Scene, value: Value) -> tuple[Value, float]:
    """Return x and the number by which it is multiplied."""
    op = scene.maker(value)
    if op is not None and op.kind in ("mul", "div"):
        for x, other in (op.ins, op.ins[::-1]) if op.kind == "mul" else (op.ins,):
            number = uniform(scene, other)
            if number is not None and number != 0 and x.type == value.type:
                return x, float(number if op.kind == "mul" else 1 / number)
    return value, 1.0


# ---------------------------------------------------------------------------------------- masks


def _masks(emitted: _Emitted, scores: _MaskedScores, shares: Value) -> tuple[bool, list[Value]] | None:
    """Return whether the attention is causal, and the mask that is left; None where there is more than that."""
    scene, rows, columns = emitted.scene, shares.type.dims[-2], shares.type.dims[-1]
    triangle = np.tri(rows, columns, dtype=bool)
    hiding, added, causal = [], [], []
    for hidden in scores.hiding:
        pattern = _pattern(scene, hidden.visible, rows, columns)
        visible = pattern if pattern is None or not hidden.turned else ~pattern
        if visible is not None and np.array_equal(visible, triangle):
            causal.append(hidden.fill)
        elif visible is None or not visible.all():
            hiding.append(hidden)
    for mask in scores.added:
        numbers = _pattern(scene, mask, rows, columns)
        if numbers is not None and (numbers[triangle] == 0).all() and (numbers[~triangle] <= _HIDES).all():
            causal.append(float(numbers[~triangle].max(initial=-np.inf)))
        elif numbers is None or numbers.any():
            added.append(mask)
    if len(hiding) + len(added) > 1:
        return None
    if not causal or not hiding + added:
        masks = [_bool_mask(emitted, hidden) for hidden in hiding] + added
        return bool(causal), masks
    if max(causal) == -np.inf:
        return True, [_bool_mask(emitted, hidden) for hidden in hiding] + added
    # In a row where the mask hides all earlier positions, later positions count as much as those: one mask for both.
    row = emitted.emit("iota", dtype="i32", shape=(rows, 1), axis=0)
    column = emitted.emit("iota", dtype="i32", shape=(1, columns), axis=1)
    earlier = emitted.emit("less_equal", column, row)
    if hiding:
        return False, [emitted.emit("and", _bool_mask(emitted, hiding[0]), earlier)]
    fill = emitted.emit("const", value=max(causal), dtype=added[0].type.dtype)
    return False, [emitted.emit("where", earlier, added[0], fill)]


def _bool_mask(emitted: _Emitted, hidden: _Hiding) -> Value:
    return emitted.emit("not", hidden.visible) if hidden.turned else hidden.visible


def _pattern(scene: Scene, mask: Value, rows: int, columns: int) -> np.ndarray[Any, Any] | None:
    """Return a mask that is known when compiling and the same for all heads, [rows, columns]."""
    array = _known(scene, mask, {})
    if array is None or array.ndim > 4:
        return None
    last = np.broadcast_to(array, np.broadcast_shapes(array.shape, (rows, columns))).reshape(-1, rows, columns)
    return np.asarray(last[0]) if (last == last[0]).all() else None


def _known(scene: Scene, value: Value, memory: dict[Value, np.ndarray[Any, Any] | None]) -> np.ndarray[Any, Any] | None:
    """Return a value that depends on constants and iota only."""
    if value not in memory:
        op = scene.maker(value)
        memory[value] = None
        small = value.type.is_static and value.type.size <= _LARGEST_MASK
        if op is not None and small and OPS[op.kind].family in ("source", "elementwise", "layout"):
            operands = [_known(scene, v, memory) for v in op.ins]
            known = [x for x in operands if x is not None]
            if len(known) == len(operands):
                memory[value] = apply_op(op, known)[0]
    return memory[value]
