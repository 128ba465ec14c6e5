"""Recurrent layers, unrolled: a cell of a few operations for each step, in one or both directions.

Products with the inputs are taken for all steps at once, so that only those with the state are left in the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.frontends.writer import Writer
from penstock.ir.graph import Value

from .layout import cut, reshape

Function = Callable[[Value], Value]
# From the gates of one step, as far as the inputs go, and the state to the next state, whose first part is the result.
Cell = Callable[[Value, tuple[Value, ...]], tuple[Value, ...]]


def split(w: Writer, x: Value, parts: int) -> list[Value]:
    """Equal parts of the last dimension."""
    last, size = x.type.rank - 1, x.type.dims[-1] // parts
    return [cut(w, x, last, i * size, (i + 1) * size) for i in range(parts)]


def linear(w: Writer, x: Value, weight: Value, bias: Value | None) -> Value:
    y = w.emit("matmul", x, weight, tb=True)
    return y if bias is None else w.emit("add", y, bias)


def lstm_cell(
    w: Writer,
    recurrent: Value,
    peepholes: Sequence[Value] | None,
    functions: Sequence[Function],
    coupled: bool,
    order: str = "iofg",
) -> Cell:
    """Gates input, output, forget and cell in the given order; peepholes for input, output and forget. `coupled`: forget is 1 - input."""
    gate, candidate, shown = functions

    def cell(gates: Value, state: tuple[Value, ...]) -> tuple[Value, ...]:
        h, c = state
        parts = split(w, w.emit("add", gates, w.emit("matmul", h, recurrent, tb=True)), 4)
        i, o, f, g = (parts[order.index(name)] for name in "iofg")
        if peepholes is not None:
            i, f = (w.emit("add", x, w.emit("mul", p, c)) for x, p in ((i, peepholes[0]), (f, peepholes[2])))
        i = gate(i)
        f = w.emit("sub", w.literal(1.0, i.type.dtype), i) if coupled else gate(f)
        c = w.emit("add", w.emit("mul", f, c), w.emit("mul", i, candidate(g)))
        if peepholes is not None:
            o = w.emit("add", o, w.emit("mul", peepholes[1], c))
        return w.emit("mul", gate(o), shown(c)), c

    return cell


def gru_cell(
    w: Writer, recurrent: Value, bias: Value | None, functions: Sequence[Function], reset_after: bool, order: str = "zr"
) -> Cell:
    """Gates update and reset in the given order, then hidden; `bias` is the recurrent one of the latter, which the
    reset gate scales with `reset_after`."""
    gate, candidate = functions
    size = recurrent.type.dims[-1]

    def cell(gates: Value, state: tuple[Value, ...]) -> tuple[Value, ...]:
        (h,) = state
        whole = linear(w, h, recurrent, None) if reset_after else None  # one product for all gates
        both = linear(w, h, cut(w, recurrent, 0, 0, 2 * size), None) if whole is None else cut(w, whole, 1, 0, 2 * size)
        parts = split(w, gate(w.emit("add", cut(w, gates, 1, 0, 2 * size), both)), 2)
        z, r = (parts[order.index(name)] for name in "zr")
        if whole is None:
            hidden = linear(w, w.emit("mul", r, h), cut(w, recurrent, 0, 2 * size, 3 * size), bias)
        else:
            own = cut(w, whole, 1, 2 * size, 3 * size)
            hidden = w.emit("mul", r, own if bias is None else w.emit("add", own, bias))
        new = candidate(w.emit("add", cut(w, gates, 1, 2 * size, 3 * size), hidden))
        return (w.emit("add", w.emit("mul", w.emit("sub", w.literal(1.0, z.type.dtype), z), new), w.emit("mul", z, h)),)

    return cell


def plain_cell(w: Writer, recurrent: Value, function: Function) -> Cell:
    return lambda gates, state: (function(w.emit("add", gates, w.emit("matmul", state[0], recurrent, tb=True))),)


def without_hidden(w: Writer, bias: Value, size: int) -> Value:
    """The recurrent bias of a GRU without that of the hidden gate, which stays with the product inside the cell."""
    return w.emit("pad", cut(w, bias, 0, 0, 2 * size), low=(0,), high=(size,))


def unroll(
    w: Writer, gates: Value, state: tuple[Value, ...], cell: Cell, lengths: Value | None, backward: bool
) -> tuple[Value, tuple[Value, ...]]:
    """All results [steps, batch, size] and the last state; gates are [steps, batch, ...]. Beyond the length of a
    sequence its state stays and results are 0."""
    steps, batch = gates.type.dims[:2]
    w.require(steps > 0, "there are no steps")
    outs: list[Value] = [state[0]] * steps
    for t in reversed(range(steps)) if backward else range(steps):
        new = cell(reshape(w, cut(w, gates, 0, t, t + 1), gates.type.dims[1:]), state)
        shown = new[0]
        if lengths is not None:
            lasts = reshape(w, w.emit("less", w.literal(t, lengths.type.dtype), lengths), (batch, 1))
            new = tuple(w.emit("where", lasts, a, b) for a, b in zip(new, state, strict=True))
            shown = w.emit("where", lasts, shown, 0.0)
        state = new
        outs[t] = reshape(w, shown, (1, *shown.type.dims))
    return (outs[0] if steps == 1 else w.emit("concat", *outs, axis=0)), state
