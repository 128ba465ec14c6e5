"""LSTM, GRU and plain recurrent layers, step by step: as many copies of a cell as there are steps.

What the steps have in common is computed for all of them at once: the product with the weights of the input. Gates stand in torch's order.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.ir.graph import Value

from ..formulas.layout import cut, reshape, transpose
from .node import Node, Result, Rule

# A cell: from what the input gives to the gates, the weights and bias for the state, and the state (one or two tensors) to the next state.
Cell = Callable[[Node, Value, Value, Value | None, tuple[Value, ...]], tuple[Value, ...]]


def _gates(n: Node, x: Value, count: int) -> list[Value]:
    size = x.type.dims[-1] // count
    return [cut(n, x, x.type.rank - 1, i * size, (i + 1) * size) for i in range(count)]


def _from_state(n: Node, hidden: Value, weight: Value, bias: Value | None) -> Value:
    y = n.emit("matmul", hidden, weight, tb=True)
    return y if bias is None else n.emit("add", y, bias)


def _lstm_cell(n: Node, x: Value, weight: Value, bias: Value | None, state: tuple[Value, ...]) -> tuple[Value, ...]:
    hidden, cell = state
    i, f, g, o = _gates(n, n.emit("add", x, _from_state(n, hidden, weight, bias)), 4)
    kept = n.emit("mul", n.emit("sigmoid", f), cell)
    cell = n.emit("add", kept, n.emit("mul", n.emit("sigmoid", i), n.emit("tanh", g)))
    return n.emit("mul", n.emit("sigmoid", o), n.emit("tanh", cell)), cell


def _gru_cell(n: Node, x: Value, weight: Value, bias: Value | None, state: tuple[Value, ...]) -> tuple[Value, ...]:
    (hidden,) = state
    xr, xz, xn = _gates(n, x, 3)
    hr, hz, hn = _gates(n, _from_state(n, hidden, weight, bias), 3)
    reset, update = n.emit("sigmoid", n.emit("add", xr, hr)), n.emit("sigmoid", n.emit("add", xz, hz))
    new = n.emit("tanh", n.emit("add", xn, n.emit("mul", reset, hn)))
    return (n.emit("add", new, n.emit("mul", update, n.emit("sub", hidden, new))),)


def plain_cell(kind: str) -> Cell:
    def cell(n: Node, x: Value, weight: Value, bias: Value | None, state: tuple[Value, ...]) -> tuple[Value, ...]:
        return (n.emit(kind, n.emit("add", x, _from_state(n, state[0], weight, bias))),)

    return cell


def _one_way(n: Node, x: Value, weights: list[Value], biased: bool, state: tuple[Value, ...], cell: Cell, back: bool) -> tuple[Value, ...]:
    """All steps of one layer in one direction: outputs [steps, batch, size], and the last state."""
    steps, batch, width = x.type.dims
    into = n.emit("matmul", reshape(n, x, (steps * batch, width)), weights[0], tb=True)
    if biased:
        into = n.emit("add", into, weights[2])
    into = reshape(n, into, (steps, batch, into.type.dims[-1]))
    out_weight = weights[-1] if len(weights) == (5 if biased else 3) else None  # a projection of the hidden state
    outs: list[Value] = []
    for t in range(steps)[::-1] if back else range(steps):
        now = reshape(n, cut(n, into, 0, t, t + 1), (batch, into.type.dims[-1]))
        state = cell(n, now, weights[1], weights[3] if biased else None, state)
        if out_weight is not None:
            state = (n.emit("matmul", state[0], out_weight, tb=True), *state[1:])
        outs.append(reshape(n, state[0], (1, *state[0].type.dims)))
    y = n.emit("concat", *(outs[::-1] if back else outs), axis=0) if len(outs) > 1 else outs[0]
    return y, *state


def recurrent(cell: Cell, states: int) -> Rule:
    def rule(n: Node) -> Result:
        dropout = float(n.arg("dropout"))
        n.require(
            not n.arg("train") or dropout == 0.0,
            "dropout between recurrent layers: there are no random numbers here yet; call eval() before, or set it to 0",
        )
        x = n.value("input")
        batched = x.type.rank == 3
        first = bool(n.arg("batch_first")) and batched
        x = x if batched else reshape(n, x, (x.type.dims[0], 1, x.type.dims[1]))
        x = transpose(n, x, (1, 0, 2)) if first else x
        begin = n.values("hx") if states > 1 else [n.value("hx")]
        begin = begin if batched else [reshape(n, h, (h.type.dims[0], 1, h.type.dims[1])) for h in begin]
        params, biased = n.values("params"), bool(n.arg("has_biases"))
        layers, ways = int(n.arg("num_layers")), 2 if n.arg("bidirectional") else 1
        each = len(params) // (layers * ways)
        ends: list[list[Value]] = [[] for _ in range(states)]
        for layer in range(layers):
            outs = []
            for way in range(ways):
                at = layer * ways + way
                state = tuple(reshape(n, cut(n, h, 0, at, at + 1), h.type.dims[1:]) for h in begin)
                y, *end = _one_way(n, x, params[at * each : (at + 1) * each], biased, state, cell, way == 1)
                outs.append(y)
                for i, one in enumerate(end):
                    ends[i].append(reshape(n, one, (1, *one.type.dims)))
            x = n.emit("concat", *outs, axis=2) if ways > 1 else outs[0]
        last = [n.emit("concat", *parts, axis=0) if len(parts) > 1 else parts[0] for parts in ends]
        x = transpose(n, x, (1, 0, 2)) if first else x
        if not batched:
            x, last = reshape(n, x, (x.type.dims[0], x.type.dims[2])), [reshape(n, h, (h.type.dims[0], h.type.dims[2])) for h in last]
        return x, *last

    return rule


RULES: dict[str, Rule] = {
    "lstm.input": recurrent(_lstm_cell, 2),
    "gru.input": recurrent(_gru_cell, 1),
    "rnn_tanh.input": recurrent(plain_cell("tanh"), 1),
    "rnn_relu.input": recurrent(plain_cell("relu"), 1),
}
