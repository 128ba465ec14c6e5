"""ONNX operators of recurrent layers: RNN, LSTM and GRU, unrolled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.frontends.formulas.elementwise import between, elu, hard_sigmoid, leaky, softplus
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
from penstock.frontends.onnx.node import OnnxNode, Result, Rule
from penstock.ir.graph import Value

# The most steps of one layer: a file of a few bytes can ask for any number.
MOST_STEPS = 1024
# Functions by name, with the defaults of the numbers they take.
_FUNCTIONS: dict[str, tuple[Callable[..., Value], tuple[float, ...]]] = {
    "sigmoid": (lambda n, x: n.emit("sigmoid", x), ()),
    "tanh": (lambda n, x: n.emit("tanh", x), ()),
    "relu": (lambda n, x: n.emit("relu", x), ()),
    "softsign": (lambda n, x: n.emit("div", x, n.emit("add", n.emit("abs", x), 1.0)), ()),
    "softplus": (softplus, ()),
    "affine": (lambda n, x, a, b: n.emit("add", n.emit("mul", x, a), b), (1.0, 0.0)),
    "scaledtanh": (lambda n, x, a, b: n.emit("mul", n.emit("tanh", n.emit("mul", x, b)), a), (1.0, 1.0)),
    "hardsigmoid": (hard_sigmoid, (0.2, 0.5)),
    "leakyrelu": (leaky, (0.01,)),
    "thresholdedrelu": (lambda n, x, a: n.emit("where", n.emit("less", n.literal(a, x.type.dtype), x), x, 0.0), (1.0,)),
    "elu": (elu, (1.0,)),
}


def _functions(n: OnnxNode, defaults: Sequence[str], directions: int) -> list[list[Function]]:
    """Return the functions of each direction.

    Their numbers are in two lists, in the order of the functions that take them.
    """
    names = [name.lower() for name in n.texts_attr("activations")] or [*defaults] * directions
    n.require(len(names) == len(defaults) * directions, f"{len(names)} activations do not fit {directions} directions")
    alphas, betas, clip = (
        list(n.floats_attr("activation_alpha")),
        list(n.floats_attr("activation_beta")),
        n.float_attr("clip"),
    )

    def function(name: str) -> Function:
        n.require(name in _FUNCTIONS, f"activation {name} is not known")
        write, numbers = _FUNCTIONS[name]
        parameters = [
            (alphas if i == 0 else betas).pop(0) if (alphas if i == 0 else betas) else x for i, x in enumerate(numbers)
        ]

        def apply(x: Value) -> Value:
            x = between(n, x, -clip, clip) if clip else x
            return write(n, x, *parameters)

        return apply

    functions = [function(name) for name in names]
    return [functions[i * len(defaults) : (i + 1) * len(defaults)] for i in range(directions)]


def _layer(
    n: OnnxNode,
    gates: int,
    functions: Sequence[str],
    states: int,
    cell: Callable[[int, Value, Value | None, list[Function]], Cell],
) -> Sequence[Result]:
    """Write a recurrent layer.

    `cell` makes the cell of a direction from its recurrent weight, the recurrent half of its bias, and its functions.
    """
    direction, first = n.text_attr("direction", "forward"), bool(n.int_attr("layout"))
    n.require(direction in ("forward", "reverse", "bidirectional"), f"direction={direction} is not known")
    count = 2 if direction == "bidirectional" else 1
    x = transpose(n, n.value(0), (1, 0, 2)) if first else n.value(0)
    size = n.type(2).dims[-1]
    n.require(n.int_attr("hidden_size", size) == size, f"hidden_size differs from the weight {n.type(2)}")
    n.require(n.type(1).dims[0] == count, f"weights {n.type(1)} are not those of {count} directions")
    steps, batch = x.type.dims[:2]
    n.require(0 < steps <= MOST_STEPS, f"{steps} steps are not supported, 1 to {MOST_STEPS}")
    lengths = n.value(4) if n.has(4) else None
    chosen = _functions(n, functions, count)

    def part(i: int, d: int) -> Value:
        return reshape(n, cut(n, n.value(i), 0, d, d + 1), n.type(i).dims[1:])

    def start(i: int, d: int) -> Value:
        if not n.has(i):
            return n.emit("const", value=0.0, dtype=x.type.dtype, shape=(batch, size))
        whole = transpose(n, n.value(i), (1, 0, 2)) if first else n.value(i)
        return reshape(n, cut(n, whole, 0, d, d + 1), (batch, size))

    ys: list[Value] = []
    lasts: list[list[Value]] = []
    for d in range(count):
        bias = (
            [cut(n, part(3, d), 0, i * gates * size, (i + 1) * gates * size) for i in (0, 1)]
            if n.has(3)
            else [None, None]
        )
        outer, inner = bias
        if outer is not None and inner is not None:
            outer = n.emit("add", outer, without_hidden(n, inner, size) if n.kind == "GRU" else inner)
        inputs = linear(n, x, part(1, d), outer)
        state = tuple(start(5 + i, d) for i in range(states))
        y, last = unroll(
            n, inputs, state, cell(d, part(2, d), inner, chosen[d]), lengths, direction == "reverse" or d == 1
        )
        ys.append(reshape(n, y, (y.type.dims[0], 1, batch, size)))
        lasts.append([reshape(n, s, (1, batch, size)) for s in last])
    y = concat(n, ys, 1)
    ends = [concat(n, directions, 0) for directions in zip(*lasts, strict=True)]
    if first:
        y, ends = transpose(n, y, (2, 0, 1, 3)), [transpose(n, e, (1, 0, 2)) for e in ends]
    return y, *ends


def _rnn(n: OnnxNode) -> Sequence[Result]:
    return _layer(n, 1, ("tanh",), 1, lambda d, weight, bias, functions: plain_cell(n, weight, functions[0]))


def _gru(n: OnnxNode) -> Sequence[Result]:
    after = bool(n.int_attr("linear_before_reset"))

    def cell(d: int, weight: Value, bias: Value | None, functions: list[Function]) -> Cell:
        size = weight.type.dims[-1]
        return gru_cell(n, weight, None if bias is None else cut(n, bias, 0, 2 * size, 3 * size), functions, after)

    return _layer(n, 3, ("sigmoid", "tanh"), 1, cell)


def _lstm(n: OnnxNode) -> Sequence[Result]:
    coupled = bool(n.int_attr("input_forget"))

    def cell(d: int, weight: Value, bias: Value | None, functions: list[Function]) -> Cell:
        size = weight.type.dims[-1]
        peepholes = None
        if n.has(7):
            weights = reshape(n, cut(n, n.value(7), 0, d, d + 1), (3 * size,))
            peepholes = [cut(n, weights, 0, i * size, (i + 1) * size) for i in range(3)]
        return lstm_cell(n, weight, peepholes, functions, coupled)

    return _layer(n, 4, ("sigmoid", "tanh", "tanh"), 2, cell)


RULES: dict[str, Rule] = {"RNN": _rnn, "GRU": _gru, "LSTM": _lstm}
