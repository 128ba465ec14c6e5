"""Own forms: operations whose local form is not the same operation on smaller shapes.

`FORMS[kind](b, call)` writes the local operations of one operation, and returns its results in order. `call` has the
local operands, the types of operands and results in the whole program, and the axes that split each name of the
operation's rule (ir/sharding/rules.py). Forms see to the padding of dimensions with their own mark themselves. As the
operations that they stand for, they compute on 16-bit numbers in f32 and round results once.
"""

from __future__ import annotations

from penstock.ir.graph import Value
from penstock.ir.ops import integer, reduced_axes

from .building import LocalWriter
from .calls import Form, LocalCall, is_uneven, lowest_of, narrowed, reduced, unpadded, widened
from .halos import HALOS
from .reshard import part_numbers
from .rings.attention import RINGS
from .rows import ROWS

# ------------------------------------------------------------------------------------------------ reductions


def _mean(b: LocalWriter, call: LocalCall) -> list[Value]:
    """Write a sum over this rank's part, divided by the whole count: the results of all ranks add up to the mean."""
    x, axes = call.ins[0], reduced_axes(call.whole(0), call.attrs["axes"])
    for dim in axes:
        if call.axes_of(0, dim):
            x = unpadded(b, LocalCall(call.op, call.rule, call.axes, (x,)), 0, dim, 0.0)
    count = 1
    for dim in axes:
        count *= call.whole(0).dims[dim]
    total = b.emit("sum", widened(b, x), axes=axes, keep=bool(call.attrs["keep"]))
    return [narrowed(b, b.emit("div", total, b.number(float(count), total.type.dtype)), x.type.dtype)]


def _max(b: LocalWriter, call: LocalCall) -> list[Value]:
    axes, x = reduced_axes(call.whole(0), call.attrs["axes"]), call.ins[0]
    split: tuple[str, ...] = ()
    for dim in axes:
        if call.axes_of(0, dim):
            # Padding is the lowest number there is, so that it never wins over all.
            x = unpadded(b, LocalCall(call.op, call.rule, call.axes, (x,)), 0, dim, lowest_of(x.type.dtype))
            split += call.axes_of(0, dim)
    return [reduced(b, b.emit("max", x, axes=axes, keep=bool(call.attrs["keep"])), split, "max")]


def _row_axis(call: LocalCall) -> tuple[int, tuple[str, ...]]:
    dim = integer(call.attrs["axis"]) % call.whole(0).rank
    return dim, call.axes_of(0, dim)


def _log_sum(b: LocalWriter, call: LocalCall) -> tuple[Value, Value, Value]:
    """Return the operand less its largest element, e to the power of that, and the sum of these powers, along the row
    that several ranks share."""
    dim, axes = _row_axis(call)
    x = widened(b, unpadded(b, call, 0, dim, float("-inf")))
    largest = reduced(b, b.emit("max", x, axes=(dim,), keep=True), axes, "max")
    below = b.emit("sub", x, largest)
    powers = b.emit("exp", below)
    return below, powers, reduced(b, b.emit("sum", powers, axes=(dim,), keep=True), axes)


def _softmax(b: LocalWriter, call: LocalCall) -> list[Value]:
    _, powers, total = _log_sum(b, call)
    return [narrowed(b, b.emit("div", powers, total), call.whole(0).dtype)]


def _log_softmax(b: LocalWriter, call: LocalCall) -> list[Value]:
    below, _, total = _log_sum(b, call)
    return [narrowed(b, b.emit("sub", below, b.emit("log", total)), call.whole(0).dtype)]


def _softmax_grad(b: LocalWriter, call: LocalCall) -> list[Value]:
    """Write y * (dy - sum(dy * y)); where padding is not zero, it is left out of the sum."""
    dim, axes = _row_axis(call)
    y, dy = (widened(b, unpadded(b, call, i, dim, 0.0)) for i in range(2))
    inner = reduced(b, b.emit("sum", b.emit("mul", dy, y), axes=(dim,), keep=True), axes)
    return [narrowed(b, b.emit("mul", y, b.emit("sub", dy, inner)), call.whole(0).dtype)]


def _log_softmax_grad(b: LocalWriter, call: LocalCall) -> list[Value]:
    dim, axes = _row_axis(call)
    y, dy = widened(b, call.ins[0]), widened(b, unpadded(b, call, 1, dim, 0.0))
    inner = reduced(b, b.emit("sum", dy, axes=(dim,), keep=True), axes)
    return [narrowed(b, b.emit("sub", dy, b.emit("mul", b.emit("exp", y), inner)), call.whole(0).dtype)]


# ------------------------------------------------------------------------------------------------ lookups


