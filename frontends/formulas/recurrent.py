"""Recurrent layers, unrolled: a cell of a few operations for each step, in one or both directions.

The products with the inputs are computed for all steps at once. Only those with the state are in the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.frontends.writer import Writer
from penstock.ir.graph import Value

from .layout import concat, cut, reshape

Function = Callable[[Value], Value]
# A cell maps the gates of one step, as far as the inputs determine them, and the state to the next state. The first
# part of the new state is the result.
Cell = Callable[[Value, tuple[Value, ...]], tuple[Value, ...]]


def split(w: Writer, x: Value, parts: int) -> list[Value]:
    """Split the last dimension into equal parts."""
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
    """Make an LSTM cell with the gates input, output, forget and cell in the order `order`.

    Peepholes are for input, output and forget. `coupled` means that forget is 1 - input.
    """
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
    """Make a GRU cell with the gates update and reset in the order `order`, then hidden.

    `bias` is the recurrent one of the hidden gate. With `reset_after` the reset gate scales it too.
    """
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
            recurrent_hidden = cut(w, whole, 1, 2 * size, 3 * size)
            hidden = w.emit("mul", r, recurrent_hidden if bias is None else w.emit("add", recurrent_hidden, bias))
        new = candidate(w.emit("add", cut(w, gates, 1, 2 * size, 3 * size), hidden))
        return (w.emit("add", w.emit("mul", w.emit("sub", w.literal(1.0, z.type.dtype), z), new), w.emit("mul", z, h)),)

    return cell


def plain_cell(w: Writer, recurrent: Value, function: Function) -> Cell:
    return lambda gates, state: (function(w.emit("add", gates, w.emit("matmul", state[0], recurrent, tb=True))),)


def without_hidden(w: Writer, bias: Value, size: int) -> Value:
    """Remove the part of the hidden gate from a GRU's recurrent bias. The cell adds that part itself."""
    return w.emit("pad", cut(w, bias, 0, 0, 2 * size), low=(0,), high=(size,))


def unroll(
    w: Writer, gates: Value, state: tuple[Value, ...], cell: Cell, lengths: Value | None, backward: bool
) -> tuple[Value, tuple[Value, ...]]:
    """Run a cell over all steps. Return the results [steps, batch, size] and the last state.

    `gates` are [steps, batch, ...]. Beyond the length of a sequence its state stays and its results are 0.
    """
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
    return concat(w, outs, 0), state
