"""Bytes that are made floats where they are read: dequantising that a later kernel does, rather than keep floats.

In: a graph. Out: the values between bytes and floats that readers compute for themselves. A chain of operations begins
with the cast of a value of 8 bits. Casts, and sums and products with single numbers, follow, each read by the next one
alone. Its last value is read by elementwise operations of later kernels alone: they have another operand from further
on in the graph, and are computed there. Bytes in memory are a fourth of the floats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.ir.graph import Op, Value
from penstock.ir.ops import OPS

_BYTES = ("i8", "u8")
_STEPS = ("cast", "add", "sub", "mul")


def widened_later(
    ops: Sequence[Op], makers: Mapping[Value, Op], readers: Mapping[Value, Sequence[Op]], results: set[Value]
) -> frozenset[Value]:
    """Return the values between bytes and floats that later kernels compute for themselves."""
    places = _places(ops, makers)
    later: set[Value] = set()
    for op in ops:
        if op.kind != "cast" or op.ins[0].type.dtype not in _BYTES or op.outs[0].type.dtype in _BYTES:
            continue
        chain = _chain(op, makers, readers)
        users = readers.get(chain[-1], [])
        here = places.get(op.ins[0], -1)
        if results.isdisjoint(chain) and users and all(_is_later(user, chain[-1], here, places) for user in users):
            later.update(chain)
    return frozenset(later)


def _places(ops: Sequence[Op], makers: Mapping[Value, Op]) -> dict[Value, int]:
    """Return for each value the place of the last operation before it that has loops of its own."""
    places: dict[Value, int] = {}
    for number, op in enumerate(ops):
        if op.kind == "read" or not op.ins:
            continue
        before = max((places.get(v, -1) for v in op.ins), default=-1)
        place = before if OPS[op.kind].family in ("elementwise", "layout") else number
        places |= dict.fromkeys(op.outs, place)
    return places


def _chain(first: Op, makers: Mapping[Value, Op], readers: Mapping[Value, Sequence[Op]]) -> list[Value]:
    """Return the results of operations from a cast on, of which each is read by the next one alone."""
    chain = [first.outs[0]]
    while len(users := readers.get(chain[-1], [])) == 1:
        (user,) = users
        others = [v for v in user.ins if v != chain[-1]]
        plain = all((maker := makers.get(v)) is not None and maker.kind == "const" and v.type.size == 1 for v in others)
        if user.kind not in _STEPS or not plain or user.outs[0].type.dtype in _BYTES:
            break
        if user.kind != "cast" and user.outs[0].type.shape != chain[-1].type.shape:
            break
        chain.append(user.outs[0])
    return chain


def _is_later(user: Op, value: Value, here: int, places: Mapping[Value, int]) -> bool:
    """Return whether an elementwise operation is computed in a later kernel than the bytes behind one operand."""
    if OPS[user.kind].family != "elementwise" or user.outs[0].type.shape != value.type.shape:
        return False
    return any(places.get(v, -1) > here for v in user.ins if v != value)