def _own_rows(b: LocalWriter, indices: Value, whole: int, rows: int, axes: tuple[str, ...]) -> tuple[Value, Value]:
    """Return indices into this rank's rows, and where they are in them. Negative indices count from the end."""
    wide = indices if indices.type.dtype == "i64" else b.emit("cast", indices, dtype="i64")
    zero = b.number(0, "i64")
    positive = b.emit("where", b.emit("less", wide, zero), b.emit("add", wide, b.number(whole, "i64")), wide)
    at = b.emit("sub", positive, b.first(axes, rows))
    last = b.number(rows - 1, "i64")
    inside = b.emit("and", b.emit("less_equal", zero, at), b.emit("less_equal", at, last))
    return b.emit("minimum", b.emit("maximum", at, zero), last), inside


def _spread(b: LocalWriter, mask: Value, x: Value, dim: int) -> Value:
    """Return a mask of indices in the rank of a tensor that has the dimensions of the indices from `dim` on."""
    behind = x.type.rank - dim - mask.type.rank
    return b.emit("reshape", mask, shape=(*(1,) * dim, *mask.type.dims, *(1,) * behind))


def _gather(b: LocalWriter, call: LocalCall) -> list[Value]:
    """Look up this rank's rows; rows of others are zero, and all ranks add up to the result."""
    dim = integer(call.attrs["axis"]) % call.whole(0).rank
    table, indices = call.ins
    axes = call.axes_of(0, dim)
    if not axes:
        return [b.emit("gather", table, indices, axis=dim)]
    rows, inside = _own_rows(b, indices, call.whole(0).dims[dim], table.type.dims[dim], axes)
    looked_up = b.emit("gather", table, rows, axis=dim)
    zero = b.number(0.0 if "f" in looked_up.type.dtype else 0, looked_up.type.dtype)
    return [b.emit("where", _spread(b, inside, looked_up, dim), looked_up, zero)]


def _gather_grad(b: LocalWriter, call: LocalCall) -> list[Value]:
    """Add this rank's rows of the gradient; those of others are zero in its place."""
    result = call.op.outs[0].type
    dim, local = integer(call.attrs["axis"]) % result.rank, result.local(b.sizes).dims
    grad, indices = call.ins
    if axes := result.axes_of(dim):
        indices, inside = _own_rows(b, indices, result.dims[dim], local[dim], axes)
        zero = b.number(0.0 if "f" in grad.type.dtype else 0, grad.type.dtype)
        grad = b.emit("where", _spread(b, inside, grad, dim), grad, zero)
    return [b.emit("gather_grad", grad, indices, axis=dim, shape=local)]


def _scatter(b: LocalWriter, call: LocalCall) -> list[Value]:
    """Write into this rank's rows; what others write goes into one more row, which is cut off."""
    dim = integer(call.attrs["axis"]) % call.whole(0).rank
    x, indices, updates = call.ins
    size = x.type.dims[dim]
    rows, inside = _own_rows(b, indices, call.whole(0).dims[dim], size, call.axes_of(0, dim))
    rows = b.emit("where", inside, rows, b.number(size, "i64"))
    ends = tuple(1 if i == dim else 0 for i in range(x.type.rank))
    more = b.emit("pad", x, low=(0,) * x.type.rank, high=ends)
    written = b.emit("scatter", more, rows, updates, axis=dim, add=bool(call.attrs["add"]))
    starts, steps = (0,) * x.type.rank, (1,) * x.type.rank
    return [b.emit("slice", written, start=starts, stop=x.type.dims, step=steps)]


def _iota(b: LocalWriter, call: LocalCall) -> list[Value]:
    """Count from this rank's first element on."""
    result = call.op.outs[0].type
    dim, dtype = integer(call.attrs["axis"]) % result.rank, str(call.attrs["dtype"])
    local, axes, folded = result.local(b.sizes).dims, result.axes_of(dim), result.blocks_of(dim) < 0
    blocks = abs(result.blocks_of(dim))
    if not axes:
        return [b.emit("iota", dtype=dtype, shape=local, axis=dim)]
    each, size = result.dims[dim] // blocks, local[dim] // blocks
    if folded:
        first = b.emit("mul", part_numbers(b, axes, -blocks), b.number(size, "i64"))
        column = b.emit("reshape", first, shape=(blocks, 1))
        numbers = b.emit("iota", name=b.namer.fresh("local.places"), dtype="i64", shape=(1, size), axis=1)
        places = b.emit("reshape", b.emit("add", column, numbers), shape=(blocks * size,))
    else:
        places = b.numbered((size,), 0, axes)
    if blocks > 1 and not folded:
        starts = b.emit("mul", b.emit("iota", dtype="i64", shape=(blocks, 1)), b.number(each, "i64"))
        places = b.emit("reshape", b.emit("add", starts, places), shape=(blocks * size,))
    typed = places if dtype == "i64" else b.emit("cast", places, dtype=dtype)
    column = b.emit("reshape", typed, shape=tuple(n if i == dim else 1 for i, n in enumerate(local)))
    return [column if column.type.dims == local else b.emit("broadcast", column, shape=local)]


# ------------------------------------------------------------------------------------------------ losses


