"""Kernel generators: each turns a group of operations into one TIR function, with loops chosen by formula, not by
tuning.

  emit, functions, elements     the tools: statements, elementary functions, the rules for one element
  body                          parameters of a kernel, and the fusion of a prologue and an epilogue
  sweep, loops                  the interface to the loops of other devices
  register_tile, transpose      tiles of accumulators, blocks transposed in registers
  turn                          stored transpositions, in place of the loops of elementwise

Each family of main operations has a file of its own: elementwise, gemm, attention, conv, rows, reduce, scan, select,
lookup, windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from penstock.backends.tvm.kernels.rows.sums import SUMS
from penstock.backends.tvm.kernels.tools.body import Body, Fusion, GeneratedKernel, NotOneKernel, PackingEmitted
from penstock.backends.tvm.kernels.tools.elements import Index
from penstock.backends.tvm.kernels.tools.emit import literal
from penstock.backends.tvm.target import TargetMachine
from penstock.ir.graph import Op

from .attention import forward as attention
from .attention import gradient as attention_grad
from .caches import attend, pick, put
from .conv import conv, windows
from .conv.integers import choose as byte_conv
from .elementwise import elementwise, lookup
from .product import byte_product, gemm, quantised
from .product.packed_table import packed_tables
from .recurrent import steps
from .rows import reduce, rows, scan, select

# Operations that bring loops of their own; a group has at most one of them.
MAIN: dict[str, Callable[[Body, Op], None]] = {
    "matmul": gemm.emit_matmul,
    "matmul_q": quantised.emit_matmul_q,
    "matmul_bytes": byte_product.emit_matmul_bytes,
    "conv_bytes": byte_conv.emit_conv_bytes,
    "attention": attention.emit_attention,
    "attention_grad": attention_grad.emit_attention_grad,
    "conv": conv.emit_conv,
    "conv_grad_input": conv.emit_conv_grad_input,
    "conv_grad_weight": conv.emit_conv_grad_weight,
    "max_pool": windows.emit_pool,
    "max_pool_grad": windows.emit_max_pool_grad,
    "avg_pool": windows.emit_pool,
    "avg_pool_grad": conv.emit_avg_pool_grad,
    "softmax": rows.emit_softmax,
    "log_softmax": rows.emit_softmax,
    "softmax_grad": rows.emit_softmax_grad,
    "log_softmax_grad": rows.emit_softmax_grad,
    "layer_norm": rows.emit_layer_norm,
    "layer_norm_grad": rows.emit_layer_norm_grad,
    "cross_entropy": rows.emit_cross_entropy,
    "argmax": rows.emit_argmax,
    "sum": reduce.emit_reduction,
    "mean": reduce.emit_reduction,
    "max": reduce.emit_reduction,
    "mse": reduce.emit_reduction,
    "layer_norm_grad_weight": reduce.emit_reduction,
    "gather_grad": lookup.emit_gather_grad,
    "scatter": lookup.emit_scatter,
    "cumsum": scan.emit_cumsum,
    "topk": select.emit_topk,
    "put": put.emit_put,
    "attend": attend.emit_attend,
    "pick": pick.emit_pick,
    "concat": lambda body, op: elementwise.emit_concat(body),
}

# Row operations that column sums can ride along with.
WITH_SUMS = ("layer_norm_grad",)


# The element of a result that is not empty although an operand is.
_OF_NOTHING = {
    **dict.fromkeys(
        (
            "matmul",
            "matmul_q",
            "matmul_bytes",
            "conv_bytes",
            "conv",
            "conv_grad_input",
            "conv_grad_weight",
            "gather_grad",
            "sum",
            "layer_norm_grad_weight",
            "attend",
        ),
        0.0,
    ),
    **dict.fromkeys(("mean", "mse", "cross_entropy"), math.nan),
}


# These do some work although an operand is empty.
_ALSO_EMPTY = ("concat", "scatter", "put")


def _emit_of_nothing(body: Body, op: Op) -> None:
    """Emit the results of an operation with an empty operand: each element is the same."""
    full = [v for v in op.outs if v.type.size]
    if full:
        element = literal(_OF_NOTHING[op.kind], full[0].type.dtype)
        dims = full[0].type.dims
        # The epilogue may look at coordinates.
        merged = body.merged_from(dims, [o for o in body.group.ops if o is not op])

        def point(index: Index) -> None:
            with body.point():
                body.finish(dict.fromkeys(full, (element, index)))

        elementwise.emit_nest(body, dims, merged, point)


# Operations whose results are stored one by one.
IN_PARTS = ("attention_grad",)


def generate(group: Fusion, machine: TargetMachine) -> GeneratedKernel:
    """Generate the kernel of a group; raise NotOneKernel when it needs several."""
    body = Body(group, machine)
    emit_group(body, MAIN)
    kernel = body.kernel()
    if kernel.packing is None:
        return kernel
    return replace(kernel, packing=replace(kernel.packing, function=_packing_function(group, machine)))


def _packing_function(group: Fusion, machine: TargetMachine) -> object:
    """Emit the function that fills the packed operand, by the same generator, up to where it has filled it."""
    try:
        emit_group(Body(group, machine, only_packing=True), MAIN)
    except PackingEmitted as emitted:
        return emitted.function
    raise AssertionError("the kernel takes a packed operand, and nothing packs it")


def emit_group(body: Body, generators: Mapping[str, Callable[[Any, Op], None]]) -> None:
    """Emit the loops of a group by the generator of its main operation."""
    with body.giving(packed_tables(body)):
        _emit_loops(body, generators)


def _emit_loops(body: Body, generators: Mapping[str, Callable[[Any, Op], None]]) -> None:
    if body.loops is None and steps.is_recurrence(body.group):
        steps.emit_recurrence(body)
        return
    main = [op for op in body.group.ops if op.kind in MAIN]
    if main and main[0].kind in IN_PARTS:
        # The parts of a concatenation are stored where they are computed.
        main = [op for op in main if op.kind != "concat"]
    sums = [op for op in main if op.kind in SUMS]
    if len(main) > 1 and any(v.type.size == 0 for op in main for v in op.ins):
        raise NotOneKernel("what has no elements has no loops to share")
    if len(main) > 1 and body.loops is None:
        if len(sums) == len(main):
            reduce.emit_reductions(body, sums)
            return
        if len(main) == len(sums) + 1 and main[0].kind in WITH_SUMS:
            body.sums, main = tuple(sums), main[:1]
    if len(main) > 1:
        raise NotOneKernel(f"{main[0].kind} and {main[1].kind} both need loops of their own")
    if main and any(v.type.size == 0 for v in (*main[0].ins, *main[0].outs)) and main[0].kind not in _ALSO_EMPTY:
        _emit_of_nothing(body, main[0])
    elif main:
        generators[main[0].kind](body, main[0])
    else:
        elementwise.emit_elementwise(body)


def generate_effect(group: Fusion, machine: TargetMachine) -> GeneratedKernel:
    """Generate the kernel of a state operation on its own."""
    body = Body(group, machine)
    elementwise.emit_effect(body, group.ops[0])
    return body.kernel()
