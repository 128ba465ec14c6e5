"""Rules of LSTM, GRU and plain recurrent layers: a copy of a cell for each step, with gates in torch's order."""

from __future__ import annotations

from collections.abc import Callable

from penstock.frontends.formulas.draws import dropout
from penstock.frontends.formulas.layout import concat, cut, reshape, transpose
from penstock.frontends.formulas.recurrent import (
    Cell,
    Function,
    gru_cell,
    linear,
    lstm_cell,
    plain_cell,
    unroll,
    without_hidden,
)
from penstock.frontends.torch.node import Result, Rule, TorchNode
from penstock.ir.graph import Value

# Makes the cell of a direction from its recurrent weight and recurrent bias. Also returns the part of that bias that is
# added to the inputs in advance.
Maker = Callable[[TorchNode, Value, Value | None], tuple[Cell, Value | None]]


def _by(n: TorchNode, kind: str) -> Function:
    return lambda x: n.emit(kind, x)


def _lstm(n: TorchNode, weight: Value, bias: Value | None) -> tuple[Cell, Value | None]:
    return lstm_cell(n, weight, None, (_by(n, "sigmoid"), _by(n, "tanh"), _by(n, "tanh")), False, "ifgo"), bias


def _gru(n: TorchNode, weight: Value, bias: Value | None) -> tuple[Cell, Value | None]:
    size, functions = weight.type.dims[-1], (_by(n, "sigmoid"), _by(n, "tanh"))
    if bias is None:
        return gru_cell(n, weight, None, functions, True, "rz"), None
    return gru_cell(n, weight, cut(n, bias, 0, 2 * size, 3 * size), functions, True, "rz"), without_hidden(
        n, bias, size
    )


def _plain(kind: str) -> Maker:
    return lambda n, weight, bias: (plain_cell(n, weight, _by(n, kind)), bias)


def _projected(n: TorchNode, cell: Cell, weight: Value) -> Cell:
    """Multiply the hidden state of a cell by a weight."""

    def projected(gates: Value, state: tuple[Value, ...]) -> tuple[Value, ...]:
        hidden, *others = cell(gates, state)
        return linear(n, hidden, weight, None), *others

    return projected


def _one_way(
    n: TorchNode, x: Value, weights: list[Value], biased: bool, state: tuple[Value, ...], make: Maker, back: bool
) -> tuple[Value, tuple[Value, ...]]:
    """Run all steps of one layer in one direction. Return the outputs [steps, batch, size] and the last state."""
    steps, batch, width = x.type.dims
    cell, more = make(n, weights[1], weights[3] if biased else None)
    bias = None if more is None else n.emit("add", weights[2], more)
    gates = linear(n, reshape(n, x, (steps * batch, width)), weights[0], bias)
    if len(weights) == (5 if biased else 3):
        cell = _projected(n, cell, weights[-1])
    return unroll(n, reshape(n, gates, (steps, batch, gates.type.dims[-1])), state, cell, None, back)


def recurrent(make: Maker, states: int) -> Rule:
    def rule(n: TorchNode) -> Result:
        p, training = float(n.arg("dropout")), bool(n.arg("train"))
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
                y, end = _one_way(n, x, params[at * each : (at + 1) * each], biased, state, make, way == 1)
                outs.append(y)
                for i, state_end in enumerate(end):
                    ends[i].append(reshape(n, state_end, (1, *state_end.type.dims)))
            x = concat(n, outs, 2)
            if training and p and layer < layers - 1:
                x, _ = dropout(n, x, p)
        last = [concat(n, parts, 0) for parts in ends]
        x = transpose(n, x, (1, 0, 2)) if first else x
        if not batched:
            x, last = (
                reshape(n, x, (x.type.dims[0], x.type.dims[2])),
                [reshape(n, h, (h.type.dims[0], h.type.dims[2])) for h in last],
            )
        return x, *last

    return rule


RULES: dict[str, Rule] = {
    "lstm.input": recurrent(_lstm, 2),
    "gru.input": recurrent(_gru, 1),
    "rnn_tanh.input": recurrent(_plain("tanh"), 1),
    "rnn_relu.input": recurrent(_plain("relu"), 1),
}
