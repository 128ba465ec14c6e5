"""Rows for training: losses, optimisers, and the state operations, which alone have an effect."""

from __future__ import annotations

from penstock.ir.training.rates import COLUMNS
from penstock.ir.types import FLOATS, INTS, TensorType

from .table import Infer, Required, Types, Values, need, need_floats, per_element, row


def _cross_entropy(x: Types, a: Values) -> tuple[TensorType, ...]:
    logits, labels = x[:2]
    need(
        logits.dtype in FLOATS and labels.dtype in INTS,
        f"needs floating-point logits and integer labels, got {logits} and {labels}",
    )
    need(logits.rank >= 1 and logits.shape[-1] != 0, f"there are no classes in {logits}")
    need(
        labels.shape == logits.shape[:-1], f"labels of {logits} must have shape {list(logits.shape[:-1])}, got {labels}"
    )
    return logits.with_shape(()), logits.with_shape(logits.shape[:-1])


def _cross_entropy_grad(x: Types, a: Values) -> tuple[TensorType, ...]:
    loss, lse = _cross_entropy(x, a)
    need(x[2] == lse and x[3] == loss, f"expected lse {lse} and gradient {loss}, got {x[2]} and {x[3]}")
    return (x[0],)


def _mse(x: Types, a: Values) -> tuple[TensorType, ...]:
    need(
        x[0] == x[1] and x[0].dtype in FLOATS,
        f"prediction and target must have the same floating-point type, got {x[0]} and {x[1]}",
    )
    return (x[0].with_shape(()),)


def _optimizer(states: int, scalars: int) -> Infer:
    def infer(x: Types, a: Values) -> tuple[TensorType, ...]:
        arrays, scalar_types = x[: 2 + states], x[2 + states :]
        need_floats(arrays)
        need(len(set(arrays)) == 1, f"weight, gradient and state differ: {' and '.join(map(str, arrays))}")
        need(
            len(scalar_types) == scalars and all(t.shape == () for t in scalar_types),
            f"expected {scalars} scalars, got {', '.join(map(str, scalar_types))}",
        )
        return (x[0],) * (1 + states)

    return infer


def _ramp(x: Types, a: Values) -> tuple[TensorType, ...]:
    table, step = x
    need(table.dtype == step.dtype == "f64", f"needs a table and a step in f64, got {table} and {step}")
    need(
        table.rank == 2 and table.shape[0] != 0 and table.shape[1] == COLUMNS,
        f"a row of the table has {COLUMNS} columns, got {table}",
    )
    need(step.shape == (), f"the step must be a scalar, got {step}")
    return (step,)


def _state(x: Types, a: Values) -> tuple[TensorType, ...]:
    raise AssertionError("state operations take their type from the variable, see infer_op")


ROWS = (
    # losses, mean over all rows
    row(
        "cross_entropy",
        "row",
        2,
        _cross_entropy,
        "mean of lse - logit of the label, from (logits, labels); also gives lse = log(sum(e^logits)) per row",
        flops=per_element(14),
        dims="b...*+ n*, b...*+ -> , b...",
    ),
    row(
        "cross_entropy_grad",
        "row",
        4,
        _cross_entropy_grad,
        "gradient for logits, from (logits, labels, lse, dloss)",
        flops=per_element(14),
        dims="b...* n*, b...*, b...*, -> b... n",
    ),
    row("mse", "reduce", 2, _mse, "mean of the squared difference", flops=per_element(3), dims="b...*+, b...*+ -> "),
    # optimisers: (w, g, state..., scalars...) -> (w, state...)
    row(
        "sgd",
        "optimizer",
        3,
        _optimizer(0, 1),
        "w - lr * (g + weight_decay * w), from (w, g, lr)",
        weight_decay=0.0,
        flops=per_element(3),
    ),
    row(
        "momentum",
        "optimizer",
        4,
        _optimizer(1, 1),
        "g = g + weight_decay * w; m = beta * m + g; w - lr * m (nesterov: w - lr * (g + beta * m)), "
        "from (w, g, m, lr)",
        beta=0.9,
        weight_decay=0.0,
        nesterov=False,
        flops=per_element(5),
    ),
    row(
        "adamw",
        "optimizer",
        7,
        _optimizer(2, 3),
        "Adam with decoupled weight decay, from (w, g, m, v, c1, c2, lr), where c1 = 1 - beta1^t and c2 = 1 - beta2^t",
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.0,
        flops=per_element(14),
    ),
    # the learning rate as data
    row(
        "ramp",
        "optimizer",
        2,
        _ramp,
        "the value at a step of a piecewise curve, from (table, step); rows of the table are start, "
        "length, from, to, shape (0 linear, 1 cosine, 2 step)",
        flops=per_element(4),
        dims="r^ c^, -> ",
    ),
    # state: the only operations with an effect
    row(
        "read",
        "state",
        0,
        _state,
        "the variable; `version` is mb (the microbatch's own) or latest",
        var=Required(str),
        version="latest",
        effect=True,
    ),
    row("write", "state", 1, _state, "the variable's next version", var=Required(str), effect=True),
    row("accum", "state", 1, _state, "add to the variable", var=Required(str), effect=True),
    row("take", "state", 0, _state, "the variable, which is zero afterwards", var=Required(str), effect=True),
)