def _mse(b: LocalWriter, call: LocalCall) -> list[Value]:
    """Write the sum over this rank's part, divided by the whole count."""
    difference = b.emit("sub", *(widened(b, x) for x in call.ins))
    square = b.emit("mul", difference, difference)
    for dim in range(call.whole(0).rank):
        if call.axes_of(0, dim) and is_uneven(b, call, 0, dim):
            square = b.masked(square, dim, call.axes_of(0, dim), call.whole(0).dims[dim])
    total = b.emit("sum", square, axes=tuple(range(square.type.rank)))
    mean = b.emit("div", total, b.number(float(call.whole(0).size), square.type.dtype))
    return [narrowed(b, mean, call.op.outs[0].type.dtype)]


def _label_place(b: LocalWriter, call: LocalCall) -> tuple[Value, Value]:
    """Return where a class of this rank is the label, and the labels as a column beside the logits."""
    logits, labels = call.ins[:2]
    dim = logits.type.rank - 1
    wide = labels if labels.type.dtype == "i64" else b.emit("cast", labels, dtype="i64")
    column = b.emit("reshape", wide, shape=(*labels.type.dims, 1))
    classes = b.number(call.whole(0).dims[dim], "i64")
    positive = b.emit("where", b.emit("less", column, b.number(0, "i64")), b.emit("add", column, classes), column)
    numbers = b.numbered(logits.type.dims, dim, call.axes_of(0, dim))
    return b.emit("equal", numbers, positive), positive


def _cross_entropy(b: LocalWriter, call: LocalCall) -> list[Value]:
    """Write the mean over the whole count of rows. Where classes are split, the largest logit, the sum of powers and
    the label's logit are found together."""
    logits = call.whole(0)
    dim, rows = logits.rank - 1, float(logits.size // logits.dims[-1])
    axes = call.axes_of(0, dim)
    x = widened(b, unpadded(b, call, 0, dim, float("-inf")))
    zero = b.number(0.0, x.type.dtype)
    largest = reduced(b, b.emit("max", x, axes=(dim,), keep=True), axes, "max")
    powers = b.emit("exp", b.emit("sub", x, largest))
    total = reduced(b, b.emit("sum", powers, axes=(dim,), keep=True), axes)
    flat = call.ins[1].type.dims
    lse = b.emit("reshape", b.emit("add", b.emit("log", total), largest), shape=flat)
    place, _ = _label_place(b, call)
    label = b.emit("sum", b.emit("where", place, x, zero), axes=(dim,))
    losses = b.emit("sub", lse, reduced(b, label, axes))
    for i in range(dim):
        if call.axes_of(0, i) and is_uneven(b, call, 0, i):
            losses = b.masked(losses, i, call.axes_of(0, i), logits.dims[i])
    mean = b.emit("div", b.emit("sum", losses, axes=tuple(range(dim))), b.number(rows, x.type.dtype))
    return [narrowed(b, x, v.type.dtype) for x, v in zip((mean, lse), call.op.outs, strict=True)]


def _cross_entropy_grad(b: LocalWriter, call: LocalCall) -> list[Value]:
    """Write (e^(logits - lse) - 1 at the label) * dloss / rows, with the whole count of rows."""
    x, lse, grad = (widened(b, call.ins[i]) for i in (0, 2, 3))
    logits = call.whole(0)
    rows = float(logits.size // logits.dims[-1])
    column = b.emit("reshape", lse, shape=(*lse.type.dims, 1))
    share = b.emit("exp", b.emit("sub", x, column))
    place, _ = _label_place(b, call)
    hot = b.emit("cast", place, dtype=x.type.dtype)
    scale = b.emit("div", grad, b.number(rows, x.type.dtype))
    return [narrowed(b, b.emit("mul", b.emit("sub", share, hot), scale), logits.dtype)]


FORMS: dict[str, Form] = {
    **HALOS,
    **ROWS,
    **RINGS,
    "mean": _mean,
    "max": _max,
    "softmax": _softmax,
    "softmax_grad": _softmax_grad,
    "log_softmax": _log_softmax,
    "log_softmax_grad": _log_softmax_grad,
    "gather": _gather,
    "gather_grad": _gather_grad,
    "scatter": _scatter,
    "iota": _iota,
    "mse": _mse,
    "cross_entropy": _cross_entropy,
    "cross_entropy_grad": _cross_entropy_grad,
}

# Blocks of a sequence in folded order, an early and a late part for each rank.
FOLDED = -2

# Forms to which the order of elements along their dimensions means nothing.
_IN_ANY_ORDER = {
    "mean", "max", "softmax", "softmax_grad", "log_softmax", "log_softmax_grad", "iota", "mse",
    "layer_norm", "layer_norm_grad",
}  # fmt: skip


def takes_blocks(kind: str, name: str, blocks: int) -> bool:
    """Return whether the form of an operation takes a dimension of which each of several blocks is split: a rank's part
    has elements of all blocks then, and does not begin at an offset."""
    if kind in RINGS:
        return blocks == FOLDED
    return kind in _IN_ANY_ORDER or (kind.startswith("cross_entropy") and name != "n")
